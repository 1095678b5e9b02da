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

from .geometry import Phase

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
    device = draws.device
    number = torch.arange(samples, device=device)
    chosen = None
    if samples < batch:
        chosen = _spread(number, _offset(number * moves(batch, samples), draws, 0), batch, samples)
    positions = []
    for place, (axis, pick) in enumerate(zip(phase, picks, strict=True), start=1):
        cells = torch.arange(pick, device=device)[None]
        if pick < axis.count:
            cells = _spread(cells, _offset(number, draws, min(place, 3))[:, None], axis.count, pick)
        positions.append(cells)
    return Sample(chosen, tuple(positions), (samples, *picks))


def moves(batch: int, samples: int) -> int:
    """1 if samples have offsets of their own, 0 if all have one: where nearly all are chosen, none must be so twice."""
    return int(batch >= 2 * samples)


def _offset(number: Tensor, draws: Tensor, place: int) -> Tensor:
    offset: Tensor = (number * STRIDES[place] + draws[place]) & ((1 << BITS) - 1)
    return offset


def _spread(cell: Tensor, offset: Tensor, count: int, picks: int) -> Tensor:
    return ((cell << BITS) + offset) * count // (picks << BITS)


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


def lattice(sizes: tuple[int, ...], most: int | None) -> tuple[slice, ...]:
    """A fixed grid of about `most` positions of each sample, for its scale: evenly spaced, the same in every call."""
    total = math.prod(sizes)
    if most is None or total <= most:
        return tuple(slice(None) for _ in sizes)
    step = math.ceil((total / most) ** (1 / len(sizes)) - 1e-9)
    return tuple(slice(min(step // 2, (size - 1) // 2), None, step) for size in sizes)
