"""The look of a report: its CSS, and a script that follows the pointer, for which plain tooltips stand in."""

# Colours are told apart by those who see few of them: Okabe and Ito's, darker on white and lighter on black.
STYLE = """
:root{color-scheme:light dark;--page:#fcfcfb;--text:#1a1d21;--soft:#5d6670;--rule:#e3e5e8;--grid:#eceef0;
--code:#f2f3f4;--warn:#a33b00;--c0:#0069b4;--c1:#cf4a0a;--c2:#00825f;--c3:#a8458c;--c4:#a87400;--c5:#2f93cc;
--c6:#59626d;--c7:#7a4d2b}
@media (prefers-color-scheme:dark){:root{--page:#15181c;--text:#e8eaed;--soft:#9aa3ad;--rule:#30353c;--grid:#23282e;
--code:#1f2429;--warn:#ff9d66;--c0:#5cb0ff;--c1:#ff8c4f;--c2:#33c79c;--c3:#e68fcb;--c4:#e7b73a;--c5:#97d8ff;
--c6:#adb6c1;--c7:#c99d77}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1136px;margin:0 auto;padding:56px 24px 80px}
.over{margin:0 0 12px;color:var(--soft);font-size:14px;letter-spacing:.02em}
h1{margin:0;font-size:clamp(23px,3.4vw,34px);line-height:1.25;font-weight:650;letter-spacing:-.012em;max-width:30em;
text-wrap:balance}
.lead{margin:16px 0 0;font-size:18px;color:var(--soft);max-width:44em}
h2{margin:64px 0 18px;font-size:20px;font-weight:650}
.muted{color:var(--soft);font-size:13.5px;max-width:62em;margin:12px 0 0}
table{width:100%;margin-top:40px;border-collapse:collapse;font-size:15px;font-variant-numeric:tabular-nums}
h2+table{margin-top:0;width:auto;min-width:min(420px,100%)}
h2+table th:first-child{width:auto}
th,td{padding:10px 0 10px 20px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap;
vertical-align:baseline}
th:first-child{width:34%;padding-left:0;text-align:left;white-space:normal}
thead th{color:var(--soft);font-size:13px;font-weight:500;white-space:normal;vertical-align:bottom;line-height:1.3}
tbody th{font-weight:550}
.best{font-weight:700}
.swatch{margin-right:9px;overflow:visible;flex:none}
.tag{display:inline-block;margin-left:8px;padding:0 7px;border:1px solid var(--rule);border-radius:9px;
color:var(--soft);font-size:12px;font-weight:400;line-height:18px;white-space:nowrap}
.warn{color:var(--warn);border-color:currentColor}
.legend{display:flex;flex-wrap:wrap;gap:6px 24px;margin:0 0 24px;padding:0;list-style:none;font-size:14px}
.legend li{display:flex;align-items:center}
figure{margin:0;min-width:0}
figcaption{margin-bottom:10px;font-size:14.5px;font-weight:600}
.charts{display:grid;grid-template-columns:1fr 1fr;gap:36px 28px}
.full{grid-column:1/-1}
.panels{display:flex;flex-wrap:wrap;gap:32px 24px;margin-top:24px}
.curves,.dumbbells{display:block;max-width:100%;height:auto;overflow:visible}
.narrow{display:none}
svg text{font-size:12px;fill:var(--soft)}
text.label{fill:var(--c);font-weight:600}
.grid{stroke:var(--grid)}.axis{stroke:var(--soft);opacity:.6}
.reference{stroke:var(--soft);stroke-dasharray:5 4}
.line{fill:none;stroke:var(--c);stroke-width:2.25;stroke-linejoin:round;stroke-linecap:round}
.line.dashed{stroke-dasharray:6 5}
.band{fill:var(--c);opacity:.16}
.dot{fill:var(--c)}.ring{fill:var(--page);stroke:var(--c);stroke-width:2}
.drop{stroke:var(--c);stroke-dasharray:1.5 3.5;stroke-width:1.5;opacity:.8}
.leader{stroke:var(--c);stroke-width:1;opacity:.4}
.cross{stroke:var(--c);stroke-width:2.25;fill:none}
.bar{stroke:var(--c);stroke-width:3;opacity:.35}.raw{stroke:var(--soft);stroke-width:2}
.hit{fill:var(--c);opacity:0}.hit:hover,.hit.near{opacity:1}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}
.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}
pre{margin:0;padding:16px 18px;border-radius:8px;background:var(--code);font:13.5px/1.6 ui-monospace,SFMono-Regular,
Menlo,Consolas,monospace;white-space:pre-wrap;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 20px;margin:20px 0 0;font-size:14px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
#tip{position:fixed;z-index:1;pointer-events:none;padding:5px 10px;border-radius:6px;background:var(--text);
color:var(--page);font-size:13px;white-space:nowrap}
@media (max-width:1040px){.charts{grid-template-columns:1fr}}
@media screen and (max-width:820px){
main{padding:32px 18px 56px}.wide{display:none}.narrow{display:block}h2{margin-top:48px}table{margin-top:32px}
thead{display:none}tr{display:block;padding:12px 0;border-bottom:1px solid var(--rule)}
tbody th:first-child{display:block;width:auto;padding:0 0 6px;border:0}
td{display:flex;justify-content:space-between;padding:3px 0;border:0}
td::before{content:attr(data-label);color:var(--soft);font-weight:400}}
@media print{main{padding:0;max-width:none}table{font-size:11.5px}thead th{font-size:11px}th,td{padding-left:10px}
figure,tr,pre{break-inside:avoid}h2{break-after:avoid}#tip{display:none}}
"""

SCRIPT = """
const tip=document.getElementById('tip');
for(const chart of document.querySelectorAll('svg.curves')){
  const hits=[...chart.querySelectorAll('.hit')];
  for(const hit of hits){const title=hit.querySelector('title');hit.dataset.tip=title.textContent;title.remove()}
  const clear=()=>{tip.hidden=true;hits.forEach(hit=>hit.classList.remove('near'))};
  chart.addEventListener('pointerleave',clear);
  chart.addEventListener('pointermove',event=>{
    clear();let nearest=null,least=30;
    for(const hit of hits){
      const box=hit.getBoundingClientRect();
      const distance=Math.hypot(event.clientX-box.x-box.width/2,event.clientY-box.y-box.height/2);
      if(distance<least){least=distance;nearest=hit}
    }
    if(!nearest)return;
    nearest.classList.add('near');tip.textContent=nearest.dataset.tip;tip.hidden=false;
    const left=Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8);
    tip.style.left=Math.max(left,8)+'px';tip.style.top=event.clientY+16+'px';
  });
}
"""
