"""μ and Cov of sampled rows, straight from the input: three launches, no patch matrix, the same bits in every run.

`_survey` finds the peak and the column means, `_gram` the products of centred rows for tiles of the upper triangle and
for parts of the rows, `_finish` adds the parts up in order and writes both triangles.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..whitening import SMALLEST_UNIT, Moments
from . import triton_launch
from .plan import Plan, View
from .triton_rows import block_channels, column_parts, described, entry_places, gain_strides, row_places

ROWS, COLUMNS = 64, 64  # of a tile of the products
SURVEY_ROWS, WARPS = 32, 8  # the largest that spill no registers
PROGRAMS = 264  # two for each multiprocessor of an H200; a constant, so that sums have one order on every device
SIZES = ("batch", "samples", "n0", "n1", "n2", "c0", "c1", "c2", "p0", "p1", "p2", "full", "group_channels")


@triton.jit
def load_rows(
    x, gain, sample, q0, q1, q2, channel, tap, first, keep, sb, sc, s0, s1, s2, gb, g0, g1, g2, n0, n1, n2,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Entries (rows, columns) of S·X in float32; zeros of the padding, and where `keep` is not."""
    at, inside = entry_places(
        sample, q0, q1, q2, first, channel, tap, sb, sc, s0, s1, s2, n0, n1, n2, keep, TAPS
    )  # fmt: skip
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    if gain is not None:
        own = tl.load(gain + sample * gb + q0 * g0 + q1 * g1 + q2 * g2)
        value = value * own[:, None]
    return value


@triton.jit(do_not_specialize=[*SIZES, "total", "chunk"])
def _survey(
    peaks, sums, x, gain, draws, batch, samples, n0, n1, n2, c0, c1, c2, p0, p1, p2,
    sb, sc, s0, s1, s2, gb, g0, g1, g2, full, group_channels, total, chunk, share,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, FULL_BLOCKS: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Peak (as the bits of |x|: NaN above Inf above numbers) and Σ x·share of every column, by parts of the rows."""
    tile, block, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channel, tap, _ = column_parts(tile * COLUMNS + tl.arange(0, COLUMNS), BLOCK, TAPS, CHANNELS_LAST)
    taps: tl.constexpr = TAPS[0][0] * TAPS[1][0] * TAPS[2][0]
    mean = tl.zeros((COLUMNS,), tl.float32)
    peak = tl.zeros((COLUMNS,), tl.int32)
    for start in tl.range(part * chunk, tl.minimum(part * chunk + chunk, total), ROWS):
        row = start + tl.arange(0, ROWS)
        own = row % full if SHARED else block + row * 0
        place = tl.minimum(row, total - 1) // full if SHARED else tl.minimum(row, total - 1)
        sample, q0, q1, q2 = row_places(place, draws, batch, samples, c0, c1, c2, p0, p1, p2, SPREAD)
        first, width = block_channels(own, full, group_channels, BLOCK, FULL_BLOCKS)
        keep = (row < total)[:, None] & (channel[None, :] < width[:, None]) & (tap[None, :] < taps)
        v = load_rows(
            x, gain, sample, q0, q1, q2, channel, tap, first, keep,
            sb, sc, s0, s1, s2, gb, g0, g1, g2, n0, n1, n2, TAPS,
        )  # fmt: skip
        v = tl.where(keep, v, 0.0)
        mean += tl.sum(v * share, 0)
        peak = tl.maximum(peak, tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
    width = tl.num_programs(0) * COLUMNS
    tl.store(sums + (part * tl.num_programs(1) + block) * width + tile * COLUMNS + tl.arange(0, COLUMNS), mean)
    at = (part * tl.num_programs(1) + block) * tl.num_programs(0) + tile
    tl.store(peaks + at, tl.max(peak, 0))


@triton.jit
def _unit(peaks, count, smallest, PEAKS: tl.constexpr):
    """As in the twin: the power of two at or below the peak, 1 of zeros, not below the smallest; is all finite?"""
    peak = tl.max(tl.zeros((PEAKS,), tl.int32), 0)
    for start in tl.range(0, count, PEAKS):
        at = start + tl.arange(0, PEAKS)
        peak = tl.maximum(peak, tl.max(tl.load(peaks + at, at < count, 0), 0))
    finite = peak < 0x7F800000
    power = (peak & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(tl.where(finite & (peak > 0), power, 1.0), smallest), finite


@triton.jit
def _shift(sums, parts, block, blocks, width, column, unit, finite, COLUMNS: tl.constexpr):
    """Column means in the unit, from the parts of the survey in their order."""
    mean = tl.zeros((COLUMNS,), tl.float32)
    for part in tl.range(0, parts):
        mean += tl.load(sums + (part * blocks + block) * width + column)
    return tl.where(finite, mean * tl.div_rn(1.0, unit), 0.0)


@triton.jit(do_not_specialize=[*SIZES, "total", "chunk", "parts", "count", "tiles"])
def _gram(
    products, residuals, peaks, sums, x, gain, draws, batch, samples, n0, n1, n2, c0, c1, c2, p0, p1, p2,
    sb, sc, s0, s1, s2, gb, g0, g1, g2, full, group_channels, total, chunk, parts, count, tiles, smallest,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, FULL_BLOCKS: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PEAKS: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ c·cᵀ and Σ c of centred rows c, for one pair of column tiles and one part of the rows."""
    i, j, block, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1), tl.program_id(2)
    if j < i:
        return
    blocks = tl.num_programs(1)
    unit, finite = _unit(peaks, count, smallest, PEAKS)
    scale = tl.div_rn(1.0, unit)
    at = tl.arange(0, COLUMNS)
    channel_i, tap_i, _ = column_parts(i * COLUMNS + at, BLOCK, TAPS, CHANNELS_LAST)
    channel_j, tap_j, _ = column_parts(j * COLUMNS + at, BLOCK, TAPS, CHANNELS_LAST)
    taps: tl.constexpr = TAPS[0][0] * TAPS[1][0] * TAPS[2][0]
    shift_i = _shift(sums, parts, block, blocks, tiles * COLUMNS, i * COLUMNS + at, unit, finite, COLUMNS)
    shift_j = _shift(sums, parts, block, blocks, tiles * COLUMNS, j * COLUMNS + at, unit, finite, COLUMNS)
    product = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    residual = tl.zeros((COLUMNS,), tl.float32)
    for start in tl.range(part * chunk, tl.minimum(part * chunk + chunk, total), ROWS):
        row = start + tl.arange(0, ROWS)
        own = row % full if SHARED else block + row * 0
        place = tl.minimum(row, total - 1) // full if SHARED else tl.minimum(row, total - 1)
        sample, q0, q1, q2 = row_places(place, draws, batch, samples, c0, c1, c2, p0, p1, p2, SPREAD)
        first, width = block_channels(own, full, group_channels, BLOCK, FULL_BLOCKS)
        used = (row < tl.where(finite, total, 0))[:, None]
        keep = used & (channel_i[None, :] < width[:, None]) & (tap_i[None, :] < taps)
        a = load_rows(
            x, gain, sample, q0, q1, q2, channel_i, tap_i, first, keep,
            sb, sc, s0, s1, s2, gb, g0, g1, g2, n0, n1, n2, TAPS,
        )  # fmt: skip
        a = tl.where(keep, a * scale - shift_i[None, :], 0.0)
        keep = used & (channel_j[None, :] < width[:, None]) & (tap_j[None, :] < taps)
        b = load_rows(
            x, gain, sample, q0, q1, q2, channel_j, tap_j, first, keep,
            sb, sc, s0, s1, s2, gb, g0, g1, g2, n0, n1, n2, TAPS,
        )  # fmt: skip
        b = tl.where(keep, b * scale - shift_j[None, :], 0.0)
        if NARROW:
            a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        product = tl.dot(tl.trans(a), b, product, input_precision=PRECISION)
        residual += tl.sum(a.to(tl.float32), 0)
    whole = (part * blocks + block).to(tl.int64)
    out = products + (whole * tiles * tiles + i * tiles + j) * (COLUMNS * COLUMNS)
    tl.store(out + at[:, None] * COLUMNS + at[None, :], product)
    if i == j:
        tl.store(residuals + whole * tiles * COLUMNS + i * COLUMNS + at, residual)


@triton.jit(do_not_specialize=["f", "parts", "gram_parts", "count", "tiles"])
def _finish(
    rows, mean, cov, unit_out, products, residuals, peaks, sums, f, parts, gram_parts, count, tiles, smallest,
    share, positions,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, CHANNELS_LAST: tl.constexpr, COLUMNS: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """Parts added up in order, less what rounding left of the means; features in the order (channel, tap)."""
    i, j, block = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if j < i:
        return
    blocks = tl.num_programs(1)
    unit, finite = _unit(peaks, count, smallest, PEAKS)
    at = tl.arange(0, COLUMNS)
    product = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    left, right = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for part in tl.range(0, gram_parts):
        whole = (part * blocks + block).to(tl.int64)
        tile = products + (whole * tiles * tiles + i * tiles + j) * (COLUMNS * COLUMNS)
        product += tl.load(tile + at[:, None] * COLUMNS + at[None, :])
        left += tl.load(residuals + whole * tiles * COLUMNS + i * COLUMNS + at)
        right += tl.load(residuals + whole * tiles * COLUMNS + j * COLUMNS + at)
    left, right = left * share, right * share
    product = product * share - left[:, None] * right[None, :]
    if i == j:  # no order of summation is promised to be that of the transpose
        product = (product + tl.trans(product)) * 0.5
    channel_i, tap_i, feature_i = column_parts(i * COLUMNS + at, BLOCK, TAPS, CHANNELS_LAST)
    channel_j, tap_j, feature_j = column_parts(j * COLUMNS + at, BLOCK, TAPS, CHANNELS_LAST)
    taps: tl.constexpr = TAPS[0][0] * TAPS[1][0] * TAPS[2][0]
    in_i, in_j = (channel_i < BLOCK) & (tap_i < taps), (channel_j < BLOCK) & (tap_j < taps)
    own = cov + block.to(tl.int64) * f * f
    tl.store(own + feature_i[:, None] * f + feature_j[None, :], product, in_i[:, None] & in_j[None, :])
    if i == j:
        shift = _shift(sums, parts, block, blocks, tiles * COLUMNS, i * COLUMNS + at, unit, finite, COLUMNS)
        tl.store(mean + block * f + feature_i, shift + left, in_i)
        if (i == 0) & (block == 0):
            tl.store(unit_out, unit)
            tl.store(rows, tl.where(finite, positions, float("nan")))
    else:
        tl.store(own + feature_j[None, :] * f + feature_i[:, None], product, in_i[:, None] & in_j[None, :])


def moments(x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> Moments:
    """As `plain.moments`."""
    blocks, f = sum(g for g, _ in plan.layout.widths), plan.layout.widths[0][1]
    tiles = triton.cdiv(f, COLUMNS)
    told = described(x, draws, view, plan) | gain_strides(gain)
    total = math.prod(view.budget) * (told["full"] if plan.layout.shared else 1)
    new = {"dtype": torch.float32, "device": x.device}
    parts, chunk = _parts(total, tiles * blocks)
    sums = torch.empty(parts * blocks * tiles * COLUMNS, **new)
    peaks = torch.empty(parts * blocks * tiles, dtype=torch.int32, device=x.device)
    triton_launch.launch(
        _survey, (tiles, blocks, parts), WARPS, x, peaks=peaks, sums=sums, **told, total=total, chunk=chunk,
        share=1.0 / total, ROWS=SURVEY_ROWS, COLUMNS=COLUMNS,
    )  # fmt: skip
    of_peaks = {"peaks": peaks, "sums": sums, "parts": parts, "count": peaks.numel(), "tiles": tiles}
    of_peaks |= {"smallest": max(math.sqrt(plan.eps), SMALLEST_UNIT), "PEAKS": 256}
    gram_parts, chunk = _parts(total, tiles * (tiles + 1) // 2 * blocks)
    products = torch.empty(gram_parts * blocks * tiles * tiles * COLUMNS * COLUMNS, **new)
    residuals = torch.empty(gram_parts * blocks * tiles * COLUMNS, **new)
    triton_launch.launch(
        _gram, (tiles * tiles, blocks, gram_parts), WARPS, x, products=products, residuals=residuals, **told,
        **of_peaks, total=total, chunk=chunk, ROWS=ROWS, COLUMNS=COLUMNS, **triton_launch.precision(x.dtype),
    )  # fmt: skip
    rows, mean = torch.empty((), **new), torch.empty(blocks, f, **new)
    cov, unit = torch.empty(blocks, f, f, **new), torch.empty((), **new)
    triton_launch.launch(
        _finish, (tiles * tiles, blocks), WARPS, x, rows=rows, mean=mean, cov=cov, unit_out=unit, products=products,
        residuals=residuals, f=f, gram_parts=gram_parts, share=1.0 / total,
        positions=float(x.shape[0] * math.prod([axis.count for axis in view.phase])), **of_peaks,
        **{name: told[name] for name in ("TAPS", "BLOCK", "CHANNELS_LAST")}, COLUMNS=COLUMNS,
    )  # fmt: skip
    return Moments(rows, mean, cov, unit)


def _parts(total: int, programs: int) -> tuple[int, int]:
    """How many parts of how many rows: enough programs for the device, and enough rows for a program."""
    parts = max(min(PROGRAMS // programs, total // (2 * ROWS), 64), 1)
    chunk = triton.cdiv(triton.cdiv(total, parts), ROWS) * ROWS
    return triton.cdiv(total, chunk), chunk
