"""Rows of the data matrix, gathered from the input without padding or unfolding it, and added back to its gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import Axis, Phase, progression
from .sampling import Sample


class Places(NamedTuple):
    """Where the entries of rows lie: flat positions (1 or samples, taps, rows of a sample), and which are inside."""

    at: Tensor
    inside: Tensor | None  # of the same shape, where zeros are padded
    samples: Tensor | None


def locate(phase: Phase, sample: Sample, padding_mode: str, device: torch.device) -> Places:
    """The places of all entries of these rows."""
    index = torch.zeros(1, 1, 1, dtype=torch.long, device=device)
    inside: Tensor | None = None
    for axis, position in zip(phase, sample.positions, strict=True):
        at = position[:, None, :] * axis.step + progression(axis.offsets, device)[:, None]
        if axis.overhangs and padding_mode == "zeros":
            reached = (at >= 0) & (at < axis.size)
            before = inside if inside is not None else torch.ones_like(index, dtype=torch.bool)
            inside = _outer(before) & _inner(reached)
            inside = inside.reshape(inside.shape[0], inside.shape[1] * inside.shape[2], -1)
        elif inside is not None:
            inside = inside.repeat_interleave(at.shape[1], 1).repeat_interleave(at.shape[2], 2)
        index = _outer(index) * axis.size + _inner(_PADDING[padding_mode](at, axis.size))
        index = index.reshape(index.shape[0], index.shape[1] * index.shape[2], -1)
    return Places(index, inside, sample.samples)


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


def is_whole(phase: Phase, sample: Sample) -> bool:
    """Whether the rows are all positions of these samples, one tap each: the input itself."""
    return all(axis.plain and p.shape == (1, axis.count) for axis, p in zip(phase, sample.positions, strict=True))


def patches(x: Tensor, phase: Phase, sample: Sample, padding_mode: str = "zeros") -> Tensor:
    """Rows (n, channels, taps) of input (batch, channels, *sizes). Differentiable."""
    if is_whole(phase, sample):
        x = x if sample.samples is None else x.index_select(0, sample.samples)
        return x.reshape(x.shape[0], x.shape[1], -1).mT.reshape(-1, x.shape[1], 1)
    return gather(x, locate(phase, sample, padding_mode, x.device))


def gather(x: Tensor, places: Places) -> Tensor:
    """Rows (n, channels, taps) of input (batch, channels, *sizes) at these places. Differentiable.

    In memory they lie as the input has them: pixel by pixel where its channels lie together, else channel by channel.
    """
    batch, channels = x.shape[:2]
    taps, each = places.at.shape[1:]
    flat = x.reshape(batch, channels, -1)
    samples = batch if places.samples is None else len(places.samples)
    if flat.stride(1) == 1 or torch.are_deterministic_algorithms_enabled():
        pixels = flat.mT.reshape(-1, channels).index_select(0, _pixels(places, batch, flat.shape[2]))
        values = pixels.reshape(samples, taps, each, channels)
        if places.inside is not None:
            values = values.masked_fill_(~places.inside[..., None], 0.0)
        return values.transpose(1, 2).reshape(samples * each, taps, channels).transpose(1, 2)
    flat = flat if places.samples is None else flat.index_select(0, places.samples)
    values = flat.gather(2, places.at.flatten(1)[:, None].expand(samples, channels, -1))
    values = values.reshape(samples, channels, taps, each)
    if places.inside is not None:
        values = values.masked_fill_(~places.inside[:, None], 0.0)
    return values.permute(1, 2, 0, 3).reshape(channels, taps, -1).permute(2, 0, 1)


def add_(grad: Tensor, rows: Tensor, places: Places) -> None:
    """The adjoint of `gather`, added in place to the gradient of its input: only the places of the rows are touched."""
    batch, channels = grad.shape[:2]
    taps, each = places.at.shape[1:]
    samples = batch if places.samples is None else len(places.samples)
    values = rows.to(grad.dtype).reshape(samples, each, channels, taps)
    if places.inside is not None:
        values = values.masked_fill(~places.inside.transpose(1, 2)[:, :, None], 0.0)
    flat = grad.flatten(2) if grad.dim() > 2 else grad[:, :, None]
    in_place = flat.data_ptr() == grad.data_ptr()  # else the positions are no one axis of this gradient
    if in_place and flat.stride(1) != 1 and places.samples is None and not torch.are_deterministic_algorithms_enabled():
        values = values.permute(0, 2, 3, 1).reshape(samples, channels, -1)
        flat.scatter_add_(2, places.at.flatten(1)[:, None].expand(samples, channels, -1), values)
        return
    pixels, at = values.permute(0, 3, 1, 2).reshape(-1, channels), _pixels(places, batch, flat.shape[2])
    if in_place and flat.stride(1) == 1 and flat.stride(0) == flat.shape[2] * flat.stride(2):
        flat.mT.view(-1, channels).index_add_(0, at, pixels)
    else:
        added = torch.zeros(batch * flat.shape[2], channels, dtype=grad.dtype, device=grad.device)
        grad.add_(added.index_add_(0, at, pixels).reshape(batch, -1, channels).mT.reshape(grad.shape))


def _pixels(places: Places, batch: int, size: int) -> Tensor:
    """Places among the pixels of all samples, one axis."""
    if batch == 1:
        return places.at.flatten()
    number = torch.arange(batch, device=places.at.device) if places.samples is None else places.samples
    return (places.at + number[:, None, None] * size).flatten()


def row_weights(valid: Tensor, phase: Phase, sample: Sample) -> Tensor:
    """Which rows (n,) count under a mask (batch, *sizes): 1.0 or 0.0."""
    anchors = tuple(Axis(a.size, a.count, a.step, a.anchors, (0, 1)) for a in phase)
    ends = patches(valid[:, None].float(), anchors, sample, "replicate")
    ends = ends.reshape(ends.shape[0], *(2 for _ in phase)) if phase else ends[:, 0, 0]
    for axis in reversed(phase):  # a window must lie within the data; one turned inside out by padding must meet it
        ends = ends.amin(-1) if axis.anchors[0] <= axis.anchors[1] else ends.amax(-1)
    return ends
