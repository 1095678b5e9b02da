"""Where the rows of a call lie: the integers of `sampling.choose` and `rows.locate`, as kernels compute them.

Sizes, strides and taps are arguments, so that a kernel is compiled for a few kinds of layers and not for each. They
come in groups, always in the order of the functions below.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling import BITS, STRIDES
from .plan import Plan, View

CELLS = ("batch", "samples", "c0", "c1", "c2", "p0", "p1", "p2")  # and those of positions: all there are, and chosen
TAPS = ("n0", "n1", "n2", "e0", "e1", "e2", "o0", "o1", "o2", "d0", "d1", "d2", "k1", "k2")  # size, step, first, next
PLACES = ("sb", "sc", "s0", "s1", "s2")  # strides of an input
GAINS = ("gb", "g0", "g1", "g2")
BLOCKS = ("block", "full_blocks", "full", "group_channels", "taps")
OF_BATCH = tl.constexpr(STRIDES[0])
OF_AXES = tl.constexpr(STRIDES[1:])
KEPT_BITS = tl.constexpr((1 << BITS) - 1)
FREE_BITS = tl.constexpr(32 - BITS)
WIDE = tl.constexpr(8)  # values of 16 bits that one load takes


@triton.jit
def _spread(cell, number, draw, count, picks, STRIDE: tl.constexpr):
    """One of `count` places for each of `picks` cells; every cell is its place where there are as many.

    (c·2^B + o)·count // (picks·2^B) = (c·count + (o·count >> B)) // picks, in 32 bits.
    """
    offset = (number.to(tl.uint32) * STRIDE + draw) & KEPT_BITS
    part = tl.umulhi(offset << FREE_BITS, offset * 0 + count).to(tl.int32)
    return tl.where(picks < count, (cell * count + part) // picks, cell)


@triton.jit
def row_places(row, draws, cells, AXES: tl.constexpr):
    """Sample and position along three axes of rows, which are numbered sample by sample."""
    batch, samples, c0, c1, c2, p0, p1, p2 = cells
    number, q0, q1, q2 = row, row * 0, row * 0, row * 0
    if AXES > 2:
        q2 = number % p2
        number = number // p2
    if AXES > 1:
        q1 = number % p1
        number = number // p1
    if AXES > 0:
        q0 = number % p0
        number = number // p0
    if AXES > 2:
        q2 = _spread(q2, number, tl.load(draws + 3).to(tl.uint32), c2, p2, OF_AXES[2])
    if AXES > 1:
        q1 = _spread(q1, number, tl.load(draws + 2).to(tl.uint32), c1, p1, OF_AXES[1])
    if AXES > 0:
        q0 = _spread(q0, number, tl.load(draws + 1).to(tl.uint32), c0, p0, OF_AXES[0])
    moved = tl.where(number * 0 + batch >= 2 * samples, number, 0)  # as `sampling.moves`
    sample = _spread(number, moved, tl.load(draws).to(tl.uint32), batch, samples, OF_BATCH)
    return sample, q0, q1, q2


@triton.jit
def located(row, draws, own, cells, blocks, AXES: tl.constexpr, SHARED: tl.constexpr):
    """Where rows lie, and of which block they are: one for all, or stacked as extra rows, where these share a D."""
    place, of_blocks = row, own + row * 0
    if SHARED:
        place, of_blocks = row // blocks[2], row % blocks[2]
    return row_places(place, draws, cells, AXES), of_blocks


@triton.jit
def gain_places(of_rows, gains):
    sample, q0, q1, q2 = of_rows
    return sample.to(tl.int64) * gains[0] + q0 * gains[1] + q1 * gains[2] + q2 * gains[3]


@triton.jit
def column_parts(column, block, taps, BY_TAP: tl.constexpr):
    """Channel of a block, tap, and feature (channel, tap) of a column. Where channels lie together, so do columns."""
    if BY_TAP:
        channel, tap = column % block, column // block
    else:
        channel, tap = column // taps, column % taps
    return channel, tap, channel * taps + tap


@triton.jit
def feature_columns(feature, block, taps, BY_TAP: tl.constexpr):
    """The inverse: the column of a feature."""
    return feature % taps * block + feature // taps if BY_TAP else feature


@triton.jit
def there(channel, tap, own, blocks, WIDELY: tl.constexpr):
    """Which columns a block has. Where blocks share a D, all have as many."""
    _, width = block_channels(own, blocks)
    inside = (channel < width) & (tap < blocks[4])
    if WIDELY:
        inside = tl.max_constancy(inside, WIDE)
    return inside


@triton.jit
def block_channels(own, blocks):
    """First channel of a block, and how many it has; smaller last blocks of all groups come after the full ones."""
    block, full_blocks, full, group_channels, _ = blocks
    is_full = own < full
    first = own // full_blocks * group_channels + own % full_blocks * block
    start = tl.where(is_full, first, (own - full) * group_channels + full_blocks * block)
    return start, tl.where(is_full, block, group_channels - full_blocks * block)


@triton.jit
def entry_places(
    of_rows, first, channel, tap, keep, taps, places, AXES: tl.constexpr, PADDED: tl.constexpr, WIDELY: tl.constexpr
):
    """Offsets (rows, columns) into a tensor (batch, channels, *sizes) of these strides, and those of `keep` inside.

    Rows and columns have their own part each, so that there is one sum for each entry; what is inside is asked only
    where taps overhang. WIDELY: columns come in runs of eight that lie together.
    """
    sample, q0, q1, q2 = of_rows
    n0, n1, n2, e0, e1, e2, o0, o1, o2, d0, d1, d2, k1, k2 = taps
    sb, sc, s0, s1, s2 = places
    of_row, of_column = sample.to(tl.int64) * sb + first * sc, channel * sc
    if AXES > 0:
        r0, t0 = q0 * e0 + o0, tap // (k1 * k2) * d0
        of_row, of_column = of_row + r0 * s0, of_column + t0 * s0
        if PADDED:
            keep = keep & (r0[:, None] + t0[None, :] >= 0) & (r0[:, None] + t0[None, :] < n0)
    if AXES > 1:
        r1, t1 = q1 * e1 + o1, tap // k2 % k1 * d1
        of_row, of_column = of_row + r1 * s1, of_column + t1 * s1
        if PADDED:
            keep = keep & (r1[:, None] + t1[None, :] >= 0) & (r1[:, None] + t1[None, :] < n1)
    if AXES > 2:
        r2, t2 = q2 * e2 + o2, tap % k2 * d2
        of_row, of_column = of_row + r2 * s2, of_column + t2 * s2
        if PADDED:
            keep = keep & (r2[:, None] + t2[None, :] >= 0) & (r2[:, None] + t2[None, :] < n2)
    at = of_row[:, None] + of_column[None, :]
    if WIDELY:
        at = tl.max_contiguous(tl.multiple_of(at, [1, WIDE]), [1, WIDE])
        keep = tl.max_constancy(keep, [1, WIDE])
    return at, keep


# --- what these functions are told ---


def cells(batch: int, view: View) -> tuple[int, ...]:
    """CELLS."""
    counts = [axis.count for axis in view.phase]
    more = [1] * (3 - len(counts))
    return (batch, view.budget[0], *counts, *more, *view.budget[1:], *more)


def taps(view: View) -> tuple[int, ...]:
    """TAPS."""
    axes = [(a.size, a.step, a.offsets[0], spacing(a.offsets), len(a.offsets)) for a in view.phase]
    axes += [(1, 1, 0, 0, 1)] * (3 - len(axes))
    *numbers, count = zip(*axes, strict=True)
    return (*(value for number in numbers for value in number), *count[1:])


def blocks(plan: Plan) -> tuple[int, ...]:
    """BLOCKS."""
    layout = plan.layout
    full = layout.parts[0].blocks
    return min(layout.block, layout.channels), full, layout.groups * full, layout.channels, layout.taps


def places(strides: tuple[int, ...]) -> tuple[int, ...]:
    """PLACES, of a tensor with these strides."""
    return (*strides, 0, 0, 0)[:5]


def gain_strides(gain: Tensor | None) -> tuple[int, ...]:
    """GAINS: none where there is one gain for a whole sample."""
    if gain is None:
        return (0, 0, 0, 0)
    own = [s if size > 1 else 0 for s, size in zip(gain.stride(), gain.shape, strict=True)]
    return (own[0], *own[2:], 0, 0, 0)[:4]


def spacing(offsets: tuple[int, ...]) -> int:
    return offsets[1] - offsets[0] if len(offsets) > 1 else 0


def padded(view: View) -> bool:
    return any(axis.overhangs for axis in view.phase)


def lies_widely(strides: tuple[int, ...], itemsize: int, plan: Plan, overhangs: bool) -> bool:
    """Whether columns of such an input come in runs that one load takes.

    An axis of stride 1 beside that of the channels has one position, but where taps overhang.
    """
    block, _, _, group_channels, _ = blocks(plan)
    others = [s for axis, s in enumerate(strides) if axis != 1 and (s != 1 or overhangs)] + [block, group_channels]
    return strides[1] == 1 and itemsize <= 4 and all(value % 8 == 0 for value in others)


def products(dtype: torch.dtype, interpreted: bool) -> tuple[bool, str]:
    """How products with rows of this dtype are made: of numbers of 16 bits or not, and those of float32 with what.

    "tf32x3" is three tensor-core products of split factors, within a few roundings of float32. Where data have 16 bits,
    "tf32", one product that keeps ten, is within what their own rounding leaves. The interpreter has no product of
    bfloat16.
    """
    narrow = dtype in (torch.bfloat16, torch.float16)
    return narrow and not interpreted, "tf32" if narrow else "tf32x3"
