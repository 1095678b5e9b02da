"""Rows of wide blocks, written down before they are multiplied: what takes several tiles would be looked for in each.

`_gather` finds every entry once, and `_gram_of_gathered` is a plain product that ends with μ and Cov. Where rows are so
many that they should not be written, `triton_moments` reads them as it goes.
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

from ..whitening import Moments
from . import triton_moments as as_read
from . import triton_rows as rows_of
from .plan import Plan, View
from .triton_launch import INTERPRETED, Prepared, cdiv, launcher
from .triton_moments import PEAKS, first_of_part, load_rows, power_below, smallest_unit, unit_of
from .triton_rows import BLOCKS, CELLS, GAINS, PLACES, TAPS, column_parts, there

ROWS, COLUMNS = 128, 64  # of a tile that is written, and of one that is read
SOME = 16  # rows that say around what all of them are
SUMS = 32  # of tiles, at a time
WARPS, OF_16_BITS, OF_32_BITS = 4, (128, 3), (32, 2)  # of the product: rows at a time, and stages
GATHER_WARPS = 4
MOST_ROWS, MOST_BYTES = 1 << 14, 1 << 28  # that are written down: one program multiplies all rows of two tiles


@triton.jit(do_not_specialize=[*CELLS, *TAPS, *PLACES, *GAINS, *BLOCKS, "total", "tiles"])
def _gather(
    gathered, kept, x, gain, draws, rows, mean, unit,
    batch, samples, c0, c1, c2, p0, p1, p2, n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2,
    sb, sc, s0, s1, s2, gb, g0, g1, g2, block, full_blocks, full, group_channels, taps, total, tiles,
    AXES: tl.constexpr, PADDED: tl.constexpr, WIDELY: tl.constexpr, BY_TAP: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """A tile of the rows: less the mean of some of them and in a unit of theirs; or, given moments, centred."""
    line, j, own = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lines, blocks, width = tl.num_programs(0), tl.num_programs(2), tiles * COLUMNS
    told = (
        (batch, samples, c0, c1, c2, p0, p1, p2), (n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2),
        (sb, sc, s0, s1, s2), (gb, g0, g1, g2), (block, full_blocks, full, group_channels, taps),
    )  # fmt: skip
    column = j * COLUMNS + tl.arange(0, COLUMNS)
    channel, tap, feature = column_parts(column, block, taps, BY_TAP)
    columns = (channel, tap, there(channel, tap, own, told[4], WIDELY))
    row = line * ROWS + tl.arange(0, ROWS)
    last = total
    if mean is not None:
        last = tl.where(tl.load(rows) > 0, total, 0)  # where there was nothing to look at, there is nothing to add
    a, keep = load_rows(x, gain, draws, row, last, own, columns, told, AXES, PADDED, WIDELY, SHARED)
    if mean is None:
        some = tl.arange(0, SOME) * tl.maximum(total // SOME, 1)  # of all samples alike
        first, _ = load_rows(
            x, gain, draws, some, total, own, columns, told, AXES, PADDED, WIDELY, SHARED
        )  # fmt: skip
        shift, _ = first_of_part(first, tl.minimum(total, SOME).to(tl.float32))
        peak = tl.max(tl.max(a.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 0).to(tl.float32, bitcast=True)
        by = tl.div_rn(1.0, power_below(tl.maximum(peak, tl.max(tl.abs(shift), 0))))  # of this tile: none overflows
        a = tl.where(keep, (a - shift[None, :]) * by, 0.0)
        rounded = a.to(gathered.dtype.element_ty).to(tl.float32)
        whole = line * blocks + own
        tl.store(kept + 2 * whole * width + column, tl.sum(a, 0))
        tl.store(kept + (2 * whole + 1) * width + column, tl.sum(rounded, 0))
        shifts = kept + 2 * lines * blocks * width
        peaks = shifts + blocks * width
        tl.store(peaks + whole * tiles + j, peak)
        tl.store(peaks + (lines * blocks + whole) * tiles + j, by)
        if line == 0:
            tl.store(shifts + own * width + column, shift)
    else:
        mu = tl.load(mean + own * (block * taps) + feature, columns[2], 0.0)
        a = tl.where(keep, a * tl.div_rn(1.0, tl.load(unit)) - mu[None, :], 0.0)
    place = (own.to(tl.int64) * lines * ROWS + row) * width
    tl.store(gathered + place[:, None] + column[None, :], a.to(gathered.dtype.element_ty))


@triton.jit
def _sums(
    kept, factors, inverse, own, blocks, width, lines, tiles, tile, column, WHICH: tl.constexpr, SUMS: tl.constexpr
):
    """Of columns, in the unit, over all lines, each in one of its own: as they were, or as they were rounded."""
    total = column.to(tl.float32) * 0
    for start in tl.range(0, lines, SUMS):
        line = start + tl.arange(0, SUMS)
        at = kept + ((2 * (line * blocks + own) + WHICH) * width)[:, None] + column[None, :]
        by = tl.load(factors + (line * blocks + own) * tiles + tile, line < lines, 1.0)
        total += tl.sum(tl.load(at, (line < lines)[:, None], 0.0) * (inverse / by)[:, None], 0)
    return total


@triton.jit(do_not_specialize=["f", "taps", "block", "total", "tiles", "lines", "steps"])
def _gram_of_gathered(
    rows, mean, cov, unit_out, gathered, kept, f, taps, block, total, tiles, lines, steps, smallest, positions,
    BY_TAP: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SUMS: tl.constexpr, PEAKS: tl.constexpr,
):  # fmt: skip
    """One tile of the upper triangle of Cov, and its mirror image; features in the order (channel, tap)."""
    i, j, own = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if j < i:
        return
    blocks, width = tl.num_programs(1), tiles * COLUMNS
    shifts = kept + 2 * lines * blocks * width
    peaks = shifts + blocks * width
    factors = peaks + lines * blocks * tiles
    unit, finite = unit_of(peaks, lines * blocks * tiles, smallest, PEAKS)
    inverse = tl.div_rn(1.0, unit)
    at_i, at_j = i * COLUMNS + tl.arange(0, COLUMNS), j * COLUMNS + tl.arange(0, COLUMNS)
    here = gathered + own.to(tl.int64) * steps * ROWS * width
    lines_of = tl.arange(0, ROWS)[:, None] * width
    product = tl.zeros((COLUMNS, COLUMNS), tl.float32)
    for step in tl.range(0, steps):
        place = here + step * (ROWS * width) + lines_of
        a, b = tl.load(place + at_i[None, :]), tl.load(place + at_j[None, :])
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        at = factors + (step * lines // steps * blocks + own) * tiles
        by = (inverse / tl.load(at + i)) * (inverse / tl.load(at + j))
        product += tl.dot(tl.trans(a), b, input_precision=PRECISION) * by
    left = _sums(kept, factors, inverse, own, blocks, width, lines, tiles, i, at_i, 1, SUMS)
    right = _sums(kept, factors, inverse, own, blocks, width, lines, tiles, j, at_j, 1, SUMS)
    product = tl.where(finite, (product - left[:, None] * (right / total)[None, :]) / total, 0.0)
    _, _, feature_i = column_parts(at_i, block, taps, BY_TAP)
    _, _, feature_j = column_parts(at_j, block, taps, BY_TAP)
    in_i, in_j = at_i < f, at_j < f
    inside, out = in_i[:, None] & in_j[None, :], cov + own.to(tl.int64) * f * f
    if i == j:
        product = (product + tl.trans(product)) * 0.5  # no order of summation is promised to be that of the transpose
        sums = _sums(kept, factors, inverse, own, blocks, width, lines, tiles, i, at_i, 0, SUMS)
        of_mean = tl.load(shifts + own * width + at_i) * inverse + sums / total
        tl.store(mean + own * f + feature_i, tl.where(finite, of_mean, 0.0), in_i)
        if (i == 0) & (own == 0):
            tl.store(unit_out, unit)
            tl.store(rows, tl.where(finite, positions, float("nan")))
    else:
        tl.store(out + feature_j[None, :] * f + feature_i[:, None], product, inside)
    tl.store(out + feature_i[:, None] * f + feature_j[None, :], product, inside)


# --- what they are told ---


class Told(NamedTuple):
    """The launches for one kind of call."""

    gather: Prepared
    centre: Prepared
    gram: Prepared
    dtype: torch.dtype  # of what is written
    size: int
    kept: int
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
) -> Told | None:
    """None where rows are not to be written: for narrow blocks, and where they are many."""
    own, f = sum(g for g, _ in plan.layout.widths), plan.layout.widths[0][1]
    tiles, of_blocks = cdiv(f, COLUMNS), rows_of.blocks(plan)
    total = math.prod(view.budget) * (of_blocks[2] if plan.layout.shared else 1)
    lines = cdiv(total, ROWS)
    size = own * lines * ROWS * tiles * COLUMNS
    narrow, precision = rows_of.products(dtype, INTERPRETED)
    written = torch.bfloat16 if dtype.itemsize == 2 else torch.float32
    if tiles == 1 or total > MOST_ROWS or size * written.itemsize > MOST_BYTES:
        return None
    padded = rows_of.padded(view)
    kind = (len(view.phase), padded, rows_of.lies_widely(strides, dtype.itemsize, plan, padded), strides[1] == 1)
    sizes = (plan.layout.shared, ROWS, COLUMNS, SOME)
    gather, centre = (
        launcher(_gather, GATHER_WARPS, 1, (dtype, gained, written, *given), *kind, *sizes)
        for given in ((), (torch.float32,))
    )
    numbers = (*rows_of.cells(batch, view), *rows_of.taps(view), *rows_of.places(strides), *gains)
    read, stages = OF_16_BITS if narrow else OF_32_BITS
    how = (kind[3], written == torch.bfloat16 and not narrow, precision, read, COLUMNS, SUMS, PEAKS)
    gram = launcher(_gram_of_gathered, WARPS, stages, (written,), *how)
    positions = float(batch * math.prod([axis.count for axis in view.phase]))
    block, _, _, _, taps = of_blocks
    numbers = (*numbers, *of_blocks, total, tiles)
    return Told(
        gather=gather.prepared((lines, tiles, own), *numbers),
        centre=centre.prepared((lines, tiles, own), *numbers),
        gram=gram.prepared(
            (tiles * tiles, own, 1),
            f,
            taps,
            block,
            total,
            tiles,
            lines,
            lines * ROWS // read,
            smallest_unit(plan),
            positions,
        ),
        dtype=written,
        size=size,
        kept=own * tiles * (2 * lines * (COLUMNS + 1) + COLUMNS),
        own=own,
        f=f,
    )


def moments(x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> Moments:
    """As `plain.moments`."""
    kind = (None, (0, 0, 0, 0)) if gain is None else (gain.dtype, rows_of.gain_strides(gain))
    told = told_of(x.shape[0], x.stride(), x.dtype, view, plan, *kind)
    if told is None:
        return as_read.moments(x, gain, draws, view, plan)
    gathered = torch.empty(told.size, dtype=told.dtype, device=x.device)
    kept = torch.empty(told.kept, dtype=torch.float32, device=x.device)
    told.gather(gathered, kept, x, gain, draws, None, None, None)
    new, own, f = kept.new_empty, told.own, told.f
    found = Moments(new(()), new((own, f)), new((own, f, f)), new(()))
    told.gram(*found, gathered, kept)
    return found


def centred(x: Tensor, gain: Tensor | None, draws: Tensor, stats: Moments, mean: Tensor, told: Told) -> Tensor:
    """The rows in their unit, less their mean; zeros where there are none."""
    gathered = torch.empty(told.size, dtype=told.dtype, device=x.device)
    told.centre(gathered, None, x, gain, draws, stats.rows, mean, stats.unit)
    return gathered
