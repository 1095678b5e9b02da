"""Which positions are padding: a context that every ndpp layer inside it reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _Active:
    """The mask in force. Process-wide, not per thread: autograd runs checkpointed layers again on its own threads."""

    valid: Tensor | None = None


@contextmanager
def mask(valid: Tensor | None) -> Iterator[None]:
    """Within this context, positions where `valid` is False take no part in statistics and scale.

    Args:
        valid: boolean, True for data and False for padding. Tokens: (batch, time), for Linear inputs (batch, time,
            features) or (batch·time, features) and for Conv1d inputs. Images: (batch, height, width), at any
            resolution: feature maps of another size take the nearest positions. Inputs of shape (batch, features)
            drop samples that are padding altogether. None switches an outer mask off.

    The outputs at padded positions are computed all the same. With activation checkpointing, call backward inside the
    context: the layers run again there.
    """
    if valid is not None and (not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.dim() < 1):
        seen = f"{valid.dtype} of shape {tuple(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise TypeError(f"ndpp.mask: expected a boolean tensor of shape (batch, ...), True where data is; got {seen}")
    previous, _Active.valid = _Active.valid, valid
    try:
        yield
    finally:
        _Active.valid = previous


def active() -> Tensor | None:
    """The mask in force, if any."""
    return _Active.valid


def fit(valid: Tensor, batch: int, sizes: tuple[int, ...]) -> Tensor:
    """The mask for positions (batch, *sizes) of one layer's input."""
    if tuple(valid.shape) == (batch, *sizes):
        return valid
    if not sizes and valid.numel() == batch:
        return valid.flatten()
    if valid.shape[0] == batch and not sizes:
        return valid.flatten(1).any(1)
    if valid.shape[0] == batch and valid.dim() == 1 + len(sizes) and min(sizes) > 0 and min(valid.shape[1:]) > 0:
        for axis, size in enumerate(sizes, start=1):
            valid = valid.index_select(axis, _nearest(valid.shape[axis], size, valid.device))
        return valid
    raise ValueError(
        f"expected a mask for positions {(batch, *sizes)} (batch first, then time or space), got {tuple(valid.shape)}; "
        "put ndpp.mask with a tensor of that shape around this part of the model, or ndpp.mask(None) to count every one"
    )


def _nearest(size: int, wanted: int, device: torch.device) -> Tensor:
    """For each of `wanted` positions the one of `size` it lies on. Strided layers keep every s-th position exactly."""
    step = max(round(size / wanted), 1)
    positions = torch.arange(wanted, device=device)
    if wanted in (-(-size // step), size // step):
        return (positions * step).clamp_max(size - 1)
    return (positions * size).div(wanted, rounding_mode="floor")
