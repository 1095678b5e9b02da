"""μ and Cov of sampled rows, straight from the input: two launches, no patch matrix, the same bits in every run.

`_gram` makes products of centred rows for tiles of the upper triangle and for parts of the rows. Each part is centred
by the means of its own first rows, and brought to a unit of its own. `_finish` puts the parts together, exactly, and
writes both triangles; for small blocks `triton_root` does that and goes on.
"""

# mypy: ignore-errors
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..whitening import SMALLEST_UNIT, Moments
from . import triton_rows as rows_of
from .plan import Plan, View
from .triton_launch import INTERPRETED, Prepared, cdiv, launcher, power_of_two
from .triton_rows import (
    BLOCKS,
    CELLS,
    GAINS,
    PLACES,
    TAPS,
    block_channels,
    column_parts,
    entry_places,
    gain_places,
    located,
    there,
)

ROWS, COLUMNS = 64, 64  # of a tile of the products; blocks of few features take tiles of fewer columns
WARPS, STAGES = 8, 2
LEAST_TILES = 2  # of rows, for a program
PROGRAMS, MOST_PARTS = 528, 64  # four for each multiprocessor of an H200; constants, for one order of sums everywhere
VECTORS = 3  # kept for each column of a part: shift, Σ of what is left, and by how much that was multiplied
SUMMED = ("total", "chunk", "tiles")
FURTHEST = tl.constexpr(2.0**126)
UNROLLED = tl.constexpr(4)


@triton.jit
def load_rows(
    x, gain, draws, row, last, own, columns, told,
    AXES: tl.constexpr, PADDED: tl.constexpr, WIDELY: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Entries (rows, columns) of S·X in float32, zeros of the padding; which of them there are, up to row `last`."""
    cells, taps, places, gains, blocks = told
    channel, tap, inside = columns
    of_rows, of_blocks = located(row, draws, own, cells, blocks, AXES, SHARED)
    first, _ = block_channels(of_blocks, blocks)
    keep = (row < last)[:, None] & inside[None, :]
    at, read = entry_places(of_rows, first, channel, tap, keep, taps, places, AXES, PADDED, WIDELY)
    value = tl.load(x + at, read, 0.0).to(tl.float32)
    if gain is not None:
        value = value * tl.load(gain + gain_places(of_rows, gains), row < last, 0.0)[:, None]
    return value, keep


@triton.jit
def power_below(peak):
    """The power of two at or below, whose inverse is one as well; 1 where there is none, or it is not finite."""
    power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((power >= 1 / FURTHEST) & (power <= FURTHEST), power, 1.0)


@triton.jit
def first_of_part(value, count):
    """From the first rows of a part: means of columns, and the power of two that brings their magnitude to 1."""
    power = power_below(tl.max(tl.max(tl.abs(value), 1), 0))
    return tl.sum(value * tl.div_rn(1.0, count), 0), tl.div_rn(1.0, power)


@triton.jit
def places_of_parts(found, parts, blocks, tiles, COLUMNS: tl.constexpr, VECTORS: tl.constexpr):
    """Products, vectors and peaks: one after the other, each by parts of the rows and then by blocks."""
    whole = parts.to(tl.int64) * blocks * tiles
    vectors = found + whole * tiles * (COLUMNS * COLUMNS)
    return found, vectors, vectors + whole * (COLUMNS * VECTORS)


@triton.jit(do_not_specialize=[*CELLS, *TAPS, *PLACES, *GAINS, *BLOCKS, *SUMMED])
def _gram(
    found, x, gain, draws,
    batch, samples, c0, c1, c2, p0, p1, p2, n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2,
    sb, sc, s0, s1, s2, gb, g0, g1, g2, block, full_blocks, full, group_channels, taps, total, chunk, tiles,
    AXES: tl.constexpr, PADDED: tl.constexpr, WIDELY: tl.constexpr, BY_TAP: tl.constexpr, SHARED: tl.constexpr,
    SINGLE: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """Σ c·cᵀ and Σ c of centred rows c, for one pair of column tiles and one part of the rows."""
    i, j, own, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1), tl.program_id(2)
    if j < i:
        return
    told = (
        (batch, samples, c0, c1, c2, p0, p1, p2), (n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2),
        (sb, sc, s0, s1, s2), (gb, g0, g1, g2), (block, full_blocks, full, group_channels, taps),
    )  # fmt: skip
    at, lines = tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    channel_i, tap_i, _ = column_parts(i * COLUMNS + at, block, taps, BY_TAP)
    channel_j, tap_j, _ = column_parts(j * COLUMNS + at, block, taps, BY_TAP)
    columns_i = (channel_i, tap_i, there(channel_i, tap_i, own, told[4], WIDELY))
    columns_j = (channel_j, tap_j, there(channel_j, tap_j, own, told[4], WIDELY))
    begin, end = part * chunk, tl.minimum(part * chunk + chunk, total)
    count = tl.minimum(end - begin, ROWS).to(tl.float32)
    first, _ = load_rows(
        x, gain, draws, begin + lines, end, own, columns_i, told, AXES, PADDED, WIDELY, SHARED
    )  # fmt: skip
    shift_i, unit_i = first_of_part(first, count)
    shift_j, unit_j = shift_i, unit_i
    if not SINGLE:
        other, _ = load_rows(
            x, gain, draws, begin + lines, end, own, columns_j, told, AXES, PADDED, WIDELY, SHARED
        )  # fmt: skip
        shift_j, unit_j = first_of_part(other, count)
    product = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    residual = tl.zeros((COLUMNS,), tl.float32)
    peak = tl.zeros((COLUMNS,), tl.int32)
    for start in tl.range(begin, end, ROWS):
        a, keep = load_rows(
            x, gain, draws, start + lines, end, own, columns_i, told, AXES, PADDED, WIDELY, SHARED
        )  # fmt: skip
        peak = tl.maximum(peak, tl.max(a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0))
        a = tl.where(keep, (a - shift_i[None, :]) * unit_i, 0.0)
        residual += tl.sum(a, 0)
        if NARROW:
            a = a.to(tl.bfloat16)
        b = a
        if not SINGLE:
            b, keep = load_rows(
                x, gain, draws, start + lines, end, own, columns_j, told, AXES, PADDED, WIDELY, SHARED
            )  # fmt: skip
            b = tl.where(keep, (b - shift_j[None, :]) * unit_j, 0.0)
            if NARROW:
                b = b.to(tl.bfloat16)
        product = tl.dot(tl.trans(a), b, product, input_precision=PRECISION)
    whole = (part * tl.num_programs(1) + own).to(tl.int64)
    products, vectors, peaks = places_of_parts(found, tl.num_programs(2), tl.num_programs(1), tiles, COLUMNS, VECTORS)
    out = products + (whole * tiles * tiles + i * tiles + j) * (COLUMNS * COLUMNS)
    tl.store(out + at[:, None] * COLUMNS + at[None, :], product)
    if i == j:
        of_part = vectors + whole * tiles * COLUMNS * VECTORS + i * COLUMNS + at
        tl.store(of_part, shift_i)
        tl.store(of_part + tiles * COLUMNS, residual)
        tl.store(of_part + 2 * tiles * COLUMNS, residual * 0 + unit_i)
        tl.store(peaks + whole * tiles + i, tl.max(peak, 0).to(tl.float32, bitcast=True))


# --- parts put together ---


@triton.jit
def unit_of(peaks, count, smallest, PEAKS: tl.constexpr):
    """As in the twin: the power of two at or below the peak, 1 of zeros, not below the smallest; is all finite?"""
    peak = tl.max(tl.zeros((PEAKS,), tl.int32), 0)
    for start in tl.range(0, count, PEAKS):
        at = start + tl.arange(0, PEAKS)
        peak = tl.maximum(peak, tl.max(tl.load(peaks + at, at < count, 0.0).to(tl.int32, bitcast=True), 0))
    finite = peak < 0x7F800000
    power = (peak & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.maximum(tl.where(finite & (power > 0), power, 1.0), smallest), finite


@triton.jit
def _vectors(vectors, whole, width, column, inside, inverse):
    """Shift and residual of columns in the unit, and what their products are to be multiplied by."""
    at = vectors + whole * 3 * width + column
    by = inverse / tl.load(at + 2 * width, inside, 1.0)
    return tl.load(at, inside, 0.0) * inverse, tl.load(at + width, inside, 0.0) * by, by


@triton.jit
def product_places(i, j, tiles, COLUMNS: tl.constexpr):
    """Where a part has the products of columns i and j of any tiles: only those of the upper triangle are there."""
    tile_i, tile_j = (i // COLUMNS)[:, None], (j // COLUMNS)[None, :]
    inner_i, inner_j = (i % COLUMNS)[:, None], (j % COLUMNS)[None, :]
    upper = tile_i <= tile_j
    tile = tl.where(upper, tile_i * tiles + tile_j, tile_j * tiles + tile_i)
    inner = tl.where(upper, inner_i * COLUMNS + inner_j, inner_j * COLUMNS + inner_i)
    return tile * (COLUMNS * COLUMNS) + inner


@triton.jit
def part_means(vectors, own, blocks, width, column, inside, parts, chunk, total, inverse, SIZE: tl.constexpr):
    """Means of columns over all parts, in the unit."""
    mean = tl.zeros((SIZE,), tl.float32)
    for part in tl.range(0, parts, loop_unroll_factor=UNROLLED):  # so that loads of several parts are under way
        shift, residual, _ = _vectors(vectors, (part * blocks + own).to(tl.int64), width, column, inside, inverse)
        mean += shift * (tl.minimum(chunk, total - part * chunk).to(tl.float32) / total) + residual / total
    return mean


@triton.jit
def part_products(
    products, vectors, at, own, blocks, tiles, i, in_i, j, in_j, mean_i, mean_j, parts, chunk, total, inverse,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Covariances of columns i and j over all parts, in the unit; `at` says where a part has their products."""
    inside = in_i[:, None] & in_j[None, :]
    cov = tl.zeros((SIZE, SIZE), tl.float32)
    for part in tl.range(0, parts):
        whole = (part * blocks + own).to(tl.int64)
        count = tl.minimum(chunk, total - part * chunk).to(tl.float32)
        shift_i, residual_i, by_i = _vectors(vectors, whole, tiles * COLUMNS, i, in_i, inverse)
        shift_j, residual_j, by_j = _vectors(vectors, whole, tiles * COLUMNS, j, in_j, inverse)
        product = tl.load(products + whole * (tiles * tiles * COLUMNS * COLUMNS) + at, inside, 0.0)
        left, right = shift_i - mean_i, shift_j - mean_j
        both = (residual_i + left * count)[:, None] * right[None, :] + left[:, None] * residual_j[None, :]
        cov += product * by_i[:, None] * by_j[None, :] + both
    return cov / total


@triton.jit(do_not_specialize=["f", "taps", "block", "parts", "chunk", "total", "tiles", "count"])
def _finish(
    rows, mean, cov, unit_out, found, f, taps, block, parts, chunk, total, tiles, count, smallest,
    positions, BY_TAP: tl.constexpr, COLUMNS: tl.constexpr, VECTORS: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """One tile of every triangle, and its mirror image; features in the order (channel, tap)."""
    i, j, own = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if j < i:
        return
    blocks = tl.num_programs(1)
    products, vectors, peaks = places_of_parts(found, parts, blocks, tiles, COLUMNS, VECTORS)
    unit, finite = unit_of(peaks, count, smallest, PEAKS)
    inverse = tl.div_rn(1.0, unit)
    at_i, at_j = i * COLUMNS + tl.arange(0, COLUMNS), j * COLUMNS + tl.arange(0, COLUMNS)
    _, _, feature_i = column_parts(at_i, block, taps, BY_TAP)
    _, _, feature_j = column_parts(at_j, block, taps, BY_TAP)
    in_i, in_j = at_i < f, at_j < f
    width = tiles * COLUMNS
    mean_i = part_means(vectors, own, blocks, width, at_i, in_i, parts, chunk, total, inverse, COLUMNS)
    mean_j = part_means(vectors, own, blocks, width, at_j, in_j, parts, chunk, total, inverse, COLUMNS)
    inner = tl.arange(0, COLUMNS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    product = part_products(
        products, vectors, (i * tiles + j) * (COLUMNS * COLUMNS) + inner, own, blocks, tiles, at_i, in_i, at_j, in_j,
        mean_i, mean_j, parts, chunk, total, inverse, COLUMNS, COLUMNS,
    )  # fmt: skip
    product = tl.where(finite, product, 0.0)
    inside, out = in_i[:, None] & in_j[None, :], cov + own.to(tl.int64) * f * f
    if i == j:
        product = (product + tl.trans(product)) * 0.5  # no order of summation is promised to be that of the transpose
        tl.store(mean + own * f + feature_i, tl.where(finite, mean_i, 0.0), in_i)
        if (i == 0) & (own == 0):
            tl.store(unit_out, unit)
            tl.store(rows, tl.where(finite, positions, float("nan")))
    else:
        tl.store(out + feature_j[None, :] * f + feature_i[:, None], product, inside)
    tl.store(out + feature_i[:, None] * f + feature_j[None, :], product, inside)


# --- what they are told ---


class Told(NamedTuple):
    """The launches for one kind of call."""

    start: Prepared
    finish: Prepared
    size: int  # of what is between them
    summed: tuple[int, ...]  # parts, chunk, total, tiles, count
    positions: float  # all there are, for which the sampled rows stand
    own: int
    f: int


@functools.lru_cache(4096)
def told_of(
    batch: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    view: View,
    plan: Plan,
    gained: torch.dtype | None,
    gains: tuple[int, ...],
) -> Told:
    own, f = sum(g for g, _ in plan.layout.widths), plan.layout.widths[0][1]
    columns = columns_of(f)
    tiles, warps = cdiv(f, columns), warps_of(columns)
    of_blocks = rows_of.blocks(plan)
    total = math.prod(view.budget) * (of_blocks[2] if plan.layout.shared else 1)
    parts, chunk = _parts(total, tiles * (tiles + 1) // 2 * own)
    narrow, precision = rows_of.products(dtype, INTERPRETED)
    widely = rows_of.lies_widely(strides, dtype.itemsize, plan, rows_of.padded(view))
    kind = (len(view.phase), rows_of.padded(view), widely, strides[1] == 1, plan.layout.shared, tiles == 1)
    start = launcher(_gram, warps, STAGES, (dtype, gained), *kind, narrow, precision, ROWS, columns, VECTORS)
    numbers = (*rows_of.cells(batch, view), *rows_of.taps(view), *rows_of.places(strides), *gains)
    count = parts * own * tiles
    summed = (parts, chunk, total, tiles, count)
    positions = float(batch * math.prod([axis.count for axis in view.phase]))
    finish = launcher(_finish, warps, STAGES, (), strides[1] == 1, columns, VECTORS, PEAKS)
    block, _, _, _, taps = of_blocks
    return Told(
        start.prepared((tiles * tiles, own, parts), *numbers, *of_blocks, total, chunk, tiles),
        finish.prepared((tiles * tiles, own, 1), f, taps, block, *summed, smallest_unit(plan), positions),
        count * (tiles * columns * columns + columns * VECTORS + 1),
        summed,
        positions,
        own,
        f,
    )


def _parts(total: int, programs: int) -> tuple[int, int]:
    """How many parts of how many rows: enough programs for the device, and whole tiles for a program."""
    parts = max(min(PROGRAMS // programs, cdiv(total, LEAST_TILES * ROWS), MOST_PARTS), 1)
    chunk = cdiv(cdiv(total, parts), ROWS) * ROWS
    return cdiv(total, chunk), chunk


def columns_of(f: int) -> int:
    """Of a tile; 16 at least, as products take."""
    return max(min(power_of_two(f), COLUMNS), 16)


def warps_of(columns: int) -> int:
    return WARPS if columns == COLUMNS else WARPS // 2


def gram(x: Tensor, gain: Tensor | None, draws: Tensor, told: Told) -> Tensor:
    """The first launch, and what it leaves."""
    found = torch.empty(told.size, dtype=torch.float32, device=x.device)
    told.start(found, x, gain, draws)
    return found


PEAKS = 1024


def smallest_unit(plan: Plan) -> float:
    return max(math.sqrt(plan.eps), SMALLEST_UNIT)


def moments(x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> Moments:
    """As `plain.moments`."""
    kind = (None, (0, 0, 0, 0)) if gain is None else (gain.dtype, rows_of.gain_strides(gain))
    told = told_of(x.shape[0], x.stride(), x.dtype, view, plan, *kind)
    left = gram(x, gain, draws, told)
    found = new_moments(left, told)
    told.finish(*found, left)
    return found


def new_moments(like: Tensor, told: Told) -> Moments:
    new, own, f = like.new_empty, told.own, told.f
    return Moments(new(()), new((own, f)), new((own, f, f)), new(()))
