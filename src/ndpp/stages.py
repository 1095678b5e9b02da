"""The stages of a training call and their adjoints, as functions and as operators that compiled code sees whole.

Operators take numbers, strings and tensors: a plan travels as its text, the positions of an input as six numbers per
axis.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from . import kernels
from .geometry import Axis, Grid, Layout
from .keeping import seen
from .kernels import Plan, Running, View
from .sampling import row_budget
from .whitening import Moments, statistics_dtype

# --- what the operators are told, in numbers and strings ---


def plan_key(plan: Plan) -> str:
    return repr(dataclasses.astuple(plan))


@functools.cache
def plan_of(key: str) -> Plan:
    layout, *rest = ast.literal_eval(key)
    return Plan(Layout(*layout), *rest)


def axes_of(grid: Grid) -> list[int]:
    """The positions of a grid of one phase as six numbers per axis: taps are evenly spaced."""
    numbers: list[int] = []
    for axis in grid.phases[0]:
        spacing = axis.offsets[1] - axis.offsets[0] if len(axis.offsets) > 1 else 1
        numbers += [axis.size, axis.count, axis.step, len(axis.offsets), axis.offsets[0], spacing]
    return numbers


@functools.lru_cache(4096)
def view_of(axes: tuple[int, ...], batch: int, rows: int | None, stride: int | None) -> View:
    phase = []
    for at in range(0, len(axes), 6):
        size, count, step, taps, first, spacing = axes[at : at + 6]
        phase.append(Axis(size, count, step, tuple(first + spacing * t for t in range(taps)), tuple(range(taps))))
    return View(tuple(phase), row_budget(batch, tuple(phase), rows, stride))


# --- the stages ---


def _moments(
    x: Tensor, gain: Tensor | None, draws: Tensor, axes: Sequence[int], rows: int | None, key: str
) -> list[Tensor]:
    """Rows, mean, covariance and unit of what this call looks at."""
    plan = plan_of(key)
    if x.numel() == 0:
        return _empty_moments(x, plan)
    return list(kernels.moments(x, gain, draws, _view(x, axes, rows, plan), plan))


def _view(x: Tensor, axes: Sequence[int], rows: int | None, plan: Plan) -> View:
    return view_of(tuple(axes), x.shape[0], rows, plan.stride)


def _empty_moments(x: Tensor, plan: Plan) -> list[Tensor]:
    blocks, f = sum(g for g, _ in plan.layout.widths), plan.layout.widths[0][1]
    options: Any = {"dtype": statistics_dtype(x.dtype), "device": x.device}
    shapes: tuple[tuple[int, ...], ...] = ((), (blocks, f), (blocks, f, f))
    return [*(torch.zeros(shape, **options) for shape in shapes), torch.ones((), **options)]


def _moments_adjoint(
    grad: Tensor,
    grad_stats: Sequence[Tensor],
    batch: Sequence[Tensor],
    x: Tensor,
    gain: Tensor | None,
    draws: Tensor,
    axes: Sequence[int],
    rows: int | None,
    key: str,
) -> Tensor:
    """Add to the gradient of x; the gradient of the gain (nothing where there is none)."""
    plan, stats = plan_of(key), Moments(*batch)
    of_gain = None
    if x.numel() > 0 and seen(stats.rows) is not False:
        view = _view(x, axes, rows, plan)
        of_gain = kernels.moments_adjoint_(grad, grad_stats[0], grad_stats[1], stats, x, gain, draws, view, plan)
    if gain is None:
        return grad.new_zeros(0)
    return torch.zeros_like(gain) if of_gain is None else of_gain


def _fold(
    batch: Sequence[Tensor], running: Sequence[Tensor], weight: Tensor, bias: Tensor | None, key: str
) -> list[Tensor]:
    """D·W and b - μ·D·W; D, and the μ and the unit that were used."""
    plan = plan_of(key)
    stats = kernels.usable(Moments(*batch), running[0], running[1], running[2], plan)
    d = kernels.root(stats, plan)
    return [*kernels.folded(d, stats, weight, bias, plan), d, stats.mean, stats.unit]


def _fold_adjoint(
    grad_folded: Tensor,
    grad_constant: Tensor,
    grad_used: Sequence[Tensor],
    batch: Sequence[Tensor],
    used: Sequence[Tensor],
    weight: Tensor,
    key: str,
) -> list[Tensor]:
    """Gradients of the weight, and of μ and Cov of the batch: of no use where it had no rows.

    grad_used: what reaches D and μ by other ways than this weight, if anything does.
    """
    plan, stats = plan_of(key), Moments(*batch)
    d, mean, unit = used
    of_d, of_mean, of_weight = kernels.folded_adjoint(
        d, Moments(stats.rows, mean, stats.cov, unit), weight, grad_folded, grad_constant, plan
    )
    if grad_used:
        of_d, of_mean = of_d + grad_used[0], of_mean + grad_used[1]
    if seen(stats.rows) is False:
        return [of_weight, torch.zeros_like(of_mean), torch.zeros_like(of_d)]
    return [of_weight, of_mean, kernels.root_adjoint(stats, d, of_d, plan)]


# --- the same as operators ---


moments_op = custom_op("ndpp::moments", mutates_args=())(_moments)
moments_adjoint_op = custom_op("ndpp::moments_adjoint_", mutates_args=("grad",))(_moments_adjoint)


@moments_op.register_fake
def _(x: Tensor, gain: Tensor | None, draws: Tensor, axes: Sequence[int], rows: int | None, key: str) -> list[Tensor]:
    return _empty_moments(x, plan_of(key))


@moments_adjoint_op.register_fake
def _(grad: Tensor, grad_stats: object, batch: object, x: Tensor, gain: Tensor | None, *_: object) -> Tensor:
    return grad.new_zeros(0) if gain is None else torch.empty_like(gain)


@custom_op("ndpp::fold", mutates_args=())
def fold_op(
    batch: Sequence[Tensor], running: Sequence[Tensor], weight: Tensor, bias: Tensor | None, key: str
) -> list[Tensor]:
    folded, constant, d, mean, unit = _fold(batch, running, weight, bias, key)
    # Operators give away what is theirs, laid out as their fake twins say.
    return [torch.empty_like(weight).copy_(folded), constant.clone(), d.contiguous(), mean.clone(), unit.clone()]


@fold_op.register_fake
def _(
    batch: Sequence[Tensor], running: Sequence[Tensor], weight: Tensor, bias: Tensor | None, key: str
) -> list[Tensor]:
    _, mean, cov, unit = batch
    outputs = plan_of(key).outputs(weight)
    kept = [torch.empty_like(t) for t in (cov, mean, unit)]
    return [torch.empty_like(weight), weight.new_empty(outputs), *kept]


@custom_op("ndpp::fold_adjoint", mutates_args=())
def fold_adjoint_op(
    grad_folded: Tensor,
    grad_constant: Tensor,
    grad_used: Sequence[Tensor],
    batch: Sequence[Tensor],
    used: Sequence[Tensor],
    weight: Tensor,
    key: str,
) -> list[Tensor]:
    of_weight, of_mean, of_cov = _fold_adjoint(grad_folded, grad_constant, grad_used, batch, used, weight, key)
    return [torch.empty_like(weight).copy_(of_weight), of_mean.contiguous(), of_cov.contiguous()]


@fold_adjoint_op.register_fake
def _(
    grad_folded: Tensor,
    grad_constant: Tensor,
    grad_used: Sequence[Tensor],
    batch: Sequence[Tensor],
    used: Sequence[Tensor],
    weight: Tensor,
    key: str,
) -> list[Tensor]:
    return [torch.empty_like(weight), torch.empty_like(batch[1]), torch.empty_like(batch[2])]


@custom_op("ndpp::observe_", mutates_args=("mean", "cov", "tracked", "step_rows", "step_mean", "step_cov"))
def observe_op_(
    mean: Tensor,
    cov: Tensor,
    tracked: Tensor,
    step_rows: Tensor,
    step_mean: Tensor,
    step_cov: Tensor,
    batch: Sequence[Tensor],
    momentum: float | None,
    more_may_come: bool,
) -> None:
    """`kernels.observe_`: some two dozen operations that a compiler would have to work through for every layer."""
    state = Running(mean, cov, tracked, step_rows, step_mean, step_cov)
    kernels.observe_(state, Moments(*batch), momentum, more_may_come)


class Stages(NamedTuple):
    """The stages as they are, or as operators for compiled code."""

    moments: Callable[..., Any]
    moments_adjoint_: Callable[..., Any]
    fold: Callable[..., Any]
    fold_adjoint: Callable[..., Any]


_DIRECT = Stages(_moments, _moments_adjoint, _fold, _fold_adjoint)
_OPERATORS = Stages(moments_op, moments_adjoint_op, fold_op, fold_adjoint_op)


def stages() -> Stages:
    """Which of the two this code needs."""
    return _OPERATORS if torch.compiler.is_compiling() else _DIRECT
