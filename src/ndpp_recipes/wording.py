"""What a comparison of runs shows, in words and numbers as they are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from .comparison import NORM_TITLES, Group, RunRecord, grouped, seconds_to, steps_to


class Metric(NamedTuple):
    """How a metric is called and written."""

    title: str
    unit: str = ""
    digits: int = 2

    def __call__(self, value: float) -> str:
        return f"{value:,.{self.digits}f}{self.unit}" if math.isfinite(value) else "–"


# Shares are in percent, COCO's average precision is not.
METRICS = {
    "top1": Metric("accuracy", "\u00a0%"),
    "top5": Metric("top-5 accuracy", "\u00a0%"),
    "miou": Metric("mIoU", "\u00a0%"),
    "pixel_accuracy": Metric("pixel accuracy", "\u00a0%"),
    "bbox_ap": Metric("box AP", digits=3),
    "mask_ap": Metric("mask AP", digits=3),
    "bleu": Metric("BLEU"),
    "perplexity": Metric("perplexity"),
    "ppl": Metric("perplexity"),
    "eval_loss": Metric("loss", digits=3),
}


# By whether steps and seconds were fewer (-1), as many or more (1) than the baseline's.
TIMES = {
    (-1, -1): "in {} against {}",
    (-1, 0): "in the same time ({})",
    (-1, 1): "but in more time: {} against {}",
    (0, -1): "in {} against {}",
    (0, 0): "in the same time ({})",
    (0, 1): "but in more time: {} against {}",
    (1, -1): "yet in less time: {} against {}",
    (1, 0): "in the same time ({})",
    (1, 1): "and in more time: {} against {}",
}


def metric_named(name: str) -> Metric:
    return METRICS.get(name, Metric(name.replace("_", " ")))


def headline(runs: Sequence[RunRecord]) -> str:
    """What the runs show, said plainly whoever won."""
    return " ".join(said(grouped(runs)))


def said(groups: Sequence[Group]) -> tuple[str, str]:
    """The headline, and what should be known beside it."""
    base = next(group for group in groups if group.baseline)
    others = [group for group in groups if not group.baseline and group.mean.metric == base.mean.metric]
    rivals = [group for group in others if group.mean.norm == "ndpp"] or others
    form = metric_named(base.mean.metric)
    if not rivals or not math.isfinite(base.mean.final):
        return _alone(base, form), ""
    sign = 1 if base.mean.maximise else -1
    rival = max(rivals, key=lambda group: _rank(group, sign))
    names = names_of(groups)
    return _race(rival, base, form, names), _endings(groups, rival, base, form, names)


def _rank(group: Group, sign: int) -> float:
    return sign * group.mean.final if math.isfinite(group.mean.final) else -math.inf


def names_of(groups: Sequence[Group]) -> dict[str, str]:
    """What groups are called in sentences and charts: the norm, where no other has it."""
    norms = [group.mean.norm for group in groups]
    titles = [NORM_TITLES.get(norm, norm) for norm in norms]
    return {
        group.label: title if norms.count(norm) == 1 else group.label
        for group, norm, title in zip(groups, norms, titles, strict=True)
    }


def _alone(base: Group, form: Metric) -> str:
    took = f"after {base.mean.steps:,} steps and {seconds_text(base.mean.seconds)}"
    if not math.isfinite(base.mean.final):
        return f"{base.label} has no final {form.title} {took}: there is nothing to compare with."
    return f"{base.label} ended at {form(base.mean.final)} {form.title} {took}."


def _race(rival: Group, base: Group, form: Metric, names: dict[str, str]) -> str:
    value = base.mean.final
    who, other = names[rival.label], names[base.label]
    own_title = f"{other}’s final {form.title}" if " " not in other else f"the final {form.title} of {other}"
    target = f"{own_title} ({form(value)})"
    steps, own = steps_to(rival.mean, value), steps_to(base.mean, value)
    seconds, own_seconds = seconds_to(rival.mean, value), seconds_to(base.mean, value)
    if steps is None or seconds is None or own is None or own_seconds is None:  # not the latter: it is on that curve
        best = f"its best was {form(rival.mean.best)}" if math.isfinite(rival.mean.best) else "it has no value at all"
        ended = rival.note or f"in {rival.mean.steps:,} steps"
        return f"{who} did not reach {target}: {best}, {ended}."
    in_steps = {-1: f"after {steps:,} steps against {own:,}", 0: f"after {steps:,} steps, as {other} did"}.get(
        _sign(steps - own), f"only after {steps:,} steps against {own:,}"
    )
    shown, own_shown = seconds_text(seconds), seconds_text(own_seconds)
    slower = 0 if shown == own_shown else _sign(seconds - own_seconds)
    in_time = TIMES[_sign(steps - own), slower].format(shown, own_shown)
    return f"{who} reached {target} {in_steps}, {in_time}."


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _endings(groups: Sequence[Group], rival: Group, base: Group, form: Metric, names: dict[str, str]) -> str:
    """Where both ended, and whether another method did better than the baseline."""
    sign = 1 if base.mean.maximise else -1
    final, other = form(rival.mean.final), form(base.mean.final)
    if not math.isfinite(rival.mean.final):
        said = f"{names[rival.label]} has no final {form.title}."
    elif final == other:
        said = f"Both ended at {final}."
    else:
        said = f"{names[rival.label]} ended at {final}, {names[base.label]} at {other}."
    others = [g for g in groups if g.mean.metric == base.mean.metric and g.mean.norm != rival.mean.norm]
    best = max(others or [base], key=lambda group: _rank(group, sign))
    if best is not base:
        said += f" Of the others, {names[best.label]} ended best, at {form(best.mean.final)}."
    return said


def seconds_text(value: float) -> str:
    if value < 1:
        return f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"
