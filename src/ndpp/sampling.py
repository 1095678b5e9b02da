"""Which rows of the data matrix a call looks at: a budget, spread over samples and space, anew in every call.

Rows are drawn by four random integers at most, on the device: sizes do not change how many, so that compiled code does
not depend on them, and a kernel can find its rows without a list of them. All arithmetic is in integers: every
implementation finds the same rows.
"""

from __future__ import annotations

import math
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import Phase, whole_numbers
from .keeping import kept

ROWS_PER_FEATURE, FEWEST_ROWS, MOST_ROWS = 8, 512, 4096
SCALE_VALUES, FEWEST_POSITIONS = 1 << 15, 64
BITS = 24  # of an offset within a cell of the grid
# From one sample to the next, the offset of an axis moves on by these parts of a cell, whose multiples fill it evenly
# (a Kronecker sequence): the golden ratio for the samples themselves, then those that do so for two axes together.
PARTS = (0.6180339887498949, 0.7548776662466927, 0.5698402909980532, 2**0.5 - 1)
STRIDES = tuple(round(2**BITS * part) for part in PARTS)


class Sample(NamedTuple):
    """Chosen rows of one phase: which samples of the batch, and per axis which positions (1 or samples, positions)."""

    samples: Tensor | None
    positions: tuple[Tensor, ...]
    size: tuple[int, ...]  # samples, then positions along each axis


def rows_for(features: int) -> int:
    """Rows that do for a block of so many columns: where more no longer change what is learnt."""
    return min(max(ROWS_PER_FEATURE * features, FEWEST_ROWS), MOST_ROWS)


def row_budget(batch: int, phase: Phase, rows: int | None, stride: int | None) -> tuple[int, ...]:
    """How many samples, and how many positions along each axis, to look at."""
    counts = [axis.count for axis in phase]
    if stride is not None:
        return (batch, *(-(-count // stride) for count in counts))
    if rows is None or batch * math.prod(counts) <= rows:
        return (batch, *counts)
    if rows <= batch:
        return (rows, *(1 for _ in counts))
    # A compiler that takes the sizes for symbols must not carry them through what follows: one graph for each size.
    batch, counts = operator.index(batch), [operator.index(count) for count in counts]
    each = left = rows // batch
    picks = [1] * len(counts)
    order = sorted(range(len(counts)), key=lambda i: counts[i])
    for done, i in enumerate(order):  # the same ratio along every axis, where the short ones have that much to give
        ratio = (left / math.prod([counts[j] for j in order[done:]])) ** (1 / (len(order) - done))
        picks[i] = min(max(int(counts[i] * ratio), 1), counts[i])
        left = max(left // picks[i], 1)
    while True:  # spend what rounding left over where the grid is coarsest
        room = [i for i, p in enumerate(picks) if p < counts[i] and math.prod(picks) // p * (p + 1) <= each]
        if not room:
            return (batch, *picks)
        picks[max(room, key=lambda i: counts[i] / picks[i])] += 1


def draw(device: torch.device, sampled: bool = True) -> Tensor:
    """What `choose` draws rows by, from torch's generator: activation checkpointing replays it, graphs capture it.

    Where every row is looked at, the generator is left alone.
    """
    if not sampled:
        return torch.zeros(len(STRIDES), dtype=torch.long, device=device)
    return torch.randint(1 << BITS, (len(STRIDES),), device=device)


def choose(batch: int, phase: Phase, budget: tuple[int, ...], draws: Tensor) -> Sample:
    """A grid in every sample, with an offset of its own per sample and axis.

    Every position is equally likely, so borders come in their true proportion; a grid in each axis cannot alias with
    the width of the input, nor the samples with a period of the batch: one from each stratum.
    """
    samples, *picks = budget
    counts = tuple(axis.count for axis in phase)
    if samples == batch and tuple(picks) == counts:
        return Sample(None, tuple(whole_numbers(n, draws.device)[None] for n in counts), budget)
    cells = _cells(batch, counts, budget, draws.device)
    offsets = (cells.start + draws.index_select(0, cells.draws)) & ((1 << BITS) - 1)
    places = torch.div(torch.addcmul(cells.base, offsets, cells.counts), cells.divisors, rounding_mode="floor")
    of_sample, *of_axes = torch.split(places, [1, *picks], 1)
    return Sample(
        of_sample[:, 0] if samples < batch else None,
        tuple(
            own if pick < count else whole_numbers(count, draws.device)[None]
            for own, pick, count in zip(of_axes, picks, counts, strict=True)
        ),
        budget,
    )


def moves(batch: int, samples: int) -> int:
    """1 if samples have offsets of their own, 0 if all have one: where nearly all are chosen, none must be so twice."""
    return int(batch >= 2 * samples)


class _Cells(NamedTuple):
    """All cells of a call, a line for each sample: its own cell, then those of every axis.

    An offset o within cell c of p is position (c·2^BITS + o)·count // (p·2^BITS); c itself, where p is all there are.
    """

    start: Tensor  # (samples, cells); how far a sample's offsets are from those of the first
    base: Tensor  # (samples, cells); c·2^BITS·count
    counts: Tensor  # (cells,): positions along the axis of a cell, p·2^BITS, and which number draws the offset
    divisors: Tensor
    draws: Tensor


@kept
def _cells(batch: int, counts: tuple[int, ...], budget: tuple[int, ...], device: torch.device) -> _Cells:
    number = torch.arange(budget[0], device=device)[:, None]
    starts, bases, counted, divisors, draws = [], [], [], [], []
    for place, (count, picks) in enumerate(zip((batch, *counts), budget, strict=True)):
        cell = number if place == 0 else torch.arange(picks, device=device).expand(budget[0], -1)
        stride = STRIDES[min(place, 3)] * (moves(batch, picks) if place == 0 else 1)
        starts.append((number * stride).expand(cell.shape))
        bases.append((cell << BITS) * count)
        counted.append(torch.full_like(cell[0], count))
        divisors.append(torch.full_like(cell[0], picks << BITS))
        draws.append(torch.full_like(cell[0], min(place, 3)))
    return _Cells(torch.cat(starts, 1), torch.cat(bases, 1), *(torch.cat(t) for t in (counted, divisors, draws)))


def every(batch: int, phase: Phase, most: int, device: torch.device) -> list[Sample]:
    """All rows of a phase, about `most` at once: some samples, and of one sample some lines of the first axis."""
    counts = [axis.count for axis in phase]
    samples = min(max(most // max(math.prod(counts), 1), 1), batch)
    lines = counts[0] if counts else 1
    if samples == 1:
        lines = min(max(most // max(math.prod(counts[1:]), 1), 1), lines)
    chunks = []
    rest = [torch.arange(count, device=device)[None] for count in counts[1:]]
    for first in range(0, batch, samples):
        chosen = torch.arange(first, min(first + samples, batch), device=device)
        for start in range(0, counts[0] if counts else 1, lines):
            stop = min(start + lines, counts[0] if counts else 1)
            positions = [torch.arange(start, stop, device=device)[None], *rest] if counts else []
            size = (len(chosen), *([stop - start, *counts[1:]] if counts else []))
            chunks.append(Sample(None if len(chosen) == batch else chosen, tuple(positions), size))
    return chunks


def lattice(channels: int, sizes: tuple[int, ...], most: int | None) -> tuple[slice, ...]:
    """A fixed grid of about `most` positions of each sample, for its scale: evenly spaced, the same in every call.

    Slices of the channels and of every axis. Of many channels fewer positions do, SCALE_VALUES in all but not below
    FEWEST_POSITIONS; and of very many channels every second, third …
    """
    total = math.prod(sizes)
    everything = tuple(slice(None) for _ in sizes)
    if most is None:
        return (slice(None), *everything)
    most = min(most, max(SCALE_VALUES // max(channels, 1), FEWEST_POSITIONS), total)
    some = slice(None, None, max(channels * most // SCALE_VALUES, 1))
    if total <= most:
        return (some, *everything)
    step = math.ceil((total / most) ** (1 / len(sizes)) - 1e-9)
    return (some, *(slice(min(step // 2, (size - 1) // 2), None, step) for size in sizes))
