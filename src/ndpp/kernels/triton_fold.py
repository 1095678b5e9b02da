"""D·W, b - μ·D·W and the adjoint of both, in the dtype and layout of what the stock operation is given.

A weight is a matrix (outputs, features) for every block, wherever its entries lie: o·so + channel·sc + tap·st, and each
group further on by sg.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .triton_rows import BLOCKS, block_channels

OUTPUTS, FEATURES, DEPTH = 64, 64, 32  # of a tile, and of the factors that are loaded at a time
WARPS, STAGES = 8, 2
LINES, COLUMNS, WARPS_OF_LINES = 8, 512, 4  # of the products with μ
OF_WEIGHT = ("wg", "wo", "wc", "wt")
OF_FOLDED = ("vg", "vo", "vc", "vt")


@triton.jit
def _group_of(own, blocks):
    """The group of a block, and its first channel there."""
    _, full_blocks, full, group_channels, _ = blocks
    first, width = block_channels(own, blocks)
    group = tl.where(own < full, own // full_blocks, own - full)
    return group, first - group * group_channels, width


@triton.jit
def _weights(matrix, group, first, width, o, k, outputs, taps, strides):
    """Where weights (o, k) of a block lie, and which of them there are."""
    sg, so, sc, st = strides
    at = group.to(tl.int64) * sg + first * sc + o[:, None] * so + (k // taps * sc + k % taps * st)[None, :]
    return matrix + at, (o < outputs)[:, None] & (k < width * taps)[None, :]


@triton.jit(do_not_specialize=["f", "outputs", *BLOCKS, *OF_WEIGHT, *OF_FOLDED])
def _fold(
    out, weight, d, unit, f, outputs, block, full_blocks, full, group_channels, taps, wg, wo, wc, wt, vg, vo, vc, vt,
    SHARED: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of D·W of one block."""
    blocks = (block, full_blocks, full, group_channels, taps)
    own = tl.program_id(2)
    group, first, width = _group_of(own, blocks)
    of_d = d
    if not SHARED:
        of_d += own.to(tl.int64) * f * f
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    j = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros((OUTPUTS, FEATURES), tl.float32)
    for start in tl.range(0, width * taps, DEPTH):
        k = start + tl.arange(0, DEPTH)
        at, inside = _weights(weight, group, first, width, o, k, outputs, taps, (wg, wo, wc, wt))
        w = tl.load(at, inside, 0.0).to(tl.float32)
        root = tl.load(of_d + k[:, None] * f + j[None, :], (k < f)[:, None] & (j < f)[None, :], 0.0)
        total = tl.dot(w, root, total, input_precision=PRECISION)
    at, inside = _weights(out, group, first, width, o, j, outputs, taps, (vg, vo, vc, vt))
    tl.store(at, total * tl.div_rn(1.0, tl.load(unit)), inside)


@triton.jit(do_not_specialize=["f", "outputs", *BLOCKS, *OF_FOLDED])
def _constant(
    out, bias, folded, mean, unit, f, outputs, block, full_blocks, full, group_channels, taps, vg, vo, vc, vt,
    BY_TAP: tl.constexpr, SHARED: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """b - μ·D·W of some outputs of a group, with D·W as it was rounded: what it adds up to on μ is then exact."""
    group = tl.program_id(1)
    o = tl.program_id(0) * LINES + tl.arange(0, LINES)
    total = tl.zeros((LINES,), tl.float32)
    for start in tl.range(0, group_channels * taps, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < group_channels * taps
        if BY_TAP:
            channel, tap = column % group_channels, column // group_channels
        else:
            channel, tap = column // taps, column % taps
        number = tl.minimum(channel // block, full_blocks)  # of a block in its group; the smaller one comes last
        own = tl.where(number < full_blocks, group * full_blocks + number, full + group)
        feature = (channel - number * block) * taps + tap
        if SHARED:
            own = own * 0
        mu = tl.load(mean + own * f + feature, inside, 0.0)
        at = folded + group.to(tl.int64) * vg + o[:, None] * vo + (channel * vc + tap * vt)[None, :]
        v = tl.load(at, (o < outputs)[:, None] & inside[None, :], 0.0).to(tl.float32)
        total += tl.sum(v * mu[None, :], 1)
    constant = -total * tl.load(unit)
    if bias is not None:
        constant += tl.load(bias + group * outputs + o, o < outputs, 0.0).to(tl.float32)
    tl.store(out + group * outputs + o, constant, o < outputs)


@triton.jit
def _product_gradient(grad, constants, mean, unit, group, first, width, o, k, outputs, taps, f, strides):
    """What reaches D·W of a block (o, k): by itself, and by way of b - μ·D·W."""
    at, inside = _weights(grad, group, first, width, o, k, outputs, taps, strides)
    of_constant = tl.load(constants + group * outputs + o, o < outputs, 0.0).to(tl.float32) * unit
    return tl.load(at, inside, 0.0).to(tl.float32) - of_constant[:, None] * tl.load(mean + k, k < f, 0.0)[None, :]


@triton.jit
def _weight_gradient(
    of_weight, grad, constants, d, mean, unit, own, o, j, f, outputs, blocks, strides, of_folded,
    SHARED: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of P·D."""
    group, first, width = _group_of(own, blocks)
    if not SHARED:
        d, mean = d + own.to(tl.int64) * f * f, mean + own * f
    total = tl.zeros((o.shape[0], j.shape[0]), tl.float32)
    for start in tl.range(0, width * blocks[4], DEPTH):
        k = start + tl.arange(0, DEPTH)
        p = _product_gradient(grad, constants, mean, unit, group, first, width, o, k, outputs, blocks[4], f, of_folded)
        root = tl.load(d + k[:, None] * f + j[None, :], (k < f)[:, None] & (j < f)[None, :], 0.0)
        total = tl.dot(p, root, total, input_precision=PRECISION)
    at, inside = _weights(of_weight, group, first, width, o, j, outputs, blocks[4], strides)
    tl.store(at, total * tl.div_rn(1.0, unit), inside)


@triton.jit
def _root_gradient(
    of_d, of_shift, grad, constants, weight, mean, unit, own, each, i, j, shifts, f, outputs, blocks, strides,
    of_folded, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Wᵀ·P over all blocks that share a D; of what reaches μ·D·W as Wᵀ·(-db), the first `shifts`."""
    total = tl.zeros((i.shape[0], j.shape[0]), tl.float32)
    shift = tl.zeros((i.shape[0],), tl.float32)
    lines = tl.cdiv(outputs, OUTPUTS)
    for step in tl.range(0, each * lines):
        now = own + step // lines
        group, first, width = _group_of(now, blocks)
        o = step % lines * OUTPUTS + tl.arange(0, OUTPUTS)
        at, inside = _weights(weight, group, first, width, o, i, outputs, blocks[4], strides)
        w = tl.load(at, inside, 0.0).to(tl.float32)
        p = _product_gradient(
            grad, constants, mean + own * f, unit, group, first, width, o, j, outputs, blocks[4], f, of_folded
        )  # fmt: skip
        total = tl.dot(tl.trans(w), p, total, input_precision=PRECISION)
        of_constant = tl.load(constants + group * outputs + o, o < outputs, 0.0).to(tl.float32)
        shift -= tl.sum(w * of_constant[:, None], 0)
    inside = (i < f)[:, None] & (j < f)[None, :]
    place = of_d + own.to(tl.int64) * f * f + i[:, None] * f + j[None, :]
    tl.store(place, total * tl.div_rn(1.0, unit), inside)
    tl.store(of_shift + own * f + i, shift, i < shifts)


@triton.jit(do_not_specialize=["f", "outputs", "many", "wide", "of_weights", "each", *BLOCKS, *OF_WEIGHT, *OF_FOLDED])
def _fold_adjoint(
    of_weight, of_d, of_shift, grad, constants, weight, d, mean, unit_of_used,
    f, outputs, many, wide, of_weights, each,
    block, full_blocks, full, group_channels, taps, wg, wo, wc, wt, vg, vo, vc, vt,
    SHARED: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of W: tiles of P·D, `many` by `wide` for each block. Of D: tiles of Wᵀ·P. P is what reaches D·W in all."""
    blocks = (block, full_blocks, full, group_channels, taps)
    strides, of_folded = (wg, wo, wc, wt), (vg, vo, vc, vt)
    number, unit = tl.program_id(0), tl.load(unit_of_used)
    at = tl.arange(0, FEATURES)
    if number < of_weights:
        o = number % many * OUTPUTS + tl.arange(0, OUTPUTS)
        _weight_gradient(
            of_weight, grad, constants, d, mean, unit, number // (many * wide), o,
            number // many % wide * FEATURES + at, f, outputs, blocks, strides, of_folded, SHARED, DEPTH, PRECISION,
        )  # fmt: skip
    else:
        rest = number - of_weights
        _root_gradient(
            of_d, of_shift, grad, constants, weight, mean, unit, rest // (wide * wide), each,
            rest % wide * FEATURES + at, rest // wide % wide * FEATURES + at, tl.where(rest // wide % wide == 0, f, 0),
            f, outputs, blocks, strides, of_folded, OUTPUTS, PRECISION,
        )  # fmt: skip
