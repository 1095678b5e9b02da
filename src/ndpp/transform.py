"""A layer's training call as one node of the graph: (x, W, b) → (x, D·W, b - μ·D·W, S), and its gradient by hand.

The input comes back as an alias that the stock operation reads. Its gradient is then the first thing the backward pass
of this node is given, and what comes by way of the statistics is added to it in place, only where rows were looked
at. Compiled code sees a handful of operators in place of some hundred.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.autograd.forward_ad
from torch import Tensor

from . import kernels, sync
from .geometry import Grid
from .keeping import is_exporting, is_traced
from .kernels import Plan
from .products import Link
from .stages import stages
from .whitening import Moments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Again(NamedTuple):
    """What a backward pass that is itself differentiated needs: the call once more, with a graph."""

    run: Callable[[Tensor, Tensor, Tensor | None], Sequence[Tensor | None]]
    tokens: object  # live as long as the graph of the call

    def gradients(self, inputs: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the inputs, differentiable."""
        leaves = [None if t is None else torch.ops.aten.alias(t) for t in inputs]
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
        link: Link | None,
        lead: Any,
        dtype: torch.dtype,
        *step_rows: Tensor,
    ) -> tuple[Tensor, ...]:
        """The alias of x, D·W, b - μ·D·W; rows, mean, covariance and unit of the batch; the gain if there is one.

        D·W and the constant come in `dtype`. `finite` says whether all of x is. If this call has others to `lead` (a
        `sharing.Meeting`), also D, μ and their unit as used, until the backward pass. That sets every `step_rows` to
        zero: the step of this call is then over.
        """
        gain = kernels.scale(x, plan) if plan.scale != "none" else None
        stage = stages()
        rows = budget(plan, group)
        running = [running_mean, running_cov, tracked]
        of_rank: tuple[Tensor, ...] = ()
        if group is None and finite is None:
            found = stage.forward(x, gain, draws, running, weight, bias, axes, rows, key, dtype)
            (folded, constant), batch, used = found[:2], Moments(*found[2:6]), found[6:]
        else:
            local = Moments(*stage.moments(x, gain, draws, axes, rows, key))
            if finite is not None:
                local = local._replace(rows=torch.where(finite, local.rows, torch.nan))
            batch, kept = (local, ()) if group is None else sync.join_forward(local, group)
            of_rank = () if group is None else (*local, *kept)
            folded, constant, *used = stage.fold([*batch], running, weight, bias, key, dtype)
        alias = torch.ops.aten.alias.default(x)  # with the strides of x: a view would change those of axes of size 1
        ctx.save_for_backward(x, weight, bias, draws, gain, *batch, *used, *of_rank)
        ctx.told = axes, rows, key, plan, group, step_rows, again, link, lead, dtype
        ctx.set_materialize_grads(False)
        for_others = [torch.ops.aten.alias(t) for t in used] if lead is not None else []  # μ may be that of the batch
        ctx.mark_non_differentiable(*batch, *for_others[2:], *(() if ctx.needs_input_grad[0] else (alias,)))
        return (alias, folded, constant, *batch, *(() if gain is None else (gain,)), *for_others)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        if torch.compiler.is_compiling():
            return Transform.adjoint(ctx, saved, grads)
        with no_autocast(saved[0].device.type):  # as in the forward pass
            return Transform.adjoint(ctx, saved, grads)

    @staticmethod
    def adjoint(ctx: Any, saved: Sequence[Any], grads: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of all inputs from those of the outputs."""
        x, weight, bias, draws, gain, *saved = saved
        axes, rows, key, plan, group, step_rows, again, link, lead, dtype = ctx.told
        grad_x, grad_folded, grad_constant = grads[:3]
        for step in step_rows:
            step.zero_()
        if lead is not None:
            lead.clear()
        rest = (None,) * (13 + len(step_rows))
        grad_gain = None if gain is None else grads[7]
        grad_used = grads[7 if gain is None else 8 :][:2]  # of D and μ, from others that read x
        if link is not None and grad_x is not None and not link.explicit:
            grad_gain = kernels.gain_adjoint(grad_x, x, gain, plan)
        if again is not None and torch.is_grad_enabled():
            of_outputs = (grad_x, grad_folded, grad_constant, grad_gain, *grad_used)
            return (*again.gradients((x, weight, bias), of_outputs), *rest)
        stage = stages()
        batch, used, local, kept = saved[:4], saved[4:7], saved[7:11], saved[11:]
        unused = grad_folded is None and grad_constant is None  # only others used what was found
        grad_folded = torch.zeros_like(weight, dtype=dtype) if grad_folded is None else grad_folded
        if grad_constant is None:
            grad_constant = weight.new_zeros(plan.outputs(weight), dtype=dtype)
        if any(grad is not None for grad in grad_used):
            grad_used = [torch.zeros_like(t) if g is None else g for g, t in zip(grad_used, used[:2], strict=True)]
        else:
            grad_used = []
        of_weight, *of_stats = stage.fold_adjoint(grad_folded, grad_constant, grad_used, batch, used, weight, key)
        of_x = None
        if ctx.needs_input_grad[0]:
            if group is not None:
                of_mean, of_cov = (torch.where(batch[0] > 0, part, 0.0) for part in of_stats)
                of_stats = [*sync.join_adjoint(sync.Kept(*kept), of_mean, of_cov, group)]
                batch = local
            of_x = torch.zeros_like(x) if grad_x is None else grad_x
            of_gain = stage.moments_adjoint_(of_x, of_stats, batch, x, gain, draws, axes, rows, key)
            if gain is not None:
                of_gain = of_gain if grad_gain is None else of_gain + grad_gain
                kernels.scale_adjoint_(of_x, x, gain, of_gain, plan)
        if unused:
            return (of_x, None, None, *rest)
        return (of_x, of_weight, None if bias is None else grad_constant.to(bias.dtype), *rest)


class _NoAutocast:
    """As `torch.autocast(device_type, enabled=False)` inside of one that is enabled, in a tenth of its time."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __enter__(self) -> None:
        torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled(self.device_type, True)


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False) if is_traced() else _NoAutocast(device_type)


def budget(plan: Plan, group: ProcessGroup | None) -> int | None:
    """Rows that this rank looks at: the settings speak of all ranks together."""
    return plan.rows if plan.rows is None or group is None else max(plan.rows // group.size(), 1)


def declines(x: Tensor, grid: Grid, valid: Tensor | None, taps: int) -> str | None:
    """Why a call is not one node but a graph of plain operations; None if it is one."""
    if valid is not None:
        return "positions are masked"
    if len(grid.phases) > 1 or math.prod([len(axis.taps) for axis in grid.phases[0]]) < taps:
        return "a transposed convolution with several phases"
    if is_exporting() or torch._C._get_tracing_state() is not None:
        return "exported: only stock operators"
    if torch.compiler.is_compiling():  # which has its own way with what follows
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "under a function transform of torch.func"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return None
