"""What runs left behind, read and compared: which one reached what, after how many steps and seconds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .errors import RecipeError

NORM_TITLES = {
    "ndpp": "ND++",
    "nd": "ND",
    "bn": "BatchNorm",
    "syncbn": "SyncBatchNorm",
    "frozenbn": "FrozenBatchNorm",
    "gn": "GroupNorm",
    "ln": "LayerNorm",
    "frn": "FRN",
    "iternorm": "IterNorm",
    "sw": "SwitchableWhitening",
    "none": "No norm",
}
# What does not tell two configurations apart: one is drawn once, whatever its seeds, place and loading.
NOT_THE_METHOD = ("run.seed", "run.out", "run.device", "run.save_every", "run.keep", "run.log_every", "data.workers")


class Point(NamedTuple):
    step: int
    seconds: float
    value: float


@dataclass(frozen=True)
class RunRecord:
    """One finished run, or the mean of several that differ in their seed alone."""

    name: str  # of its folder
    config: dict[str, Any]
    train: tuple[dict[str, Any], ...]
    evals: tuple[dict[str, Any], ...]
    result: dict[str, Any]
    conditioning: dict[str, list[dict[str, Any]]] | None = None

    @property
    def norm(self) -> str:
        return str(self.config["norm"]["name"])

    @property
    def lr(self) -> float:
        return float(self.config["optimizer"]["lr"])

    @property
    def seed(self) -> int:
        return int(self.config["run"]["seed"])

    @property
    def metric(self) -> str:
        return str(self.result["metric"])

    @property
    def maximise(self) -> bool:
        return bool(self.result["maximise"])

    @property
    def label(self) -> str:
        return f"{NORM_TITLES.get(self.norm, self.norm)} lr {self.lr:g}"

    @property
    def final(self) -> float:
        """The headline metric at the end; NaN if the run has none."""
        return number(self.result["final"].get(self.metric))

    @property
    def best(self) -> float:
        return number((self.result["best"] or {}).get("value"))

    @property
    def steps(self) -> int:
        return int(self.result["steps"])

    @property
    def planned(self) -> int:
        """Steps that it should have had."""
        return int(self.result.get("total") or self.config["run"].get("steps") or self.steps)

    @property
    def seconds(self) -> float:
        return float(self.result["seconds"])

    @property
    def train_loss(self) -> float:
        """The mean of the last tenth of what was logged."""
        losses = [number(line.get("loss")) for line in self.train]
        return statistics.fmean(losses[-max(len(losses) // 10, 1) :]) if losses else math.nan

    @property
    def diverged(self) -> bool:
        return bool(self.train) and not math.isfinite(number(self.train[-1].get("loss")))

    def curve(self, metric: str) -> list[Point]:
        """A metric of the evaluations; values that are no numbers are left out.

        The final one is that of the last evaluation, whose line is rounded, or a later one without a line.
        """
        points = {int(e["step"]): Point(int(e["step"]), float(e["seconds"]), number(e.get(metric))) for e in self.evals}
        final, last = number(self.result["final"].get(metric)), points[max(points)] if points else None
        if math.isfinite(final):
            same = last is not None and math.isclose(last.value, final, rel_tol=1e-5)
            at = last if same and last is not None else Point(self.steps, self.seconds, final)
            points[at.step] = at._replace(value=final)
        return [points[step] for step in sorted(points) if math.isfinite(points[step].value)]


def number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


# --- reading ---


def read_run(folder: str | Path) -> RunRecord:
    """What the engine wrote to a run's folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RecipeError(f"{folder}: expected the folder of a run; there is none")
    config = _object(folder / "config.json", ("norm", "optimizer", "run"))
    lines = _lines(folder / "metrics.jsonl")
    result = _object(folder / "result.json", ("metric", "maximise", "final", "best", "steps", "seconds"))
    conditioning = folder / "conditioning.json"
    return RunRecord(
        name=folder.resolve().name,
        config=config,
        train=tuple(line for line in lines if line.get("kind") == "train"),
        evals=tuple(line for line in lines if line.get("kind") == "eval"),
        result=result,
        conditioning=_object(conditioning, ("before", "after")) if conditioning.exists() else None,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: missing; every finished run has one, so let the run finish first") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read ({error})") from error


def _object(path: Path, needed: Sequence[str]) -> dict[str, Any]:
    try:
        values = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise RecipeError(f"{path}: is not whole JSON ({error}); let the run write it again") from error
    missing = [key for key in needed if not isinstance(values, dict) or key not in values]
    if missing:
        raise RecipeError(f"{path}: expected an object with {', '.join(needed)}; {', '.join(missing)} is missing")
    return dict(values)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Every line; the last one may be torn, as a run that was killed leaves it."""
    texts = _text(path).splitlines()
    lines: list[dict[str, Any]] = []
    for index, text in enumerate(texts):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or "step" not in line or "seconds" not in line:
                raise ValueError("expected an object with kind, step and seconds")
        except ValueError as error:
            if index == len(texts) - 1:
                break
            raise RecipeError(f"{path} [line {index + 1}]: {error}; got {text[:60]!r}") from error
        lines.append(line)
    return lines


# --- several seeds ---


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, under as many seeds."""

    label: str
    runs: tuple[RunRecord, ...]
    mean: RunRecord
    baseline: bool = False

    @property
    def note(self) -> str:
        """What is to be known of how its runs ended."""
        count = len(self.runs)
        diverged = [run.steps for run in self.runs if run.diverged]
        if diverged:
            return f"diverged at step {diverged[0]:,}" if count == 1 else f"{len(diverged)} of {count} seeds diverged"
        planned = self.runs[0].planned
        short = [run.steps for run in self.runs if run.steps < planned]
        return f"ended at step {min(short):,} of {planned:,}" if short else ""


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """Runs that differ in their seed alone, together; labels say what else tells groups apart."""
    if not runs:
        raise RecipeError("expected at least one run to report on; got none")
    members: dict[str, list[RunRecord]] = {}
    for run in runs:
        members.setdefault(json.dumps(_method(run), sort_keys=True, default=str), []).append(run)
    found = list(members.values())
    base = next((i for i, group in enumerate(found) if group[0].norm == "bn"), 0)
    labels = _labels([group[0] for group in found])
    return [Group(labels[i], tuple(group), _mean(group), i == base) for i, group in enumerate(found)]


def _method(run: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in _flat(run.config) if key not in NOT_THE_METHOD}


def _flat(section: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Of runs with the same label, also the settings in which they differ."""
    labels = []
    for run in runs:
        twins = [_method(other) for other in runs if other.label == run.label]
        own = _method(run)
        apart = [key for key in own if any(twin.get(key) != own[key] for twin in twins)]
        labels.append(", ".join([run.label, *(f"{key.rsplit('.', 1)[-1]} {own[key]}" for key in apart)]))
    return labels


def _mean(runs: Sequence[RunRecord]) -> RunRecord:
    """Over seeds, at the steps that all of them reached."""
    first = runs[0]
    if len(runs) == 1:
        return first
    result = {
        **first.result,
        "final": _mean_values([run.result["final"] for run in runs]),
        "best": {"value": statistics.fmean(run.best for run in runs)},
        "steps": max(run.steps for run in runs),
        "seconds": statistics.fmean(run.seconds for run in runs),
    }
    train, evals = _mean_lines([run.train for run in runs]), _mean_lines([run.evals for run in runs])
    conditioning = next((run.conditioning for run in runs if run.conditioning), None)
    return RunRecord(first.name, first.config, train, evals, result, conditioning)


def _mean_lines(runs: Sequence[tuple[dict[str, Any], ...]]) -> tuple[dict[str, Any], ...]:
    by_step = [{int(line["step"]): line for line in lines} for lines in runs]
    common = sorted(set.intersection(*(set(lines) for lines in by_step)))
    return tuple({**_mean_values([lines[step] for lines in by_step]), "step": step} for step in common)


def _mean_values(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    keys = [key for key in lines[0] if all(isinstance(line.get(key), (int, float)) for line in lines)]
    return {key: statistics.fmean(line[key] for line in lines) for key in keys}


# --- comparing ---


def steps_to(run: RunRecord, value: float) -> int | None:
    """Steps after which an evaluation first reached this value of the run's metric; None if none did."""
    point = _reached(run, value)
    return None if point is None else point.step


def seconds_to(run: RunRecord, value: float) -> float | None:
    """The same in seconds of training."""
    point = _reached(run, value)
    return None if point is None else point.seconds


def _reached(run: RunRecord, value: float) -> Point | None:
    sign = 1 if run.maximise else -1
    return next((point for point in run.curve(run.metric) if sign * point.value >= sign * value), None)


def compare_table(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """A row for every configuration: means over its seeds, and what it took to reach the baseline's final value.

    The baseline is the first run with BatchNorm, otherwise the first. steps_to and seconds_to are None where the mean
    over seeds never got there; a std is None where there is one seed; numbers a run does not have are NaN.
    """
    return table_of(grouped(runs))


def table_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    base = next(group for group in groups if group.baseline).mean
    rows = []
    for group in groups:
        mean, same = group.mean, group.mean.metric == base.metric
        finals, bests = ([getattr(run, name) if same else math.nan for run in group.runs] for name in ("final", "best"))
        rows.append(
            {
                "label": group.label,
                "norm": mean.norm,
                "lr": mean.lr,
                "seeds": len(group.runs),
                "baseline": group.baseline,
                "metric": base.metric,
                "target": base.final,
                "steps_to": steps_to(mean, base.final) if same else None,
                "seconds_to": seconds_to(mean, base.final) if same else None,
                "final": statistics.fmean(finals),
                "final_std": _std(finals),
                "best": statistics.fmean(bests),
                "best_std": _std(bests),
                "ms_per_step": 1000 * statistics.fmean(run.seconds / max(run.steps, 1) for run in group.runs),
                "train_loss": statistics.fmean(run.train_loss for run in group.runs),
                "note": group.note if same else f"its metric is {mean.metric}",
            }
        )
    return rows


def _std(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
