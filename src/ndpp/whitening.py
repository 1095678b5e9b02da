"""The math of ND++ as pure functions: y = S·X·D·w with D = (Cov + εI)^(-1/2).

Index letters: n rows, f features (columns) of a block, g blocks that have a D of their own, o outputs.
Everything here is differentiable, and its gradient is the adjoint of what was computed, truncated iterations included.
Mean and covariance are kept in a `unit` near the data's magnitude, so that inputs of 1e18 or 1e-18 neither overflow
nor underflow on the way, forward or backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .keeping import readable

FEW, LINE = 1 << 20, 256  # values of which a copy stays in the cache of a CPU; those worth a norm of their own
SMALLEST_UNIT = 2.0**-100  # squares of anything in this unit stay normal numbers in float32


class Moments(NamedTuple):
    """Mean and covariance of the columns of X / unit, over a number of rows (output positions)."""

    rows: Tensor  # (); NaN where there was data that is not finite
    mean: Tensor  # (g, f)
    cov: Tensor  # (g, f, f), normalised by the rows
    unit: Tensor  # ()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics are never kept or computed in less than float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def magnitude(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """The power of two at or below max |x| (exact to divide by); 1 where x is all zeros. Never differentiated."""
    peak = x.detach().abs().amax() if dim is None else x.detach().abs().amax(dim, keepdim=True)
    return torch.exp2(torch.log2(torch.where(peak > 0, peak, 1.0)).floor())


# --- S: each sample's own scale ---


def sample_scale(
    x: Tensor, mode: str, dim: tuple[int, ...], valid: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(center, gain) of each sample such that S·x = (x - center)·gain; center is zero but for "standardize".

    `eps` is added to the square of the scale (to the scale itself for "l1"). `valid` (broadcastable to x, boolean)
    leaves padding out. A sample without any scale (all zeros) has gain 0: its features are then 0, and so are their
    gradients, instead of a division by nothing.
    """
    x = x.to(statistics_dtype(x.dtype))
    if valid is not None:
        x = torch.where(valid, x, 0.0)

    def mean(values: Tensor) -> Tensor:
        if valid is None:
            return values.mean(dim, keepdim=True)
        share = valid.expand_as(values).to(values.dtype)
        return (values * share).sum(dim, keepdim=True) / share.sum(dim, keepdim=True).clamp_min(1.0)

    if mode == "l1":
        size = (_mean_size(x, dim) if valid is None else mean(x.abs())) + eps
        return torch.zeros_like(size), reciprocal(size, where=size > torch.finfo(size.dtype).tiny)
    unit = magnitude(x, dim).clamp_min(SMALLEST_UNIT)
    z = x / unit
    center, power = mean(z), mean(z.square())
    # A spread below the rounding of the data is none. The floor is relative, so that scale invariance stays exact.
    floor = variance_floor(z.dtype) * power
    variance = power if mode == "rms" else torch.maximum(mean((z - center).square()), floor)
    variance = variance if eps == 0 else variance + (math.sqrt(eps) / unit).square()
    deviation = torch.where(power > 0, variance, 1.0).sqrt()
    present = (power > 0) & (deviation * unit > torch.finfo(z.dtype).tiny)  # 1/σ is beyond the dtype otherwise
    gain = reciprocal(deviation, where=present) / unit  # in this order: 1/σ² of the gradient stays in range, too
    return (center * unit if mode == "standardize" else torch.zeros_like(center)), gain


def _mean_size(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Mean |x|; where there are many, without a copy: by lines, as a norm of many values loses digits on a CPU."""
    along = min(dim, key=x.stride) if readable(x) else dim[-1]  # as they lie in memory
    if readable(x) and (x.numel() <= FEW or x.shape[along] < LINE or x.stride(along) != 1):
        return x.abs().mean(dim, keepdim=True)  # five times as fast as a norm there, and more
    lines: Tensor = torch.linalg.vector_norm(x, 1, along, keepdim=True)
    total = lines.sum(dim, keepdim=True) if len(dim) > 1 else lines
    return total / math.prod([x.shape[i] for i in dim])


def variance_floor(dtype: torch.dtype) -> float:
    """The least variance of a sample that is not rounding, relative to its mean square."""
    return float((8 * torch.finfo(dtype).eps) ** 2)


def reciprocal(size: Tensor, where: Tensor) -> Tensor:
    """1/size where asked and 0 elsewhere, with finite gradients in both places."""
    return torch.where(where, 1.0 / torch.where(where, size, 1.0), 0.0)


# --- μ and Cov ---


def moments(rows: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean (g, f) and covariance (g, f, f) of rows (g, n, f); `weight` (n,) of zeros and ones marks rows that count.

    Centred first: E[xx] - E[x]E[x] loses 1% at mean/std = 100 in float32. The second centring removes the rounding of
    the first, so that constant columns have exactly no variance.
    """
    column = None if weight is None else weight[:, None]
    total = rows.shape[1] if weight is None else weight.sum().clamp_min(1.0)

    def mean(values: Tensor) -> Tensor:
        return (values if column is None else values * column).sum(1, keepdim=True) / total

    shift = mean(rows.detach())
    rows = rows - shift
    residual = mean(rows)
    rows = rows - residual
    if column is not None:
        rows = rows * column
    return (shift + residual).squeeze(1), rows.mT @ rows / total


def merge(first: Moments, second: Moments) -> Moments:
    """Moments of the joined rows, by the exact parallel-variance formula. Either may be empty."""
    unit = torch.maximum(first.unit, second.unit)
    total = first.rows + second.rows
    share = torch.where(total > 0, second.rows / total.clamp_min(1.0), 0.0)
    mean_1, mean_2 = first.mean * (first.unit / unit), second.mean * (second.unit / unit)
    cov_1, cov_2 = first.cov * (first.unit / unit).square(), second.cov * (second.unit / unit).square()
    delta = mean_2 - mean_1
    between = share * (1 - share) * delta[:, :, None] * delta[:, None, :]
    return Moments(total, torch.lerp(mean_1, mean_2, share), torch.lerp(cov_1, cov_2, share) + between, unit)


def in_unit(rows: Tensor, mean: Tensor, cov: Tensor, eps: float) -> Moments:
    """Moments of the data as it is, in a unit near its magnitude; √ε at least, so that ε/unit² stays in range."""
    deviation = cov.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    largest = torch.maximum(mean.abs(), deviation).amax((0, 1))
    unit = largest.clamp_min(max(math.sqrt(eps), SMALLEST_UNIT))
    return Moments(rows, mean / unit, cov / unit / unit, unit)


def assemble_phases(
    parts: Sequence[tuple[Tensor, Tensor]], taps: Sequence[Tensor], shares: Sequence[Tensor], all_taps: int
) -> tuple[Tensor, Tensor]:
    """Moments of rows that come in phases, each of which is zero outside its own taps (transposed convolution).

    parts: (mean, cov) of each phase over its own columns (channel, own tap), taps: where those stand among all taps,
    shares: each phase's fraction of all rows.
    The zeros are never made: the covariance is block-diagonal within the phases, plus what the phases' means differ by.
    """
    reference = parts[0][0]
    g, f = reference.shape
    channels = f // len(taps[0])
    mean = reference.new_zeros(all_taps, g, channels)
    share = reference.new_zeros(all_taps)
    phase_of = torch.zeros(all_taps, dtype=torch.long, device=reference.device)
    within = reference.new_zeros(all_taps, all_taps, g, channels, channels)
    for number, ((mean_p, cov_p), index, share_p) in enumerate(zip(parts, taps, shares, strict=True)):
        k = len(index)
        mean[index] = mean_p.reshape(g, channels, k).permute(2, 0, 1)
        share[index] = share_p
        phase_of.index_fill_(0, index, number)
        block = (cov_p * share_p).reshape(g, channels, k, channels, k)
        within[index[:, None], index[None, :]] = block.permute(2, 4, 0, 1, 3)
    # Rows of phase p have mean m_p in their own columns and 0 elsewhere: the covariance of those means.
    same_phase = phase_of[:, None] == phase_of[None, :]
    coupling = torch.where(same_phase, share[:, None], 0.0) - share[:, None] * share[None, :]
    between = coupling[:, :, None, None, None] * mean[:, None, :, :, None] * mean[None, :, :, None, :]
    total = channels * all_taps
    cov = (within + between).permute(2, 3, 0, 4, 1).reshape(g, total, total)
    return (share[:, None, None] * mean).permute(1, 2, 0).reshape(g, total), cov


# --- D·W ---


def fold(d: Tensor, mean: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """D·W (blocks, o, f) and μ·D·W (blocks, o) of weights (blocks, o, f); one D for all blocks, or one for each."""
    folded = weight @ d
    return folded, (folded @ mean[:, :, None]).squeeze(2)


def unfold(d: Tensor, mean: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """D⁻¹·W and μ·W, the way back from weights of the plain layer. What D drops (no variance) stays dropped."""
    return weight @ torch.linalg.pinv(d, hermitian=True), (weight @ mean[:, :, None]).squeeze(2)
