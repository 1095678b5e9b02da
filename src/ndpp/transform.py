"""A layer's training call as one node of the graph: (x, W, b) → (x, D·W, b - μ·D·W, S), and its gradient by hand.

The input comes back as an alias that the stock operation reads. Its gradient is then the first thing the backward pass
of this node is given, and what comes by way of the statistics is added to it in place, only where rows were looked
at. Compiled code sees a handful of operators in place of some hundred.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch.library import custom_op

from . import kernels, sync
from .geometry import Axis, Grid, Layout
from .kernels import Plan, View, known
from .sampling import row_budget
from .whitening import Moments, statistics_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
    if x.numel() > 0 and known(stats.rows > 0) is not False:
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
    batch: Sequence[Tensor],
    used: Sequence[Tensor],
    weight: Tensor,
    key: str,
) -> list[Tensor]:
    """Gradients of the weight, and of μ and Cov of the batch: zero where the running ones were used."""
    plan, stats = plan_of(key), Moments(*batch)
    d, mean, unit = used
    of_d, of_mean, of_weight = kernels.folded_adjoint(
        d, Moments(stats.rows, mean, stats.cov, unit), weight, grad_folded, grad_constant, plan
    )
    seen = known(stats.rows > 0)
    if seen is False:
        return [of_weight, torch.zeros_like(of_mean), torch.zeros_like(of_d)]
    of_cov = kernels.root_adjoint(stats, of_d, plan)
    if seen is None:
        of_mean, of_cov = (torch.where(stats.rows > 0, g, 0.0) for g in (of_mean, of_cov))
    return [of_weight, of_mean, of_cov]


# --- the same as operators ---


@custom_op("ndpp::moments", mutates_args=())
def moments_op(
    x: Tensor, gain: Tensor | None, draws: Tensor, axes: Sequence[int], rows: int | None, key: str
) -> list[Tensor]:
    return _moments(x, gain, draws, axes, rows, key)


@moments_op.register_fake
def _(x: Tensor, gain: Tensor | None, draws: Tensor, axes: Sequence[int], rows: int | None, key: str) -> list[Tensor]:
    return _empty_moments(x, plan_of(key))


@custom_op("ndpp::moments_adjoint_", mutates_args=("grad",))
def moments_adjoint_op(
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
    return _moments_adjoint(grad, grad_stats, batch, x, gain, draws, axes, rows, key)


@moments_adjoint_op.register_fake
def _(
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
    batch: Sequence[Tensor],
    used: Sequence[Tensor],
    weight: Tensor,
    key: str,
) -> list[Tensor]:
    of_weight, of_mean, of_cov = _fold_adjoint(grad_folded, grad_constant, batch, used, weight, key)
    return [torch.empty_like(weight).copy_(of_weight), of_mean.contiguous(), of_cov.contiguous()]


@fold_adjoint_op.register_fake
def _(
    grad_folded: Tensor,
    grad_constant: Tensor,
    batch: Sequence[Tensor],
    used: Sequence[Tensor],
    weight: Tensor,
    key: str,
) -> list[Tensor]:
    return [torch.empty_like(weight), torch.empty_like(batch[1]), torch.empty_like(batch[2])]


class Stages(NamedTuple):
    """The stages as they are, or as operators for compiled code."""

    moments: Callable[..., Any]
    moments_adjoint_: Callable[..., Any]
    fold: Callable[..., Any]
    fold_adjoint: Callable[..., Any]


_DIRECT = Stages(_moments, _moments_adjoint, _fold, _fold_adjoint)
_OPERATORS = Stages(moments_op, moments_adjoint_op, fold_op, fold_adjoint_op)


def _stages() -> Stages:
    return _OPERATORS if torch.compiler.is_compiling() else _DIRECT


# --- the node ---


class Again(NamedTuple):
    """What a backward pass that is itself differentiated needs: the call once more, with a graph."""

    run: Callable[[Tensor, Tensor, Tensor | None], Sequence[Tensor | None]]
    token: object  # lives as long as the graph of the call

    def gradients(self, inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the inputs, differentiable."""
        leaves = [None if t is None else t.view_as(t) for t in inputs]
        outputs = self.run(*leaves)  # type: ignore[arg-type]
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None]
        wanted = [t for t in leaves if t is not None and t.requires_grad]
        sums, cotangents = [o for o, _ in pairs if o.requires_grad], [g for o, g in pairs if o.requires_grad]
        found = iter(torch.autograd.grad(sums, wanted, cotangents, create_graph=True, allow_unused=True))
        return [next(found) if t is not None and t.requires_grad else None for t in leaves]


class Transform(torch.autograd.Function):
    """Stages in order; backward their adjoints in the opposite order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        draws: Tensor,
        finite: Tensor | None,
        running_mean: Tensor,
        running_cov: Tensor,
        tracked: Tensor,
        axes: tuple[int, ...],
        key: str,
        plan: Plan,
        group: ProcessGroup | None,
        again: Again | None,
        *step_rows: Tensor,
    ) -> tuple[Tensor, ...]:
        """The alias of x, D·W, b - μ·D·W; rows, mean, covariance and unit of the batch; the gain if there is one.

        `finite` says whether all of x is. The backward pass sets every `step_rows` to zero: the step that this call
        belongs to is then over.
        """
        gain = kernels.scale(x, plan) if plan.scale != "none" else None
        stages = _stages()
        rows = budget(plan, group)
        local = Moments(*stages.moments(x, gain, draws, axes, rows, key))
        if finite is not None:
            local = local._replace(rows=torch.where(finite, local.rows, torch.nan))
        batch, kept = (local, ()) if group is None else sync.join_forward(local, group)
        folded, constant, *used = stages.fold([*batch], [running_mean, running_cov, tracked], weight, bias, key)
        alias = x.view_as(x)
        of_rank = () if group is None else (*local, *kept)
        ctx.save_for_backward(x, weight, bias, draws, gain, *batch, *used, *of_rank)
        ctx.told = axes, rows, key, plan, group, step_rows, again
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*batch, *(() if ctx.needs_input_grad[0] else (alias,)))
        return (alias, folded, constant, *batch, *(() if gain is None else (gain,)))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        x, weight, bias, draws, gain, *saved = ctx.saved_tensors
        axes, rows, key, plan, group, step_rows, again = ctx.told
        grad_x, grad_folded, grad_constant = grads[:3]
        grad_gain = grads[7] if gain is not None else None
        for step in step_rows:
            step.zero_()
        rest = (None,) * (10 + len(step_rows))
        if again is not None and torch.is_grad_enabled():
            return (*again.gradients((x, weight, bias), (grad_x, grad_folded, grad_constant, grad_gain)), *rest)
        stages = _stages()
        batch, used, local, kept = saved[:4], saved[4:7], saved[7:11], saved[11:]
        grad_folded = torch.zeros_like(weight) if grad_folded is None else grad_folded
        if grad_constant is None:
            grad_constant = weight.new_zeros(plan.outputs(weight))
        of_weight, *of_stats = stages.fold_adjoint(grad_folded, grad_constant, batch, used, weight, key)
        of_x = None
        if ctx.needs_input_grad[0]:
            if group is not None:
                of_stats = [*sync.join_adjoint(sync.Kept(*kept), of_stats[0], of_stats[1], group)]
                batch = local
            of_x = torch.zeros_like(x) if grad_x is None else grad_x
            of_gain = stages.moments_adjoint_(of_x, of_stats, batch, x, gain, draws, axes, rows, key)
            if gain is not None:
                of_gain = of_gain if grad_gain is None else of_gain + grad_gain
                kernels.scale_adjoint_(of_x, x, gain, of_gain, plan)
        return (of_x, of_weight, None if bias is None else grad_constant.to(bias.dtype), *rest)


def budget(plan: Plan, group: ProcessGroup | None) -> int | None:
    """Rows that this rank looks at: the settings speak of all ranks together."""
    return plan.rows if plan.rows is None or group is None else max(plan.rows // group.size(), 1)


def declines(x: Tensor, grid: Grid, valid: Tensor | None, taps: int) -> str | None:
    """Why a call is not one node but a graph of plain operations; None if it is one."""
    if valid is not None:
        return "positions are masked"
    if len(grid.phases) > 1 or math.prod([len(axis.taps) for axis in grid.phases[0]]) < taps:
        return "a transposed convolution with several phases"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "under a function transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None:
        return "exported: only stock operators"
    return None
