"""What a training call computes, stage by stage, in PyTorch operations: specification, oracle and fallback.

Nothing here records a graph. Every stage has its adjoint beside it; `transform` puts them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import adjoints, roots, whitening
from ..geometry import Layout, Phase, grouped, ungrouped
from ..keeping import known, readable
from ..roots import symmetric_product
from ..rows import Places, add_, every_pixel, gather, is_whole, locate
from ..sampling import Sample, choose, lattice
from ..whitening import Moments

LARGE = 2.0**48  # rows of this magnitude, or below its inverse, are brought to their unit before they are squared


@dataclass(frozen=True)
class Plan:
    """What a layer's arguments and settings say about its statistics. Constant over calls."""

    layout: Layout
    transposed: bool
    per_row: bool  # S is of each row, not of the whole sample
    padding_mode: str
    scale: str
    scale_eps: float
    scale_positions: int | None
    solver: str
    steps: int
    eps: float
    shrinkage: float
    rows: int | None
    stride: int | None

    def outputs(self, weight: Tensor) -> int:
        return weight.shape[1] * self.layout.groups if self.transposed else weight.shape[0]

    @property
    def samples_rows(self) -> bool:
        return self.rows is not None or self.stride is not None


@dataclass(frozen=True)
class View:
    """The rows of one call: the positions of its input, and how many of them are looked at."""

    phase: Phase
    budget: tuple[int, ...]


# --- S ---


def scale(x: Tensor, plan: Plan) -> Tensor:
    """The gain of every row (batch, 1, *sizes) or sample (batch, 1, 1…); not for "standardize"."""
    part, dim = scaled_part(x, plan)
    return whitening.sample_scale(part, plan.scale, dim, eps=plan.scale_eps)[1]


def gain_adjoint(grad: Tensor, x: Tensor, gain: Tensor, plan: Plan) -> Tensor:
    """The gradient of the gain of f(x)·gain, with f linear, from what f hands back to x: ⟨x, fᵀ(dy)⟩, over the gain."""
    dim = (1,) if plan.per_row else tuple(range(1, x.dim()))
    total = torch.sum(grad * x, dim, keepdim=True, dtype=gain.dtype)
    return total * whitening.reciprocal(gain, where=gain > 0)


def scale_adjoint_(grad: Tensor, x: Tensor, gain: Tensor, grad_gain: Tensor, plan: Plan) -> None:
    """Add to the gradient of x what comes by way of the gain."""
    part, dim = scaled_part(x, plan)
    added = adjoints.scale_adjoint(part.to(gain.dtype), plan.scale, dim, gain, grad_gain)
    scaled_part(grad, plan)[0].add_(added.to(grad.dtype))


def scaled_part(x: Tensor, plan: Plan) -> tuple[Tensor, tuple[int, ...]]:
    """What of x enters the scale, and over which axes."""
    if plan.per_row:
        return x, (1,)
    channels = plan.layout.groups * plan.layout.channels  # not those of x, which may be a mask
    at: tuple[Any, ...] = (..., *lattice(channels, tuple(x.shape[2:]), plan.scale_positions))
    return x[at], tuple(range(1, x.dim()))


# --- μ and Cov ---


def moments(x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> Moments:
    """Of the rows looked at. A call with non-finite values in them has a count of NaN, and zeros for values."""
    values, *_ = _rows(x, gain, draws, view, plan)
    low, high = torch.aminmax(_as_in_memory(values))
    ours = values.data_ptr() != x.data_ptr()
    total = float(x.shape[0] * math.prod([axis.count for axis in view.phase]))
    if readable(low):
        return _moments_now(values, ours, max(float(high), -float(low)), total, plan)
    peak = torch.maximum(high, -low)
    finite = peak < math.inf
    unit = torch.where(finite & (peak > 0), _power(peak), 1.0).clamp_min(_least_unit(plan))
    mean, cov = _part_moments(values.mul_(unit.reciprocal()) if ours else values / unit, True, plan)
    mean, cov = torch.where(finite, mean, 0.0), torch.where(finite, cov, 0.0)
    return Moments(torch.where(finite, total, math.nan).to(unit.dtype), mean, cov, unit)


def _moments_now(values: Tensor, ours: bool, peak: float, total: float, plan: Plan) -> Moments:
    """Where the peak is a number, most rows need no unit of their own: the moments are brought to it in the end."""
    finite = math.isfinite(peak)
    unit = max(2.0 ** (math.frexp(peak)[1] - 1) if finite and peak > 0 else 1.0, _least_unit(plan))
    if not finite:
        values, ours = torch.zeros_like(values), True
    within = 1 / LARGE < unit < LARGE
    if not within:
        values, ours = values / unit, True
    mean, cov = _part_moments(values, ours, plan)
    if within and unit != 1.0:
        mean, cov = mean.div_(unit), cov.div_(unit * unit)
    rows = torch.full_like(mean[0, 0], total if finite else math.nan)
    return Moments(rows, mean, cov, torch.full_like(rows, unit))


def _least_unit(plan: Plan) -> float:
    return max(math.sqrt(plan.eps), whitening.SMALLEST_UNIT)


def _power(peak: Tensor) -> Tensor:
    """The power of two at or below a number, by its exponent's bits."""
    bits, exponent = (torch.int64, 0x7FF << 52) if peak.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    return (peak.view(bits) & exponent).view(peak.dtype)


def _as_in_memory(values: Tensor) -> Tensor:
    """The same values with their axes in the order of memory: some reductions copy what is not."""
    return values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))


def _part_moments(values: Tensor, ours: bool, plan: Plan) -> tuple[Tensor, Tensor]:
    """Mean and covariance of rows (n, channels, taps), in one centring; what its rounding left comes off the product.

    Rows that are `ours` are overwritten: another pass through memory costs as much as the product itself.
    """
    parts = []
    for rows in plan.layout.stack(values):
        shift = rows.mean(1, keepdim=True)
        rows = rows.sub_(shift) if ours else rows - shift
        residual = rows.mean(1, keepdim=True)
        cov = symmetric_product((rows.mT, rows), plus=residual.mT * residual, share=-1.0, times=1.0 / rows.shape[1])
        parts.append((shift.add_(residual).squeeze(1), cov))
    return plan.layout.pack(parts)


def moments_adjoint_(
    grad: Tensor,
    grad_mean: Tensor,
    grad_cov: Tensor,
    stats: Moments,
    x: Tensor,
    gain: Tensor | None,
    draws: Tensor,
    view: View,
    plan: Plan,
) -> Tensor | None:
    """Add to the gradient of x what comes by way of μ and Cov; the gradient of the gain by that way."""
    values, sample, places = _rows(x, gain, draws, view, plan)
    n = values.shape[0]
    parts, first = [], 0
    for part, (own, f), rows in zip(plan.layout.parts, plan.layout.widths, plan.layout.stack(values), strict=True):
        at = slice(first, first + own)
        first += own
        back = _row_gradients(rows, grad_mean[at, :f], grad_cov[at, :f, :f], stats.mean[at, :f], stats)
        blocks = plan.layout.groups * part.blocks
        back = back.reshape(n, blocks, -1, plan.layout.taps) if plan.layout.shared else _by_row(back, plan)
        parts.append(back if len(plan.layout.parts) == 1 else back.reshape(n, plan.layout.groups, -1, back.shape[-1]))
    rows = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    if gain is None:
        _add_rows_(grad, rows, places)
        return None
    rows = rows.reshape(values.shape)
    of_rows = _row_gain(gain, sample, places, plan)
    _add_rows_(grad, rows * of_rows, places)
    # values = x·gain: where the gain is zero so are the values, whatever they were
    of_gain = (rows * values * whitening.reciprocal(of_rows, where=of_rows > 0)).sum((1, 2))
    return _gain_adjoint(gain, of_gain, sample, places, plan)


def _row_gradients(rows: Tensor, grad_mean: Tensor, grad_cov: Tensor, mean: Tensor, stats: Moments) -> Tensor:
    """Of rows (g, n, f) as they are, from the gradients of mean and covariance in their unit u.

    ((x/u - μ)·(G + Gᵀ) + h) / (n·u) = x·A + b, with A and b as small as the statistics: rows are read once.
    """
    n = rows.shape[1]
    unit = float(stats.unit) if readable(stats.unit) else None
    if unit is not None and 1 / LARGE < unit < LARGE:
        a = (grad_cov + grad_cov.mT) * (1 / (n * unit * unit))
        b = grad_mean[:, None] * (1 / (n * unit)) - (mean[:, None] * unit) @ a
        return torch.baddbmm(b, rows, a)
    back = adjoints.moments_adjoint(rows / stats.unit - mean[:, None], grad_mean, grad_cov, n)
    if unit is None:  # where there was nothing to look at, there is nothing to add
        back = torch.where(stats.rows > 0, back, 0.0)
    return back / stats.unit


def _by_row(back: Tensor, plan: Plan) -> Tensor:
    """(n, blocks, channels, taps) of rows (blocks, n, f), without a copy."""
    return back.reshape(*back.shape[:2], -1, plan.layout.taps).transpose(0, 1)


def _rows(
    x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan
) -> tuple[Tensor, Sample, Places | None]:
    """Rows (n, channels, taps) of S·X, in the dtype of statistics, and their places: None where they are all of x."""
    sample = choose(x.shape[0], view.phase, view.budget, draws)
    whole = sample.samples is None and is_whole(view.phase, sample)
    places = None if whole else locate(view.phase, sample, plan.padding_mode, x.device)
    values = every_pixel(x) if places is None else gather(x, places)
    values = values.to(whitening.statistics_dtype(x.dtype))
    if gain is not None:
        own = _row_gain(gain, sample, places, plan)
        values = values * own if places is None else values.mul_(own)
    return values, sample, places


def _add_rows_(grad: Tensor, rows: Tensor, places: Places | None) -> None:
    if places is None:
        grad.add_(rows.reshape(grad.shape[0], -1, grad.shape[1]).mT.reshape(grad.shape).to(grad.dtype))
    else:
        add_(grad, rows, places)


def _row_gain(gain: Tensor, sample: Sample, places: Places | None, plan: Plan) -> Tensor:
    """(n, 1, 1) of rows, from that of samples or of positions."""
    if plan.per_row and gain.dim() > 2:
        return every_pixel(gain) if places is None else gather(gain, places)
    chosen = gain if sample.samples is None else gain.index_select(0, sample.samples)
    return chosen.reshape(-1, 1, 1).repeat_interleave(math.prod(sample.size[1:]), 0)


def _gain_adjoint(gain: Tensor, of_rows: Tensor, sample: Sample, places: Places | None, plan: Plan) -> Tensor:
    grad = torch.zeros_like(gain)
    if plan.per_row and gain.dim() > 2:
        _add_rows_(grad, of_rows[:, None, None], places)
    else:
        sums = of_rows.reshape(sample.size[0], -1).sum(1).reshape(-1, *gain.shape[1:])
        grad = sums if sample.samples is None else grad.index_add_(0, sample.samples, sums)
    return grad


# --- D and D·W ---


def usable(batch: Moments, running_mean: Tensor, running_cov: Tensor, tracked: Tensor, plan: Plan) -> Moments:
    """The batch's moments, or the running ones where it has none to give (all padding, or not finite)."""
    seen = known(batch.rows > 0)
    if seen:
        return batch
    if seen is False or batch.mean.requires_grad:
        running = whitening.in_unit(tracked.to(batch.rows.dtype), running_mean, running_cov, plan.eps)
        if seen is False:
            return running
        return Moments(*(torch.where(batch.rows > 0, b, r) for b, r in zip(batch, running, strict=True)))
    # Moments of nothing are zeros: the running ones are added to them, in unit 1, without asking the device.
    some = batch.rows > 0
    share = torch.where(some, 0.0, 1.0).to(batch.rows.dtype)
    mean, cov = torch.addcmul(batch.mean, running_mean, share), torch.addcmul(batch.cov, running_cov, share)
    return Moments(torch.where(some, batch.rows, tracked), mean, cov, torch.where(some, batch.unit, 1.0))


def root(stats: Moments, plan: Plan) -> Tensor:
    """D in the unit of the moments. Of no rows at all it is the identity: the layer is then the stock layer."""
    widths = plan.layout.feature_counts(stats.cov.device)
    options: Any = {"eps": plan.eps, "shrinkage": plan.shrinkage, "widths": widths}
    seen = known(stats.rows > 0)
    if seen is not False:
        d = roots.decorrelate(stats, solver=plan.solver, steps=plan.steps, **options)
        if seen:
            return d
    identity = torch.eye(stats.cov.shape[-1], dtype=stats.cov.dtype, device=stats.cov.device) * stats.unit
    return identity.expand_as(stats.cov) if seen is False else torch.where(stats.rows > 0, d, identity)


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


class Running(NamedTuple):
    """The buffers of a layer, which `observe_` writes to."""

    mean: Tensor  # (g, f)
    cov: Tensor  # (g, f, f)
    tracked: Tensor  # ()
    step_rows: Tensor  # (); those of the present step, and their moments
    step_mean: Tensor
    step_cov: Tensor


def absolute(batch: Moments, like: Tensor) -> tuple[Moments, Tensor]:
    """These moments in unit 1, and whether they are worth anything. No covariance exceeds its two variances."""
    mean, cov = (batch.mean * batch.unit).to(like.dtype), (batch.cov * batch.unit.square()).to(like.dtype)
    variance = cov.diagonal(dim1=-2, dim2=-1)
    usable = (torch.isfinite(variance) & torch.isfinite(mean)).all() & (batch.rows > 0)
    return Moments(batch.rows.to(like.dtype), mean, cov, torch.ones_like(like)), usable


def newest_weight(tracked: Tensor, momentum: float | None, dtype: torch.dtype) -> Tensor:
    """Weight of the newest step. An average without a start value: the first step counts fully."""
    t = tracked.clamp_min(1).to(dtype)
    if momentum is None or momentum == 1.0:
        return 1.0 / t if momentum is None else torch.ones_like(t)
    return momentum / -torch.expm1(t * math.log1p(-momentum))  # m / (1 - (1 - m)^t)


def observe_(state: Running, batch: Moments, momentum: float | None, more_may_come: bool) -> None:
    """Take a call's moments into the step, and the step into the running statistics, without asking the device."""
    new, usable = absolute(batch, state.step_rows)
    mean, cov = (torch.where(usable, n, old) for n, old in ((new.mean, state.step_mean), (new.cov, state.step_cov)))
    fresh = state.step_rows == 0
    one = torch.ones_like(state.step_rows)
    before = Moments(state.step_rows, state.step_mean, state.step_cov, one)
    step = whitening.merge(before, Moments(torch.where(usable, new.rows, 0.0), mean, cov, new.unit))
    state.tracked.add_(fresh & usable)
    weight = torch.where(usable, newest_weight(state.tracked, momentum, state.mean.dtype), 0.0)
    for running, value, old in ((state.mean, step.mean, state.step_mean), (state.cov, step.cov, state.step_cov)):
        running.add_(weight * (value - torch.where(fresh, running, old)))
        old.copy_(value)
    state.step_rows.copy_(step.rows if more_may_come else torch.zeros_like(step.rows))
