"""What the gradients of μ and Cov add to that of the input, at the places of the sampled rows only."""

# mypy: ignore-errors
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..whitening import Moments
from . import triton_launch
from .plan import Plan, View
from .triton_moments import COLUMNS, SIZES, WARPS, load_rows
from .triton_rows import block_channels, column_parts, described, entry_places, gain_strides, row_places, strides

ROWS = 32  # of a tile; more spill registers


@triton.jit(do_not_specialize=[*SIZES, "total", "tiles", "f"])
def _adjoint(
    grad, of_rows, grad_mean, grad_cov, rows, mean, unit, x, gain, draws, batch, samples,
    n0, n1, n2, c0, c1, c2, p0, p1, p2, sb, sc, s0, s1, s2, tb, tc, t0, t1, t2, gb, g0, g1, g2,
    full, group_channels, total, tiles, f, share,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, FULL_BLOCKS: tl.constexpr, SHARED: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, SPREAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(centred·(G + Gᵀ) + m) / rows of one tile, added to the gradient of x; for the gain, Σ of it·x."""
    j, block = tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seen = tl.load(rows) > 0  # where there was nothing to look at, there is nothing to add
    scale = tl.div_rn(1.0, tl.load(unit))
    taps: tl.constexpr = TAPS[0][0] * TAPS[1][0] * TAPS[2][0]
    own = row % full if SHARED else block + row * 0
    place = tl.minimum(row, total - 1) // full if SHARED else tl.minimum(row, total - 1)
    sample, q0, q1, q2 = row_places(place, draws, batch, samples, c0, c1, c2, p0, p1, p2, SPREAD)
    first, width = block_channels(own, full, group_channels, BLOCK, FULL_BLOCKS)
    used = (row < tl.where(seen, total, 0))[:, None]
    at = tl.arange(0, COLUMNS)
    channel, tap, feature = column_parts(j * COLUMNS + at, BLOCK, TAPS, CHANNELS_LAST)
    in_j = (channel < BLOCK) & (tap < taps)
    g = grad_cov + block.to(tl.int64) * f * f
    back = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in tl.range(0, tiles):
        channel_k, tap_k, feature_k = column_parts(k * COLUMNS + at, BLOCK, TAPS, CHANNELS_LAST)
        in_k = (channel_k < BLOCK) & (tap_k < taps)
        keep = used & (channel_k[None, :] < width[:, None]) & (tap_k[None, :] < taps)
        c = load_rows(
            x, gain, sample, q0, q1, q2, channel_k, tap_k, first, keep,
            sb, sc, s0, s1, s2, gb, g0, g1, g2, n0, n1, n2, TAPS,
        )  # fmt: skip
        c = tl.where(keep, c * scale - tl.load(mean + block * f + feature_k, in_k, 0.0)[None, :], 0.0)
        both = in_k[:, None] & in_j[None, :]
        both_g = tl.load(g + feature_k[:, None] * f + feature[None, :], both, 0.0)
        both_g = (both_g + tl.load(g + feature[None, :] * f + feature_k[:, None], both, 0.0)) * share
        if NARROW:
            c, both_g = c.to(tl.bfloat16), both_g.to(tl.bfloat16)
        back = tl.dot(c, both_g, back, input_precision=PRECISION)
    keep = used & (channel[None, :] < width[:, None]) & (tap[None, :] < taps)
    back = (back + tl.load(grad_mean + block * f + feature, in_j, 0.0)[None, :] * share) * scale
    if gain is not None:
        s = tl.load(gain + sample * gb + q0 * g0 + q1 * g1 + q2 * g2)
        plain = load_rows(
            x, None, sample, q0, q1, q2, channel, tap, first, keep & (s > 0)[:, None],
            sb, sc, s0, s1, s2, gb, g0, g1, g2, n0, n1, n2, TAPS,
        )  # fmt: skip
        of_gain = tl.sum(tl.where(keep & (s > 0)[:, None], back * plain, 0.0), 1)
        tl.store(of_rows + (block * tiles + j) * total.to(tl.int64) + row, of_gain, row < total)
        back = back * s[:, None]
    at_grad, keep = entry_places(
        sample, q0, q1, q2, first, channel, tap, tb, tc, t0, t1, t2, n0, n1, n2, keep, TAPS
    )  # fmt: skip
    if taps == 1:  # no two rows share an entry
        present = tl.load(grad + at_grad, keep, 0.0)
        tl.store(grad + at_grad, (present.to(tl.float32) + back).to(present.dtype), keep)
    else:
        tl.atomic_add(grad + at_grad, back.to(grad.dtype.element_ty), keep, sem="relaxed")


@triton.jit(do_not_specialize=["batch", "samples", "c0", "c1", "c2", "p0", "p1", "p2", "total", "leading", "each"])
def _gain_adjoint(
    out, of_rows, draws, batch, samples, c0, c1, c2, p0, p1, p2, gb, g0, g1, g2, total, leading, each, repeats,
    SPREAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Σ over tiles, and over the rows that share a gain."""
    slot = tl.program_id(0)
    value = tl.zeros((SIZE,), tl.float32)
    for line in tl.range(0, leading):
        for start in tl.range(0, each, SIZE):
            at = start + tl.arange(0, SIZE)
            value += tl.load(of_rows + line * total.to(tl.int64) + slot * each + at, at < each, 0.0)
    sample, q0, q1, q2 = row_places(
        slot * each // repeats, draws, batch, samples, c0, c1, c2, p0, p1, p2, SPREAD
    )  # fmt: skip
    tl.store(out + sample * gb + q0 * g0 + q1 * g1 + q2 * g2, tl.sum(value, 0))


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
    blocks, f = stats.mean.shape
    tiles = triton.cdiv(f, COLUMNS)
    told = described(x, draws, view, plan) | gain_strides(gain)
    repeats = told["full"] if plan.layout.shared else 1
    total = math.prod(view.budget) * repeats
    of_rows = None if gain is None else torch.empty(blocks * tiles * total, dtype=torch.float32, device=x.device)
    triton_launch.launch(
        _adjoint, (triton.cdiv(total, ROWS), tiles, blocks), WARPS, x, grad=grad, of_rows=of_rows,
        grad_mean=grad_mean.contiguous(), grad_cov=grad_cov.contiguous(), rows=stats.rows,
        mean=stats.mean.contiguous(), unit=stats.unit, **told, **strides(grad, "t"), total=total, tiles=tiles, f=f,
        share=1.0 / total, ROWS=ROWS, COLUMNS=COLUMNS, **triton_launch.precision(x.dtype),
    )  # fmt: skip
    if gain is None:
        return None
    each = repeats if plan.per_row else repeats * math.prod(view.budget[1:])
    out = torch.zeros_like(gain)
    names = ("draws", "batch", "samples", "c0", "c1", "c2", "p0", "p1", "p2", "SPREAD")
    own = {name: value for name, value in gain_strides(out).items() if name != "gain"}
    triton_launch.launch(
        _gain_adjoint, (total // each,), 1, x, out=out, of_rows=of_rows, **{name: told[name] for name in names},
        **own, total=total, leading=blocks * tiles, each=each, repeats=repeats, SIZE=128,
    )  # fmt: skip
    return out
