"""S of every sample from a fixed grid of its values, and the adjoint: a launch each, one program for each sample."""

# mypy: ignore-errors
from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling import lattice
from ..whitening import SMALLEST_UNIT, variance_floor
from .plan import Plan
from .triton_launch import Prepared, launcher
from .triton_rows import places

MODES = {"l1": 0, "rms": 1, "std": 2}
SIZE, WARPS = 4096, 8  # values at a time
GRID = ("channels", "m0", "m1", "m2", "b0", "b1", "b2", "step", "each")  # chosen: how many, the first, steps
STRIDES = ("sb", "sc", "s0", "s1", "s2")
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
FLOOR = tl.constexpr(variance_floor(torch.float32))
SMALLEST = tl.constexpr(SMALLEST_UNIT)


@triton.jit
def _values(x, sample, start, count, grid, strides, BY_PIXEL: tl.constexpr, SIZE: tl.constexpr):
    """Places of some values of a sample, and which there are."""
    channels, m0, m1, m2, b0, b1, b2, step, each = grid
    sb, sc, s0, s1, s2 = strides
    at = start + tl.arange(0, SIZE)
    if BY_PIXEL:
        channel, position = at % channels, at // channels
    else:
        position, channel = at % (m0 * m1 * m2), at // (m0 * m1 * m2)
    q0, q1, q2 = position // (m1 * m2), position // m2 % m1, position % m2
    place = channel * (each * sc) + (b0 + q0 * step) * s0 + (b1 + q1 * step) * s1 + (b2 + q2 * step) * s2
    return x + sample.to(tl.int64) * sb + place, at < count


@triton.jit
def _mean_square(x, sample, count, center, by, grid, strides, BY_PIXEL: tl.constexpr, SIZE: tl.constexpr):
    """Mean of (x·by - center)²."""
    total = tl.zeros((SIZE,), tl.float32)
    for start in tl.range(0, count, SIZE):
        at, inside = _values(x, sample, start, count, grid, strides, BY_PIXEL, SIZE)
        z = tl.load(at, inside, 0.0).to(tl.float32) * by - center
        total += tl.where(inside, z * z, 0.0)
    return tl.sum(total, 0) / count


@triton.jit
def _mean(x, sample, count, by, grid, strides, ABSOLUTE: tl.constexpr, BY_PIXEL: tl.constexpr, SIZE: tl.constexpr):
    total = tl.zeros((SIZE,), tl.float32)
    for start in tl.range(0, count, SIZE):
        at, inside = _values(x, sample, start, count, grid, strides, BY_PIXEL, SIZE)
        z = tl.load(at, inside, 0.0).to(tl.float32) * by
        if ABSOLUTE:
            z = tl.abs(z)
        total += z
    return tl.sum(total, 0) / count


@triton.jit(do_not_specialize=["count", *GRID, *STRIDES])
def _scale(
    gain, x, count, channels, m0, m1, m2, b0, b1, b2, step, each, sb, sc, s0, s1, s2, eps, root_eps,
    MODE: tl.constexpr, BY_PIXEL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """1/size of a sample, as in the twin; 0 where it has none."""
    sample, grid, strides = tl.program_id(0), (channels, m0, m1, m2, b0, b1, b2, step, each), (sb, sc, s0, s1, s2)
    if MODE == 0:
        size = _mean(x, sample, count, 1.0, grid, strides, True, BY_PIXEL, SIZE) + eps
        present = size > TINY
        found = tl.div_rn(1.0, tl.where(present, size, 1.0))
    else:
        peaks = tl.zeros((SIZE,), tl.float32)
        for start in tl.range(0, count, SIZE):
            at, inside = _values(x, sample, start, count, grid, strides, BY_PIXEL, SIZE)
            peaks = tl.maximum(peaks, tl.abs(tl.load(at, inside, 0.0).to(tl.float32)))
        peak = tl.max(peaks, 0)
        unit = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = tl.maximum(tl.where(peak > 0, unit, 1.0), SMALLEST)
        by = tl.div_rn(1.0, unit)
        power = _mean_square(x, sample, count, 0.0, by, grid, strides, BY_PIXEL, SIZE)
        variance = power
        if MODE == 2:
            center = _mean(x, sample, count, by, grid, strides, False, BY_PIXEL, SIZE)
            variance = _mean_square(x, sample, count, center, by, grid, strides, BY_PIXEL, SIZE)
            variance = tl.maximum(variance, FLOOR * power)
        ratio = root_eps * by
        deviation = tl.sqrt_rn(tl.where(power > 0, variance + ratio * ratio, 1.0))
        present = (power > 0) & (deviation * unit > TINY)
        found = tl.div_rn(1.0, tl.where(present, deviation, 1.0)) * by
    tl.store(gain + sample, tl.where(present, found, 0.0))


@triton.jit(do_not_specialize=["count", *GRID, *STRIDES, "tb", "tc", "t0", "t1", "t2"])
def _scale_adjoint(
    grad, x, gain, grad_gain, count, channels, m0, m1, m2, b0, b1, b2, step, each,
    sb, sc, s0, s1, s2, tb, tc, t0, t1, t2,
    MODE: tl.constexpr, BY_PIXEL: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """What reaches the values by way of the gain, added to their gradient."""
    sample, grid, strides = tl.program_id(0), (channels, m0, m1, m2, b0, b1, b2, step, each), (sb, sc, s0, s1, s2)
    own = tl.load(gain + sample)
    share = -(tl.load(grad_gain + sample) * own) * own / count
    center, factor = 0.0, 1.0
    if MODE == 2:
        center = _mean(x, sample, count, own, grid, strides, False, BY_PIXEL, SIZE)
        power = _mean_square(x, sample, count, 0.0, own, grid, strides, BY_PIXEL, SIZE)
        spread = _mean_square(x, sample, count, center, own, grid, strides, BY_PIXEL, SIZE)
        center, factor = tl.where(spread > FLOOR * power, center, 0.0), tl.where(spread > FLOOR * power, 1.0, FLOOR)
    for start in tl.range(0, count, SIZE):
        at, inside = _values(x, sample, start, count, grid, strides, BY_PIXEL, SIZE)
        value = tl.load(at, inside, 0.0).to(tl.float32)
        if MODE == 0:
            value = tl.where(value > 0, 1.0, tl.where(value < 0, -1.0, 0.0))
        else:
            value = (value * own - center) * factor
        at, inside = _values(grad, sample, start, count, grid, (tb, tc, t0, t1, t2), BY_PIXEL, SIZE)
        present = tl.load(at, inside, 0.0)
        tl.store(at, (present.to(tl.float32) + value * share).to(present.dtype), inside)


@functools.lru_cache(4096)
def _grid(shape: tuple[int, ...], most: int | None) -> tuple[int, ...]:
    """How many values, and GRID."""
    slices = lattice(shape[1], shape[2:], most)
    chosen = [range(size)[one] for one, size in zip(slices, shape[1:], strict=True)]
    more = [1] * (5 - len(shape))
    steps = [r.step for r in chosen[1:] if len(r) > 1]  # the same along all axes
    counts = [len(r) for r in chosen]
    firsts = [r.start for r in chosen[1:]]
    step = steps[0] if steps else 1
    return math.prod(counts), counts[0], *counts[1:], *more, *firsts, *(0 for _ in more), step, chosen[0].step


@functools.lru_cache(4096)
def _told(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, plan: Plan) -> Prepared:
    start = launcher(_scale, WARPS, 1, (dtype,), MODES[plan.scale], strides[1] == 1, SIZE)
    numbers = (*_grid(shape, plan.scale_positions), *places(strides))
    return start.prepared((shape[0], 1, 1), *numbers, float(plan.scale_eps), math.sqrt(plan.scale_eps))


def scale(x: Tensor, plan: Plan) -> Tensor:
    """As `plain.scale`."""
    gain = torch.empty((len(x), *[1] * (x.dim() - 1)), dtype=torch.float32, device=x.device)
    _told(x.shape, x.stride(), x.dtype, plan)(gain, x)
    return gain


@functools.lru_cache(4096)
def _adjoint_told(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    of_grad: tuple[int, ...],
    grad_dtype: torch.dtype,
    plan: Plan,
) -> Prepared:
    start = launcher(_scale_adjoint, WARPS, 1, (grad_dtype, dtype), MODES[plan.scale], strides[1] == 1, SIZE)
    numbers = (*_grid(shape, plan.scale_positions), *places(strides), *places(of_grad))
    return start.prepared((shape[0], 1, 1), *numbers)


def scale_adjoint_(grad: Tensor, x: Tensor, gain: Tensor, grad_gain: Tensor, plan: Plan) -> None:
    """As `plain.scale_adjoint_`."""
    told = _adjoint_told(x.shape, x.stride(), x.dtype, grad.stride(), grad.dtype, plan)
    told(grad, x, gain, grad_gain.contiguous())


def declines(x: Tensor, plan: Plan) -> str | None:
    """Why the scale of an input is left to the twin."""
    if plan.per_row:
        return "a gain for every row"
    return "more than three axes" if x.dim() > 5 else None
