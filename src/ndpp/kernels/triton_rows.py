"""Where the rows of a call lie: the integers of `sampling.choose` and `rows.locate`, as kernels compute them."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..sampling import BITS, STRIDES
from .plan import Plan, View


@triton.jit
def _spread(cell, number, draw, count, picks, STRIDE: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr):
    """One of `count` places for each of `picks` cells; every cell is its place where there are as many."""
    offset = (number * STRIDE + draw) & ((1 << BITS) - 1)
    scaled = (((cell << BITS) + offset) * count) >> BITS  # a // (picks << BITS) is (a >> BITS) // picks, exactly
    if not WIDE:  # division of 64 bits is a long program
        scaled = scaled.to(tl.int32)
    return tl.where(picks < count, (scaled // picks).to(tl.int64), cell)


@triton.jit
def row_places(row, draws, batch, samples, c0, c1, c2, p0, p1, p2, SPREAD: tl.constexpr):
    """Sample and position along three axes of rows, which are numbered sample by sample."""
    last = (row % p2).to(tl.int64)
    middle = ((row // p2) % p1).to(tl.int64)
    first = ((row // p2 // p1) % p0).to(tl.int64)
    number = (row // p2 // p1 // p0).to(tl.int64)
    moved = tl.where(number * 0 + batch >= 2 * samples, number, 0)  # as `sampling.moves`
    sample = _spread(number, moved, tl.load(draws), batch, samples, SPREAD[1][0], SPREAD[0], SPREAD[2])
    first = _spread(first, number, tl.load(draws + 1), c0, p0, SPREAD[1][1], SPREAD[0], SPREAD[2])
    middle = _spread(middle, number, tl.load(draws + 2), c1, p1, SPREAD[1][2], SPREAD[0], SPREAD[2])
    last = _spread(last, number, tl.load(draws + 3), c2, p2, SPREAD[1][3], SPREAD[0], SPREAD[2])
    return sample, first, middle, last


@triton.jit
def column_parts(column, BLOCK: tl.constexpr, TAPS: tl.constexpr, CHANNELS_LAST: tl.constexpr):
    """Channel of a block, tap, and feature (channel, tap) of a column. Where channels lie together, so do columns."""
    total: tl.constexpr = TAPS[0][0] * TAPS[1][0] * TAPS[2][0]
    if CHANNELS_LAST:
        channel, tap = column % BLOCK, column // BLOCK
    else:
        channel, tap = column // total, column % total
    return channel, tap, channel * total + tap


@triton.jit
def block_channels(block, full, group_channels, BLOCK: tl.constexpr, FULL_BLOCKS: tl.constexpr):
    """First channel of a block, and how many it has; smaller last blocks of all groups come after the full ones."""
    is_full = block < full
    start = tl.where(
        is_full,
        block // FULL_BLOCKS * group_channels + block % FULL_BLOCKS * BLOCK,
        (block - full) * group_channels + FULL_BLOCKS * BLOCK,
    )
    return start, tl.where(is_full, BLOCK, group_channels - FULL_BLOCKS * BLOCK)


@triton.jit
def entry_places(
    sample, q0, q1, q2, first, channel, tap, sb, sc, s0, s1, s2, n0, n1, n2, keep, TAPS: tl.constexpr
):  # fmt: skip
    """Offsets (rows, columns) into a tensor (batch, channels, *sizes) of these strides, and those of `keep` inside.

    Rows and columns have their own part each, so that there is one sum for each entry; what is inside is asked only
    along axes where taps overhang.
    """
    r0, r1, r2 = q0 * TAPS[0][1] + TAPS[0][2], q1 * TAPS[1][1] + TAPS[1][2], q2 * TAPS[2][1] + TAPS[2][2]
    t0 = tap // (TAPS[1][0] * TAPS[2][0]) * TAPS[0][3]
    t1 = (tap // TAPS[2][0]) % TAPS[1][0] * TAPS[1][3]
    t2 = tap % TAPS[2][0] * TAPS[2][3]
    if TAPS[0][4]:
        at = r0.to(tl.int32)[:, None] + t0[None, :]
        keep = keep & (at >= 0) & (at < n0)
    if TAPS[1][4]:
        at = r1.to(tl.int32)[:, None] + t1[None, :]
        keep = keep & (at >= 0) & (at < n1)
    if TAPS[2][4]:
        at = r2.to(tl.int32)[:, None] + t2[None, :]
        keep = keep & (at >= 0) & (at < n2)
    of_row = sample * sb + first * sc + r0 * s0 + r1 * s1 + r2 * s2
    of_column = channel * sc + t0 * s0 + t1 * s1 + t2 * s2
    return of_row[:, None] + of_column[None, :], keep


def described(x: Tensor, draws: Tensor, view: View, plan: Plan) -> dict[str, Any]:
    """What these functions are told. Sizes are arguments of a kernel, and a layer's taps are built into it."""
    axes = [(a.size, a.count, p) for a, p in zip(view.phase, view.budget[1:], strict=True)]
    axes += [(1, 1, 1)] * (3 - len(axes))
    taps = [(len(a.offsets), a.step, a.offsets[0], spacing(a.offsets), a.overhangs) for a in view.phase]
    taps += [(1, 1, 0, 1, False)] * (3 - len(taps))
    full = plan.layout.parts[0].blocks
    wide = max(x.shape[0] * view.budget[0], *(count * picks for _, count, picks in axes)) >= 2**31
    return {
        "x": x,
        "draws": draws,
        "batch": x.shape[0],
        "samples": view.budget[0],
        **{f"{name}{i}": axis[at] for at, name in enumerate("ncp") for i, axis in enumerate(axes)},
        **strides(x, "s"),
        "full": plan.layout.groups * full,
        "group_channels": plan.layout.channels,
        "TAPS": tuple(taps),
        "BLOCK": min(plan.layout.block, plan.layout.channels),
        "FULL_BLOCKS": full,
        "SHARED": plan.layout.shared,
        "CHANNELS_LAST": x.stride(1) == 1,
        "SPREAD": (BITS, STRIDES, wide),
    }


def gain_strides(gain: Tensor | None) -> dict[str, Any]:
    """The gain, and its strides along batch and axes: none where there is one gain for a whole sample."""
    given = {"gb": 0, "g0": 0, "g1": 0, "g2": 0}
    if gain is not None:
        own = [s if size > 1 else 0 for s, size in zip(gain.stride(), gain.shape, strict=True)]
        given = dict(zip(given, [own[0], *own[2:], 0, 0, 0], strict=False))
    return {"gain": gain, **given}


def strides(x: Tensor, name: str) -> dict[str, int]:
    """Of batch, channels and three axes."""
    given = [*x.stride(), 0, 0, 0][:5]
    return {f"{name}{axis}": given[at] for at, axis in enumerate("bc012")}


def spacing(offsets: tuple[int, ...]) -> int:
    return offsets[1] - offsets[0] if len(offsets) > 1 else 1
