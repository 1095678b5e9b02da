"""How each layer kind shows its input as a data matrix, and its weight as the matrix D multiplies.

One row for every output position, one column for every (input channel, tap). A convolution has one *phase*; a
transposed convolution of stride s has s per axis, each of which uses its own taps and is zero in all others.
Along one axis, tap t of position j reads input[j·step + offset[t]]: that is all the rest of the library knows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# --- positions and taps ---


@dataclass(frozen=True)
class Axis:
    """The output positions of one phase along one axis of an input of `size`."""

    size: int
    count: int
    step: int = 1
    offsets: tuple[int, ...] = (0,)
    taps: tuple[int, ...] = (0,)
    # For masks: position j exists in a sample that starts at input a and ends at b if a <= j·step + anchors[0] and
    # j·step + anchors[1] <= b. A padded sample so has the rows of the same sample alone.
    anchors: tuple[int, int] = (0, 0)

    @property
    def plain(self) -> bool:
        """Every input position is read once, by one tap."""
        return self.count == self.size and self.step == 1 and self.offsets == (0,)

    @property
    def overhangs(self) -> bool:
        last = (self.count - 1) * self.step
        return min(self.offsets) < 0 or last + max(self.offsets) >= self.size


Phase = tuple[Axis, ...]


@dataclass(frozen=True)
class Grid:
    """All output positions of one sample, phase by phase."""

    phases: tuple[Phase, ...]
    kernel: tuple[int, ...]

    def taps(self, phase: Phase, device: torch.device) -> Tensor:
        """Where this phase's taps stand in the flattened kernel."""
        index = torch.zeros(1, dtype=torch.long, device=device)
        for axis, size in zip(phase, self.kernel, strict=True):
            index = (index[:, None] * size + progression(axis.taps, device)).flatten()
        return index

    @staticmethod
    def positions(phase: Phase) -> int:
        return math.prod([axis.count for axis in phase])


def progression(values: Sequence[int], device: torch.device) -> Tensor:
    """A tensor of evenly spaced integers made on the device: copies from the host would stall it, and break capture."""
    step = values[1] - values[0] if len(values) > 1 else 1
    return torch.arange(len(values), device=device) * step + (values[0] if values else 0)


def pointwise_grid(sizes: Sequence[int]) -> Grid:
    """Linear: every leading position is a row, its features are the columns."""
    return Grid((tuple(Axis(size, size) for size in sizes),), (1,) * len(sizes))


def conv_grid(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> Grid:
    """Convolution: the patches of the padded input."""
    axes = []
    for size, k, s, (left, right), d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        reach = d * (k - 1) - left - right
        count = (size - reach - 1) // s + 1
        axes.append(Axis(size, count, s, tuple(d * t - left for t in range(k)), tuple(range(k)), (0, reach)))
    return Grid((tuple(axes),), tuple(kernel))


def transposed_grid(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> Grid:
    """Transposed convolution: output o reads input i through tap t where o = i·stride - padding + dilation·t."""
    choices = []
    for size, k, s, p, d, extra in zip(sizes, kernel, stride, padding, dilation, output_padding, strict=True):
        reach = d * (k - 1) + extra - 2 * p
        outputs = (size - 1) * s + reach + 1
        axes = []
        for phase in range(s):
            first = (phase - p) % s
            taps = tuple(t for t in range(k) if (d * t - phase) % s == 0)
            offsets = tuple((first + p - d * t) // s for t in taps)
            anchors = (first // s, -((reach - first) // s))
            axes.append(Axis(size, max(-(-(outputs - first) // s), 0), 1, offsets, taps, anchors))
        choices.append(axes)
    return Grid(tuple(itertools.product(*choices)), tuple(kernel))


# --- sampling ---


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


def draw(batch: int, phase: Phase, budget: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Random offsets (1 + axes, samples) in [0, 1) for `choose`, from torch's generator; None if nothing is sampled.

    Activation checkpointing replays that generator, and so looks at the same rows again.
    """
    if budget == (batch, *(axis.count for axis in phase)):
        return None
    return torch.rand(len(budget), budget[0], device=device)


def choose(
    batch: int, phase: Phase, budget: tuple[int, ...], device: torch.device, draws: Tensor | None = None
) -> Sample:
    """A grid in every sample, with a random offset of its own per sample and axis.

    Every position is equally likely, so borders come in their true proportion; a grid in each axis cannot alias with
    the width of the input.
    """
    samples, *picks = budget
    draws = draw(batch, phase, budget, device) if draws is None else draws
    chosen = None
    if samples < batch:  # one from each stratum: no period of the batch can hide from it
        assert draws is not None
        chosen = _spread(torch.arange(samples, device=device) + draws[0], batch, samples)
    positions = []
    for number, (axis, pick) in enumerate(zip(phase, picks, strict=True), start=1):
        steps = torch.arange(pick, device=device)
        if pick == axis.count:
            positions.append(steps[None])
        else:
            assert draws is not None
            positions.append(_spread(steps + draws[number][:, None], axis.count, pick))
    return Sample(chosen, tuple(positions), (samples, *picks))


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


def _spread(at: Tensor, count: int, picks: int) -> Tensor:
    return (at * (count / picks)).long().clamp_max(count - 1)


# --- rows ---


def patches(x: Tensor, phase: Phase, sample: Sample, padding_mode: str = "zeros") -> Tensor:
    """Rows (n, channels, taps) of input (batch, channels, *sizes), gathered without padding or unfolding it."""
    if sample.samples is not None:
        x = x.index_select(0, sample.samples)
    flat = x.reshape(x.shape[0], x.shape[1], -1)
    if all(axis.plain and p.shape == (1, axis.count) for axis, p in zip(phase, sample.positions, strict=True)):
        return flat.mT.reshape(-1, x.shape[1], 1)
    index, inside = _indices(phase, sample, padding_mode)
    values = _gather(flat, index.reshape(index.shape[0], -1)).reshape(x.shape[0], x.shape[1], *index.shape[1:])
    if inside is not None:
        values = values.masked_fill(~inside[:, None], 0.0)
    return values.transpose(1, 2).reshape(-1, x.shape[1], index.shape[2])


def _gather(flat: Tensor, index: Tensor) -> Tensor:
    """Positions `index` (1 or batch, n) of every channel of (batch, channels, positions)."""
    batch, channels, size = flat.shape
    if index.shape[0] == 1:
        return flat.index_select(2, index[0])
    if torch.are_deterministic_algorithms_enabled():  # the gradient of gather adds up in any order on a GPU
        at = index + torch.arange(batch, device=index.device)[:, None] * size
        return flat.mT.reshape(-1, channels).index_select(0, at.flatten()).reshape(batch, -1, channels).mT
    return flat.gather(2, index[:, None].expand(-1, channels, -1))


def _indices(phase: Phase, sample: Sample, padding_mode: str) -> tuple[Tensor, Tensor | None]:
    """Flat input index (1 or samples, positions, taps) of every entry, and where it is inside the input."""
    device = sample.positions[0].device
    index = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
    inside: Tensor | None = None
    for axis, position in zip(phase, sample.positions, strict=True):
        at = position[:, :, None] * axis.step + progression(axis.offsets, device)
        if axis.overhangs and padding_mode == "zeros":
            reached = (at >= 0) & (at < axis.size)
            before = inside if inside is not None else torch.ones_like(index, dtype=torch.bool)
            inside = _outer(before) & _inner(reached)
            inside = inside.reshape(inside.shape[0], inside.shape[1] * inside.shape[2], -1)
        elif inside is not None:
            inside = inside.repeat_interleave(at.shape[1], 1).repeat_interleave(at.shape[2], 2)
        index = _outer(index) * axis.size + _inner(_PADDING[padding_mode](at, axis.size))
        index = index.reshape(index.shape[0], index.shape[1] * index.shape[2], -1)
    return index, inside


def _outer(t: Tensor) -> Tensor:
    return t[:, :, None, :, None]


def _inner(t: Tensor) -> Tensor:
    return t[:, None, :, None, :]


_PADDING = {
    "zeros": lambda at, size: at.clamp(0, size - 1),
    "replicate": lambda at, size: at.clamp(0, size - 1),
    "circular": lambda at, size: at % size,
    "reflect": lambda at, size: size - 1 - (size - 1 - at.abs()).abs(),
}


def row_weights(valid: Tensor, phase: Phase, sample: Sample) -> Tensor:
    """Which rows (n,) count under a mask (batch, *sizes): 1.0 or 0.0."""
    anchors = tuple(Axis(a.size, a.count, a.step, a.anchors, (0, 1)) for a in phase)
    ends = patches(valid[:, None].float(), anchors, sample, "replicate")
    ends = ends.reshape(ends.shape[0], *(2 for _ in phase)) if phase else ends[:, 0, 0]
    for axis in reversed(phase):  # a window must lie within the data; one turned inside out by padding must meet it
        ends = ends.amin(-1) if axis.anchors[0] <= axis.anchors[1] else ends.amax(-1)
    return ends


# --- blocks ---


class Part(NamedTuple):
    """Channels start:stop of every group, as `blocks` equal blocks."""

    start: int
    stop: int
    blocks: int


@dataclass(frozen=True)
class Layout:
    """The columns of a layer as blocks of whole, contiguous channels that never cross a group."""

    groups: int
    channels: int  # of one group
    taps: int
    block: int
    shared: bool

    @property
    def parts(self) -> tuple[Part, ...]:
        block = min(self.block, self.channels)
        full = self.channels // block
        parts = [Part(0, full * block, full)]
        if full * block < self.channels:
            parts.append(Part(full * block, self.channels, 1))
        return tuple(parts)

    def _of_own(self, part: Part) -> int:
        return 1 if self.shared else self.groups * part.blocks

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """(how many D, features of each) for every part, in the order of the statistics."""
        return tuple((self._of_own(p), (p.stop - p.start) // p.blocks * self.taps) for p in self.parts)

    def stack(self, rows: Tensor) -> list[Tensor]:
        """Rows (n, groups·channels, taps) as (g, n, f) for every part; shared blocks are stacked as extra rows."""
        n = rows.shape[0]
        grouped = rows.reshape(n, self.groups, self.channels, -1)
        stacked = []
        for part in self.parts:
            blocks = grouped[:, :, part.start : part.stop].reshape(n, self.groups * part.blocks, -1)
            stacked.append(blocks.reshape(1, -1, blocks.shape[2]) if self.shared else blocks.transpose(0, 1))
        return stacked

    def repeats(self, part: Part) -> int:
        """Rows that one position becomes when its blocks are stacked."""
        return self.groups * part.blocks if self.shared else 1

    def pack(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Mean (g, f) and covariance (g, f, f) of all parts; a smaller last block is padded with zeros."""
        if len(parts) == 1:
            return parts[0]
        width = parts[0][0].shape[1]
        means = [F.pad(mean, (0, width - mean.shape[1])) for mean, _ in parts]
        covs = [F.pad(cov, (0, width - cov.shape[1], 0, width - cov.shape[1])) for _, cov in parts]
        return torch.cat(means), torch.cat(covs)

    def split(self, d: Tensor, mean: Tensor, matrix: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(D, mean, weight (groups·blocks, f, o)) of every part, from what `pack` made and the weight matrix."""
        split, first = [], 0
        for part in self.parts:
            own = slice(first, first + self._of_own(part))
            first = own.stop
            blocks = matrix[:, part.start : part.stop].reshape(self.groups * part.blocks, -1, matrix.shape[-1])
            f = blocks.shape[1]
            split.append((d[own, :f, :f], mean[own, :f], blocks))
        return split


# --- weights ---


def weight_matrix(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """(groups, channels, taps, outputs) of a weight (out, in, *kernel), or (in, out, *kernel) when transposed."""
    taps = math.prod(weight.shape[2:])
    grouped = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], taps)
    return grouped.permute(0, 1, 3, 2) if transposed else grouped.permute(0, 2, 3, 1)


def matrix_weight(matrix: Tensor, like: Tensor, transposed: bool) -> Tensor:
    """The inverse of `weight_matrix`, in the shape and the memory format of the weight."""
    grouped = matrix.permute(0, 1, 3, 2) if transposed else matrix.permute(0, 3, 1, 2)
    weight = grouped.reshape(-1).reshape(like.shape)  # by way of one axis: no odd strides where a size is 1
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    if last is not None and not like.is_contiguous() and like.is_contiguous(memory_format=last):
        return weight.contiguous(memory_format=last)
    return weight
