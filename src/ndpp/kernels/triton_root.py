"""D of small blocks, one program for each: from the parts of the moments, or from moments that ranks have joined.

D = ν^(-1/2) q(A/ν) with A = Cov + ridge·I, ν = ‖A‖_F and q = κI + γM + c·Q², Q = M² + aM + δI. What is wider is in
`triton_root_wide`.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_launch import power_of_two
from .triton_moments import part_means, part_products, places_of_parts, product_places, unit_of
from .triton_rows import feature_columns

WIDEST = 64  # features of a block that one program does: matrices of 128 do not fit beside their factors
SMALLEST_RIDGE = torch.finfo(torch.float32).eps


@triton.jit
def ridge_of(unit, root_eps, SMALLEST: tl.constexpr):
    """ε in the unit of Cov, not below the rounding of the data."""
    ridge = tl.maximum(root_eps / unit, SMALLEST)
    return ridge * ridge


@triton.jit
def _regularised(a, unit, root_eps, shrinkage, width, SMALLEST: tl.constexpr, F: tl.constexpr):
    """Cov + (ε + shrinkage·mean eigenvalue)·I of one block, zero beyond its width."""
    i, j = tl.arange(0, F)[:, None], tl.arange(0, F)[None, :]
    ridge = ridge_of(unit, root_eps, SMALLEST) + shrinkage * tl.sum(tl.sum(tl.where(i == j, a, 0.0), 1), 0) / width
    return a + tl.where((i == j) & (i < width), ridge, 0.0)


@triton.jit
def _norm(a):
    """‖A‖_F, without overflow."""
    peak = tl.max(tl.max(tl.abs(a), 1), 0)
    peak = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # its power of two
    peak = tl.where(peak > 0, peak, 1.0)
    scaled = a * tl.div_rn(1.0, peak)
    square = tl.sum(tl.sum(scaled * scaled, 1), 0)
    return tl.where(square > 0, tl.sqrt_rn(tl.where(square > 0, square, 1.0)) * peak, 1.0)


@triton.jit
def _quartic_factor(m, COEFFICIENTS: tl.constexpr, F: tl.constexpr, PRECISION: tl.constexpr):
    """Q = M² + aM + δI."""
    i, j = tl.arange(0, F)[:, None], tl.arange(0, F)[None, :]
    q = tl.dot(m, m, COEFFICIENTS[3] * m, input_precision=PRECISION)
    return q + tl.where(i == j, COEFFICIENTS[4], 0.0)


@triton.jit(
    do_not_specialize=["f", "taps", "block", "parts", "chunk", "total", "tiles", "count", "first_last", "last_width"]
)
def _solve(
    d, used_mean, used_unit, rows, mean, cov, unit_of_batch, running_mean, running_cov, tracked,
    found, f, taps, block, parts, chunk, total, tiles, count, smallest, positions,
    root_eps, shrinkage, first_last, last_width,
    COLLECT: tl.constexpr, BY_TAP: tl.constexpr, COEFFICIENTS: tl.constexpr, SMALLEST: tl.constexpr, F: tl.constexpr,
    COLUMNS: tl.constexpr, VECTORS: tl.constexpr, PEAKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D of the batch, or of the running statistics where it has none; the identity without either.

    COLLECT: moments are put together here, and written; else they are given.
    """
    own, blocks = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, F)
    i, j, inside = at[:, None], at[None, :], at < f
    both, place = inside[:, None] & inside[None, :], own.to(tl.int64) * f * f + i * f + j
    if COLLECT:
        products, vectors, peaks = places_of_parts(found, parts, blocks, tiles, COLUMNS, VECTORS)
        unit, finite = unit_of(peaks, count, smallest, PEAKS)
        given = tl.where(finite, f, 0)
        inverse = tl.div_rn(1.0, unit)
        column = feature_columns(at, block, taps, BY_TAP)
        of_mean = part_means(
            vectors, own, blocks, tiles * COLUMNS, column, inside, parts, chunk, total, inverse, F
        )  # fmt: skip
        a = part_products(
            products, vectors, product_places(column, column, tiles, COLUMNS), own, blocks, tiles, column, inside,
            column, inside, of_mean, of_mean, parts, chunk, total, inverse, F, COLUMNS,
        )  # fmt: skip
        a = tl.where((i < given) & (j < given), (a + tl.trans(a)) * 0.5, 0.0)
        of_mean = tl.where(at < given, of_mean, 0.0)
        tl.store(cov + place, a, both)
        tl.store(mean + own * f + at, of_mean, inside)
        if own == 0:
            tl.store(unit_of_batch, unit)
            tl.store(rows, tl.where(finite, positions, float("nan")))
    else:
        unit, given = tl.load(unit_of_batch), tl.where(tl.load(rows) > 0, f, 0)
        a, of_mean = tl.load(cov + place, both, 0.0), tl.load(mean + own * f + at, inside, 0.0)
    other, inverse = f - given, tl.div_rn(1.0, unit)  # all columns are those of the batch, or none
    a += tl.load(running_cov + place, (i < other) & (j < other), 0.0) * inverse * inverse
    of_mean += tl.load(running_mean + own * f + at, at < other, 0.0) * inverse
    tl.store(used_mean + own * f + at, of_mean, inside)
    if own == 0:
        tl.store(used_unit, unit)
    width = tl.where(own < first_last, f, last_width)
    a = _regularised(a, unit, root_eps, shrinkage, width, SMALLEST, F)
    norm = _norm(a)
    m = a * tl.div_rn(1.0, norm)
    q = _quartic_factor(m, COEFFICIENTS, F, PRECISION)
    x = COEFFICIENTS[1] * m + tl.where(i == j, COEFFICIENTS[0], 0.0)
    x += COEFFICIENTS[2] * tl.dot(q, q, input_precision=PRECISION)
    known = given + tl.load(tracked) > 0
    x = tl.where(known, x * tl.div_rn(1.0, tl.sqrt_rn(norm)), tl.where(i == j, unit, 0.0))
    tl.store(d + place, x, both)


@triton.jit(do_not_specialize=["f", "parts", "first_last", "last_width"])
def _solve_adjoint(
    of_cov, of_mean, of_d, d, rows, cov, unit, f, parts, root_eps, shrinkage, first_last, last_width,
    COEFFICIENTS: tl.constexpr, SMALLEST: tl.constexpr, F: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The polynomial on pairs (M, dM) with the gradient of D in the place of dM, and D·(what reaches μ·D·W).

    The gradient of D is symmetric, and comes in parts, as does what follows them: what reaches μ·D·W.

    Where the batch had no moments of its own nothing reaches them.
    """
    own, at = tl.program_id(0), tl.arange(0, F)
    i, j, inside = at[:, None], at[None, :], at < f
    both, place = inside[:, None] & inside[None, :], own.to(tl.int64) * f * f + i * f + j
    width = tl.where(own < first_last, f, last_width)
    a = _regularised(tl.load(cov + place, both, 0.0), tl.load(unit), root_eps, shrinkage, width, SMALLEST, F)
    norm = _norm(a)
    m = a * tl.div_rn(1.0, norm)
    s, shifts, blocks = tl.zeros((F, F), tl.float32), tl.zeros((F,), tl.float32), tl.num_programs(0)
    of_shift = of_d + (parts * blocks).to(tl.int64) * f * f
    for part in tl.range(0, parts):
        s += tl.load(of_d + (part * blocks).to(tl.int64) * f * f + place, both, 0.0)
        shifts += tl.load(of_shift + (part * blocks + own) * f + at, inside, 0.0)
    dm = s * tl.div_rn(1.0, tl.sqrt_rn(norm))
    k = tl.dot(m, dm, input_precision=PRECISION)
    dq = COEFFICIENTS[3] * dm + k + tl.trans(k)
    q = _quartic_factor(m, COEFFICIENTS, F, PRECISION)
    k = tl.dot(q, dq, input_precision=PRECISION)
    dx = COEFFICIENTS[1] * dm + COEFFICIENTS[2] * (k + tl.trans(k))
    root = tl.load(d + place, both, 0.0)
    along = tl.sum(tl.sum(dx * m + s * root / 2, 1), 0)  # ν moves with A as well
    back = tl.where(both, (dx - m * along) * tl.div_rn(1.0, norm), 0.0)
    share = shrinkage * tl.sum(tl.sum(tl.where((i == j) & (i < width), back, 0.0), 1), 0) / width
    seen = tl.load(rows) > 0
    tl.store(of_cov + place, tl.where(seen, back + tl.where(i == j, share, 0.0), 0.0), both)
    shift = tl.sum(root * shifts[None, :], 1)
    tl.store(of_mean + own * f + at, tl.where(seen, shift, 0.0), inside)


def size_of(f: int) -> int:
    """Of the matrices of a program."""
    return max(power_of_two(f), 16)


def warps_of(size: int) -> int:
    return 4 if size <= 32 else 8 if size <= 64 else 16
