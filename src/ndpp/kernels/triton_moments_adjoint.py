"""What the gradients of μ and Cov add to that of the input, at the places of the sampled rows only.

Where no two rows read the same entry, which is so but for small maps, every program adds to its own entries. Else
rows are written first, and added tap by tap, a sample at a time: within a tap no two share an entry. Either way sums
have one order, and nothing is added atomically.
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
from . import triton_gathered as gathered
from . import triton_rows as rows_of
from .plan import Plan, View
from .triton_launch import INTERPRETED, Prepared, cdiv, launcher, power_of_two
from .triton_moments import STAGES, columns_of, load_rows, warps_of
from .triton_rows import (
    BLOCKS,
    CELLS,
    GAINS,
    PLACES,
    TAPS,
    WIDE,
    block_channels,
    column_parts,
    entry_places,
    gain_places,
    located,
    row_places,
    there,
)

ROWS = 64  # of a tile of products
ADDED_ROWS, ADDED_COLUMNS = 256, 8  # at most of a tile that is added: long, as one program has all rows of a sample
GRAD_PLACES = ("tb", "tc", "t0", "t1", "t2")


@triton.jit(do_not_specialize=["f", "taps", "block"])
def _arrange(out, grad_cov, f, taps, block, BY_TAP: tl.constexpr, COLUMNS: tl.constexpr):
    """G + Gᵀ with features in the order of columns, in whole tiles: zeros beyond them."""
    own, at, width = tl.program_id(2), tl.arange(0, COLUMNS), tl.num_programs(0) * COLUMNS
    i, j = tl.program_id(0) * COLUMNS + at, tl.program_id(1) * COLUMNS + at
    _, _, line = column_parts(i, block, taps, BY_TAP)
    _, _, column = column_parts(j, block, taps, BY_TAP)
    place, inside = grad_cov + own.to(tl.int64) * f * f, (i < f)[:, None] & (j < f)[None, :]
    both = tl.load(place + line[:, None] * f + column[None, :], inside, 0.0)
    both += tl.load(place + column[None, :] * f + line[:, None], inside, 0.0)
    tl.store(out + own.to(tl.int64) * width * width + i[:, None] * width + j[None, :], both)


@triton.jit(do_not_specialize=[*CELLS, *TAPS, *PLACES, *GAINS, *BLOCKS, "total", "tiles", "f", "written", *GRAD_PLACES])
def _adjoint(
    grad, back_rows, of_rows, g_or_sum, grad_mean, rows, mean, unit, x, gain, draws, gathered,
    batch, samples, c0, c1, c2, p0, p1, p2, n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2,
    sb, sc, s0, s1, s2, gb, g0, g1, g2, block, full_blocks, full, group_channels, taps, total, tiles, f, written, share,
    tb, tc, t0, t1, t2,
    AXES: tl.constexpr, PADDED: tl.constexpr, WIDELY: tl.constexpr, BY_TAP: tl.constexpr, SHARED: tl.constexpr,
    WIDELY_ADDED: tl.constexpr, ARRANGED: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(centred·(G + Gᵀ) + h) / rows of one tile, added to the gradient of x or written; for the gain, Σ of it·x."""
    j, own = tl.program_id(1), tl.program_id(2)
    told = (
        (batch, samples, c0, c1, c2, p0, p1, p2), (n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2),
        (sb, sc, s0, s1, s2), (gb, g0, g1, g2), (block, full_blocks, full, group_channels, taps),
    )  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    last = tl.where(tl.load(rows) > 0, total, 0)  # where there was nothing to look at, there is nothing to add
    scale = tl.div_rn(1.0, tl.load(unit))
    at = tl.arange(0, COLUMNS)
    back = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, tiles):
        if gathered is None:
            channel, tap, feature = column_parts(k * COLUMNS + at, block, taps, BY_TAP)
            columns = (channel, tap, there(channel, tap, own, told[4], WIDELY))
            c, keep = load_rows(x, gain, draws, row, last, own, columns, told, AXES, PADDED, WIDELY, SHARED)
            mu = tl.load(mean + own * f + feature, columns[2], 0.0)
            c = tl.where(keep, c * scale - mu[None, :], 0.0)
        else:
            place = (own.to(tl.int64) * written + row) * (tiles * COLUMNS)
            c = tl.load(gathered + place[:, None] + (k * COLUMNS + at)[None, :])
        line, column = k * COLUMNS + at, j * COLUMNS + at
        if ARRANGED:
            width = tiles * COLUMNS
            of_block = g_or_sum + own.to(tl.int64) * width * width
            g = tl.load(of_block + line[:, None] * width + column[None, :])
        else:
            both = (line < f)[:, None] & (column < f)[None, :]
            of_block = g_or_sum + own.to(tl.int64) * f * f
            g = tl.load(of_block + line[:, None] * f + column[None, :], both, 0.0)
            swapped = (column < f)[:, None] & (line < f)[None, :]
            g += tl.trans(tl.load(of_block + column[:, None] * f + line[None, :], swapped, 0.0))
        if NARROW:
            c, g = c.to(tl.bfloat16), g.to(tl.bfloat16)
        else:
            c = c.to(tl.float32)
        back = tl.dot(c, g, back, input_precision=PRECISION)
    channel, tap, feature = column_parts(j * COLUMNS + at, block, taps, BY_TAP)
    inside = there(channel, tap, own, told[4], WIDELY_ADDED)
    back = (back + tl.load(grad_mean + own * f + feature, inside, 0.0)[None, :]) * (share * scale)
    of_places, of_blocks = located(row, draws, own, told[0], told[4], AXES, SHARED)
    first, _ = block_channels(of_blocks, told[4])
    keep = (row < last)[:, None] & inside[None, :]
    if gain is not None:
        s = tl.load(gain + gain_places(of_places, told[3]), row < last, 0.0)
        at_x, read = entry_places(
            of_places, first, channel, tap, keep & (s > 0)[:, None], told[1], told[2], AXES, PADDED, False
        )  # fmt: skip
        of_gain = tl.sum(back * tl.load(x + at_x, read, 0.0).to(tl.float32), 1)
        tl.store(of_rows + (own * tiles + j) * total.to(tl.int64) + row, of_gain, row < total)
        back = back * s[:, None]
    if back_rows is None:
        at_grad, added = entry_places(
            of_places, first, channel, tap, keep, told[1], (tb, tc, t0, t1, t2), AXES, PADDED, WIDELY_ADDED
        )  # fmt: skip
        present = tl.load(grad + at_grad, added, 0.0)
        tl.store(grad + at_grad, (present.to(tl.float32) + back).to(present.dtype), added)
    else:
        line = (row.to(tl.int64) * tl.num_programs(2) + own) * f
        at_rows = line[:, None] + (j * COLUMNS + at)[None, :]
        if WIDELY_ADDED:
            at_rows = tl.max_contiguous(tl.multiple_of(at_rows, [1, WIDE]), [1, WIDE])
        tl.store(back_rows + at_rows, back.to(back_rows.dtype.element_ty), keep)


@triton.jit(do_not_specialize=[*CELLS, *TAPS, *BLOCKS, "total", "each", "f", "matrices", *GRAD_PLACES])
def _add(
    grad, back_rows, rows, draws, batch, samples, c0, c1, c2, p0, p1, p2,
    n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2, block, full_blocks, full, group_channels, taps,
    total, each, f, matrices, tb, tc, t0, t1, t2,
    AXES: tl.constexpr, PADDED: tl.constexpr, WIDELY: tl.constexpr, BY_TAP: tl.constexpr, SHARED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows of one sample and one block, tap by tap: what one tap has added is there before the next one comes."""
    cells, of_taps = (batch, samples, c0, c1, c2, p0, p1, p2), (n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2)
    blocks = (block, full_blocks, full, group_channels, taps)
    number, own = tl.program_id(0), tl.program_id(1)
    channel = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first, _ = block_channels(own, blocks)
    last = tl.where(tl.load(rows) > 0, each, 0)  # as above
    for tap in tl.range(0, taps):
        of_tap = channel * 0 + tap
        inside = there(channel, of_tap, own, blocks, WIDELY)
        column = channel * taps + tap
        if BY_TAP:
            column = tap * block + channel
        for start in tl.range(0, each, ROWS):
            own_rows = start + tl.arange(0, ROWS)
            place = number * each + own_rows
            keep = (own_rows < last)[:, None] & inside[None, :]
            at_grad, added = entry_places(
                row_places(place, draws, cells, AXES), first, channel, of_tap, keep, of_taps, (tb, tc, t0, t1, t2),
                AXES, PADDED, WIDELY,
            )  # fmt: skip
            line = place.to(tl.int64) * matrices + own
            if SHARED:
                line = place.to(tl.int64) * full + own
            at_rows = line[:, None] * f + column[None, :]
            if WIDELY and BY_TAP:
                at_rows = tl.max_contiguous(tl.multiple_of(at_rows, [1, WIDE]), [1, WIDE])
            back = tl.load(back_rows + at_rows, keep, 0.0).to(tl.float32)
            present = tl.load(grad + at_grad, added, 0.0)
            tl.store(grad + at_grad, (present.to(tl.float32) + back).to(present.dtype), added)
        tl.debug_barrier()


@triton.jit(do_not_specialize=[*CELLS, *GAINS, "total", "leading", "each", "repeats"])
def _gain_adjoint(
    out, of_rows, draws, batch, samples, c0, c1, c2, p0, p1, p2, gb, g0, g1, g2, total, leading, each, repeats,
    AXES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Σ over tiles, and over the rows that share a gain."""
    slot = tl.program_id(0)
    value = tl.zeros((SIZE,), tl.float32)
    for line in tl.range(0, leading):
        for start in tl.range(0, each, SIZE):
            at = start + tl.arange(0, SIZE)
            value += tl.load(of_rows + line * total.to(tl.int64) + slot * each + at, at < each, 0.0)
    cells = (batch, samples, c0, c1, c2, p0, p1, p2)
    of_rows_ = row_places(slot * each // repeats, draws, cells, AXES)
    tl.store(out + gain_places(of_rows_, (gb, g0, g1, g2)), tl.sum(value, 0))


# --- how they are started ---


class Told(NamedTuple):
    """The launches for one kind of call."""

    gather: gathered.Told | None  # where rows are written before they are multiplied
    arrange: Prepared | None  # where columns are ordered otherwise than features
    arranged: tuple[int, torch.dtype]  # size of what it leaves
    adjoint: Prepared
    add: Prepared | None  # where rows share entries
    of_gain: Prepared | None
    written: int  # values of rows that are written first
    gained: int  # of the gain, of every row


@functools.lru_cache(4096)
def _told(
    batch: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    of_grad: tuple[int, ...],
    grad_dtype: torch.dtype,
    view: View,
    plan: Plan,
    gained: torch.dtype | None,
    gains: tuple[int, ...],
) -> Told:
    layout = plan.layout
    own, f = sum(g for g, _ in layout.widths), layout.widths[0][1]
    columns, of_blocks = columns_of(f), rows_of.blocks(plan)
    tiles = cdiv(f, columns)
    block, taps = of_blocks[0], of_blocks[4]
    by_tap, axes, padded = strides[1] == 1, len(view.phase), rows_of.padded(view)
    narrow, precision = rows_of.products(dtype, INTERPRETED)
    widely, widely_added = (
        rows_of.lies_widely(s, kind.itemsize, plan, padded) for s, kind in ((strides, dtype), (of_grad, grad_dtype))
    )
    gather = gathered.told_of(batch, strides, dtype, view, plan, gained, gains)
    shares, arranges = taps > 1 and not disjoint(view), taps > 1 or gather is not None
    kind = (axes, padded, widely, by_tap, layout.shared, widely_added and by_tap)
    # rows that are written first are written in the dtype of the gradient
    dtypes = (dtype, gained, grad_dtype, shares, gather is not None)
    repeats, each = of_blocks[2] if layout.shared else 1, math.prod(view.budget[1:])
    total = math.prod(view.budget) * repeats
    cells, of_taps, to_grad = rows_of.cells(batch, view), rows_of.taps(view), rows_of.places(of_grad)
    arrange = launcher(_arrange, 4, STAGES, (narrow,), by_tap, columns)
    lines = ROWS if gather is None else gathered.ROWS
    adjoint = launcher(_adjoint, warps_of(columns), STAGES, dtypes, *kind, arranges, narrow, precision, lines, columns)
    added = min(max(power_of_two(each), 32), ADDED_ROWS), min(power_of_two(block), ADDED_COLUMNS)
    add = launcher(_add, 4, 1, dtypes, axes, padded, widely_added, by_tap, layout.shared, *added)
    return Told(
        gather=gather,
        arrange=arrange.prepared((tiles, tiles, own), f, taps, block) if arranges else None,
        arranged=(own * (tiles * columns) ** 2, torch.bfloat16 if narrow else torch.float32),
        adjoint=adjoint.prepared(
            (cdiv(total, lines), tiles, own), *cells, *of_taps, *rows_of.places(strides), *gains, *of_blocks,
            total, tiles, f, cdiv(total, lines) * lines, 1.0 / total, *to_grad,
        ),
        add=add.prepared(
            (view.budget[0], layout.groups * sum(part.blocks for part in layout.parts), cdiv(block, added[1])),
            *cells, *of_taps, *of_blocks, total, each, f, own, *to_grad,
        ) if shares else None,
        of_gain=_gain_start(gained, plan, view, cells, gains, (total, own * tiles, each, repeats)),
        written=total * own * f,
        gained=own * tiles * total,
    )  # fmt: skip


def _gain_start(
    gained: torch.dtype | None,
    plan: Plan,
    view: View,
    cells: tuple[int, ...],
    gains: tuple[int, ...],
    sizes: tuple[int, ...],
) -> Prepared | None:
    if gained is None:
        return None
    total, lines, each, repeats = sizes
    each = repeats if plan.per_row else repeats * each
    start = launcher(_gain_adjoint, 1, 1, (gained,), len(view.phase), 128)
    return start.prepared((total // each, 1, 1), *cells, *gains, total, lines, each, repeats)


def disjoint(view: View) -> bool:
    """Whether no two rows read the same entry: along every axis they lie further apart than their taps reach."""
    for axis, picks in zip(view.phase, view.budget[1:], strict=True):
        reach = (len(axis.offsets) - 1) * rows_of.spacing(axis.offsets)
        if picks > 1 and axis.count // picks * axis.step <= abs(reach):
            return False
    return True


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
    """As `plain.moments_adjoint_`."""
    gain = None if gain is None else gain.contiguous()  # as what is returned
    kind = (None, (0, 0, 0, 0)) if gain is None else (gain.dtype, rows_of.gain_strides(gain))
    told = _told(x.shape[0], x.stride(), x.dtype, grad.stride(), grad.dtype, view, plan, *kind)
    grad_cov = grad_cov.contiguous()
    if told.arrange is not None:
        size, dtype = told.arranged
        arranged = torch.empty(size, dtype=dtype, device=grad_cov.device)
        told.arrange(arranged, grad_cov)
        grad_cov = arranged
    rows_ = None if told.add is None else grad.new_empty(told.written)
    of_rows = None if gain is None else grad_mean.new_empty(told.gained)
    rows, mean = stats.rows, stats.mean.contiguous()
    centred = None if told.gather is None else gathered.centred(x, gain, draws, stats, mean, told.gather)
    pointers = (grad, rows_, of_rows, grad_cov, grad_mean.contiguous(), rows, mean, stats.unit, x, gain, draws)
    told.adjoint(*pointers, centred)
    if told.add is not None:
        told.add(grad, rows_, rows, draws)
    if told.of_gain is None:
        return None
    out = torch.zeros_like(gain)
    told.of_gain(out, of_rows, draws)
    return out
