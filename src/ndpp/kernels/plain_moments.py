"""μ and Cov of the rows a call looks at, and their adjoint, in PyTorch operations.

On a CPU blocks are taken some at a time: what stays in the cache is read again for next to nothing, and large
temporaries cost more than the arithmetic. Elsewhere all are taken at once, in few launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import adjoints, whitening
from ..geometry import Run
from ..keeping import multiplies_bfloat16, readable
from ..roots import symmetric_product
from ..rows import add_, every_pixel, gather, is_whole, locate
from ..sampling import choose
from ..whitening import Moments
from .plan import Plan, View

AT_ONCE = 1 << 20  # values of rows that stay in the cache of a CPU
LARGE = 2.0**48  # rows of this magnitude, or below its inverse, are brought to their unit before they are squared


class Blocks(NamedTuple):
    """Rows of some blocks, with their columns in the order of memory."""

    rows: Tensor  # (blocks, n, f), in the dtype of statistics
    by_tap: bool  # columns are (tap, channel), where the channels of a pixel lie together; else (channel, tap)
    ours: bool  # nobody else's, to be overwritten


class Looked:
    """The rows of S·X that a call looks at."""

    def __init__(self, x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> None:
        self.x, self.gain, self.plan = x, gain, plan
        self.sample = choose(x.shape[0], view.phase, view.budget, draws)
        whole = self.sample.samples is None and is_whole(view.phase, self.sample)
        self.places = None if whole else locate(view.phase, self.sample, plan.padding_mode, x.device)
        self.of_rows = None if gain is None else self._row_gain(gain)
        self.count = math.prod(self.sample.size)
        # Products of sampled rows of 16 bits in bfloat16, where a CPU has it: their rounding is a tenth of what
        # sampling leaves. Not for roots that amplify small eigenvalues much.
        sampled = plan.solver == "quartic" and plan.samples_rows and x.element_size() == 2
        self.narrow = sampled and x.device.type == "cpu" and multiplies_bfloat16()
        self.positions = x.shape[0] * math.prod([axis.count for axis in view.phase])

    def runs(self) -> Iterator[Run]:
        return self.plan.layout.runs(max(AT_ONCE // self.count, 1) if self.x.device.type == "cpu" else None)

    def blocks(self, run: Run) -> Blocks:
        """The rows of these blocks."""
        part = self.x[:, run.channels]
        values = every_pixel(part) if self.places is None else gather(part, self.places)
        ours = values.data_ptr() != part.data_ptr()
        n, _, taps = values.shape
        by_tap = taps > 1 and values.stride(1) == 1
        split = values.reshape(n, -1, run.block, taps)
        dtype = whitening.statistics_dtype(values.dtype)
        if not by_tap:
            rows = split.flatten(2).transpose(0, 1)
            rows, ours = rows.to(dtype), ours or rows.dtype != dtype
        elif split.shape[1] == 1 and values.dtype == dtype:
            rows = split.permute(1, 0, 3, 2).reshape(1, n, -1)
        else:  # one copy, whatever it changes
            split = split.permute(1, 0, 3, 2)
            rows, ours = torch.empty(split.shape, dtype=dtype, device=split.device).copy_(split).flatten(2), True
        if self.of_rows is None:
            return Blocks(rows, by_tap, ours)
        return Blocks(rows.mul_(self.of_rows) if ours else rows * self.of_rows, by_tap, True)

    def _row_gain(self, gain: Tensor) -> Tensor:
        """(n, 1) of rows, from that of samples or of positions."""
        if self.plan.per_row and gain.dim() > 2:
            return (every_pixel(gain) if self.places is None else gather(gain, self.places)).flatten(1)
        chosen = gain if self.sample.samples is None else gain.index_select(0, self.sample.samples)
        return chosen.reshape(-1, 1).repeat_interleave(math.prod(self.sample.size[1:]), 0)

    def gain_adjoint(self, of_rows: Tensor) -> Tensor:
        """The gradient of the gain from that of every row (n,)."""
        assert self.gain is not None
        grad = torch.zeros_like(self.gain)
        if self.plan.per_row and grad.dim() > 2:
            add_(grad, [(slice(None), of_rows[:, None, None])], self.places)
            return grad
        sums = of_rows.reshape(self.sample.size[0], -1).sum(1).reshape(-1, *grad.shape[1:])
        return sums if self.sample.samples is None else grad.index_add_(0, self.sample.samples, sums)


# --- forward ---


def moments(x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> Moments:
    """Of the rows looked at. A call with non-finite values in them has a count of NaN, and zeros for values."""
    looked = Looked(x, gain, draws, view, plan)
    if readable(x):
        return _moments_now(looked)
    parts = [(run, looked.blocks(run)) for run in looked.runs()]
    extremes = [torch.aminmax(_as_in_memory(blocks.rows)) for _, blocks in parts]
    peaks = [torch.maximum(high, -low) for low, high in extremes]
    peak = peaks[0] if len(peaks) == 1 else torch.stack(peaks).amax()
    finite = peak < math.inf
    unit = torch.where(finite & (peak > 0), _power(peak), 1.0).clamp_min(_least_unit(plan))
    total = Collected(looked)
    for run, (rows, by_tap, ours) in parts:
        total.take(run, Blocks(rows.mul_(unit.reciprocal()) if ours else rows / unit, by_tap, True))
    mean, cov = (torch.where(finite, value, 0.0) for value in total.ended())
    return Moments(torch.where(finite, float(looked.positions), math.nan).to(unit.dtype), mean, cov, unit)


def _moments_now(looked: Looked) -> Moments:
    """Where the peak is a number, most rows need no unit of their own: the moments are brought to it in the end."""
    total, peak = Collected(looked), 0.0
    for run in looked.runs():
        blocks = looked.blocks(run)
        low, high = torch.aminmax(_as_in_memory(blocks.rows))
        own = max(float(high), -float(low))
        if not math.isfinite(own):
            return _nothing(looked)
        peak = max(peak, own)
        total.take(run, blocks)
    unit = max(2.0 ** (math.frexp(peak)[1] - 1) if peak > 0 else 1.0, _least_unit(looked.plan))
    if 1 / LARGE < unit < LARGE:
        mean, cov = total.ended()
        mean, cov = (mean, cov) if unit == 1.0 else (mean.div_(unit), cov.div_(unit * unit))
    else:  # once more
        total = Collected(looked)
        for run in looked.runs():
            rows, by_tap, _ = looked.blocks(run)
            total.take(run, Blocks(rows / unit, by_tap, True))
        mean, cov = total.ended()
    rows = torch.full_like(mean[0, 0], looked.positions)
    return Moments(rows, mean, cov, torch.full_like(rows, unit))


def _nothing(looked: Looked) -> Moments:
    """Of data that is not finite."""
    (g, f), *more = looked.plan.layout.widths
    mean = looked.x.new_zeros(g + sum(g for g, _ in more), f, dtype=whitening.statistics_dtype(looked.x.dtype))
    rows = torch.full_like(mean[0, 0], math.nan)
    unit = torch.full_like(rows, max(1.0, _least_unit(looked.plan)))
    return Moments(rows, mean, mean[:, :, None].expand(-1, -1, f).clone(), unit)


class Collected:
    """Mean and covariance of everything that has a D, from those of some blocks at a time."""

    def __init__(self, looked: Looked) -> None:
        self.layout, self.narrow = looked.plan.layout, looked.narrow
        self.parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layout.parts]

    def take(self, run: Run, blocks: Blocks) -> None:
        mean, cov = _own_moments(blocks, self.narrow)
        if blocks.by_tap:
            mean, cov = _by_channel(mean, run.block), _by_channel(cov, run.block)
        self.parts[run.part].append((mean, cov.sum(0, keepdim=True) if self.layout.shared else cov))

    def ended(self) -> tuple[Tensor, Tensor]:
        return self.layout.pack([self._joined(found) for found in self.parts])

    def _joined(self, found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        mean, cov = found[0] if len(found) == 1 else (torch.cat(values) for values in zip(*found, strict=True))
        if not self.layout.shared:
            return mean, cov
        # Blocks stacked as extra rows: the mean of their covariances, and what their means differ by.
        shared = mean.mean(0, keepdim=True)
        between = mean - shared
        return shared, ((cov.sum(0) + between.mT @ between) / len(mean))[None]


def _own_moments(blocks: Blocks, narrow: bool) -> tuple[Tensor, Tensor]:
    """Of every block by itself, in one centring; what its rounding left comes off the product."""
    rows = blocks.rows
    shift = rows.mean(1, keepdim=True)
    rows = rows.sub_(shift) if blocks.ours else rows - shift
    residual = rows.mean(1, keepdim=True)
    if narrow:
        half = rows.bfloat16()
        gram = (half.mT @ half).to(rows.dtype)
        cov = torch.baddbmm(gram + gram.mT, residual.mT, residual, beta=0.5 / rows.shape[1], alpha=-1.0)
        return shift.add_(residual).squeeze(1), cov
    cov = symmetric_product((rows.mT, rows), plus=residual.mT * residual, share=-1.0, times=1.0 / rows.shape[1])
    return shift.add_(residual).squeeze(1), cov


def _by_channel(t: Tensor, channels: int) -> Tensor:
    """Columns (tap, channel) of means (k, f) or covariances (k, f, f) as (channel, tap)."""
    return _swapped(t, t.shape[1] // channels, channels)


def _by_tap(t: Tensor, channels: int) -> Tensor:
    """The inverse of `_by_channel`; also for (k, 1, f)."""
    return _swapped(t, channels, t.shape[-1] // channels)


def _swapped(t: Tensor, first: int, second: int) -> Tensor:
    """Columns numbered by two numbers, with the other of them first."""
    split = t.reshape(t.shape[0], *(n for size in t.shape[1:] for n in ((first, second) if size > 1 else (1, 1))))
    order = [place + 1 - 2 * (place % 2) for place in range(split.dim() - 1)]
    return split.permute(0, *(1 + place for place in order)).reshape(t.shape)


def _least_unit(plan: Plan) -> float:
    return max(math.sqrt(plan.eps), whitening.SMALLEST_UNIT)


def _power(peak: Tensor) -> Tensor:
    """The power of two at or below a number, by its exponent's bits."""
    bits, exponent = (torch.int64, 0x7FF << 52) if peak.dtype == torch.float64 else (torch.int32, 0xFF << 23)
    return (peak.view(bits) & exponent).view(peak.dtype)


def _as_in_memory(values: Tensor) -> Tensor:
    """The same values with their axes in the order of memory: some reductions copy what is not."""
    return values.permute(sorted(range(values.dim()), key=values.stride, reverse=True))


# --- backward ---


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
    looked = Looked(x, gain, draws, view, plan)
    of_gain: list[Tensor] = []

    def parts() -> Iterator[tuple[slice, Tensor]]:
        for run in looked.runs():
            blocks = looked.blocks(run)
            f = blocks.rows.shape[2]
            own = (grad_mean[run.own, :f], grad_cov[run.own, :f, :f], stats.mean[run.own, :f])
            count = looked.count * plan.layout.repeats(run.part)
            back = _row_gradients(blocks, run, own, stats, count, looked.narrow)
            if looked.of_rows is not None:
                # rows are x·gain: where the gain is zero so are they, whatever x was
                inverse = whitening.reciprocal(looked.of_rows, where=looked.of_rows > 0)
                of_gain.append((back * blocks.rows * inverse).sum((0, 2)))
                back = back * looked.of_rows
            yield run.channels, _as_patches(back, run, blocks.by_tap, plan.layout.taps)

    add_(grad, parts(), looked.places)
    return looked.gain_adjoint(torch.stack(of_gain).sum(0)) if of_gain else None


def _row_gradients(
    blocks: Blocks, run: Run, own: tuple[Tensor, Tensor, Tensor], stats: Moments, count: int, narrow: bool
) -> Tensor:
    """Of rows (k, n, f) as they are, from the gradients of mean and covariance in their unit u.

    ((x/u - μ)·(G + Gᵀ) + h) / (n·u) = x·A + b, with A and b as small as the statistics: rows are read once.
    """
    grad_mean, grad_cov, mean = own
    rows = blocks.rows
    unit = float(stats.unit) if readable(stats.unit) else None
    ordered = (lambda t: _by_tap(t, run.block)) if blocks.by_tap else (lambda t: t)
    if unit is not None and 1 / LARGE < unit < LARGE:
        a = (grad_cov + grad_cov.mT) * (1 / (count * unit * unit))
        if narrow:  # centred before they are rounded
            centred = (rows - ordered(mean[:, None] * unit)).bfloat16()
            a, b = (ordered(t).expand(len(rows), -1, -1).bfloat16() for t in (a, grad_mean[:, None] / (count * unit)))
            return torch.baddbmm(b, centred, a)
        b = grad_mean[:, None] * (1 / (count * unit)) - (mean[:, None] * unit) @ a
        a, b = (ordered(t).expand(len(rows), -1, -1) for t in (a, b))
        if rows.stride(2) == 1:
            return torch.baddbmm(b, rows, a)
        return torch.baddbmm(b.mT, a.mT, rows.mT).mT  # as the rows lie in memory
    grad_mean, grad_cov, mean = (ordered(t) for t in own)
    back = adjoints.moments_adjoint(rows / stats.unit - mean[:, None], grad_mean, grad_cov, count * stats.unit)
    # where there was nothing to look at, there is nothing to add
    return torch.where(stats.rows > 0, back, 0.0) if unit is None else back


def _as_patches(back: Tensor, run: Run, by_tap: bool, taps: int) -> Tensor:
    """(n, blocks, channels, taps) of rows (blocks, n, f), without a copy."""
    if by_tap:
        return back.reshape(*back.shape[:2], taps, run.block).permute(1, 0, 3, 2)
    return back.reshape(*back.shape[:2], run.block, taps).transpose(0, 1)
