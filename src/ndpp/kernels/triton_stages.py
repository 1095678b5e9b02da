"""The stages around the weight, from rows or their moments to D·W, and back: which launches a case takes."""

# mypy: ignore-errors
from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..roots import quartic_coefficients
from ..whitening import Moments
from . import triton_fold as fold_kernels
from . import triton_root as small
from . import triton_root_wide as wide
from . import triton_rows as rows_of
from .plan import Folded, Plan, View
from .triton_launch import INTERPRETED, Launcher, cdiv, launcher, power_of_two
from .triton_moments import COLUMNS, PEAKS, Gram, gram, moments, positions, smallest_unit

PROGRAMS, LEAST_STEPS = 264, 4  # of a launch: two for each multiprocessor of an H200; of one program


class Told(NamedTuple):
    """Of a layer and a precision: sizes, numbers and launches."""

    own: int  # matrices D
    f: int
    first_last: int  # blocks from this one on have the width of the last part
    last_width: int
    blocks: tuple[int, ...]
    of_weights: int  # blocks that have weights
    solve: dict[bool, Launcher]  # by whether features of rows come (tap, channel)
    solve_given: Launcher
    solve_adjoint: Launcher
    wide: tuple[Launcher, ...]
    tiles: int  # of a wide D
    ridge: tuple[float, float]


@functools.lru_cache(1024)
def _told(plan: Plan, weight: torch.dtype, folded: torch.dtype) -> Told:
    layout = plan.layout
    own, f = sum(g for g, _ in layout.widths), layout.widths[0][1]
    precision = "tf32" if folded.itemsize == 2 else "tf32x3"
    c, least = tuple(quartic_coefficients(plan.steps)), small.SMALLEST_RIDGE
    size = small.size_of(f)
    warps = small.warps_of(size)

    def solver(collect: bool, by_tap: bool) -> Launcher:
        constants = (collect, by_tap, c, least, size, COLUMNS, PEAKS, precision)
        return launcher(small._solve, warps, 2, (collect,), *constants)

    tiles = cdiv(f, wide.TILE)
    told = (least, plan.shrinkage > 0, power_of_two(f), f % 8 == 0)
    parts, tile = power_of_two(tiles * tiles), (wide.TILE, wide.DEPTH, precision)
    how = (wide.WARPS, wide.STAGES, ())
    of_wide = (
        launcher(wide._square, *how, *told, *tile),
        launcher(wide._quartic, *how, c, *told, parts, *tile),
        launcher(wide._square_adjoint, *how, *told, *tile),
        launcher(wide._quartic_adjoint, *how, c, *told, parts, *tile),
        launcher(wide._finish_adjoint, *how, *told, parts, wide.TILE),
    )
    return Told(
        own=own,
        f=f,
        first_last=layout.widths[0][0],
        last_width=layout.widths[-1][1],
        blocks=rows_of.blocks(plan),
        of_weights=layout.groups * sum(part.blocks for part in layout.parts),
        solve={by_tap: solver(True, by_tap) for by_tap in (False, True)},
        solve_given=solver(False, False),
        solve_adjoint=launcher(small._solve_adjoint, warps, 2, (), c, least, size, precision),
        wide=of_wide,
        tiles=tiles,
        ridge=(math.sqrt(plan.eps), float(plan.shrinkage)),
    )


def forward(
    x: Tensor,
    gain: Tensor | None,
    draws: Tensor,
    running: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    view: View,
    plan: Plan,
    dtype: torch.dtype,
) -> tuple[Moments, Folded]:
    """As `plain.forward`: small blocks are solved by the launch that puts their moments together."""
    told = _told(plan, weight.dtype, dtype)
    if told.f > small.WIDEST:
        batch = moments(x, gain, draws, view, plan)
        return batch, fold(batch, running, weight, bias, plan, dtype)
    left = gram(x, gain, draws, view, plan)
    new = left.products.new_empty
    batch = Moments(new(()), new(told.own, told.f), new(told.own, told.f, told.f), new(()))
    used = torch.empty_like(batch.cov), torch.empty_like(batch.mean), torch.empty_like(batch.unit)
    start = told.solve[x.stride(1) == 1]
    _solve(start, told, used, batch, running, left, smallest_unit(plan), positions(x, view))
    return batch, Folded(*_folded(*used, weight, bias, plan, dtype), *used)


def fold(
    batch: Moments,
    running: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    dtype: torch.dtype,
) -> Folded:
    """As `plain.fold`."""
    told = _told(plan, weight.dtype, dtype)
    batch = Moments(*(t.contiguous() for t in batch))
    used = torch.empty_like(batch.cov), torch.empty_like(batch.mean), torch.empty_like(batch.unit)
    if told.f > small.WIDEST:
        _solve_wide(told, used, batch, running)
    else:
        _solve(told.solve_given, told, used, batch, running, None, 0.0, 0.0)
    return Folded(*_folded(*used, weight, bias, plan, dtype), *used)


def _solve(
    start: Launcher,
    told: Told,
    used: tuple[Tensor, Tensor, Tensor],
    batch: Moments,
    running: tuple[Tensor, Tensor, Tensor],
    left: Gram | None,
    smallest: float,
    all_positions: float,
) -> None:
    partly, numbers = ((None, None, None), (1, 1, 1, 1, 1)) if left is None else (left[:3], left.numbers)
    block, _, _, _, taps = told.blocks
    start(
        (told.own, 1, 1), (*used, *batch, *running, *partly),
        told.f, taps, block, *numbers, smallest, all_positions, *told.ridge, told.first_last, told.last_width,
    )  # fmt: skip


def _solve_wide(
    told: Told, used: tuple[Tensor, Tensor, Tensor], batch: Moments, running: tuple[Tensor, Tensor, Tensor]
) -> None:
    rows, mean, cov, unit = batch
    squares, norms = torch.empty_like(cov), cov.new_empty(told.own * told.tiles**2)
    grid, numbers = (told.tiles**2, told.own, 1), _numbers(told)
    told.wide[0](grid, (squares, norms, rows, cov, unit, running[1]), *numbers)
    told.wide[1](grid, (*used, squares, norms, rows, mean, cov, unit, *running), *numbers)


def _numbers(told: Told) -> tuple[Any, ...]:
    return told.f, told.tiles, told.first_last, told.last_width, *told.ridge


def _folded(
    d: Tensor, mean: Tensor, unit: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """D·W and b - μ·D·W."""
    told = _told(plan, weight.dtype, dtype)
    out, outputs = torch.empty_like(weight, dtype=dtype), plan.outputs(weight) // plan.layout.groups
    at, of_out = weight_places(weight, plan), weight_places(out, plan)
    grid = (cdiv(outputs, fold_kernels.OUTPUTS), cdiv(told.f, fold_kernels.FEATURES), told.of_weights)
    start = _folding(fold_kernels._fold, plan, weight.dtype, dtype, at, of_out)
    start(grid, (out, weight, d, unit), told.f, outputs, *told.blocks, *at, *of_out)
    constant = out.new_empty(outputs * plan.layout.groups)
    by_tap = of_out[2] == 1 and told.blocks[4] > 1
    lines = (by_tap, plan.layout.shared, fold_kernels.LINES, fold_kernels.COLUMNS)
    kinds = (dtype, None if bias is None else bias.dtype)
    start = launcher(fold_kernels._constant, fold_kernels.WARPS_OF_LINES, 2, kinds, *lines)
    grid = (cdiv(outputs, fold_kernels.LINES), plan.layout.groups, 1)
    start(grid, (constant, bias, out, mean, unit), told.f, outputs, *told.blocks, *of_out)
    return out, constant


@functools.lru_cache(1024)
def _folding(
    kernel: Any,
    plan: Plan,
    weight: torch.dtype,
    folded: torch.dtype,
    places: tuple[int, ...],
    of_folded: tuple[int, ...],
) -> Launcher:
    """A launch that reads and writes weights that lie like these."""
    by_tap = _by_tap(places, plan) and _by_tap(of_folded, plan)
    alike = by_tap or not (_by_tap(places, plan) or _by_tap(of_folded, plan))
    even = alike and _even(places, plan) and _even(of_folded, plan)
    even_lines, narrow = plan.layout.widths[0][1] % 8 == 0, folded == torch.bfloat16 and not INTERPRETED
    kind = (plan.layout.shared, by_tap, even, even_lines, even and not by_tap, narrow)
    tile = (fold_kernels.OUTPUTS, fold_kernels.FEATURES, fold_kernels.DEPTH)
    precision = "tf32" if folded.itemsize == 2 else "tf32x3"
    return launcher(kernel, fold_kernels.WARPS, fold_kernels.STAGES, (weight, folded), *kind, *tile, precision)


def _by_tap(places: tuple[int, ...], plan: Plan) -> bool:
    """Whether channels of a tap lie together, as with channels last."""
    return places[2] == 1 and plan.layout.taps > 1


def _even(places: tuple[int, ...], plan: Plan) -> bool:
    """Whether weights lie together in runs of eight that no block divides."""
    of_group, of_output, of_channel, of_tap = places
    block, _, _, channels, taps = rows_of.blocks(plan)
    whole = 1 if of_channel == 1 else taps
    together = (of_channel == whole) and (taps == 1 or of_tap == 1 or (of_channel == 1 and of_tap % 8 == 0))
    return together and all(n % 8 == 0 for n in (of_group, of_output, block * whole, channels * whole))


def _parts(steps: int, programs: int) -> int:
    """Into how many parts the outputs are divided, so that few wide programs do not keep a device waiting."""
    return max(min(PROGRAMS // programs, steps // LEAST_STEPS), 1)


def fold_adjoint(
    batch: Moments,
    used: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    grad_folded: Tensor,
    grad_constant: Tensor,
    grad_used: tuple[Tensor, ...],
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain.fold_adjoint`."""
    told = _told(plan, weight.dtype, grad_folded.dtype)
    d, mean, unit = (t.contiguous() for t in used)
    if weight_places(grad_folded, plan) is None:
        grad_folded = grad_folded.contiguous()
    outputs = plan.outputs(weight) // plan.layout.groups
    many, wide_ = cdiv(outputs, fold_kernels.OUTPUTS), cdiv(told.f, fold_kernels.FEATURES)
    of_weights, each = many * wide_ * told.of_weights, told.of_weights if plan.layout.shared else 1
    parts = _parts(each * many, wide_ * wide_ * told.own)
    of_weight = torch.empty_like(weight)
    of_d, of_shift = d.new_empty(parts, *d.shape), d.new_empty(parts, *mean.shape)
    of_roots = wide_ * wide_ * told.own * parts
    at, of_grad = weight_places(weight, plan), weight_places(grad_folded, plan)
    start = _folding(fold_kernels._fold_adjoint, plan, weight.dtype, grad_folded.dtype, at, of_grad)
    start(
        (of_roots + of_weights, 1, 1),
        (of_weight, of_d, of_shift, grad_folded, grad_constant.contiguous(), weight, d, mean, unit),
        told.f, outputs, many, wide_, of_roots, each, parts, told.own, *told.blocks, *at, *of_grad,
    )  # fmt: skip
    if grad_used:
        of_d[0] += (grad_used[0] + grad_used[0].mT) / 2
    of_mean, of_cov = _solved_adjoint(told, Moments(*(t.contiguous() for t in batch)), d, of_d, of_shift)
    return of_weight, of_mean + grad_used[1] if grad_used else of_mean, of_cov


def _solved_adjoint(told: Told, batch: Moments, d: Tensor, of_d: Tensor, of_shift: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of μ and Cov."""
    rows, _, cov, unit = batch
    of_mean, of_cov = torch.empty_like(batch.mean), torch.empty_like(cov)
    if told.f <= small.WIDEST:
        pointers = (of_cov, of_mean, of_d, of_shift, d, rows, cov, unit)
        numbers = (told.f, len(of_d), *told.ridge, told.first_last, told.last_width)
        told.solve_adjoint((told.own, 1, 1), pointers, *numbers)
        return of_mean, of_cov
    of_d, of_shift = (t[0] if len(t) == 1 else t.sum(0) for t in (of_d, of_shift))
    squares, sums, of_x = torch.empty_like(cov), torch.empty_like(cov), torch.empty_like(cov)
    norms, inner, projected, traces = (cov.new_empty(told.own * told.tiles**2) for _ in range(4))
    grid, numbers = (told.tiles**2, told.own, 1), _numbers(told)
    told.wide[2](grid, (squares, sums, norms, inner, of_d, d, rows, cov, unit), *numbers)
    told.wide[3](grid, (of_x, projected, traces, squares, sums, norms, of_d, rows, cov, unit), *numbers)
    pointers = (of_cov, of_mean, of_x, projected, traces, norms, inner, of_shift, d, rows, cov, unit)
    told.wide[4]((told.tiles, told.own, 1), pointers, *numbers)
    return of_mean, of_cov


def weight_places(weight: Tensor, plan: Plan) -> tuple[int, int, int, int] | None:
    """Strides of groups, outputs, channels and taps; None if taps do not lie evenly."""
    strides, sizes = weight.stride(), weight.shape
    step, passed = 0, 1
    for size, stride in zip(reversed(sizes[2:]), reversed(strides[2:]), strict=True):
        if size > 1 and step and stride != step * passed:
            return None
        if size > 1:
            step, passed = step or stride, passed * size
    if plan.transposed:
        return plan.layout.channels * strides[0], strides[1], strides[0], step
    return sizes[0] // plan.layout.groups * strides[0], strides[0], strides[1], step
