"""What a training call computes, stage by stage, in PyTorch operations: specification, oracle and fallback.

Nothing here records a graph. Every stage has its adjoint beside it; `transform` puts them together.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.autograd.forward_ad
from torch import Tensor

from .. import adjoints, roots, whitening
from ..geometry import grouped, ungrouped
from ..keeping import kept, readable, seen
from ..whitening import Moments
from .plain_moments import moments, moments_adjoint_
from .plain_scale import (
    gain_adjoint,
    normalised,
    normalised_adjoint,
    scale,
    scale_adjoint_,
    scaled_gradient,
    scaled_output_,
    scaled_part,
)
from .plan import Folded, Plan, Running, View

__all__ = [
    "Folded",
    "Plan",
    "Running",
    "View",
    "absolute",
    "fold",
    "fold_adjoint",
    "folded",
    "folded_adjoint",
    "forward",
    "gain_adjoint",
    "moments",
    "moments_adjoint_",
    "newest_weight",
    "normalised",
    "normalised_adjoint",
    "observe_",
    "root",
    "root_adjoint",
    "scale",
    "scale_adjoint_",
    "scaled_gradient",
    "scaled_output_",
    "scaled_part",
    "usable",
]

# --- from rows to D·W, and back ---


def forward(
    x: Tensor,
    gain: Tensor | None,
    draws: Tensor,
    running: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    view: View,
    plan: Plan,
    dtype: torch.dtype,
) -> tuple[Moments, Folded]:
    """Moments of the rows looked at, and what the weight becomes by them."""
    batch = moments(x, gain, draws, view, plan)
    return batch, fold(batch, running, weight, bias, plan, dtype)


def fold(
    batch: Moments,
    running: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    dtype: torch.dtype,
) -> Folded:
    """D·W and b - μ·D·W in this dtype, by the batch or else by the running statistics (mean, cov, tracked)."""
    stats = usable(batch, *running, plan)
    d = root(stats, plan)
    product, constant = folded(d, stats, weight, bias, plan)
    return Folded(product.to(dtype), constant.to(dtype), d, stats.mean, stats.unit)


def fold_adjoint(
    batch: Moments,
    used: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    grad_folded: Tensor,
    grad_constant: Tensor,
    grad_used: tuple[Tensor, ...],
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the weight, and of μ and Cov of the batch: of no use where it had no rows.

    grad_used: what reaches D and μ by other ways than this weight, if anything does.
    """
    d, mean, unit = used
    stats = Moments(batch.rows, mean, batch.cov, unit)
    of_d, of_mean, of_weight = folded_adjoint(d, stats, weight, grad_folded, grad_constant, plan)
    if grad_used:
        of_d, of_mean = of_d + grad_used[0], of_mean + grad_used[1]
    if seen(batch.rows) is False:
        return of_weight, torch.zeros_like(of_mean), torch.zeros_like(of_d)
    return of_weight, of_mean, root_adjoint(batch, d, of_d, plan)


# --- D and D·W ---


def usable(batch: Moments, running_mean: Tensor, running_cov: Tensor, tracked: Tensor, plan: Plan) -> Moments:
    """The batch's moments, or the running ones where it has none to give (all padding, or not finite)."""
    own = seen(batch.rows)
    if own:
        return batch
    some = batch.rows > 0
    if own is False or batch.mean.requires_grad:
        running = whitening.in_unit(tracked.to(batch.rows.dtype), running_mean, running_cov, plan.eps)
        if own is False:
            return running
        return Moments(*(torch.where(some, b, r) for b, r in zip(batch, running, strict=True)))
    # Moments of nothing are zeros: the running ones are added to them, in unit 1, without asking the device.
    share = some.logical_not().to(batch.rows.dtype)
    mean, cov = torch.addcmul(batch.mean, running_mean, share), torch.addcmul(batch.cov, running_cov, share)
    return Moments(torch.where(some, batch.rows, tracked), mean, cov, torch.where(some, batch.unit, 1.0))


def root(stats: Moments, plan: Plan) -> Tensor:
    """D in the unit of the moments. Of no rows at all it is the identity: the layer is then the stock layer."""
    widths = plan.layout.feature_counts(stats.cov.device)
    options: Any = {"eps": plan.eps, "shrinkage": plan.shrinkage, "widths": widths}
    own = seen(stats.rows)
    if own is not False:
        d = roots.decorrelate(stats, solver=plan.solver, steps=plan.steps, **options)
        if own:
            return d
    identity = _identity(stats.cov.shape[-1], stats.cov.dtype, stats.cov.device) * stats.unit
    return identity.expand_as(stats.cov) if own is False else torch.where(stats.rows > 0, d, identity)


@kept
def _identity(f: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.eye(f, dtype=dtype, device=device)


def root_adjoint(stats: Moments, d: Tensor, grad: Tensor, plan: Plan) -> Tensor:
    """The gradient of Cov from that of D, which `root` has made of these moments."""
    widths = plan.layout.feature_counts(stats.cov.device)
    a = roots.regularise(stats.cov, stats.unit, eps=plan.eps, shrinkage=plan.shrinkage, widths=widths)
    back = adjoints.inverse_sqrt_adjoint(a, d, grad, solver=plan.solver, steps=plan.steps, in_unit=True)
    return adjoints.regularise_adjoint(back, shrinkage=plan.shrinkage, widths=widths)


def folded(d: Tensor, stats: Moments, weight: Tensor, bias: Tensor | None, plan: Plan) -> tuple[Tensor, Tensor]:
    """D·W and b - μ·D·W, in the dtype of the weight."""
    groups = plan.layout.groups
    d, mean = d / stats.unit, stats.mean * stats.unit
    if _lies_by_block(weight, d, plan):
        product, constant = _folded_in_place(d, mean, weight, plan)
        return product, -constant if bias is None else bias.to(d.dtype) - constant
    parts, shift = [], None
    for d_part, mean_part, blocks in plan.layout.split(d, mean, grouped(weight.to(d.dtype), groups, plan.transposed)):
        product, constant = whitening.fold(d_part, mean_part, blocks)
        parts.append(product)
        constant = constant.reshape(groups, -1, constant.shape[1]).sum(1).flatten()
        shift = constant if shift is None else shift + constant
    assert shift is not None
    product = ungrouped(plan.layout.join(parts), weight, plan.transposed)
    constant = -shift if bias is None else bias.to(d.dtype) - shift
    return product.to(weight.dtype), constant.to(weight.dtype)


def _lies_by_block(weight: Tensor, d: Tensor, plan: Plan) -> bool:
    """Whether the columns of a block lie side by side, on a CPU and outside of a graph: D·W then needs no copy."""
    recorded = torch.is_grad_enabled() and (weight.requires_grad or d.requires_grad)
    recorded = recorded or torch.autograd.forward_ad._current_level >= 0
    one_part = plan.layout.groups == 1 and len(plan.layout.parts) == 1 and not plan.transposed
    return one_part and not recorded and weight.is_contiguous() and weight.dtype == d.dtype and readable(weight)


def _folded_in_place(d: Tensor, mean: Tensor, weight: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """D·W and μ·D·W."""
    product, outputs, blocks = torch.empty_like(weight), len(weight), plan.layout.parts[0].blocks
    by_block, to = (w.view(outputs, blocks, -1).transpose(0, 1) for w in (weight, product))
    torch.bmm(by_block, d.expand(blocks, -1, -1), out=to)
    return product, product.view(outputs, -1).mv(mean.expand(blocks, -1).reshape(-1))


def folded_adjoint(
    d: Tensor, stats: Moments, weight: Tensor, grad_weight: Tensor, grad_bias: Tensor, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of D, μ and the weight from those of what `folded` returns."""
    groups, layout = plan.layout.groups, plan.layout
    d, mean = d / stats.unit, stats.mean * stats.unit
    splits = [layout.split(d, mean, grouped(w.to(d.dtype), groups, plan.transposed)) for w in (weight, grad_weight)]
    outputs = splits[0][0][2].shape[1]
    of_shift = -grad_bias.to(d.dtype).reshape(groups, 1, outputs)
    of_stats, of_weight = [], []
    for (d_part, mean_part, blocks), (_, _, grads) in zip(*splits, strict=True):
        shift = of_shift.expand(groups, blocks.shape[0] // groups, outputs).reshape(-1, outputs)
        part_d, part_mean, part_weight = adjoints.fold_adjoint(d_part, mean_part, blocks, grads, shift)
        of_stats.append((part_mean, part_d))
        of_weight.append(part_weight)
    of_mean, of_d = layout.pack(of_stats)
    of_weights = ungrouped(layout.join(of_weight), weight, plan.transposed)
    return of_d / stats.unit, of_mean * stats.unit, of_weights.to(weight.dtype)


# --- running statistics ---


def absolute(batch: Moments, like: Tensor) -> tuple[Moments, Tensor]:
    """These moments in unit 1, and whether they are worth anything. No covariance exceeds its two variances."""
    mean, cov = (batch.mean * batch.unit).to(like.dtype), (batch.cov * batch.unit.square()).to(like.dtype)
    probe = mean.sum() + cov.diagonal(dim1=-2, dim2=-1).sum()
    usable = (probe.abs() < math.inf) & (batch.rows > 0)
    return Moments(batch.rows.to(like.dtype), mean, cov, torch.ones_like(like)), usable


def newest_weight(tracked: Tensor, momentum: float | None, dtype: torch.dtype) -> Tensor:
    """Weight of the newest step. An average without a start value: the first step counts fully."""
    t = tracked.clamp_min(1).to(dtype)
    if momentum is None or momentum == 1.0:
        return 1.0 / t if momentum is None else torch.ones_like(t)
    weight = -momentum / torch.expm1(t * math.log1p(-momentum))  # m / (1 - (1 - m)^t)
    return torch.where(t > 1, weight, 1.0)  # not all but a rounding: the start may be much larger than the step


@torch.no_grad()
def observe_(state: Running, batch: Moments, momentum: float | None, more_may_come: bool, begins: bool = False) -> None:
    """Take a call's moments into the step, and the step into the running statistics, without asking the device.

    begins: this call begins a step, whatever rows there are of another.
    """
    new, usable = absolute(batch, state.step_rows)
    present = torch.zeros_like(state.step_rows) if begins else state.step_rows
    fresh = present == 0
    rows = torch.where(usable, new.rows, 0.0)
    total = present + rows
    share = rows / total.clamp_min(1.0)
    state.tracked.add_(fresh & usable)
    weight = torch.where(usable, newest_weight(state.tracked, momentum, state.mean.dtype), 0.0)
    mean, cov = torch.where(usable, new.mean, state.step_mean), torch.where(usable, new.cov, state.step_cov)
    delta = mean - state.step_mean
    between = delta * torch.addcmul(share, share, share, value=-1.0)  # as in `whitening.merge`
    before = [torch.where(fresh, *pair) for pair in ((state.mean, state.step_mean), (state.cov, state.step_cov))]
    state.step_mean.lerp_(mean, share)
    state.step_cov.lerp_(cov, share).addcmul_(between[:, :, None], delta[:, None, :])
    for running, step, old in zip((state.mean, state.cov), (state.step_mean, state.step_cov), before, strict=True):
        running.lerp_(step + (running - old), weight)  # the step itself, if it is the first
    state.step_rows.copy_(total) if more_may_come else state.step_rows.zero_()
