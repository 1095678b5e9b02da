"""Rows of the data matrix, gathered from the input without padding or unfolding it, and added back to its gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import Axis, Phase, progression, whole_numbers
from .keeping import readable
from .sampling import Sample


class Places(NamedTuple):
    """Where the entries of rows lie: flat positions (1 or samples, rows of a sample, taps), and which are padding."""

    at: Tensor
    outside: Tensor | None  # of the same shape, where zeros are padded
    samples: Tensor | None


def locate(phase: Phase, sample: Sample, padding_mode: str, device: torch.device) -> Places:
    """The places of all entries of these rows."""
    index = outside = None
    pads = padding_mode == "zeros" and any(axis.overhangs for axis in phase)
    for axis, position in zip(phase, sample.positions, strict=True):
        asked = _along(axis, position, device)
        read = _PADDING[padding_mode](asked, axis.size) if axis.overhangs else asked
        index = read if index is None else _flat(torch.add(_inner(read), _outer(index), alpha=axis.size))
        if pads:
            beyond = asked != read
            outside = beyond if outside is None else _flat(_inner(beyond) | _outer(outside))
    if index is None:
        index = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
    return Places(index, outside, sample.samples)


def _along(axis: Axis, position: Tensor, device: torch.device) -> Tensor:
    """What the taps of these positions read (1 or samples, positions, taps); beyond the ends, too."""
    if axis.offsets == (0,):
        return position[:, :, None] if axis.step == 1 else position[:, :, None] * axis.step
    return torch.add(progression(axis.offsets, device), position[:, :, None], alpha=axis.step)


def _outer(t: Tensor) -> Tensor:
    return t[:, :, None, :, None]


def _inner(t: Tensor) -> Tensor:
    return t[:, None, :, None, :]


def _flat(t: Tensor) -> Tensor:
    """(samples, positions, taps) of two axes each."""
    return t.flatten(3).flatten(1, 2)


_PADDING = {
    "zeros": lambda at, size: at.clamp(0, size - 1),
    "replicate": lambda at, size: at.clamp(0, size - 1),
    "circular": lambda at, size: at % size,
    "reflect": lambda at, size: size - 1 - (size - 1 - at.abs()).abs(),
}


def is_whole(phase: Phase, sample: Sample) -> bool:
    """Whether the rows are all positions of these samples, one tap each: the input itself."""
    return all(axis.plain and p.shape == (1, axis.count) for axis, p in zip(phase, sample.positions, strict=True))


def patches(x: Tensor, phase: Phase, sample: Sample, padding_mode: str = "zeros") -> Tensor:
    """Rows (n, channels, taps) of input (batch, channels, *sizes). Differentiable."""
    if is_whole(phase, sample):
        return every_pixel(x if sample.samples is None else x.index_select(0, sample.samples))
    return gather(x, locate(phase, sample, padding_mode, x.device))


def every_pixel(x: Tensor) -> Tensor:
    """All positions as rows (n, channels, 1)."""
    return x.reshape(x.shape[0], x.shape[1], -1).mT.reshape(-1, x.shape[1], 1)


def gather(x: Tensor, places: Places) -> Tensor:
    """Rows (n, channels, taps) of input (batch, channels, *sizes) at these places. Differentiable.

    In memory they lie as the input has them: row by row where its channels lie together, else channel by channel.
    """
    batch, channels = x.shape[:2]
    each, taps = places.at.shape[1:]
    flat = x.reshape(batch, channels, -1)
    samples = batch if places.samples is None else len(places.samples)
    if flat.stride(1) == 1 or torch.are_deterministic_algorithms_enabled():
        pixels = flat.mT.reshape(-1, channels).index_select(0, _pixels(places, batch, flat.shape[2]))
        if places.outside is not None:
            pixels = _zero_(pixels, places.outside.expand(samples, each, taps).flatten(), 0)
        return pixels.reshape(-1, taps, channels).transpose(1, 2)
    flat = flat if places.samples is None else flat.index_select(0, places.samples)
    by_channel = flat.transpose(0, 1)[:, None].expand(channels, taps, samples, -1)
    values = by_channel.gather(3, places.at.permute(2, 0, 1).expand(channels, taps, samples, each)).flatten(1)
    if places.outside is not None:
        values = _zero_(values, places.outside.expand(samples, each, taps).permute(2, 0, 1).flatten(), 1)
    return values.reshape(channels, taps, -1).permute(2, 0, 1)


def _zero_(values: Tensor, where: Tensor, dim: int) -> Tensor:
    """Zeros at the places of one axis: on a CPU at these alone, elsewhere without asking for their number."""
    if readable(where):
        return values.index_fill_(dim, where.nonzero().flatten(), 0.0)
    return values.masked_fill_(where[:, None] if dim == 0 else where, 0.0)


def add_(grad: Tensor, parts: Iterable[tuple[slice, Tensor]], places: Places | None) -> None:
    """The adjoint of `gather`, added in place to the gradient of its input: only the places of the rows are touched.

    parts: channels, and the rows of these (n, channels, taps), whose channels may be several axes. No places: every
    pixel.
    """
    if places is None:
        for channels, rows in parts:
            part = grad[:, channels]
            part.add_(rows.reshape(part.shape[0], -1, part.shape[1]).mT.reshape(part.shape))
        return
    flat = grad.flatten(2) if grad.dim() > 2 else grad[:, :, None]
    in_place = flat.data_ptr() == grad.data_ptr()  # else the positions are no one axis of this gradient
    if in_place and flat.stride(1) != 1 and places.samples is None and not torch.are_deterministic_algorithms_enabled():
        for channels, rows in parts:
            _scatter_(flat[:, channels], rows, places)
        return
    pixels, at = _as_pixels(parts, places, flat), _pixels(places, len(flat), flat.shape[2])
    if in_place and flat.stride(1) == 1 and flat.stride(0) == flat.shape[2] * flat.stride(2):
        flat.mT.view(-1, flat.shape[1]).index_add_(0, at, pixels)
    else:
        added = torch.zeros(len(flat) * flat.shape[2], flat.shape[1], dtype=grad.dtype, device=grad.device)
        grad.add_(added.index_add_(0, at, pixels).reshape(len(flat), -1, flat.shape[1]).mT.reshape(grad.shape))


def _scatter_(flat: Tensor, rows: Tensor, places: Places) -> None:
    """Add rows to some channels of a gradient (samples, channels, positions), channel by channel."""
    samples, channels = flat.shape[:2]
    values = rows.to(flat.dtype).reshape(samples, -1, *rows.shape[1:]).movedim(1, -2).reshape(samples, channels, -1)
    if places.outside is not None:
        values = values.masked_fill_(places.outside.flatten(1)[:, None], 0.0)
    flat.scatter_add_(2, places.at.flatten(1)[:, None].expand(samples, channels, -1), values)


def _as_pixels(parts: Iterable[tuple[slice, Tensor]], places: Places, flat: Tensor) -> Tensor:
    """What is added to each pixel of a gradient (samples, channels, positions): (entries, channels)."""
    taps, channels = places.at.shape[2], flat.shape[1]
    samples = len(flat) if places.samples is None else len(places.samples)
    pixels = flat.new_empty(samples * places.at.shape[1], taps, channels)
    for of_part, rows in parts:
        part = pixels[:, :, of_part]
        part.view(*part.shape[:2], *rows.shape[1:-1]).copy_(rows.movedim(-1, 1))
    pixels = pixels.flatten(0, 1)
    if places.outside is None:
        return pixels
    return _zero_(pixels, places.outside.expand(samples, -1, -1).flatten(), 0)


def _pixels(places: Places, batch: int, size: int) -> Tensor:
    """Places among the pixels of all samples, one axis."""
    if batch == 1:
        return places.at.flatten()
    number = whole_numbers(batch, places.at.device) if places.samples is None else places.samples
    return torch.add(places.at, number[:, None, None], alpha=size).flatten()


def row_weights(valid: Tensor, phase: Phase, sample: Sample) -> Tensor:
    """Which rows (n,) count under a mask (batch, *sizes): 1.0 or 0.0."""
    anchors = tuple(Axis(a.size, a.count, a.step, a.anchors, (0, 1)) for a in phase)
    ends = patches(valid[:, None].float(), anchors, sample, "replicate")
    ends = ends.reshape(ends.shape[0], *(2 for _ in phase)) if phase else ends[:, 0, 0]
    for axis in reversed(phase):  # a window must lie within the data; one turned inside out by padding must meet it
        ends = ends.amin(-1) if axis.anchors[0] <= axis.anchors[1] else ends.amax(-1)
    return ends
