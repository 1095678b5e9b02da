"""D of blocks that are too wide for one program, and its adjoint, by tiles: a launch for each product in turn.

Nothing is normalised before it is multiplied: A·A and the parts of ‖A‖_F come out of one launch, and are put into their
proportion as the next one reads them. Every matrix is symmetric: tiles of the upper triangle, and their mirror images;
and the right factor of a product is read by its lines, which are its columns.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from .triton_root import ridge_of

TILE, DEPTH = 64, 32  # of an output, and of the factors that are loaded at a time
WARPS, STAGES = 8, 2
CROWD = 132  # programs at once: the multiprocessors of an H200
RUN = tl.constexpr(8)
NUMBERS = ["f", "tiles", "first_last", "last_width"]


@triton.jit
def _matrices(between, number, f):
    """Of what lies between two launches: all blocks of one matrix after those of another, then numbers of tiles."""
    return between + (number * tl.num_programs(1)).to(tl.int64) * f * f


@triton.jit
def _numbers(between, matrices, number, f, tiles):
    return _matrices(between, matrices, f) + number * tl.num_programs(1) * tiles * tiles


@triton.jit
def _places(own, i, j, f, EVEN: tl.constexpr):
    """Of a tile of a matrix (blocks, f, f). EVEN: lines come in runs of eight that lie together."""
    at = (own.to(tl.int64) * f * f + i.to(tl.int64) * f)[:, None] + j[None, :]
    return tl.max_contiguous(tl.multiple_of(at, [1, RUN]), [1, RUN]) if EVEN else at


@triton.jit
def _inside(i, j, f, EVEN: tl.constexpr):
    keep = (i < f)[:, None] & (j < f)[None, :]
    return tl.max_constancy(keep, [1, RUN]) if EVEN else keep


@triton.jit
def _trace(cov, running_cov, own, given, scale, f, WIDTH: tl.constexpr):
    """Of Cov as it is used: the batch gives all of its f columns, or none, and the running statistics the others."""
    at = tl.arange(0, WIDTH)
    place = own.to(tl.int64) * f * f + at * (f + 1)
    diagonal = tl.load(cov + place, at < given, 0.0)
    if running_cov is not None:
        diagonal += tl.load(running_cov + place, at < f - given, 0.0) * scale
    return tl.sum(diagonal, 0)


@triton.jit
def _tile(matrix, own, i, j, f, EVEN: tl.constexpr):
    """A tile of one of the matrices (blocks, f, f), zeros beyond it."""
    return tl.load(matrix + _places(own, i, j, f, EVEN), _inside(i, j, f, EVEN), 0.0)


@triton.jit
def _regular_tile(cov, running_cov, own, i, j, f, width, ridge, given, scale, EVEN: tl.constexpr):
    """A tile of Cov + ridge·I, of the batch or of the running statistics."""
    place = _places(own, i, j, f, EVEN)
    a = tl.load(cov + place, _inside(i, j, given, EVEN), 0.0)
    if running_cov is not None:
        a += tl.load(running_cov + place, _inside(i, j, f - given, EVEN), 0.0) * scale
    return a + tl.where((i[:, None] == j[None, :]) & (i < width)[:, None], ridge, 0.0)


@triton.jit
def _store(matrix, value, own, i, j, f, MIRRORED: tl.constexpr, EVEN: tl.constexpr):
    tl.store(matrix + _places(own, i, j, f, EVEN), value, _inside(i, j, f, EVEN))
    if MIRRORED:
        tl.store(matrix + _places(own, j, i, f, EVEN), tl.trans(value), _inside(j, i, f, EVEN))


@triton.jit
def _sum(parts, own, tiles, PARTS: tl.constexpr):
    """Of what the programs of the upper triangle have left, in one order."""
    at = tl.arange(0, PARTS)
    upper = (at < tiles * tiles) & (at // tiles <= at % tiles)
    return tl.sum(tl.load(parts + own * tiles * tiles + at, upper, 0.0), 0)


@triton.jit
def _identity(i, j, value):
    return tl.where(i[:, None] == j[None, :], value, 0.0)


@triton.jit
def _ridge(cov, running_cov, own, unit, given, scale, root_eps, shrinkage, f, width, SMALLEST: tl.constexpr, SHRINKS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip # noqa: E501
    ridge = ridge_of(unit, root_eps, SMALLEST)
    if SHRINKS:
        ridge += shrinkage * _trace(cov, running_cov, own, given, scale, f, WIDTH) / width
    return ridge


@triton.jit(do_not_specialize=NUMBERS)
def _square(
    between, rows, cov, unit_of_batch, running_cov, f, tiles, first_last, last_width, root_eps, shrinkage,
    SMALLEST: tl.constexpr, SHRINKS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A·A, and the part of ‖A‖² in every tile."""
    first, second, own = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if second < first:
        return
    unit, given = tl.load(unit_of_batch), tl.where(tl.load(rows) > 0, f, 0)
    scale = tl.div_rn(1.0, unit * unit)
    width = tl.where(own < first_last, f, last_width)
    ridge = _ridge(
        cov, running_cov, own, unit, given, scale, root_eps, shrinkage, f, width, SMALLEST, SHRINKS, WIDTH
    )  # fmt: skip
    i, j = first * TILE + tl.arange(0, TILE), second * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in tl.range(0, f, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left = _regular_tile(cov, running_cov, own, i, k, f, width, ridge, given, scale, EVEN)
        right = _regular_tile(cov, running_cov, own, j, k, f, width, ridge, given, scale, EVEN)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    a = _regular_tile(cov, running_cov, own, i, j, f, width, ridge, given, scale, EVEN)
    often = tl.where(first == second, 1.0, 2.0)
    norms = _numbers(between, 1, 0, f, tiles)
    tl.store(norms + own * tiles * tiles + first * tiles + second, often * tl.sum(tl.sum(a * a, 1), 0))
    _store(between, total, own, i, j, f, True, EVEN)


@triton.jit(do_not_specialize=NUMBERS)
def _quartic(
    d, used_mean, used_unit, squares, rows, mean, cov, unit_of_batch, running_mean, running_cov, tracked,
    f, tiles, first_last, last_width, root_eps, shrinkage,
    COEFFICIENTS: tl.constexpr, SMALLEST: tl.constexpr, SHRINKS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """D, with Q = A²/ν² + a·A/ν + δI from what `_square` has left."""
    first, second, own = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if second < first:
        return
    unit, given = tl.load(unit_of_batch), tl.where(tl.load(rows) > 0, f, 0)
    scale = tl.div_rn(1.0, unit * unit)
    width = tl.where(own < first_last, f, last_width)
    ridge = _ridge(
        cov, running_cov, own, unit, given, scale, root_eps, shrinkage, f, width, SMALLEST, SHRINKS, WIDTH
    )  # fmt: skip
    norm = tl.sqrt_rn(_sum(_numbers(squares, 1, 0, f, tiles), own, tiles, PARTS))
    by = tl.div_rn(1.0, norm)
    i, j = first * TILE + tl.arange(0, TILE), second * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in tl.range(0, f, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left = _regular_tile(cov, running_cov, own, i, k, f, width, ridge, given, scale, EVEN) * (COEFFICIENTS[3] * by)
        left += _tile(squares, own, i, k, f, EVEN) * (by * by) + _identity(i, k, COEFFICIENTS[4])
        right = _regular_tile(cov, running_cov, own, j, k, f, width, ridge, given, scale, EVEN) * (COEFFICIENTS[3] * by)
        right += _tile(squares, own, j, k, f, EVEN) * (by * by) + _identity(j, k, COEFFICIENTS[4])
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    a = _regular_tile(cov, running_cov, own, i, j, f, width, ridge, given, scale, EVEN)
    x = COEFFICIENTS[2] * total + (COEFFICIENTS[1] * by) * a + _identity(i, j, COEFFICIENTS[0])
    known = given + tl.load(tracked) > 0
    x = tl.where(known, x * tl.div_rn(1.0, tl.sqrt_rn(norm)), _identity(i, j, unit))
    _store(d, x, own, i, j, f, True, EVEN)
    if first == second:
        of_mean = tl.load(mean + own * f + i, i < given, 0.0)
        of_mean += tl.load(running_mean + own * f + i, i < f - given, 0.0) * tl.div_rn(1.0, unit)
        tl.store(used_mean + own * f + i, of_mean, i < f)
        if (first == 0) & (own == 0):
            tl.store(used_unit, unit)


@triton.jit(do_not_specialize=["f", "tiles", "parts"])
def _join(joined, of_d, f, tiles, parts, EVEN: tl.constexpr, TILE: tl.constexpr):
    """The gradient of D from the parts of K that make it up, K + Kᵀ, and what follows them: what reaches μ·D·W."""
    first, second, own = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if second < first:
        return
    blocks = tl.num_programs(1)
    i, j = first * TILE + tl.arange(0, TILE), second * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for part in tl.range(0, parts):
        total += _tile(of_d, part * blocks + own, i, j, f, EVEN)
        total += tl.trans(_tile(of_d, part * blocks + own, j, i, f, EVEN))
    _store(joined, total, own, i, j, f, True, EVEN)
    if first == second:
        of_shift, shift = _matrices(of_d, parts, f), tl.zeros((TILE,), tl.float32)
        for part in tl.range(0, parts):
            shift += tl.load(of_shift + (part * blocks + own) * f + i, i < f, 0.0)
        tl.store(_matrices(joined, 1, f) + own * f + i, shift, i < f)


@triton.jit(do_not_specialize=NUMBERS)
def _square_adjoint(
    between, of_d, d, rows, cov, unit_of_batch,
    f, tiles, first_last, last_width, root_eps, shrinkage,
    SMALLEST: tl.constexpr, SHRINKS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A·A again and A·S + S·A, with S the gradient of D, which is symmetric; of every tile ‖A‖² and ⟨S, D⟩."""
    first, second, own = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if second < first:
        return
    unit, given = tl.load(unit_of_batch), tl.where(tl.load(rows) > 0, f, 0)
    width = tl.where(own < first_last, f, last_width)
    ridge = _ridge(cov, None, own, unit, given, 1.0, root_eps, shrinkage, f, width, SMALLEST, SHRINKS, WIDTH)
    i, j = first * TILE + tl.arange(0, TILE), second * TILE + tl.arange(0, TILE)
    square, both = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE, TILE), tl.float32)
    for start in tl.range(0, f, DEPTH):
        k = start + tl.arange(0, DEPTH)
        left = _regular_tile(cov, None, own, i, k, f, width, ridge, given, 1.0, EVEN)
        right = tl.trans(_regular_tile(cov, None, own, j, k, f, width, ridge, given, 1.0, EVEN))
        square = tl.dot(left, right, square, input_precision=PRECISION)
        both = tl.dot(left, tl.trans(_tile(of_d, own, j, k, f, EVEN)), both, input_precision=PRECISION)
        both = tl.dot(_tile(of_d, own, i, k, f, EVEN), right, both, input_precision=PRECISION)
    a = _regular_tile(cov, None, own, i, j, f, width, ridge, given, 1.0, EVEN)
    along = _tile(of_d, own, i, j, f, EVEN) * _tile(d, own, i, j, f, EVEN)
    often = tl.where(first == second, 1.0, 2.0)
    at = own * tiles * tiles + first * tiles + second
    tl.store(_numbers(between, 3, 0, f, tiles) + at, often * tl.sum(tl.sum(a * a, 1), 0))
    tl.store(_numbers(between, 3, 1, f, tiles) + at, often * tl.sum(tl.sum(along, 1), 0))
    _store(between, square, own, i, j, f, True, EVEN)
    _store(_matrices(between, 1, f), both, own, i, j, f, True, EVEN)


@triton.jit(do_not_specialize=NUMBERS)
def _quartic_adjoint(
    between, of_d, rows, cov, unit_of_batch,
    f, tiles, first_last, last_width, root_eps, shrinkage,
    COEFFICIENTS: tl.constexpr, SMALLEST: tl.constexpr, SHRINKS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dX = c·(Q·dQ + dQ·Q) + γ·dM; of every tile ⟨dX, M⟩ and its share of the trace of dX."""
    first, second, own = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    if second < first:
        return
    unit, given = tl.load(unit_of_batch), tl.where(tl.load(rows) > 0, f, 0)
    width = tl.where(own < first_last, f, last_width)
    ridge = _ridge(cov, None, own, unit, given, 1.0, root_eps, shrinkage, f, width, SMALLEST, SHRINKS, WIDTH)
    squares, sums = between, _matrices(between, 1, f)
    norm = tl.sqrt_rn(_sum(_numbers(between, 3, 0, f, tiles), own, tiles, PARTS))
    by = tl.div_rn(1.0, norm)
    scale = tl.div_rn(1.0, tl.sqrt_rn(norm))
    i, j = first * TILE + tl.arange(0, TILE), second * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in tl.range(0, f, DEPTH):
        k = start + tl.arange(0, DEPTH)
        q_i = _regular_tile(cov, None, own, i, k, f, width, ridge, given, 1.0, EVEN) * (COEFFICIENTS[3] * by)
        q_i += _tile(squares, own, i, k, f, EVEN) * (by * by) + _identity(i, k, COEFFICIENTS[4])
        q_j = _regular_tile(cov, None, own, j, k, f, width, ridge, given, 1.0, EVEN) * (COEFFICIENTS[3] * by)
        q_j += _tile(squares, own, j, k, f, EVEN) * (by * by) + _identity(j, k, COEFFICIENTS[4])
        dq_i = _tile(of_d, own, i, k, f, EVEN) * (COEFFICIENTS[3] * scale)
        dq_i += _tile(sums, own, i, k, f, EVEN) * (by * scale)
        dq_j = _tile(of_d, own, j, k, f, EVEN) * (COEFFICIENTS[3] * scale)
        dq_j += _tile(sums, own, j, k, f, EVEN) * (by * scale)
        total = tl.dot(q_i, tl.trans(dq_j), total, input_precision=PRECISION)
        total = tl.dot(dq_i, tl.trans(q_j), total, input_precision=PRECISION)
    dx = COEFFICIENTS[2] * total + _tile(of_d, own, i, j, f, EVEN) * (COEFFICIENTS[1] * scale)
    m = _regular_tile(cov, None, own, i, j, f, width, ridge, given, 1.0, EVEN) * by
    often = tl.where(first == second, 1.0, 2.0)
    at = own * tiles * tiles + first * tiles + second
    tl.store(_numbers(between, 3, 2, f, tiles) + at, often * tl.sum(tl.sum(dx * m, 1), 0))
    on_diagonal = (i[:, None] == j[None, :]) & (i < width)[:, None]
    tl.store(_numbers(between, 3, 3, f, tiles) + at, tl.sum(tl.sum(tl.where(on_diagonal, dx, 0.0), 1), 0))
    _store(_matrices(between, 2, f), dx, own, i, j, f, True, EVEN)


@triton.jit(do_not_specialize=NUMBERS)
def _finish_adjoint(
    of_cov, of_mean, between, of_d, d, rows, cov, unit_of_batch,
    f, tiles, first_last, last_width, root_eps, shrinkage,
    SMALLEST: tl.constexpr, SHRINKS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of Cov and μ, some lines at a time: ν moves with A as well."""
    first, own = tl.program_id(0), tl.program_id(1)
    unit, given = tl.load(unit_of_batch), tl.where(tl.load(rows) > 0, f, 0)
    width = tl.where(own < first_last, f, last_width)
    trace = 0.0
    if SHRINKS:
        trace = _trace(cov, None, own, given, 1.0, f, WIDTH)
    ridge = ridge_of(unit, root_eps, SMALLEST) + shrinkage * trace / width
    by = tl.div_rn(1.0, tl.sqrt_rn(_sum(_numbers(between, 3, 0, f, tiles), own, tiles, PARTS)))
    inner = _sum(_numbers(between, 3, 1, f, tiles), own, tiles, PARTS)
    along = _sum(_numbers(between, 3, 2, f, tiles), own, tiles, PARTS) + inner / 2
    traces = _sum(_numbers(between, 3, 3, f, tiles), own, tiles, PARTS)
    of_x, of_shift = _matrices(between, 2, f), _matrices(of_d, 1, f)
    of_trace = (traces - (trace + ridge * width) * by * along) * by
    share = tl.where(given > 0, shrinkage * of_trace / width, 0.0)
    i = first * TILE + tl.arange(0, TILE)
    of_rows = tl.zeros((TILE,), tl.float32)
    for start in tl.range(0, f, TILE):
        j = start + tl.arange(0, TILE)
        a = _regular_tile(cov, None, own, i, j, f, width, ridge, given, 1.0, EVEN)
        back = (_tile(of_x, own, i, j, f, EVEN) - a * (by * along)) * by
        _store(of_cov, tl.where(given > 0, back, 0.0) + _identity(i, j, share), own, i, j, f, False, EVEN)
        of_rows += tl.sum(_tile(d, own, i, j, f, EVEN) * tl.load(of_shift + own * f + j, j < f, 0.0)[None, :], 1)
    tl.store(of_mean + own * f + i, tl.where(given > 0, of_rows, 0.0), i < f)
