"""Where a loss stopped being a number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ndpp.decorrelated import Decorrelated
from ndpp.feeding import tensors


def nonfinite_cause(model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any]) -> str:
    """The first thing that is not finite, in the order in which a step meets them: data, parameters, layers."""
    for number, tensor in enumerate(tensors(batch)):
        if _broken(tensor):
            return f"the batch itself: its tensor {number}, of shape {tuple(tensor.shape)}, has NaN or Inf"
    for name, parameter in model.named_parameters():
        if _broken(parameter):
            return (
                f"parameter {name} is not finite: an earlier gradient was too large; lower optimizer.lr or set run.clip"
            )
    for name, kind, inputs in _first_broken(model, batch, forward):
        before = "its input is finite" if inputs else "its input is not finite either"
        return f"layer {name} ({kind}) is the first whose output is not finite; {before}"
    return "every layer's output is finite; the loss function itself gave it"


def _broken(value: Tensor) -> bool:
    return value.is_floating_point() and not bool(torch.isfinite(value).all())


@contextlib.contextmanager
def _alone(model: nn.Module) -> Iterator[None]:
    """Without the statistics of other ranks, whose loss may be a number: they would not come."""
    shared = [m for m in model.modules() if isinstance(m, Decorrelated) and m.settings.sync is not False]
    before = [module.settings for module in shared]
    try:
        for module in shared:
            module.settings = module.settings.replace(sync=False)
        yield
    finally:
        for module, settings in zip(shared, before, strict=True):
            module.settings = settings


def _first_broken(
    model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any]
) -> Iterator[tuple[str, str, bool]]:
    seen: list[tuple[str, str, bool]] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not seen and any(map(_broken, tensors(output))):
                seen.append((name, type(module).__name__, not any(map(_broken, tensors(inputs)))))

        return hook

    leaves = [(name or "(the model)", m) for name, m in model.named_modules() if not any(m.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        with torch.no_grad(), _alone(model):
            forward(model, batch)
    except Exception:  # what is not finite may break later layers
        pass
    finally:
        for handle in handles:
            handle.remove()
    yield from seen
