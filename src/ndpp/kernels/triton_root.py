"""D and its adjoint for small blocks: one launch each, one program for each block, all products on the chip."""

# mypy: ignore-errors
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..roots import newton_coefficients, quartic_coefficients
from ..whitening import Moments
from . import triton_launch
from .plan import Plan

WIDEST = 128
TILE = 64  # of a product. Matrices live in memory that stays in the cache: seven of them do not fit in registers
SMALLEST_RIDGE = torch.finfo(torch.float32).eps


@triton.jit
def _regularised(cov, block, unit, root_eps, shrinkage, f, width, SMALLEST: tl.constexpr, F: tl.constexpr):
    """Cov + (ε + shrinkage·mean eigenvalue)·I of one block, zero beyond its width."""
    i, j = tl.arange(0, F)[:, None], tl.arange(0, F)[None, :]
    a = tl.load(cov + block * f * f + i * f + j, (i < f) & (j < f), 0.0)
    ridge = tl.maximum(root_eps / unit, SMALLEST)
    ridge = ridge * ridge + shrinkage * tl.sum(tl.sum(tl.where(i == j, a, 0.0), 1), 0) / width
    return a + tl.where((i == j) & (i < width), ridge, 0.0)


@triton.jit
def _norm(a):
    """‖A‖_F, without overflow; 1 and False where there is none."""
    peak = tl.max(tl.max(tl.abs(a), 1), 0)
    peak = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # its power of two
    peak = tl.where(peak > 0, peak, 1.0)
    scaled = a * tl.div_rn(1.0, peak)
    square = tl.sum(tl.sum(scaled * scaled, 1), 0)
    return tl.where(square > 0, tl.sqrt_rn(tl.where(square > 0, square, 1.0)) * peak, 1.0), square > 0


@triton.jit
def _update(out, old, alpha, beta, a, b, c, d, F: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr):
    """out = α·old + β·(a·b + c·d), all F×F in memory; without c, α·old + β·a·b. `out` is none of a, b, c, d."""
    k = tl.arange(0, T)
    for tile in tl.range(0, (F // T) * (F // T)):
        i, j = (tile // (F // T)) * T + tl.arange(0, T)[:, None], (tile % (F // T)) * T + tl.arange(0, T)[None, :]
        total = tl.zeros((T, T), tl.float32)
        for start in tl.range(0, F, T):
            at = i * F + start + k[None, :], (start + k[:, None]) * F + j
            total = tl.dot(tl.load(a + at[0]), tl.load(b + at[1]), total, input_precision=PRECISION)
            if c is not None:
                total = tl.dot(tl.load(c + at[0]), tl.load(d + at[1]), total, input_precision=PRECISION)
        tl.store(out + i * F + j, alpha * tl.load(old + i * F + j) + beta * total)
    tl.debug_barrier()  # what follows reads what other threads have written


@triton.jit
def _plus_identity_(m, share, F: tl.constexpr):
    """m += share·I, F×F in memory."""
    at = tl.arange(0, F) * (F + 1)
    tl.store(m + at, tl.load(m + at) + share)
    tl.debug_barrier()


@triton.jit
def _root(
    out, scratch, cov, rows, unit, root_eps, shrinkage, f, first_last, last_width,
    COEFFICIENTS: tl.constexpr, QUARTIC: tl.constexpr, STEPS: tl.constexpr, SMALLEST: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    width = tl.where(block < first_last, f, last_width)
    u = tl.load(unit)
    a = _regularised(cov, block, u, root_eps, shrinkage, f, width, SMALLEST, F)
    norm, present = _norm(a)
    i, j = tl.arange(0, F)[:, None], tl.arange(0, F)[None, :]
    m = scratch + block * (5 * F * F)
    p, m_new, x, x_new = m + F * F, m + 2 * F * F, m + 3 * F * F, m + 4 * F * F
    at = i * F + j
    tl.store(m + at, a / norm)
    if QUARTIC:
        tl.debug_barrier()
        _update(p, m, COEFFICIENTS[3], 1.0, m, m, None, None, F, T, PRECISION)
        _plus_identity_(p, COEFFICIENTS[4], F)
        _update(x, m, COEFFICIENTS[1], COEFFICIENTS[2], p, p, None, None, F, T, PRECISION)
    else:
        tl.store(x + at, tl.where(i == j, COEFFICIENTS[0][0], 0.0) + COEFFICIENTS[0][1] * (a / norm))
        tl.debug_barrier()
        for step in tl.static_range(1, STEPS):
            alpha, beta = COEFFICIENTS[step - 1][0], COEFFICIENTS[step - 1][1]
            _update(p, m, alpha, beta, m, m, None, None, F, T, PRECISION)
            _update(m_new, p, alpha, beta, m, p, None, None, F, T, PRECISION)
            _update(x_new, x, COEFFICIENTS[step][0], COEFFICIENTS[step][1], x, m_new, None, None, F, T, PRECISION)
            m, m_new, x, x_new = m_new, m, x_new, x
    d = tl.load(x + at)
    if QUARTIC:
        d += tl.where(i == j, COEFFICIENTS[0], 0.0)
    d = d * tl.where(present, tl.div_rn(1.0, tl.sqrt_rn(norm)), 0.0)
    d = tl.where(tl.load(rows) > 0, d, tl.where(i == j, u, 0.0))
    tl.store(out + block * f * f + i * f + j, d, (i < f) & (j < f))


@triton.jit
def _symmetric(grad, block, f, F: tl.constexpr):
    i, j = tl.arange(0, F)[:, None], tl.arange(0, F)[None, :]
    inside = (i < f) & (j < f)
    at = grad + block * f * f
    return (tl.load(at + i * f + j, inside, 0.0) + tl.load(at + j * f + i, inside, 0.0)) / 2


@triton.jit
def _root_adjoint(
    out, scratch, grad, root, cov, unit, root_eps, shrinkage, f, first_last, last_width,
    COEFFICIENTS: tl.constexpr, QUARTIC: tl.constexpr, STEPS: tl.constexpr, SMALLEST: tl.constexpr,
    F: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The iteration on (M, dM) side by side, with the gradient in the place of dM."""
    block = tl.program_id(0).to(tl.int64)
    width = tl.where(block < first_last, f, last_width)
    a = _regularised(cov, block, tl.load(unit), root_eps, shrinkage, f, width, SMALLEST, F)
    norm, present = _norm(a)
    scale = tl.div_rn(1.0, tl.sqrt_rn(norm))
    i, j = tl.arange(0, F)[:, None], tl.arange(0, F)[None, :]
    at = i * F + j
    m = scratch + block * (10 * F * F)
    p, m_new, x, x_new = m + F * F, m + 2 * F * F, m + 3 * F * F, m + 4 * F * F
    dm, dp, dm_new, dx, dx_new = m + 5 * F * F, p + 5 * F * F, m_new + 5 * F * F, x + 5 * F * F, x_new + 5 * F * F
    g = _symmetric(grad, block, f, F) * scale
    tl.store(m + at, a / norm)
    tl.store(dm + at, g)
    if QUARTIC:
        tl.debug_barrier()
        _update(p, m, COEFFICIENTS[3], 1.0, m, m, None, None, F, T, PRECISION)
        _plus_identity_(p, COEFFICIENTS[4], F)
        _update(dp, dm, COEFFICIENTS[3], 1.0, m, dm, dm, m, F, T, PRECISION)
        _update(dx, dm, COEFFICIENTS[1], COEFFICIENTS[2], dp, p, p, dp, F, T, PRECISION)
    else:
        tl.store(x + at, tl.where(i == j, COEFFICIENTS[0][0], 0.0) + COEFFICIENTS[0][1] * (a / norm))
        tl.store(dx + at, COEFFICIENTS[0][1] * g)
        tl.debug_barrier()
        for step in tl.static_range(1, STEPS):
            alpha, beta = COEFFICIENTS[step - 1][0], COEFFICIENTS[step - 1][1]
            _update(p, m, alpha, beta, m, m, None, None, F, T, PRECISION)
            _update(dp, dm, alpha, beta, m, dm, dm, m, F, T, PRECISION)
            _update(m_new, p, alpha, beta, m, p, None, None, F, T, PRECISION)
            _update(dm_new, dp, alpha, beta, dm, p, m, dp, F, T, PRECISION)
            alpha, beta = COEFFICIENTS[step][0], COEFFICIENTS[step][1]
            _update(dx_new, dx, alpha, beta, dx, m_new, x, dm_new, F, T, PRECISION)
            if step + 1 < STEPS:
                _update(x_new, x, alpha, beta, x, m_new, None, None, F, T, PRECISION)
            m, m_new, x, x_new = m_new, m, x_new, x
            dm, dm_new, dx, dx_new = dm_new, dm, dx_new, dx
    # D = ν^(-1/2) q(A/ν) with ν = ‖A‖_F, which moves with A as well. A and the gradient are read again: held since the
    # start they would have cost their registers.
    d = tl.load(root + block * f * f + i * f + j, (i < f) & (j < f), 0.0)
    along = tl.sum(tl.sum(_symmetric(grad, block, f, F) * d, 1), 0) / 2
    start = _regularised(cov, block, tl.load(unit), root_eps, shrinkage, f, width, SMALLEST, F) / norm
    of_m = tl.load(dx + at)
    along = -tl.sum(tl.sum(of_m * start, 1), 0) - along
    back = tl.where(present, of_m / norm + start * (along / norm), 0.0)
    share = shrinkage * tl.sum(tl.sum(tl.where((i == j) & (i < width), back, 0.0), 1), 0) / width
    tl.store(out + block * f * f + i * f + j, back + tl.where(i == j, share, 0.0), (i < f) & (j < f))


def root(stats: Moments, plan: Plan) -> Tensor:
    """As `plain.root`."""
    out = torch.empty_like(stats.cov, memory_format=torch.contiguous_format)
    _start(_root, 5, out, stats, plan, rows=stats.rows)
    return out


def root_adjoint(stats: Moments, d: Tensor, grad: Tensor, plan: Plan) -> Tensor:
    """As `plain.root_adjoint`."""
    out = torch.empty_like(stats.cov, memory_format=torch.contiguous_format)
    _start(_root_adjoint, 10, out, stats, plan, grad=grad.contiguous(), root=d.contiguous())
    return out


def _start(kernel, matrices: int, out: Tensor, stats: Moments, plan: Plan, **more: Tensor) -> None:
    g, f = out.shape[:2]
    size, quartic = max(triton.next_power_of_2(f), 16), plan.solver == "quartic"
    coefficients = quartic_coefficients(plan.steps) if quartic else newton_coefficients(plan.solver, plan.steps)
    triton_launch.launch(
        kernel,
        (g,),
        4 if size <= 64 else 8,
        out,
        out=out,
        scratch=out.new_empty(g * matrices * size * size),
        cov=stats.cov.contiguous(),
        unit=stats.unit,
        **more,
        root_eps=math.sqrt(plan.eps),
        shrinkage=float(plan.shrinkage),
        f=f,
        first_last=plan.layout.widths[0][0],  # blocks from this one on have the width of the last part
        last_width=plan.layout.widths[-1][1],
        COEFFICIENTS=tuple(coefficients),
        QUARTIC=quartic,
        STEPS=plan.steps,
        SMALLEST=SMALLEST_RIDGE,
        F=size,
        T=min(size, TILE),
        PRECISION=triton_launch.PRECISION,
    )
