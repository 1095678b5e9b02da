"""share_: layers that read the same tensor compute one D."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..attention import Projection
from ..decorrelated import Decorrelated
from ..feeding import evaluating, numbered
from ..geometry import Grid
from ..sharing import Meeting
from ..stages import axes_of
from .convert import refuse_wrapped

Call = tuple[object, ...]


def share_(model: nn.Module, batch: Any) -> list[tuple[str, ...]]:
    """Find the layers that read the same tensor, in one run on a batch; in training each such group computes one D.

    Queries, keys and values of attention written as three layers are such a group, the two first layers of a gated
    MLP, the heads of a detector. Layers belong together if their settings and the positions they look at are the same,
    in every call of that run. From then on whichever of them is called first in training computes the scale and the
    statistics of that tensor for all; each keeps its own running statistics, and is alone again wherever it is given
    another tensor. Compiled code, checkpointing, masks and function transforms compute for each layer, as before.
    Where that tensor needs a gradient, the outputs of a group belong to one graph: one backward pass for all of them.

    Call it after :func:`ndpp.convert_` and before wrapping the model for several processes. A second call begins anew.

    Args:
        model: one with ndpp layers.
        batch: a tensor, a mapping (``model(**batch)``), a tuple whose first element is the input, or a function of the
            model, for example ``lambda model: model(source, target)``. It runs in evaluation mode; nothing changes.

    Returns:
        The names of the layers of each group.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ndpp.share_: expected an nn.Module; got {type(model).__name__}")
    refuse_wrapped(model, "ndpp.share_", "share")
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Decorrelated)
        and not isinstance(module, Projection)  # attention sees to its own
        and not module.settings.freeze  # those go by their running statistics
    }
    if not layers:
        raise ValueError("ndpp.share_: the model has no ndpp layers; convert it first: ndpp.convert_(model)")
    calls: dict[str, list[Call]] = {name: [] for name in layers}
    with evaluating(model), _watched(layers, calls):
        for fed in numbered([batch], "ndpp.share_"):
            fed(model)
    groups: dict[tuple[Call, ...], list[str]] = {}
    for name, seen in calls.items():
        if seen:
            groups.setdefault(tuple(seen), []).append(name)
    found = [tuple(names) for names in groups.values() if len(names) > 1]
    for layer in layers.values():
        layer._meeting = None
    for names in found:
        meeting = Meeting(len(names))
        for name in names:
            layers[name]._meeting = meeting
    return found


@contextmanager
def _watched(layers: dict[str, Decorrelated], calls: dict[str, list[Call]]) -> Iterator[None]:
    """Note for every call which tensor was given, as it was then, and what decides which rows are looked at."""
    given: Any = WeakTensorKeyDictionary()  # a number for each tensor, for as long as it lives
    numbers = itertools.count()

    def watched(name: str, layer: Decorrelated) -> Callable[..., Tensor]:
        compute: Callable[..., Tensor] = layer._product
        own = calls[name]

        def product(x: Tensor, grid: Grid, *args: Any, source: Tensor) -> Tensor:
            number = next(numbers)
            if len(grid.phases) == 1 and not source.is_inference():  # others never meet
                number = given.setdefault(source, number)
            version = None if source.is_inference() else source._version
            own.append((number, version, layer.settings, layer._plan_key, *axes_of(grid)))
            return compute(x, grid, *args, source=source)

        return product

    for name, layer in layers.items():
        layer.__dict__["_product"] = watched(name, layer)
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.__dict__["_product"]
