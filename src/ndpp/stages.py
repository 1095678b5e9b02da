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
import torch.library
from torch import Tensor

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


def _forward(
    x: Tensor,
    gain: Tensor | None,
    draws: Tensor,
    running: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    axes: Sequence[int],
    rows: int | None,
    key: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    """D·W and b - μ·D·W; rows, mean, covariance and unit of what this call looks at; D, and μ and unit as used."""
    plan, mean_cov_tracked = plan_of(key), (running[0], running[1], running[2])
    if x.numel() == 0:
        batch = _empty_moments(x, plan)
        folded = kernels.fold(batch, mean_cov_tracked, weight, bias, plan, dtype)
    else:
        view = view_of(tuple(axes), x.shape[0], rows, plan.stride)
        batch, folded = kernels.forward(x, gain, draws, mean_cov_tracked, weight, bias, view, plan, dtype)
    return [*folded[:2], *batch, *folded[2:]]


def _moments(
    x: Tensor, gain: Tensor | None, draws: Tensor, axes: Sequence[int], rows: int | None, key: str
) -> list[Tensor]:
    """Rows, mean, covariance and unit of what this call looks at."""
    plan = plan_of(key)
    if x.numel() == 0:
        return list(_empty_moments(x, plan))
    return list(kernels.moments(x, gain, draws, view_of(tuple(axes), x.shape[0], rows, plan.stride), plan))


def _empty_moments(x: Tensor, plan: Plan) -> Moments:
    options: Any = {"dtype": statistics_dtype(x.dtype), "device": x.device}
    rows, mean, cov, unit = _shapes(plan)
    zeros = torch.zeros(rows, **options), torch.zeros(mean, **options), torch.zeros(cov, **options)
    return Moments(*zeros, torch.ones(unit, **options))


def _shapes(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Of rows, mean, covariance and unit."""
    blocks, f = sum(g for g, _ in plan.layout.widths), plan.layout.widths[0][1]
    return (), (blocks, f), (blocks, f, f), ()


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
        view = view_of(tuple(axes), x.shape[0], rows, plan.stride)
        of_gain = kernels.moments_adjoint_(grad, grad_stats[0], grad_stats[1], stats, x, gain, draws, view, plan)
    if gain is None:
        return grad.new_empty(0)
    return torch.zeros_like(gain) if of_gain is None else of_gain


def _fold(
    batch: Sequence[Tensor],
    running: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor | None,
    key: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    """D·W and b - μ·D·W; D, and the μ and the unit that were used."""
    mean_cov_tracked = (running[0], running[1], running[2])
    return list(kernels.fold(Moments(*batch), mean_cov_tracked, weight, bias, plan_of(key), dtype))


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
    as_used = (used[0], used[1], used[2])
    arguments = (Moments(*batch), as_used, weight, grad_folded, grad_constant, tuple(grad_used), plan_of(key))
    return list(kernels.fold_adjoint(*arguments))


# --- the same as operators ---


LIBRARY: Any = torch.library.Library("ndpp", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(
    name: str,
    stage: Callable[..., Any],
    fake: Callable[..., Any],
    owned: Callable[..., Any] | None = None,
    mutates: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """Registered by hand: `custom_op` asks every call about aliases, and takes as long for that as for a launch.

    `owned` is the stage with outputs that are no other tensors, where it may have such.
    """
    LIBRARY.define(name + torch.library.infer_schema(stage, mutates_args=mutates))
    LIBRARY.impl(name, stage if owned is None else owned, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ndpp::{name}", fake, lib=LIBRARY)
    made: Callable[..., Any] = getattr(torch.ops.ndpp, name).default
    return made


def _own(outputs: Sequence[Tensor], layouts: Sequence[Tensor | None], given: Sequence[Tensor]) -> list[Tensor]:
    """Operators give away what is theirs alone, laid out as their fake twins say: as a tensor, or contiguous."""
    made, taken = [], {t.data_ptr() for t in given if t.numel()}
    for output, layout in zip(outputs, layouts, strict=True):
        own = output.contiguous() if layout is None else output
        if layout is not None and output.stride() != layout.stride():
            own = torch.empty_like(layout, dtype=output.dtype).copy_(output)
        if own.data_ptr() in taken:
            own = own.clone()
        if own.numel():
            taken.add(own.data_ptr())
        made.append(own)
    return made


def _forward_owned(x: Tensor, gain: Any, draws: Tensor, running: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return _own(_forward(x, gain, draws, running, *rest), (rest[0], *(None,) * 8), running)


def _fold_owned(batch: Sequence[Tensor], running: Sequence[Tensor], weight: Tensor, *rest: Any) -> list[Tensor]:
    return _own(_fold(batch, running, weight, *rest), (weight, *(None,) * 4), (*batch, *running))


def _fold_adjoint_owned(
    grad_folded: Tensor,
    grad_constant: Tensor,
    grad_used: Sequence[Tensor],
    batch: Sequence[Tensor],
    used: Sequence[Tensor],
    weight: Tensor,
    key: str,
) -> list[Tensor]:
    outputs = _fold_adjoint(grad_folded, grad_constant, grad_used, batch, used, weight, key)
    return _own(outputs, (weight, None, None), (*batch, *used, grad_folded, grad_constant))


def _observe_(
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


# --- what they return, without computing it ---


def _fake_forward(x: Tensor, *rest: Any) -> list[Tensor]:
    *_, weight, _, _, _, key, dtype = rest
    batch = _fake_moments(x, key)
    return [*_fake_folded(weight, key, dtype), *batch, *(torch.empty_like(batch[at]) for at in (2, 1, 3))]


def _fake_moments(x: Tensor, *rest: Any) -> list[Tensor]:
    shapes = _shapes(plan_of(rest[-1]))
    return [x.new_empty(shape, dtype=statistics_dtype(x.dtype)) for shape in shapes]


def _fake_moments_adjoint(
    grad: Tensor, grad_stats: object, batch: object, x: Tensor, gain: Tensor | None, *_: object
) -> Tensor:
    return grad.new_empty(0) if gain is None else torch.empty_like(gain)


def _fake_fold(batch: Sequence[Tensor], running: object, weight: Tensor, *rest: Any) -> list[Tensor]:
    return [*_fake_folded(weight, *rest[1:]), *(batch[at].new_empty(batch[at].shape) for at in (2, 1, 3))]


def _fake_fold_adjoint(
    grad_folded: object, grad_constant: object, grad_used: object, batch: Sequence[Tensor], used: object, *rest: Any
) -> list[Tensor]:
    return [torch.empty_like(rest[0]), *(batch[at].new_empty(batch[at].shape) for at in (1, 2))]


def _fake_observe(*_: object) -> None:
    return None


def _fake_folded(weight: Tensor, key: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(weight, dtype=dtype), weight.new_empty(plan_of(key).outputs(weight), dtype=dtype)]


forward_op = _operator("forward", _forward, _fake_forward, _forward_owned)
moments_op = _operator("moments", _moments, _fake_moments)
moments_adjoint_op = _operator("moments_adjoint_", _moments_adjoint, _fake_moments_adjoint, mutates=("grad",))
fold_op = _operator("fold", _fold, _fake_fold, _fold_owned)
fold_adjoint_op = _operator("fold_adjoint", _fold_adjoint, _fake_fold_adjoint, _fold_adjoint_owned)
STATE = ("mean", "cov", "tracked", "step_rows", "step_mean", "step_cov")
observe_op_ = _operator("observe_", _observe_, _fake_observe, mutates=STATE)


class Stages(NamedTuple):
    """The stages as they are, or as operators for compiled code."""

    forward: Callable[..., Any]
    moments: Callable[..., Any]
    moments_adjoint_: Callable[..., Any]
    fold: Callable[..., Any]
    fold_adjoint: Callable[..., Any]


_DIRECT = Stages(_forward, _moments, _moments_adjoint, _fold, _fold_adjoint)
_OPERATORS = Stages(forward_op, moments_op, moments_adjoint_op, fold_op, fold_adjoint_op)


def stages() -> Stages:
    """Which of the two this code needs."""
    return _OPERATORS if torch.compiler.is_compiling() else _DIRECT
