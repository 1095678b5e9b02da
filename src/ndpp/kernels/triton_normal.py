"""S·X of rows, each with a scale of its own, and the adjoint: one program for each row, one pass over memory."""

# mypy: ignore-errors
from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..whitening import SMALLEST_UNIT, variance_floor
from .triton_launch import Prepared, launcher, power_of_two

RUN = tl.constexpr(8)
WIDEST = 1 << 14  # columns of a row that one program holds
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
FLOOR = tl.constexpr(variance_floor(torch.float32))
SMALLEST = tl.constexpr(SMALLEST_UNIT)


@triton.jit
def _of_row(x, inside, columns, root_eps, CENTERS: tl.constexpr):
    """(x - center)/σ of a row, 1/σ in its unit, the unit, and whether its spread is no more than rounding."""
    peak = tl.maximum(tl.max(tl.abs(x), 0), root_eps)  # ε stays in range where all else is small
    power = (peak.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.maximum(tl.where((power > 0) & (power < float("inf")), power, 1.0), SMALLEST)
    z = x * tl.div_rn(1.0, unit)
    square = tl.sum(z * z, 0) / columns
    if CENTERS:
        z = tl.where(inside, z - tl.sum(z, 0) / columns, 0.0)
    variance, floor, root = square, FLOOR * square, root_eps / unit
    if CENTERS:
        variance = tl.sum(z * z, 0) / columns
    flat = variance < floor
    if root_eps > 0:  # as torch's norms: ε is all there is to a row of zeros
        variance, floor = variance + root * root, floor * 0
    variance = tl.maximum(variance, floor)
    deviation = tl.sqrt_rn(tl.where(variance > 0, variance, 1.0))
    by = tl.where((variance > 0) & (deviation * unit > TINY), tl.div_rn(1.0, deviation), square * 0)  # NaN stays
    return z * by, by, unit, flat


@triton.jit
def _places(step, at, EVEN: tl.constexpr):
    """Of the columns of a row. EVEN: rows begin, and end, at multiples of eight."""
    start = tl.program_id(0).to(tl.int64) * step
    return tl.multiple_of(start, RUN) + at if EVEN else start + at


@triton.jit(do_not_specialize=["columns", "step"])
def _normalise(out, x, columns, step, root_eps, CENTERS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    inside = tl.max_constancy(at < columns, [RUN]) if EVEN else at < columns
    values = tl.load(x + _places(step, at, EVEN), inside, 0.0).to(tl.float32)
    y, _, _, _ = _of_row(values, inside, columns, root_eps, CENTERS)
    tl.store(out + _places(columns, at, EVEN), y.to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["columns", "step", "of_grad"])
def _normalise_adjoint(
    out, grad, x, columns, step, of_grad, root_eps, CENTERS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr
):
    """(dy - mean dy - y·mean(dy·y))/σ; where the spread is rounding, and no ε there, σ moves with the mean square."""
    at = tl.arange(0, SIZE)
    inside = tl.max_constancy(at < columns, [RUN]) if EVEN else at < columns
    values = tl.load(x + _places(step, at, EVEN), inside, 0.0).to(tl.float32)
    y, by, unit, flat = _of_row(values, inside, columns, root_eps, CENTERS)
    dy = tl.load(grad + _places(of_grad, at, EVEN), inside, 0.0).to(tl.float32)
    along = tl.sum(dy * y, 0) / columns
    if CENTERS:
        dy -= tl.sum(dy, 0) / columns
        if root_eps == 0:
            y = tl.where(flat, values * tl.div_rn(1.0, unit) * (FLOOR * by), y)
    dx = (dy - y * along) * by * tl.div_rn(1.0, unit)
    tl.store(out + _places(columns, at, EVEN), dx.to(out.dtype.element_ty), inside)


@functools.lru_cache(4096)
def _told(
    kernel: str,
    rows: int,
    strides: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    columns: int,
    mode: str,
    eps: float,
) -> Prepared:
    size = max(power_of_two(columns), 32)
    warps = min(max(size // 512, 1), 16)
    even = all(number % RUN.value == 0 for number in (columns, *strides))
    start = launcher(globals()[kernel], warps, 1, dtypes, mode == "standardize", even, size)
    return start.prepared((rows, 1, 1), columns, *strides, math.sqrt(eps))


def normalised(rows: Tensor, mode: str, eps: float, dtype: torch.dtype) -> Tensor:
    """As `plain.normalised`."""
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    count, columns = rows.numel() // rows.shape[-1], rows.shape[-1]
    told = _told("_normalise", count, (step_of(rows),), (dtype, rows.dtype), columns, mode, eps)
    told(out, rows)
    return out


def normalised_adjoint(grad: Tensor, rows: Tensor, mode: str, eps: float) -> Tensor:
    """As `plain.normalised_adjoint`."""
    grad = grad if step_of(grad) is not None else grad.contiguous()
    out = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    count, columns, strides = rows.numel() // rows.shape[-1], rows.shape[-1], (step_of(rows), step_of(grad))
    kind = (out.dtype, grad.dtype, rows.dtype)
    _told("_normalise_adjoint", count, strides, kind, columns, mode, eps)(out, grad, rows)
    return out


def declines(rows: Tensor) -> str | None:
    """Why rows are left to the twin."""
    if rows.shape[-1] > WIDEST:
        return f"more than {WIDEST} columns"
    step = step_of(rows)
    if step is None:
        return "rows that do not lie evenly"
    return "sizes beyond 32 bits" if max(step, rows.numel() // rows.shape[-1]) >= 2**31 else None


def step_of(rows: Tensor) -> int | None:
    """From one row to the next; None if that differs, or columns lie apart."""
    return _step(rows.shape, rows.stride())


@functools.lru_cache(4096)
def _step(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    if sizes[-1] > 1 and strides[-1] != 1:
        return None
    step, passed = None, 1
    for size, stride in zip(reversed(sizes[:-1]), reversed(strides[:-1]), strict=True):
        if size > 1:
            if step is not None and stride != step * passed:
                return None
            step, passed = step if step is not None else stride, passed * size
    return sizes[-1] if step is None else step
