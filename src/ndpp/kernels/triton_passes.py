"""Passes over an output or its gradient, each of which reads and writes it once.

A tensor (batch, channels, *sizes) without gaps is lines of what lies together: pixels of their channels (channels
last), or channels of their positions. `each` lines make a sample.
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

from .plan import Plan
from .triton_launch import Prepared, cdiv, launcher, power_of_two

VALUES, WIDEST, WARPS = 4096, 256, 8  # of a tile; lines of one
PROGRAMS = 528  # at most, of sums; a constant, for one order of sums everywhere
SIZE, MOST_PARTS = 4096, 64  # values of an inner product at a time, and parts of a sample
PARTS, FEW = 32, 32  # of sums, that are added up at a time


@triton.jit(do_not_specialize=["lines", "length", "each"])
def _scale_shift(
    y, gain, bias, lines, length, each,
    LAST: tl.constexpr, ALIGNED: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """y·gain + b in place."""
    wide = tl.cdiv(length, LENGTH)  # tiles of a line; a grid has room for them all along its first axis alone
    line = tl.program_id(0) // wide * LINES + tl.arange(0, LINES)
    at = tl.program_id(0) % wide * LENGTH + tl.arange(0, LENGTH)
    inside = at < length
    if ALIGNED:
        length = tl.multiple_of(length, 8)
        inside = tl.max_constancy(inside, 8)
    keep = (line < lines)[:, None] & inside[None, :]
    place = y + line.to(tl.int64)[:, None] * length + at[None, :]
    value = tl.load(place, keep, 0.0).to(tl.float32)
    if gain is not None:
        value = value * tl.load(gain + line // each, line < lines, 0.0)[:, None]
    if LAST:
        value += tl.load(bias + at, inside, 0.0).to(tl.float32)[None, :]
    else:
        value += tl.load(bias + line % each, line < lines, 0.0).to(tl.float32)[:, None]
    tl.store(place, value, keep)


@triton.jit(do_not_specialize=["lines", "length", "each", "chunk"])
def _scale_sum(
    out, sums, grad, gain, lines, length, each, chunk,
    ALIGNED: tl.constexpr, LINES: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    """dy·gain, and parts of Σ dy of every channel; either may be left out. Channels last."""
    part, at = tl.program_id(0), tl.program_id(1) * LENGTH + tl.arange(0, LENGTH)
    inside = at < length
    if ALIGNED:
        length = tl.multiple_of(length, 8)
        inside = tl.max_constancy(inside, 8)
    total = tl.zeros((LENGTH,), tl.float32)
    for start in tl.range(part * chunk, tl.minimum(part * chunk + chunk, lines), LINES):
        line = start + tl.arange(0, LINES)
        keep = (line < tl.minimum(part * chunk + chunk, lines))[:, None] & inside[None, :]
        place = line.to(tl.int64)[:, None] * length + at[None, :]
        value = tl.load(grad + place, keep, 0.0).to(tl.float32)
        total += tl.sum(value, 0)
        if out is not None:
            tl.store(out + place, value * tl.load(gain + line // each, line < lines, 0.0)[:, None], keep)
    tl.store(sums + part * length + at, total, inside)


@triton.jit(do_not_specialize=["parts", "length"])
def _sum_parts(out, sums, parts, length, PARTS: tl.constexpr, LENGTH: tl.constexpr):
    at = tl.program_id(0) * LENGTH + tl.arange(0, LENGTH)
    total = tl.zeros((LENGTH,), tl.float32)
    for start in tl.range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        keep = (part < parts)[:, None] & (at < length)[None, :]
        total += tl.sum(tl.load(sums + part[:, None] * length + at[None, :], keep, 0.0), 0)
    tl.store(out + at, total, at < length)


@triton.jit(do_not_specialize=["length", "chunk"])
def _inner(parts, a, b, length, chunk, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """Parts of ⟨a, b⟩ of every sample."""
    sample, part = tl.program_id(0), tl.program_id(1)
    if ALIGNED:
        length = tl.multiple_of(length, 8)
        chunk = tl.multiple_of(chunk, 8)
    first, last = part * chunk, tl.minimum(part * chunk + chunk, length)
    total = tl.zeros((SIZE,), tl.float32)
    base = sample.to(tl.int64) * length
    for start in tl.range(first, last, SIZE):
        at = start + tl.arange(0, SIZE)
        inside = at < last
        if ALIGNED:
            inside = tl.max_constancy(inside, 8)
        left, right = tl.load(a + base + at, inside, 0.0), tl.load(b + base + at, inside, 0.0)
        total += left.to(tl.float32) * right.to(tl.float32)
    tl.store(parts + sample * tl.num_programs(1) + part, tl.sum(total, 0))


@triton.jit(do_not_specialize=["parts"])
def _over_gain(out, sums, gain, parts, PARTS: tl.constexpr):
    """Σ of parts over the gain; 0 where there is none."""
    sample, at = tl.program_id(0), tl.arange(0, PARTS)
    total = tl.sum(tl.load(sums + sample * parts + at, at < parts, 0.0), 0)
    own = tl.load(gain + sample)
    tl.store(out + sample, tl.where(own > 0, total * tl.div_rn(1.0, tl.where(own > 0, own, 1.0)), 0.0))


class Lines(NamedTuple):
    """How a tensor lies in memory."""

    lines: int
    length: int
    each: int  # lines of a sample
    last: bool  # channels lie last


@functools.lru_cache(4096)
def lines_of(shape: tuple[int, ...], strides: tuple[int, ...], features_last: bool = False) -> Lines | None:
    """None for a tensor with gaps, or whose axes lie in another order. Linear's outputs have their features last."""
    dense, samples, channels, positions = list(range(len(shape))), math.prod(shape[:-1]), shape[-1], 1
    if not features_last:
        dense, (samples, channels), positions = [0, *range(2, len(shape)), 1], shape[:2], math.prod(shape[2:])
    if 0 in shape or math.prod(shape) >= 2**31:
        return None
    if _lie(shape, strides, dense):
        return Lines(samples * positions, channels, positions, True)
    if not features_last and _lie(shape, strides, list(range(len(shape)))):
        return Lines(samples * channels, positions, channels, False)
    return None


def _lie(shape: tuple[int, ...], strides: tuple[int, ...], order: list[int]) -> bool:
    """Whether these axes follow each other without a gap."""
    expected = 1
    for axis in reversed(order):
        if shape[axis] > 1 and strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True


def _tile(length: int) -> tuple[int, int]:
    """Lines and length of a tile."""
    wide = min(power_of_two(length), WIDEST)
    return VALUES // wide, wide


@functools.lru_cache(4096)
def _output_told(lies: Lines, dtype: torch.dtype, gained: bool, bias: torch.dtype) -> Prepared:
    tile = _tile(lies.length)
    start = launcher(_scale_shift, WARPS, 1, (dtype, gained, bias), lies.last, lies.length % 8 == 0, *tile)
    grid = (cdiv(lies.lines, tile[0]) * cdiv(lies.length, tile[1]), 1, 1)
    return start.prepared(grid, lies.lines, lies.length, lies.each)


def scaled_output_(y: Tensor, gain: Tensor | None, bias: Tensor) -> Tensor:
    """As `plain.scaled_output_`."""
    lies = lines_of(y.shape, y.stride(), bias.dim() == 1)
    _output_told(lies, y.dtype, gain is not None, bias.dtype)(y, gain, bias)
    return y


class ToldGradient(NamedTuple):
    """The launches for a gradient that lies like this, and the size of what is between them."""

    scale_sum: Prepared
    sum_parts: Prepared
    sums: int


@functools.lru_cache(4096)
def _gradient_told(lies: Lines, dtype: torch.dtype, gained: bool, bias: torch.dtype) -> ToldGradient:
    tile = _tile(lies.length)
    wide = cdiv(lies.length, tile[1])
    parts = max(min(PROGRAMS // wide, cdiv(lies.lines, tile[0])), 1)
    chunk = cdiv(cdiv(lies.lines, parts), tile[0]) * tile[0]
    parts = cdiv(lies.lines, chunk)
    scale_sum = launcher(_scale_sum, WARPS, 3, (dtype, gained), lies.length % 8 == 0, *tile)
    sum_parts = launcher(_sum_parts, 4, 1, (bias,), PARTS, FEW)
    return ToldGradient(
        scale_sum.prepared((parts, wide, 1), lies.lines, lies.length, lies.each, chunk),
        sum_parts.prepared((cdiv(lies.length, FEW), 1, 1), parts, lies.length),
        parts * lies.length,
    )


def scaled_gradient(
    grad: Tensor, gain: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `plain.scaled_gradient`."""
    told = _gradient_told(lines_of(grad.shape, grad.stride(), len(shape) == 1), grad.dtype, gain is not None, dtype)
    sums = torch.empty(told.sums, dtype=torch.float32, device=grad.device)
    out, total = None if gain is None else torch.empty_like(grad), sums.new_empty(shape, dtype=dtype)
    told.scale_sum(out, sums, grad, gain)
    told.sum_parts(total, sums)
    return grad if out is None else out, total


class ToldInner(NamedTuple):
    """The launches for inner products of samples of this length, and how many parts these have."""

    inner: Prepared
    over_gain: Prepared
    parts: int


@functools.lru_cache(4096)
def _inner_told(samples: int, length: int, grad: torch.dtype, dtype: torch.dtype) -> ToldInner:
    parts = max(min(PROGRAMS // samples, cdiv(length, SIZE), MOST_PARTS), 1)
    chunk = cdiv(cdiv(length, parts), SIZE) * SIZE
    parts = cdiv(length, chunk)
    inner = launcher(_inner, WARPS, 3, (grad, dtype), length % 8 == 0, SIZE)
    over_gain = launcher(_over_gain, 1, 1, (), MOST_PARTS)
    return ToldInner(
        inner.prepared((samples, parts, 1), length, chunk), over_gain.prepared((samples, 1, 1), parts), parts
    )


def gain_adjoint(grad: Tensor, x: Tensor, gain: Tensor, plan: Plan) -> Tensor:
    """As `plain.gain_adjoint`."""
    told = _inner_told(len(x), x.numel() // len(x), grad.dtype, x.dtype)
    sums, out = gain.new_empty(len(x) * told.parts), torch.empty_like(gain)
    told.inner(sums, grad, x)
    told.over_gain(out, sums, gain)
    return out


def declines_output(y: Tensor, bias_dims: int, channels_last: bool = False) -> str | None:
    """Why an output, or its gradient, is left to the twin."""
    lies = lines_of(y.shape, y.stride(), bias_dims == 1)
    if lies is None:
        return "an output with gaps"
    return "channels that do not lie last" if channels_last and not lies.last else None


def declines_inner(grad: Tensor, x: Tensor, plan: Plan) -> str | None:
    """Why ⟨dx, x⟩ is left to the twin."""
    if plan.per_row:
        return "a gain for every row"
    return "inputs with gaps" if grad.stride() != x.stride() or lines_of(x.shape, x.stride()) is None else None
