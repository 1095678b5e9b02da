"""Which positions are padding: a context that every ndpp layer inside it reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class _OfThread(threading.local):
    """The mask in force in this thread."""

    valid: Tensor | None = None


class _OfCompiled:
    """The mask in force for compiled code, which cannot read what belongs to a thread: the one entered last."""

    valid: Tensor | None = None


_thread = _OfThread()
_compiled = _OfCompiled()


@contextmanager
def mask(valid: Tensor | None) -> Iterator[None]:
    """Within this context, positions where `valid` is False take no part in statistics and scale.

    Args:
        valid: boolean, True for data and False for padding. Tokens: (batch, time), for Linear inputs (batch, time,
            features) or (batch·time, features) and for Conv1d inputs. Images: (batch, height, width), at any
            resolution: feature maps of another size take the nearest positions. (batch,) marks whole samples. Inputs
            of shape (batch, features) drop samples that are padding altogether. None switches an outer mask off.

    Convolutions read padding as zeros, so that with zero padding a sample gives what it gives alone. With
    activation checkpointing, enter the context inside the function that is checkpointed: it has to be there again.
    """
    if valid is not None and (not isinstance(valid, Tensor) or valid.dtype != torch.bool or valid.dim() < 1):
        seen = f"{valid.dtype} of shape {tuple(valid.shape)}" if isinstance(valid, Tensor) else type(valid).__name__
        raise TypeError(f"ndpp.mask: expected a boolean tensor of shape (batch, ...), True where data is; got {seen}")
    previous = _thread.valid
    _thread.valid = _compiled.valid = valid
    try:
        yield
    finally:
        _thread.valid = _compiled.valid = previous


def active() -> Tensor | None:
    """The mask in force, if any."""
    return _compiled.valid if torch.compiler.is_compiling() else _thread.valid


def fit(valid: Tensor, batch: int, sizes: tuple[int, ...], resample: bool = True) -> Tensor:
    """The mask for positions (batch, *sizes) of one layer's input."""
    if tuple(valid.shape) == (batch, *sizes):
        return valid
    if not sizes and valid.numel() == batch:
        return valid.flatten()
    if valid.shape[0] == batch and not sizes:
        return valid.flatten(1).any(1)
    if valid.shape == (batch,):
        return valid.reshape(batch, *(1 for _ in sizes)).expand(batch, *sizes)
    fits = valid.shape[0] == batch and valid.dim() == 1 + len(sizes)
    if resample and fits and min(sizes) > 0 and min(valid.shape[1:]) > 0:
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
