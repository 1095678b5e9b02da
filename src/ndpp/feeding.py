"""Running a model on batches as data loaders give them, and its outputs as tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn


def as_batches(batches: Any, caller: str) -> Iterable[Any]:
    """An iterable of batches, and not one batch by mistake."""
    if isinstance(batches, (Tensor, Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(
            f"{caller} must be an iterable of batches, such as a list or a data loader; got {type(batches).__name__}. "
            "One batch goes in a list: [batch]"
        )
    return batches


def numbered(batches: Iterable[Any], caller: str) -> Iterator[Any]:
    """The batches as functions of the model, whose errors say which batch it was."""
    for number, batch in enumerate(batches):
        yield functools.partial(_fed, batch, f"{caller}: batch {number}")


def _fed(batch: Any, name: str, model: nn.Module) -> Any:
    try:
        return feed(model, batch)
    except Exception as error:
        hint = "; a list or tuple is (input, ...): for other calls pass a function, lambda model: model(...)"
        hint = hint if isinstance(batch, (tuple, list)) else ""
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}{hint}") from error


def feed(model: nn.Module, batch: Any) -> Any:
    """The output for a batch: a tensor, a mapping of arguments, a tuple whose first is the input, or a function."""
    if callable(batch) and not isinstance(batch, (Tensor, Mapping)):
        return batch(model)
    batch = _moved(batch, _device(model))
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise ValueError("a batch is empty; expected (input, ...)")
        return model(batch[0])
    return model(batch)


def _device(model: nn.Module) -> torch.device | None:
    for tensors in (model.parameters(), model.buffers()):
        for tensor in tensors:
            return tensor.device
    return None


def _moved(batch: Any, device: torch.device | None) -> Any:
    if isinstance(batch, Tensor):
        return batch if device is None else batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_moved(value, device) for value in batch) if type(batch) in (tuple, list) else batch
    return batch


def tensors(output: Any) -> list[Tensor]:
    """All tensors in a model's output, whatever it is made of, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in tensors(value)]
    if isinstance(output, (tuple, list)):
        return [tensor for value in output for tensor in tensors(value)]
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return [tensor for f in dataclasses.fields(output) for tensor in tensors(getattr(output, f.name))]
    return []


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if len(set(modes.values())) == 1:
            model.train(modes[model])  # as usual: modules may do more than set a flag
            modes = {}
        for module, mode in modes.items():
            for child in module.children():
                if child not in modes:  # made in the meantime
                    child.train(mode)
            if module._modules:
                module.training = mode  # its children have their own
            elif module.training != mode:
                module.train(mode)


def shown(batches: Iterable[Any], progress: bool | None, title: str) -> Iterable[Any]:
    """The batches, under a progress bar where there is a terminal and rich is installed."""
    if progress is None:
        progress = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    if not progress:
        return batches
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError as error:
        raise ImportError("progress=True needs rich: pip install 'ndpp[inspect]'") from error
    total = len(batches) if isinstance(batches, Sized) else None
    return track(batches, title, total=total, console=Console(stderr=True))
