"""Reports: numbers against hand-made runs, words in every outcome, and a page that is whole and needs nothing else."""

import dataclasses
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ndpp_recipes import charts
from ndpp_recipes.comparison import grouped
from ndpp_recipes.errors import RecipeError
from ndpp_recipes.report import RunRecord, compare_table, headline, read_run, seconds_to, steps_to, write_report

Points = list[tuple[int, float]]


def run(
    norm: str,
    values: Points,
    *,
    ms: float = 100.0,
    lr: float = 0.1,
    seed: int = 0,
    metric: str = "top1",
    maximise: bool = True,
    losses: list[float] | None = None,
    final: float | None = None,
    conditioning: dict[str, Any] | None = None,
    **changes: Any,
) -> RunRecord:
    """A run evaluated at these (step, value), each step of which takes `ms`."""
    steps = values[-1][0]
    losses = [2.0, 1.0, 0.5, 0.25] if losses is None else losses
    every = steps // len(losses)
    last = values[-1][1] if final is None else final
    best = max(values, key=lambda p: p[1] if maximise else -p[1])
    return RunRecord(
        name=f"{norm}-{lr}-{seed}",
        config={
            "norm": {"name": norm},
            "optimizer": {"lr": lr, **changes},
            "run": {"seed": seed, "steps": 40, "out": f"runs/{norm}{seed}"},
        },
        train=tuple(
            {"step": every * (i + 1), "epoch": 1.0, "seconds": every * (i + 1) * ms / 1000, "loss": loss}
            for i, loss in enumerate(losses)
        ),
        evals=tuple({"step": s, "epoch": s / 10, "seconds": s * ms / 1000, metric: v} for s, v in values),
        result={
            "metric": metric,
            "maximise": maximise,
            "final": {metric: last},
            "best": {"step": best[0], "value": best[1]},
            "steps": steps,
            "seconds": steps * ms / 1000,
            "ndpp": "1.2.3",
            "torch": "9.8.7",
            "device": "a test device",
            "date": "2001-02-03",
            "seed": seed,
        },
        conditioning=conditioning,
    )


BN = run("bn", [(10, 50.0), (20, 60.0), (30, 71.0), (40, 70.0)], ms=100)
FAST = run("ndpp", [(10, 65.0), (20, 75.0), (30, 78.0), (40, 80.0)], ms=120)


# --- numbers ---


def test_steps_and_seconds_to_a_value() -> None:
    assert steps_to(BN, 70.0) == 30  # first there, though it falls back
    assert seconds_to(BN, 70.0) == pytest.approx(3.0)
    assert steps_to(BN, 50.0) == 10
    assert steps_to(BN, 71.5) is None
    assert seconds_to(BN, 71.5) is None
    falling = run("ln", [(10, 90.0), (20, 40.0), (40, 45.0)], metric="perplexity", maximise=False)
    assert steps_to(falling, 45.0) == 20
    assert steps_to(falling, 90.0) == 10
    assert steps_to(falling, 39.0) is None


def test_the_final_evaluation_takes_the_place_of_one_at_the_same_step() -> None:
    recalibrated = run("ndpp", [(20, 60.0), (40, 61.0)], final=66.0)
    assert [(p.step, p.value) for p in recalibrated.curve("top1")] == [(20, 60.0), (40, 66.0)]
    assert steps_to(recalibrated, 65.0) == 40


def test_a_final_value_that_is_the_last_evaluations_stays_at_its_step() -> None:
    failed = dataclasses.replace(BN, result={**BN.result, "steps": 45, "total": 60, "final": {"top1": 70.0000001}})
    assert [(p.step, p.value) for p in failed.curve("top1")][-1] == (40, 70.0000001)
    (row,) = compare_table([failed])
    assert row["note"] == "ended at step 45 of 60"


def test_values_that_are_no_numbers_are_left_out() -> None:
    broken = run("bn", [(10, math.nan), (20, 30.0), (40, math.nan)], losses=[1.0, math.nan])
    assert [p.step for p in broken.curve("top1")] == [20]
    assert broken.diverged
    (row,) = compare_table([broken])
    assert math.isnan(row["final"])
    assert row["note"] == "diverged at step 40"


def test_table() -> None:
    bn, fast = compare_table([BN, FAST])
    assert bn == {
        "label": "BatchNorm lr 0.1",
        "norm": "bn",
        "lr": 0.1,
        "seeds": 1,
        "baseline": True,
        "metric": "top1",
        "target": 70.0,
        "steps_to": 30,
        "seconds_to": pytest.approx(3.0),
        "final": 70.0,
        "final_std": None,
        "best": 71.0,
        "best_std": None,
        "ms_per_step": pytest.approx(100.0),
        "train_loss": 0.25,
        "note": "",
    }
    assert (fast["steps_to"], fast["seconds_to"]) == (20, pytest.approx(2.4))
    assert (fast["final"], fast["baseline"], fast["ms_per_step"]) == (80.0, False, pytest.approx(120.0))


def test_train_loss_is_the_mean_of_the_last_tenth() -> None:
    assert run("bn", [(40, 1.0)], losses=[9.0] * 18 + [1.0, 3.0]).train_loss == 2.0


def test_seeds_are_one_row() -> None:
    finals = (60.0, 64.0, 68.0)
    seeds = [run("bn", [(20, 50.0), (40, v)], seed=i) for i, v in enumerate(finals)]
    row, other = compare_table([*seeds, FAST])
    assert (row["seeds"], row["final"], row["final_std"]) == (3, 64.0, 4.0)  # mean and sample deviation by hand
    assert row["steps_to"] == 40  # of the mean curve, though one seed never gets there
    assert other["steps_to"] == 10  # 65 ≥ 64


def test_seeds_of_which_one_ended_early() -> None:
    whole, short = run("bn", [(20, 50.0), (40, 60.0)]), run("bn", [(20, 52.0), (30, 55.0)], seed=1)
    (group,) = grouped([whole, short])
    assert group.note == "ended at step 30 of 40"
    assert [p.step for p in group.mean.curve("top1")] == [20, 40]
    assert group.mean.curve("top1")[0].value == 51.0


def test_baseline_is_the_first_batchnorm_and_otherwise_the_first() -> None:
    slow = run("bn", [(40, 50.0)], lr=0.4)
    assert [row["baseline"] for row in compare_table([FAST, BN, slow])] == [False, True, False]
    assert [row["baseline"] for row in compare_table([run("gn", [(40, 50.0)]), FAST])] == [True, False]


def test_equal_labels_say_what_differs() -> None:
    labels = [row["label"] for row in compare_table([BN, run("bn", [(40, 50.0)], momentum=0.5)])]
    assert len(set(labels)) == 2
    assert labels[1] == "BatchNorm lr 0.1, momentum 0.5"


def test_no_runs() -> None:
    with pytest.raises(RecipeError, match="at least one run"):
        compare_table([])


# --- words ---

HEADLINES = {
    "win": (
        FAST,
        "ND++ reached BatchNorm’s final accuracy (70.00 %) after 20 steps against 30, in 2.4 s against 3.0 s.",
    ),
    "fewer steps, more time": (
        run("ndpp", [(20, 75.0), (40, 80.0)], ms=200),
        "after 20 steps against 30, but in more time: 4.0 s against 3.0 s.",
    ),
    "more steps, less time": (
        run("ndpp", [(20, 65.0), (40, 80.0)], ms=50),
        "only after 40 steps against 30, yet in less time: 2.0 s against 3.0 s.",
    ),
    "lose": (
        run("ndpp", [(20, 65.0), (40, 72.0)], ms=200),
        "only after 40 steps against 30, and in more time: 8.0 s against 3.0 s.",
    ),
    "tie": (
        run("ndpp", [(30, 70.0), (40, 70.0)]),
        "after 30 steps, as BatchNorm did, in the same time (3.0 s). Both ended at 70.00 %.",
    ),
    "never": (
        run("ndpp", [(20, 66.0), (40, 65.0)]),
        "ND++ did not reach BatchNorm’s final accuracy (70.00 %): its best was 66.00 %, in 40 steps. "
        "ND++ ended at 65.00 %, BatchNorm at 70.00 %.",
    ),
    "diverged": (
        run("ndpp", [(10, 66.0), (20, 10.0)], losses=[1.0, math.nan]),
        "ND++ did not reach BatchNorm’s final accuracy (70.00 %): its best was 66.00 %, diverged at step 20.",
    ),
}


@pytest.mark.parametrize("case", HEADLINES)
def test_headline(case: str) -> None:
    other, expected = HEADLINES[case]
    assert expected in headline([BN, other]).replace("\u00a0", " ")


def test_headline_of_a_metric_to_be_minimised() -> None:
    ln = run("ln", [(20, 90.0), (40, 60.0)], metric="perplexity", maximise=False)
    ours = run("ndpp", [(20, 55.0), (40, 50.0)], metric="perplexity", maximise=False)
    said = headline([ln, ours])
    assert said.startswith("ND++ reached LayerNorm’s final perplexity (60.00) after 20 steps against 40")
    assert said.endswith("ND++ ended at 50.00, LayerNorm at 60.00.")


def test_headline_tells_of_a_baseline_that_others_beat() -> None:
    better = run("gn", [(40, 79.0)])
    assert "Of the others, GroupNorm ended best, at 79.00" in headline([BN, FAST, better])
    assert "Of the others" not in headline([BN, FAST, run("gn", [(40, 69.0)])])


def test_headline_takes_the_best_of_several_rates_and_names_it() -> None:
    said = headline([BN, run("ndpp", [(40, 60.0)], lr=1.0), FAST])
    assert said.startswith("ND++ lr 0.1 reached")


def test_headline_of_one_run() -> None:
    assert headline([BN]).replace("\u00a0", " ").startswith("BatchNorm lr 0.1 ended at 70.00 % accuracy after 40 steps")


# --- reading ---


def write(folder: Path, record: RunRecord, lines: str = "") -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(record.config))
    both = [{"kind": "train", **line} for line in record.train] + [{"kind": "eval", **line} for line in record.evals]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in both) + lines)
    (folder / "result.json").write_text(json.dumps(record.result))
    return folder


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = read_run(write(tmp_path / "a", BN, '{"kind": "eval", "step": 50, "sec'))  # and its torn last line ignored
    assert [p.value for p in found.curve("top1")] == [50.0, 60.0, 71.0, 70.0]
    assert len(found.train) == len(BN.train)
    assert compare_table([found]) == compare_table([BN])


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "result.json"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", BN)
    (folder / name).unlink()
    with pytest.raises(RecipeError, match=rf"{re.escape(name)}: missing"):
        read_run(folder)


@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_torn_file_is_named(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", BN)
    (folder / name).write_text((folder / name).read_text()[:-5])
    with pytest.raises(RecipeError, match=rf"{re.escape(name)}: is not whole JSON"):
        read_run(folder)
    (folder / name).write_text("{}")
    with pytest.raises(RecipeError, match=rf"{re.escape(name)}: expected an object with"):
        read_run(folder)


def test_a_torn_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", BN, 'broken\n{"kind": "eval", "step": 50, "seconds": 5.0}\n')
    with pytest.raises(RecipeError, match=r"metrics.jsonl \[line 9\]"):
        read_run(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="expected the folder of a run"):
        read_run(tmp_path / "none")


# --- the page ---

VOID = {"meta", "line", "circle", "polyline", "polygon", "path"}  # as this page writes them


class Page(HTMLParser):
    """Text, tables, and whether every tag is closed where it should be."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "script" in self.open:
            return
        self.text.append(data)
        if {"td", "th"} & set(self.open) and "tr" in self.open:
            self.rows[-1][-1] += data


CONDITIONING = {
    "before": [{"layer": "conv1", "condition": 900.0}, {"layer": "fc", "condition": None}],
    "after": [{"layer": "conv1", "condition": 30.0}, {"layer": "fc", "condition": math.inf}],
}
MIXED = [
    BN,
    FAST,
    run("ndpp", [(20, 79.0), (40, 82.0)], lr=1.0, conditioning=CONDITIONING),
    run("gn", [(10, 30.0), (20, 10.0)], losses=[2.0, 1e9, math.nan]),
    run("ln", [(20, 41.0), (40, 55.0)]),
    run("ln", [(20, 45.0), (40, 57.0)], seed=1),
    run("none", [(40, 3.5)], metric="perplexity", maximise=False),
]


def written(tmp_path: Path, runs: list[RunRecord], **options: Any) -> tuple[str, Page]:
    path = tmp_path / "report.html"
    write_report(path, runs, **{"title": "a title", "command": "ndpp race", "notes": [], **options})
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


@pytest.mark.parametrize("runs", [[BN], [BN, FAST], MIXED, [run("bn", [(40, math.nan)], losses=[math.nan])]])
def test_page_is_whole_and_needs_nothing_else(runs: list[RunRecord], tmp_path: Path) -> None:
    text, page = written(tmp_path, runs)
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "xlink:href", "srcset", "onload", "action"}
    assert not re.search(r"https?:|@import|url\(", text)
    coordinates = {"x", "y", "x1", "y1", "x2", "y2", "cx", "cy", "r", "points", "viewBox", "width", "height", "d"}
    assert all("nan" not in (v or "") and "inf" not in (v or "") for k, v in page.attributes if k in coordinates)
    for row in compare_table(runs):
        assert any(cells[0].startswith(row["label"]) for cells in page.rows)


def test_numbers_in_the_table(tmp_path: Path) -> None:
    _, page = written(tmp_path, MIXED)
    rows = {row[0]: [cell.replace("\u00a0", " ") for cell in row[1:]] for row in page.rows if len(row) == 8}
    assert rows["BatchNorm lr 0.1baseline"] == ["0.1", "30", "3.0", "70.00 %", "71.00 %", "100.0", "0.250"]
    assert rows["ND++ lr 0.1"] == ["0.1", "20", "2.4", "80.00 %", "80.00 %", "120.0", "0.250"]
    deviation = f"56.00 ± {math.sqrt(2):.2f} %"
    assert rows["LayerNorm lr 0.12 seeds"] == ["0.1", "–", "–", deviation, deviation, "100.0", "0.250"]
    assert rows["GroupNorm lr 0.1diverged at step 20"] == ["0.1", "–", "–", "10.00 %", "30.00 %", "100.0", "–"]


def test_what_reproduces_it_is_there(tmp_path: Path) -> None:
    _, page = written(tmp_path, MIXED, command="ndpp race digits --seeds 2", notes=["first note", "second note"])
    for text in ("ndpp race digits --seeds 2", "1.2.3", "9.8.7", "a test device", "2001-02-03", "0, 1", "second note"):
        assert text in page.text, text
    assert "conv1" in page.text
    assert "conv1: input 900, seen by the weights 30" in page.text


def test_text_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('&')</script>"
    text, page = written(tmp_path, [BN, FAST], title=evil, command=evil, notes=[evil])
    assert text.count("<script>") == 1  # the page's own
    assert page.text.count(evil) == 4  # twice the title


def test_every_seed_is_in_the_band(tmp_path: Path) -> None:
    seeds = [run("bn", [(20, 40.0 + 10 * i), (40, 60.0 + 10 * i)], seed=i) for i in range(3)]
    text, _ = written(tmp_path, [*seeds, FAST])
    band = re.findall(r'<polygon class="band c1" points="([^"]*)"', text)[0]
    heights = [float(pair.split(",")[1]) for pair in band.split()]
    assert heights[0] < heights[-1]  # at the first step: the highest seed above the lowest
    line = re.findall(r'<polyline class="line c1" points="([^"]*)"', text)[0]
    middle = float(line.split()[0].split(",")[1])
    assert middle == pytest.approx((heights[0] + heights[-1]) / 2, abs=0.11)  # 50 is midway between 40 and 60


# --- axes ---


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 400, [0, 100, 200, 300, 400]), (0.0, 0.9, [0.0, 0.25, 0.5, 0.75]), (17, 83, [20, 40, 60, 80])],
)
def test_round_ticks(low: float, high: float, expected: list[float]) -> None:
    assert charts.round_ticks(low, high, 4) == pytest.approx(expected)


def test_log_ticks() -> None:
    assert charts.log_ticks(0.5, 2000, 5) == pytest.approx([1, 10, 100, 1000])
    assert charts.log_ticks(0.09, 2.4, 5) == pytest.approx([0.1, 0.2, 0.5, 1, 2])
    assert charts.log_ticks(61, 79, 4) == pytest.approx([65, 70, 75])
    wide = charts.log_ticks(1e-9, 1e9, 5)
    assert 3 <= len(wide) <= 6


def test_labels_are_moved_apart_and_stay_inside() -> None:
    placed = charts.spread([10.0, 11.0, 12.0, 95.0, 99.0], 15.0, 10.0, 100.0)
    assert all(b - a >= 15.0 for a, b in itertools.pairwise(placed))
    assert placed[0] >= 10.0
    assert placed[-1] <= 100.0
    assert charts.spread([20.0, 50.0], 15.0, 10.0, 100.0) == [20.0, 50.0]


@pytest.mark.parametrize(("value", "text"), [(0.001, "0.001"), (250, "250"), (12000, "12k"), (3e6, "3M"), (0, "0")])
def test_short_numbers(value: float, text: str) -> None:
    assert charts.short(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.1, "0.1"), (1e4, "10⁴"), (5e-5, "5·10⁻⁵"), (1000, "1000")])
def test_powers(value: float, text: str) -> None:
    assert charts.power(value) == text
