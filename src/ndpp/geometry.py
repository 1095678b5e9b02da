"""How each layer kind shows its input as a data matrix, and its weight as the matrix D multiplies.

One row for every output position, one column for every (input channel, tap). A convolution has one *phase*; a
transposed convolution of stride s has s per axis, each of which uses its own taps and is zero in all others.
Along one axis, tap t of position j reads input[j·step + offset[t]]: that is all the rest of the library knows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .keeping import kept

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


@kept
def whole_numbers(count: int, device: torch.device) -> Tensor:
    """0, 1, 2 … below count."""
    return torch.arange(count, device=device)


@kept
def progression(values: tuple[int, ...], device: torch.device) -> Tensor:
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


# --- blocks ---


def block_size(most: int, taps: int, features: int | None) -> int:
    """Channels of a block: `most`, or the largest power of two that keeps within this number of columns."""
    if features is None:
        return most
    return min(most, 1 << (max(features // max(taps, 1), 1).bit_length() - 1))


class Part(NamedTuple):
    """Channels start:stop of every group, as `blocks` equal blocks."""

    start: int
    stop: int
    blocks: int


class Run(NamedTuple):
    """Equal blocks whose channels lie side by side."""

    part: int
    channels: slice  # of the input
    own: slice  # their place among what has a D
    block: int  # channels of each


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

    def runs(self, columns: int | None) -> Iterator[Run]:
        """All blocks, in the order of the statistics; at a time so many that they have at most `columns` columns."""
        first = 0
        for number, part in enumerate(self.parts):
            block = (part.stop - part.start) // part.blocks
            most = None if columns is None else max(columns // (block * self.taps), 1)
            if part.stop - part.start == self.channels:  # blocks of one group follow on those of another
                starts, blocks = [0], self.groups * part.blocks
            else:
                starts, blocks = [group * self.channels + part.start for group in range(self.groups)], part.blocks
            for start in starts:
                for done in range(0, blocks, most or blocks):
                    count = min(most or blocks, blocks - done)
                    channels = slice(start + done * block, start + (done + count) * block)
                    own = slice(number, number + 1) if self.shared else slice(first, first + count)
                    yield Run(number, channels, own, block)
                    first += count

    def feature_counts(self, device: torch.device) -> Tensor | int:
        """Features of every block that has a D: one number, or (g,) where a last block is smaller."""
        if len(self.parts) == 1:
            return self.widths[0][1]
        return torch.cat([torch.full((g,), width, device=device) for g, width in self.widths])

    def stack(self, rows: Tensor) -> list[Tensor]:
        """Rows (n, groups·channels, taps) as (g, n, f) for every part; shared blocks are stacked as extra rows."""
        n = rows.shape[0]
        grouped = rows.reshape(n, self.groups, self.channels, -1)
        stacked = []
        for part in self.parts:
            blocks = grouped[:, :, part.start : part.stop].reshape(n, self.groups * part.blocks, -1)
            stacked.append(blocks.reshape(1, -1, blocks.shape[2]) if self.shared else blocks.transpose(0, 1))
        return stacked

    def repeats(self, part: int) -> int:
        """Rows that one position becomes when the blocks of a part are stacked."""
        return self.groups * self.parts[part].blocks if self.shared else 1

    def pack(self, parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Mean (g, f) and covariance (g, f, f) of all parts; a smaller last block is padded with zeros."""
        if len(parts) == 1:
            return parts[0]
        width = parts[0][0].shape[1]
        means = [F.pad(mean, (0, width - mean.shape[1])) for mean, _ in parts]
        covs = [F.pad(cov, (0, width - cov.shape[1], 0, width - cov.shape[1])) for _, cov in parts]
        return torch.cat(means), torch.cat(covs)

    def split(self, d: Tensor, mean: Tensor, weight: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(D, mean, weight (groups·blocks, o, f)) of every part, from what `pack` made and a weight as `grouped`."""
        split, first = [], 0
        for part in self.parts:
            own = slice(first, first + self._of_own(part))
            first = own.stop
            blocks = weight[:, :, part.start : part.stop].reshape(self.groups, weight.shape[1], part.blocks, -1)
            f = blocks.shape[3]
            split.append((d[own, :f, :f], mean[own, :f], blocks.transpose(1, 2).reshape(-1, weight.shape[1], f)))
        return split

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The weight (groups, outputs, channels, taps) of what `split` gave for every part."""
        joined = []
        for part, blocks in zip(self.parts, parts, strict=True):
            outputs = blocks.shape[1]
            by_output = blocks.reshape(self.groups, part.blocks, outputs, -1).transpose(1, 2)
            joined.append(by_output.reshape(self.groups, outputs, -1, self.taps))
        return joined[0] if len(joined) == 1 else torch.cat(joined, 2)


# --- weights ---


def grouped(weight: Tensor, groups: int, transposed: bool) -> Tensor:
    """(groups, outputs, channels, taps) of a weight (out, in, *kernel), or (in, out, *kernel) when transposed."""
    taps = math.prod(weight.shape[2:])
    by_group = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], taps)
    return by_group.transpose(1, 2) if transposed else by_group


def ungrouped(weight: Tensor, like: Tensor, transposed: bool) -> Tensor:
    """The inverse of `grouped`, in the shape and the memory format of another weight."""
    by_group = weight.transpose(1, 2) if transposed else weight
    weight = by_group.reshape(-1).reshape(like.shape)  # by way of one axis: no odd strides where a size is 1
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim())
    if last is not None and not like.is_contiguous() and like.is_contiguous(memory_format=last):
        return weight.contiguous(memory_format=last)
    return weight
