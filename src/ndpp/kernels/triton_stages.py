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
from . import triton_moments as moments_of
from . import triton_root as small
from . import triton_root_wide as wide
from . import triton_rows as rows_of
from .plan import Folded, Plan, View
from .triton_gathered import moments
from .triton_launch import INTERPRETED, Launcher, Prepared, cdiv, launcher, power_of_two
from .triton_moments import PEAKS, VECTORS, columns_of, gram, new_moments, smallest_unit

PROGRAMS, LEAST_STEPS = 264, 4  # of a launch: two for each multiprocessor of an H200; of one program
LEAST_OF_SMALL, MOST_OF_SMALL = 2, 8  # steps and parts, where the launch that follows adds up the parts


class Told(NamedTuple):
    """Of a layer and a precision: sizes, and the launches that its statistics take."""

    own: int  # matrices D
    f: int
    solve_given: Prepared
    solve: Launcher  # where features of rows come (channel, tap)
    solve_by_tap: Launcher
    numbers: tuple[float, ...]  # of what solves: after those of the parts of the moments
    solve_adjoint: Launcher
    wide: tuple[Prepared, ...]
    tiles: int  # of a wide D


@functools.lru_cache(4096)
def _told(plan: Plan, folded: torch.dtype) -> Told:
    layout = plan.layout
    own, f = sum(g for g, _ in layout.widths), layout.widths[0][1]
    precision = "tf32" if folded.itemsize == 2 else "tf32x3"
    c, least = tuple(quartic_coefficients(plan.steps)), small.SMALLEST_RIDGE
    size = small.size_of(f)
    warps = small.warps_of(size)
    block, _, _, _, taps = rows_of.blocks(plan)

    def solver(collect: bool, by_tap: bool) -> Launcher:
        constants = (collect, by_tap, c, least, size, columns_of(f), VECTORS, PEAKS, precision)
        return launcher(small._solve, warps, 2, (collect,), *constants)

    tiles = cdiv(f, wide.TILE)
    told = (least, plan.shrinkage > 0, power_of_two(f), f % 8 == 0)
    parts, few = power_of_two(tiles * tiles), wide.WARPS // 2 if precision == "tf32" else wide.WARPS
    crowd = tiles * (tiles + 1) // 2 * own > wide.CROWD  # then fewer warps, so that more programs run at once

    def of_tiles(kernel: Any, warps: int, *more: Any) -> Launcher:
        return launcher(kernel, warps, wide.STAGES, (), *more, wide.TILE, wide.DEPTH, precision)

    of_wide = (
        of_tiles(wide._square, few if crowd else wide.WARPS, *told),
        of_tiles(wide._quartic, wide.WARPS, c, *told, parts),
        of_tiles(wide._square_adjoint, few, *told),
        of_tiles(wide._quartic_adjoint, few, c, *told, parts),
        launcher(wide._finish_adjoint, wide.WARPS, wide.STAGES, (), *told, parts, wide.TILE),
    )
    ridge, widths = (math.sqrt(plan.eps), float(plan.shrinkage)), (layout.widths[0][0], layout.widths[-1][1])
    grids, numbers = ((tiles**2, own, 1),) * 4 + ((tiles, own, 1),), (*ridge, *widths)
    return Told(
        own=own,
        f=f,
        solve_given=solver(False, False).prepared((own, 1, 1), f, taps, block, 1, 1, 1, 1, 1, 0.0, 0.0, *numbers),
        solve=solver(True, False),
        solve_by_tap=solver(True, True),
        numbers=numbers,
        solve_adjoint=launcher(small._solve_adjoint, warps, 2, (), c, least, size, precision),
        wide=tuple(w.prepared(grid, f, tiles, *widths, *ridge) for w, grid in zip(of_wide, grids, strict=True)),
        tiles=tiles,
    )


@functools.lru_cache(4096)
def _solving(
    batch: int,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    view: View,
    plan: Plan,
    gained: torch.dtype | None,
    gains: tuple[int, ...],
    folded: torch.dtype,
) -> tuple[Told, moments_of.Told, Prepared]:
    """Of a small D: the launch that puts the parts of the moments together and goes on."""
    told, left = _told(plan, folded), moments_of.told_of(batch, strides, dtype, view, plan, gained, gains)
    block, _, _, _, taps = rows_of.blocks(plan)
    numbers = (told.f, taps, block, *left.summed, smallest_unit(plan), left.positions, *told.numbers)
    start = told.solve_by_tap if strides[1] == 1 else told.solve
    return told, left, start.prepared((told.own, 1, 1), *numbers)


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
    if plan.layout.widths[0][1] > small.WIDEST:
        batch = moments(x, gain, draws, view, plan)
        return batch, fold(batch, running, weight, bias, plan, dtype)
    kind = (None, (0, 0, 0, 0)) if gain is None else (gain.dtype, rows_of.gain_strides(gain))
    told, of_rows, solve = _solving(x.shape[0], x.stride(), x.dtype, view, plan, *kind, dtype)
    left = gram(x, gain, draws, of_rows)
    batch, used = new_moments(left, of_rows), _new_used(left, told)
    solve(*used, *batch, *running, left)
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
    told = _told(plan, dtype)
    batch = Moments(*[t.contiguous() for t in batch])
    used = _new_used(batch.cov, told)
    if told.f > small.WIDEST:
        rows, mean, cov, unit = batch
        squares = cov.new_empty(cov.numel() + told.own * told.tiles**2)  # and the norms of their tiles
        told.wide[0](squares, rows, cov, unit, running[1])
        told.wide[1](*used, squares, rows, mean, cov, unit, *running)
    else:
        told.solve_given(*used, *batch, *running, None)
    return Folded(*_folded(*used, weight, bias, plan, dtype), *used)


def _new_used(like: Tensor, told: Told) -> tuple[Tensor, Tensor, Tensor]:
    """D, and μ and unit as used."""
    new, own, f = like.new_empty, told.own, told.f
    return new((own, f, f)), new((own, f)), new(())


class ToldFold(NamedTuple):
    """The launches for a weight, and the sizes of what they need."""

    fold: Prepared
    constant: Prepared
    outputs: int  # of all groups


@functools.lru_cache(4096)
def _fold_told(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    folded_strides: tuple[int, ...],
    folded: torch.dtype,
    plan: Plan,
    bias: torch.dtype | None,
) -> ToldFold:
    groups, f = plan.layout.groups, plan.layout.widths[0][1]
    outputs, of_blocks = (shape[1] if plan.transposed else shape[0] // groups), rows_of.blocks(plan)
    at, of_out = _places(shape, strides, plan), _places(shape, folded_strides, plan)
    of_weights = groups * sum(part.blocks for part in plan.layout.parts)
    grid = (cdiv(outputs, fold_kernels.OUTPUTS), cdiv(f, fold_kernels.FEATURES), of_weights)
    fold = _folding(fold_kernels._fold, plan, dtype, folded, at, of_out)
    lines = (of_out[2] == 1 and of_blocks[4] > 1, plan.layout.shared, fold_kernels.LINES, fold_kernels.COLUMNS)
    constant = launcher(fold_kernels._constant, fold_kernels.WARPS_OF_LINES, 2, (folded, bias), *lines)
    return ToldFold(
        fold.prepared(grid, f, outputs, *of_blocks, *at, *of_out),
        constant.prepared((cdiv(outputs, fold_kernels.LINES), groups, 1), f, outputs, *of_blocks, *of_out),
        outputs * groups,
    )


def _folded(
    d: Tensor, mean: Tensor, unit: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """D·W and b - μ·D·W."""
    out = torch.empty_like(weight, dtype=dtype)
    kind = None if bias is None else bias.dtype
    told = _fold_told(weight.shape, weight.stride(), weight.dtype, out.stride(), dtype, plan, kind)
    told.fold(out, weight, d, unit)
    constant = out.new_empty(told.outputs)
    told.constant(constant, bias, out, mean, unit)
    return out, constant


def _folding(
    kernel: Any,
    plan: Plan,
    weight: torch.dtype,
    folded: torch.dtype,
    places: tuple[int, ...],
    of_folded: tuple[int, ...],
    *more: bool,
    warps: int = fold_kernels.WARPS,
) -> Launcher:
    """A launch that reads and writes weights that lie like these."""
    by_tap = _by_tap(places, plan) and _by_tap(of_folded, plan)
    alike = by_tap or not (_by_tap(places, plan) or _by_tap(of_folded, plan))
    even = alike and _even(places, plan) and _even(of_folded, plan)
    even_lines, narrow = plan.layout.widths[0][1] % 8 == 0, folded == torch.bfloat16 and not INTERPRETED
    kind = (*more, plan.layout.shared, by_tap, even, even_lines, even and not by_tap, narrow)
    tile = (fold_kernels.OUTPUTS, fold_kernels.FEATURES, fold_kernels.DEPTH)
    precision = "tf32" if folded.itemsize == 2 else "tf32x3"
    return launcher(kernel, warps, fold_kernels.STAGES, (weight, folded), *kind, *tile, precision)


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


def _parts(steps: int, programs: int, small_: bool) -> int:
    """Into how many parts the outputs are divided, so that few wide programs do not keep a device waiting."""
    if small_:
        return max(min(PROGRAMS // programs, steps // LEAST_OF_SMALL, MOST_OF_SMALL), 1)
    return max(min(PROGRAMS // programs, steps // LEAST_STEPS), 1)


class ToldAdjoint(NamedTuple):
    """The launches for the gradient of a weight, and the parts that they leave."""

    fold_adjoint: Prepared
    solve_adjoint: Prepared | None  # of a small D
    join: Prepared  # of a wide one
    parts: int


@functools.lru_cache(4096)
def _adjoint_told(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    grad_strides: tuple[int, ...],
    folded: torch.dtype,
    plan: Plan,
) -> ToldAdjoint:
    told, of_blocks = _told(plan, folded), rows_of.blocks(plan)
    outputs = shape[1] if plan.transposed else shape[0] // plan.layout.groups
    many, wide_ = cdiv(outputs, fold_kernels.OUTPUTS), cdiv(told.f, fold_kernels.FEATURES)
    blocks = plan.layout.groups * sum(part.blocks for part in plan.layout.parts)
    each = blocks if plan.layout.shared else 1
    parts = _parts(each * many, wide_ * wide_ * told.own, told.f <= small.WIDEST)
    of_roots = wide_ * wide_ * told.own * parts
    at, of_grad = _places(shape, strides, plan), _places(shape, grad_strides, plan)
    programs = of_roots + many * wide_ * blocks
    warps = fold_kernels.WARPS if programs < PROGRAMS else fold_kernels.WARPS_IN_A_CROWD
    start = _folding(fold_kernels._fold_adjoint, plan, dtype, folded, at, of_grad, wide_ == 1, warps=warps)
    numbers = (told.f, outputs, many, wide_, of_roots, each, parts, told.own)
    solve = told.solve_adjoint.prepared((told.own, 1, 1), told.f, parts, *told.numbers)
    join = launcher(wide._join, wide.WARPS, 1, (), told.f % 8 == 0, wide.TILE)
    return ToldAdjoint(
        start.prepared((programs, 1, 1), *numbers, *of_blocks, *at, *of_grad),
        solve if told.f <= small.WIDEST else None,
        join.prepared((told.tiles**2, told.own, 1), told.f, told.tiles, parts),
        parts,
    )


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
    if _places(grad_folded.shape, grad_folded.stride(), plan) is None:
        grad_folded = grad_folded.contiguous()
    shape, strides, dtype = weight.shape, weight.stride(), weight.dtype
    told = _adjoint_told(shape, strides, dtype, grad_folded.stride(), grad_folded.dtype, plan)
    d, mean, unit = [t.contiguous() for t in used]
    of_weight = torch.empty_like(weight)
    of_d = d.new_empty(told.parts * (d.numel() + mean.numel()))  # then of μ·D·W; both in parts
    told.fold_adjoint(of_weight, of_d, grad_folded, grad_constant.contiguous(), weight, d, mean, unit)
    if grad_used:  # the transpose is added later where D is wide
        share = 1 / 2 if told.solve_adjoint is not None else 1 / 4
        of_d[: d.numel()].view_as(d).add_((grad_used[0] + grad_used[0].mT) * share)
    rows, cov, of_unit = batch.rows, batch.cov.contiguous(), batch.unit
    of_mean, of_cov = torch.empty_like(mean), torch.empty_like(cov)
    if told.solve_adjoint is not None:
        told.solve_adjoint(of_cov, of_mean, of_d, d, rows, cov, of_unit)
    else:
        joined = d.new_empty(d.numel() + mean.numel())
        told.join(joined, of_d)
        _wide_adjoint(_told(plan, grad_folded.dtype), (of_cov, of_mean), joined, d, (rows, cov, of_unit))
    return of_weight, of_mean + grad_used[1] if grad_used else of_mean, of_cov


def _wide_adjoint(
    told: Told, out: tuple[Tensor, Tensor], of_d: Tensor, d: Tensor, of_batch: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Gradients of Cov and μ."""
    between = d.new_empty(3 * d.numel() + 4 * told.own * told.tiles**2)
    told.wide[2](between, of_d, d, *of_batch)
    told.wide[3](between, of_d, *of_batch)
    told.wide[4](*out, between, of_d, d, *of_batch)


def weight_places(weight: Tensor, plan: Plan) -> tuple[int, int, int, int] | None:
    """Strides of groups, outputs, channels and taps; None if taps do not lie evenly."""
    return _places(weight.shape, weight.stride(), plan)


@functools.lru_cache(4096)
def _places(sizes: tuple[int, ...], strides: tuple[int, ...], plan: Plan) -> tuple[int, int, int, int] | None:
    step, passed = 0, 1
    for size, stride in zip(reversed(sizes[2:]), reversed(strides[2:]), strict=True):
        if size > 1 and step and stride != step * passed:
            return None
        if size > 1:
            step, passed = step or stride, passed * size
    if plan.transposed:
        return plan.layout.channels * strides[0], strides[1], strides[0], step
    return sizes[0] // plan.layout.groups * strides[0], strides[0], strides[1], step
