"""recalibrate_: the statistics of a whole data set, in place of the running averages of training."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from . import sync
from .decorrelated import Decorrelated
from .feeding import as_batches, evaluating, feed, numbered, shown


def recalibrate_(model: nn.Module, batches: Iterable[Any], *, progress: bool | None = None) -> int:
    """Replace the running statistics of all layers by the exact ones over `batches`: every row counts once.

    Each layer computes with the statistics of the current batch, as in training, while dropout is off and other norms
    evaluate. Positions masked by :func:`ndpp.mask` and batches that are not finite stay out. Frozen layers keep theirs.

    Layers with ``Settings.sync`` get the statistics of the batches of all ranks, which all must call this, each with as
    many batches as it has. The ranks meet at the end alone: until then each computes with its own batch statistics.

    Args:
        model: one with ndpp layers.
        batches: tensors, mappings (``model(**batch)``), tuples whose first element is the input, or functions of the
            model, for example ``lambda model: model(source, target)``.
        progress: show a progress bar on standard error (needs rich); by default where that is a terminal.

    Returns:
        The number of batches, of all ranks that share statistics. An error on the way leaves all statistics as they
        were, on every rank.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module  # its forward would copy the buffers of rank 0 over what the others collect
    if not isinstance(model, nn.Module):
        raise TypeError(f"ndpp.recalibrate_: expected an nn.Module; got {type(model).__name__}")
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Decorrelated) and not module.settings.freeze
    }
    batches = numbered(
        shown(as_batches(batches, "ndpp.recalibrate_: batches"), progress, "recalibrating"), "ndpp.recalibrate_"
    )
    if any(layer.running_cov.is_meta for layer in layers.values()):
        raise ValueError(
            "ndpp.recalibrate_: the model is on the meta device, without data; move it to a real one first"
        )
    if not layers:
        raise ValueError("ndpp.recalibrate_: the model has no ndpp layers whose statistics may change")
    with evaluating(model):
        count, rows = collect_(layers, model, batches, "batch")
    if count == 0:
        raise ValueError("ndpp.recalibrate_: expected at least one batch; got none (is the loader used up?)")
    unseen = [name or "the model" for name, seen in rows.items() if seen == 0]
    if unseen:
        warnings.warn(
            f"ndpp.recalibrate_: {len(unseen)} layers saw no finite data and keep their statistics: "
            f"{', '.join(unseen[:5])}",
            stacklevel=2,
        )
    return count


def collect_(
    layers: dict[str, Any], model: nn.Module, batches: Iterable[Any], using: Literal["batch", "running"]
) -> tuple[int, dict[str, float]]:
    """Number of batches, and of rows by layer. The layers compute with batch statistics, or with those they have.

    Where layers share statistics, both are those of all ranks.
    """
    own = 0
    counts: dict[Any, int] = {}
    for layer in layers.values():
        layer._begin_collecting(using)
    try:
        for batch in batches:
            feed(model, batch)
            own += 1
    except Exception:
        _join(layers, own, failed=True)  # the others are waiting there
        raise
    else:
        counts = {None: own, **_join(layers, own, failed=False)}
    finally:
        rows = {name: layer._end_collecting(counts.get(_group(layer), 0)) for name, layer in layers.items()}
    return max(counts.values()), rows


def _group(layer: Any) -> Any:
    return sync.group_of(layer.settings.sync)


def _join(layers: dict[str, Any], own: int, failed: bool) -> dict[Any, int]:
    """Join what all ranks of each layer's group collected, unless one of them failed; the batches by group.

    Only here do the ranks meet: each ran as many batches as it had.
    """
    groups = {_group(layer): layer.running_cov for layer in layers.values()}
    sums = {g: sync.total([own, failed], like, g) for g, like in groups.items() if g is not None}
    for group, (_, failures) in sums.items():
        if failures and not failed:
            raise RuntimeError(
                f"{int(failures)} of {group.size()} ranks failed on their batches; the statistics are left as they were"
            )
    for layer in layers.values():
        if _group(layer) in sums and not failed:
            layer._join_collected(_group(layer))
    return {group: int(batches) for group, (batches, _) in sums.items()}
