"""Runs compared on one page: an HTML file that needs nothing besides itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from . import charts
from .charts import Band, Curve, Dumbbell, Frame, Size
from .checkpoints import write_whole
from .comparison import (
    Group,
    Point,
    RunRecord,
    compare_table,
    grouped,
    number,
    read_run,
    seconds_to,
    steps_to,
    table_of,
)
from .page import SCRIPT, STYLE
from .wording import Metric, headline, metric_named, names_of, said

__all__ = ["RunRecord", "compare_table", "headline", "read_run", "seconds_to", "steps_to", "write_report"]


HALF, FULL, NARROW = Size(530, 330, True), Size(1088, 340, True), Size(372, 270, False)
MOST_LAYERS = 24  # of a conditioning chart


def write_report(
    path: str | Path, runs: Sequence[RunRecord], title: str, command: str, notes: Sequence[str] = ()
) -> None:
    """Compare runs in an HTML file; `command` is what reproduces them."""
    groups = grouped(runs)
    colours = _colours(groups)
    sections = [
        _summary(groups),
        _table(groups, colours),
        _curves(groups, colours),
        _conditioning(groups, colours),
        _others(groups),
        _reproduce(groups, command),
        _notes(notes),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f'<body><main><p class="over">{escape(title)}</p>{"".join(sections)}</main>'
        f'<div id="tip" hidden></div><script>{SCRIPT}</script></body></html>\n'
    )
    write_whole(Path(path), lambda file: file.write(page.encode()))


def _colours(groups: Sequence[Group]) -> list[int]:
    """ND++ and the baseline have the same colour in every report, others in order."""
    chosen: dict[int, int] = {}
    first = next((i for i, group in enumerate(groups) if group.mean.norm == "ndpp"), None)
    base = next(i for i, group in enumerate(groups) if group.baseline)
    if first is not None:
        chosen[first] = 0
    chosen.setdefault(base, 1)
    free = (colour for colour in range(2 + len(groups)) if colour > 1)
    return [chosen[i] if i in chosen else next(free) for i in range(len(groups))]


# --- the parts of the page ---


def _summary(groups: Sequence[Group]) -> str:
    first, second = said(groups)
    return f"<h1>{escape(first)}</h1>" + (f'<p class="lead">{escape(second)}</p>' if second else "")


def _table(groups: Sequence[Group], colours: Sequence[int]) -> str:
    rows = table_of(groups)
    base = next(group for group in groups if group.baseline).mean
    form = metric_named(base.metric)
    sign = -1 if base.maximise else 1
    columns: list[tuple[str, Callable[[dict[str, Any]], float], Callable[[dict[str, Any]], str], int]] = [
        ("learning rate", lambda r: r["lr"], lambda r: f"{r['lr']:g}", 0),
        ("steps to target", lambda r: number(r["steps_to"]), lambda r: _or_dash(r["steps_to"], "{:,}"), 1),
        ("seconds to target", lambda r: number(r["seconds_to"]), lambda r: _or_dash(r["seconds_to"], "{:,.1f}"), 1),
        (f"final {form.title}", lambda r: r["final"], lambda r: _spread(form, r["final"], r["final_std"]), sign),
        (f"best {form.title}", lambda r: r["best"], lambda r: _spread(form, r["best"], r["best_std"]), sign),
        ("ms per step", lambda r: r["ms_per_step"], lambda r: _or_dash(r["ms_per_step"], "{:,.1f}"), 1),
        ("train loss", lambda r: r["train_loss"], lambda r: _or_dash(r["train_loss"], "{:.3f}"), 1),
    ]
    body = []
    best = [_best([value(row) for row in rows], sense) for _, value, _, sense in columns]
    for row, colour in zip(rows, colours, strict=True):
        cells = [f'<th scope="row">{_swatch(colour)}{escape(row["label"])}{_tags(row)}</th>']
        for (name, value, shown, _), winner in zip(columns, best, strict=True):
            kind = ' class="best"' if len(rows) > 1 and value(row) == winner else ""
            cells.append(f'<td data-label="{escape(name)}"{kind}>{escape(shown(row))}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("run", *(column[0] for column in columns)))
    about = (
        f"Target: the final {form.title} of {next(r['label'] for r in rows if r['baseline'])}, {form(base.final)}, "
        "reached at the first evaluation that shows it; a dash: never. Seconds are of training, without evaluations. "
        "Train loss: mean of the last tenth of the run. The best of each column is bold."
        + " Several seeds: mean ± standard deviation."
        * any(row["seeds"] > 1 for row in rows)
    )
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        f'<p class="muted">{escape(about)}</p>'
    )


def _best(values: Sequence[float], sense: int) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite) if sense > 0 else max(finite)) if sense and finite else None


def _or_dash(value: float | None, form: str) -> str:
    return form.format(value) if value is not None and math.isfinite(value) else "–"


def _spread(form: Metric, value: float, std: float | None) -> str:
    if std is None or not math.isfinite(value):
        return form(value)
    return f"{value:,.{form.digits}f} ± {std:.{form.digits}f}{form.unit}"


def _swatch(colour: int) -> str:
    return _sample(f"line {charts.style(colour)}")


def _sample(kind: str) -> str:
    line = f'<line class="{kind}" x1="1" y1="5" x2="17" y2="5"/>'
    return f'<svg class="swatch" width="18" height="10" aria-hidden="true">{line}</svg>'


def _tags(row: dict[str, Any]) -> str:
    tags = ["baseline"] * row["baseline"] + [f"{row['seeds']} seeds"] * (row["seeds"] > 1)
    plain = "".join(f'<span class="tag">{tag}</span>' for tag in tags)
    return plain + (f'<span class="tag warn">{escape(row["note"])}</span>' if row["note"] else "")


def _others(groups: Sequence[Group]) -> str:
    """Final values of the metrics beside the headline, where runs have any."""
    shown = next(group for group in groups if group.baseline).mean.metric
    names = list(dict.fromkeys(name for group in groups for name in group.mean.result["final"] if name != shown))
    if not names:
        return ""
    head = "".join(f'<th scope="col">{escape(metric_named(name).title)}</th>' for name in names)
    rows = []
    for group in groups:
        values = [(metric_named(n), number(group.mean.result["final"].get(n))) for n in names]
        cells = "".join(f'<td data-label="{escape(form.title)}">{escape(form(value))}</td>' for form, value in values)
        rows.append(f'<tr><th scope="row">{escape(group.label)}</th>{cells}</tr>')
    return (
        f'<h2>Other final metrics</h2><table><thead><tr><th scope="col">run</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


# --- curves ---


def _curves(groups: Sequence[Group], colours: Sequence[int]) -> str:
    base = next(group for group in groups if group.baseline)
    form, names = metric_named(base.mean.metric), names_of(groups)
    value = base.mean.final
    reference = value if math.isfinite(value) else None
    values = [p.value for group in groups for run in group.runs for p in run.curve(base.mean.metric)]
    # a metric to be minimised may start at many times of what it ends at
    log = not base.mean.maximise and min(values, default=0) > 0 and max(values) > 20 * min(values)
    # the first evaluations must not flatten the finish
    bottom = sorted(values)[len(values) // 10] if base.mean.maximise and len(values) >= 20 else -math.inf
    figures = []
    for x_title, pick in (("steps", _step), ("seconds", _second)):
        drawn = [
            _metric_curve(group, colour, names[group.label], base.mean, pick)
            for group, colour in zip(groups, colours, strict=True)
        ]
        tick = charts.power if log else charts.short
        frame = Frame(x_title, tick, charts.short, log, bottom=bottom, reference=reference, tip=form.__call__)
        figures.append(_figure(f"{form.title.capitalize()} against {x_title}", drawn, frame, HALF))
    losses = [_loss_curve(group, colour, names[group.label]) for group, colour in zip(groups, colours, strict=True)]
    frame = _loss_frame(losses)
    figures.append(_figure("Training loss against steps, smoothed", losses, frame, FULL))
    entries = [(_swatch(colour), group.label) for group, colour in zip(groups, colours, strict=True)]
    entries += [(_sample("reference"), f"final {form.title} of {base.label}, {form(value)}")] * (reference is not None)
    legend = "".join(f"<li>{swatch}{escape(text)}</li>" for swatch, text in entries)
    about = "A ring is where a run first reached the dashed line."
    about += " A band spans the seeds, its line is their mean." * any(len(group.runs) > 1 for group in groups)
    about += " A cross: the run diverged or ended early." * any(group.note for group in groups)
    about += " Values below the chart are drawn at its edge." * (bottom > -math.inf)
    about += " Losses above the chart are drawn at its edge." * any(y > frame.top for c in losses for _, y in c.points)
    return (
        f'<h2>Curves</h2><ul class="legend">{legend}</ul><div class="charts">{"".join(figures)}</div>'
        f'<p class="muted">{about}</p>'
    )


def _step(point: Point) -> float:
    return float(point.step)


def _second(point: Point) -> float:
    return point.seconds


def _metric_curve(group: Group, colour: int, label: str, base: RunRecord, x: Callable[[Point], float]) -> Curve:
    points = group.mean.curve(base.metric)
    sign = 1 if base.maximise else -1
    reached = next((p for p in points if sign * p.value >= sign * base.final), None)
    members = [{p.step: p.value for p in run.curve(base.metric)} for run in group.runs]
    band = [
        Band(x(p), min(m[p.step] for m in members), max(m[p.step] for m in members))
        for p in points
        if len(members) > 1 and all(p.step in m for m in members)
    ]
    crossing = None if reached is None else (x(reached), reached.value)
    return Curve(label, colour, [(x(p), p.value) for p in points], band, crossing, bool(group.note))


def _loss_curve(group: Group, colour: int, label: str) -> Curve:
    points = _smoothed(group.mean)
    members = [dict(_smoothed(run)) for run in group.runs]
    shared = [x for x, _ in charts.thinned(points, charts.DRAWN) if all(x in m for m in members)] if points else []
    band = [Band(x, min(m[x] for m in members), max(m[x] for m in members)) for x in shared if len(members) > 1]
    return Curve(label, colour, points, band, None, bool(group.note))


def _smoothed(run: RunRecord) -> list[tuple[float, float]]:
    """An exponential average over about a thirtieth of the run."""
    losses = [(float(line["step"]), number(line.get("loss"))) for line in run.train]
    losses = [(step, loss) for step, loss in losses if math.isfinite(loss)]
    weight, points = 2 / (max(len(losses) / 30, 1) + 1), list[tuple[float, float]]()
    for step, loss in losses:
        points.append((step, points[-1][1] + weight * (loss - points[-1][1]) if points else loss))
    return points


def _loss_frame(curves: Sequence[Curve]) -> Frame:
    values = [y for curve in curves for _, y in curve.points]
    values += [b.low for curve in curves for b in curve.band]
    log = min(values, default=0.0) > 0
    starts = [curve.points[0][1] for curve in curves if curve.points]
    top = 4 * max(starts) if log else math.inf  # one run that diverges must not flatten the others
    return Frame("steps", charts.power if log else charts.short, charts.short, log, top, tip="{:.3g}".format)


def _figure(title: str, curves: Sequence[Curve], frame: Frame, size: Size) -> str:
    drawn = _both([charts.line_chart(curves, frame, of, title) for of in (size, NARROW)])
    return f"<figure{' class=full' * (size is FULL)}><figcaption>{escape(title)}</figcaption>{drawn}</figure>"


def _both(drawn: Sequence[str]) -> str:
    """For wide and narrow screens: text keeps its size, so each has a chart of its own, and the page shows one."""
    return "".join(f'<div class="{kind}">{chart}</div>' for kind, chart in zip(("wide", "narrow"), drawn, strict=True))


# --- conditioning ---


def _conditioning(groups: Sequence[Group], colours: Sequence[int]) -> str:
    panels = [
        (group, colour, _dumbbells(group.mean.conditioning))
        for group, colour in zip(groups, colours, strict=True)
        if group.mean.conditioning
    ]
    values = [v for *_, rows in panels for row in rows for v in row[1:] if math.isfinite(v)]
    if not values:
        return ""
    limits = (min(values) / 1.3, max(values) * 1.3)
    figures, left_out = [], 0
    for group, colour, rows in panels:
        stride = math.ceil(len(rows) / MOST_LAYERS)
        left_out = max(left_out, len(rows) - len(rows[::stride]))
        wide = 530 if len(panels) < 3 else 346  # two or three in a row
        drawn = _both(
            [
                charts.dumbbell_chart(rows[::stride], colour, limits, width, f"conditioning of {group.label}")
                for width in (wide, NARROW.width)
            ]
        )
        figures.append(f"<figure><figcaption>{_swatch(colour)}{escape(group.label)}</figcaption>{drawn}</figure>")
    about = (
        "How many times more the input of a layer varies along its strongest direction than along its weakest: the "
        "bar leads from the input as it is (tick) to what the weights see of it (dot), after training. Further left is "
        "easier to train." + f" Evenly chosen layers; {left_out} more are left out." * (left_out > 0)
    )
    return (
        f'<h2>Conditioning of the layers</h2><p class="muted">{about}</p><div class="panels">{"".join(figures)}</div>'
    )


def _dumbbells(conditioning: dict[str, list[dict[str, Any]]]) -> list[Dumbbell]:
    seen = {line["layer"]: _positive(line.get("condition")) for line in conditioning["after"]}
    return [
        Dumbbell(str(line["layer"]), _positive(line.get("condition")), seen.get(line["layer"], math.nan))
        for line in conditioning["before"]
    ]


def _positive(value: Any) -> float:
    return number(value) if 0 < number(value) < math.inf else math.nan


# --- how to get the same ---


def _reproduce(groups: Sequence[Group], command: str) -> str:
    runs = [run for group in groups for run in group.runs]
    facts = {name: _unique(run.result.get(name) for run in runs) for name in ("ndpp", "torch", "device", "date")}
    facts["seeds"] = _unique(run.seed for run in runs)
    facts["runs"] = ", ".join(run.name for run in runs)
    rows = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value)
    return f"<h2>Reproduce</h2><pre><code>{escape(command)}</code></pre><dl>{rows}</dl>"


def _unique(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<h2>Notes</h2><ul>{items}</ul>" if items else ""
