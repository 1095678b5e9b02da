"""D·W, b - μ·D·W and the adjoint of both, in the dtype and layout of what the stock operation is given.

A weight is a matrix (outputs, features) for every block, wherever its entries lie: o·so + channel·sc + tap·st, and each
group further on by sg. Sums run over columns: features in the order in which they lie there. Lines of D are fetched in
that order; its columns, which are the outcome's, stay in their own.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .triton_rows import BLOCKS, block_channels, column_parts

OUTPUTS, FEATURES, DEPTH = 64, 64, 64  # of a tile, and of the factors that are loaded at a time
WARPS, STAGES = 8, 2
WARPS_IN_A_CROWD = 4  # where programs are more than a device can take at once
LINES, COLUMNS, WARPS_OF_LINES = 4, 1024, 4  # of the products with μ
OF_WEIGHT = ("wg", "wo", "wc", "wt")
OF_FOLDED = ("vg", "vo", "vc", "vt")
RUN = tl.constexpr(8)


@triton.jit
def _group_of(own, blocks):
    """The group of a block, and its first channel there."""
    _, full_blocks, full, group_channels, _ = blocks
    first, width = block_channels(own, blocks)
    group = tl.where(own < full, own // full_blocks, own - full)
    return group, first - group * group_channels, width


@triton.jit
def _weights(group, first, width, o, channel, tap, outputs, taps, strides, EVEN: tl.constexpr):
    """Where weights of a block lie, and which of them there are. EVEN: in runs of eight that lie together."""
    sg, so, sc, st = strides
    at = (group.to(tl.int64) * sg + first * sc + o * so)[:, None] + (channel * sc + tap * st)[None, :]
    inside = (o < outputs)[:, None] & ((channel < width) & (tap < taps))[None, :]
    if EVEN:
        at = tl.max_contiguous(tl.multiple_of(at, [1, RUN]), [1, RUN])
        inside = tl.max_constancy(inside, [1, RUN])
    return at, inside


@triton.jit
def _lines(d, own, k, j, f, keep, EVEN: tl.constexpr):
    """Lines k of D, in float32; `keep` says which there are."""
    at = (own.to(tl.int64) * f * f + k * f)[:, None] + j[None, :]
    inside = keep[:, None] & (j < f)[None, :]
    if EVEN:
        at = tl.max_contiguous(tl.multiple_of(at, [1, RUN]), [1, RUN])
        inside = tl.max_constancy(inside, [1, RUN])
    return tl.load(d + at, inside, 0.0)


@triton.jit
def _product(a, b, total, NARROW: tl.constexpr, PRECISION: tl.constexpr):
    """total + a·b. D·W is rounded to bfloat16 where NARROW, and so may be its factors."""
    if NARROW:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), total)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["f", "outputs", *BLOCKS, *OF_WEIGHT, *OF_FOLDED])
def _fold(
    out, weight, d, unit, f, outputs, block, full_blocks, full, group_channels, taps, wg, wo, wc, wt, vg, vo, vc, vt,
    SHARED: tl.constexpr, BY_TAP: tl.constexpr, EVEN: tl.constexpr, EVEN_LINES: tl.constexpr, EVEN_OUT: tl.constexpr,
    NARROW: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of D·W of one block."""
    blocks = (block, full_blocks, full, group_channels, taps)
    own = tl.program_id(2)
    group, first, width = _group_of(own, blocks)
    of_d = own
    if SHARED:
        of_d = own * 0
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    j = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros((OUTPUTS, FEATURES), tl.float32)
    for start in tl.range(0, width * taps, DEPTH):
        channel, tap, k = column_parts(start + tl.arange(0, DEPTH), width, taps, BY_TAP)
        at, inside = _weights(group, first, width, o, channel, tap, outputs, taps, (wg, wo, wc, wt), EVEN)
        w = tl.load(weight + at, inside, 0.0).to(tl.float32)
        root = _lines(d, of_d, k, j, f, (channel < width) & (tap < taps), EVEN_LINES)
        total = _product(w, root, total, NARROW, PRECISION)
    at, inside = _weights(group, first, width, o, j // taps, j % taps, outputs, taps, (vg, vo, vc, vt), EVEN_OUT)
    tl.store(out + at, total * tl.div_rn(1.0, tl.load(unit)), inside)


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
def _product_gradient(
    grad, constants, mean, unit, group, first, width, o, columns, outputs, taps, strides, EVEN: tl.constexpr
):
    """What reaches D·W of a block: by itself, and by way of b - μ·D·W."""
    channel, tap, feature = columns
    at, inside = _weights(group, first, width, o, channel, tap, outputs, taps, strides, EVEN)
    of_constant = tl.load(constants + group * outputs + o, o < outputs, 0.0).to(tl.float32) * unit
    mu = tl.load(mean + feature, (channel < width) & (tap < taps), 0.0)
    return tl.load(grad + at, inside, 0.0).to(tl.float32) - of_constant[:, None] * mu[None, :]


@triton.jit
def _weight_gradient(
    of_weight, grad, constants, d, mean, unit, own, o, j, f, outputs, blocks, strides, of_folded,
    SHARED: tl.constexpr, BY_TAP: tl.constexpr, EVEN: tl.constexpr, EVEN_LINES: tl.constexpr, EVEN_OUT: tl.constexpr,
    NARROW: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of P·D."""
    group, first, width = _group_of(own, blocks)
    of_d, taps = own, blocks[4]
    if SHARED:
        of_d = own * 0
    total = tl.zeros((o.shape[0], j.shape[0]), tl.float32)
    for start in tl.range(0, width * taps, DEPTH):
        columns = column_parts(start + tl.arange(0, DEPTH), width, taps, BY_TAP)
        p = _product_gradient(
            grad, constants, mean + of_d * f, unit, group, first, width, o, columns, outputs, taps, of_folded, EVEN
        )  # fmt: skip
        root = _lines(d, of_d, columns[2], j, f, (columns[0] < width) & (columns[1] < taps), EVEN_LINES)
        total = _product(p, root, total, NARROW, PRECISION)
    at, inside = _weights(group, first, width, o, j // taps, j % taps, outputs, taps, strides, EVEN_OUT)
    tl.store(of_weight + at, total * tl.div_rn(1.0, unit), inside)


@triton.jit
def _root_gradient(
    of_d, of_shift, grad, constants, weight, mean, unit, own, part, parts, tile_i, tile_j, each, f, outputs, blocks,
    strides, of_folded, owns, BY_TAP: tl.constexpr, EVEN: tl.constexpr, SINGLE: tl.constexpr, NARROW: tl.constexpr,
    OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of Wᵀ·P/2 over a part of the outputs, of all blocks that share a D; SINGLE: and of its transpose.

    With the tiles of the diagonal what reaches μ·D·W: Wᵀ·(-db).
    """
    total = tl.zeros((FEATURES, FEATURES), tl.float32)
    shift = tl.zeros((FEATURES,), tl.float32)
    lines, taps, at = tl.cdiv(outputs, OUTPUTS), blocks[4], tl.arange(0, FEATURES)
    block = blocks[0]  # a smaller last one has zeros where it has no channels
    i = column_parts(tile_i * FEATURES + at, block, taps, BY_TAP)
    j = column_parts(tile_j * FEATURES + at, block, taps, BY_TAP)
    chunk = tl.cdiv(each * lines, parts)
    for step in tl.range(part * chunk, tl.minimum(part * chunk + chunk, each * lines)):
        group, first, width = _group_of(own + step // lines, blocks)
        o = step % lines * OUTPUTS + tl.arange(0, OUTPUTS)
        place_i, inside_i = _weights(group, first, width, o, i[0], i[1], outputs, taps, strides, EVEN)
        w_i = tl.load(weight + place_i, inside_i, 0.0).to(tl.float32)
        p_j = _product_gradient(
            grad, constants, mean + own * f, unit, group, first, width, o, j, outputs, taps, of_folded, EVEN
        )  # fmt: skip
        total = _product(tl.trans(w_i), p_j, total, NARROW, PRECISION)
        of_constant = tl.load(constants + group * outputs + o, o < outputs, 0.0).to(tl.float32)
        shift -= tl.sum(w_i * of_constant[:, None], 0)
    if SINGLE:  # the one tile there is
        total += tl.trans(total)
    in_i, in_j = (i[0] < block) & (i[1] < taps), (j[0] < block) & (j[1] < taps)
    inside, whole = in_i[:, None] & in_j[None, :], part * owns + own
    place, total = of_d + whole.to(tl.int64) * f * f, total * tl.div_rn(0.5, unit)
    tl.store(place + i[2][:, None] * f + j[2][None, :], total, inside)
    if tile_i == tile_j:
        tl.store(of_shift + whole * f + i[2], shift, in_i)


@triton.jit(
    do_not_specialize=[
        "f", "outputs", "many", "wide", "of_roots", "each", "parts", "owns", *BLOCKS, *OF_WEIGHT, *OF_FOLDED
    ]
)  # fmt: skip
def _fold_adjoint(
    of_weight, of_d, grad, constants, weight, d, mean, unit_of_used,
    f, outputs, many, wide, of_roots, each, parts, owns,
    block, full_blocks, full, group_channels, taps, wg, wo, wc, wt, vg, vo, vc, vt,
    SINGLE: tl.constexpr, SHARED: tl.constexpr, BY_TAP: tl.constexpr, EVEN: tl.constexpr, EVEN_LINES: tl.constexpr,
    EVEN_OUT: tl.constexpr, NARROW: tl.constexpr, OUTPUTS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Of D: tiles of Wᵀ·P, which take longest. Of W: tiles of P·D, `many` by `wide` for each block.

    P is what reaches D·W in all.
    """
    blocks = (block, full_blocks, full, group_channels, taps)
    strides, of_folded = (wg, wo, wc, wt), (vg, vo, vc, vt)
    number, unit = tl.program_id(0), tl.load(unit_of_used)
    if number < of_roots:
        tile_i, tile_j = number % wide, number // wide % wide
        rest = number // (wide * wide)
        _root_gradient(
            of_d, of_d + (parts * owns).to(tl.int64) * f * f, grad, constants, weight, mean, unit,
            rest % owns, rest // owns, parts, tile_i, tile_j, each, f, outputs, blocks, strides, of_folded, owns,
            BY_TAP, EVEN, SINGLE, NARROW, OUTPUTS, FEATURES, PRECISION,
        )  # fmt: skip
    else:
        rest = number - of_roots
        _weight_gradient(
            of_weight, grad, constants, d, mean, unit, rest // (many * wide),
            rest % many * OUTPUTS + tl.arange(0, OUTPUTS), rest // many % wide * FEATURES + tl.arange(0, FEATURES),
            f, outputs, blocks, strides, of_folded,
            SHARED, BY_TAP, EVEN, EVEN_LINES, EVEN_OUT, NARROW, DEPTH, PRECISION,
        )  # fmt: skip
