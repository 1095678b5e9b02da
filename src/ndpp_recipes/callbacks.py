"""ndpp in other people's loops: callbacks for Lightning and for transformers' Trainer.

`LightningCallback` and `TransformersCallback` are made when they are asked for, so that this module imports without
either library.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import ndpp
from ndpp.decorrelated import Decorrelated
from ndpp.feeding import feed as fed
from ndpp.inspection import Change, _compare

from .errors import MissingExtra, RecipeError

Feed = Callable[[nn.Module, Any], Any]


@torch.no_grad()
def conditioning(model: nn.Module) -> dict[str, Change]:
    """Condition number of the input of every ndpp layer by its running statistics, and after decorrelation.

    It costs eigenvalues and no data. Layers that have seen none, or whose input does not vary, are left out.
    """
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, Decorrelated) and int(layer.num_batches_tracked) > 0:
            stats = layer._running()
            change, *_ = _compare(stats.cov, layer._solve(stats), layer.layout.widths)
            if change.before == change.before:
                found[name] = change
    return found


def conditioning_summary(model: nn.Module) -> dict[str, float]:
    """Median and worst over the layers, under the names that loggers get."""
    found = conditioning(model).values()
    if not found:
        return {}
    before, after = zip(*found, strict=True)
    return {
        "ndpp/condition_median": statistics.median(before),
        "ndpp/condition_worst": max(before),
        "ndpp/decorrelated_median": statistics.median(after),
        "ndpp/decorrelated_worst": max(after),
    }


class Recalibration:
    """What both callbacks do, at the end of training and before every so many evaluations.

    Args:
        batches: of the training loader, to recalibrate on.
        every: 0 is at the end only, n before every n-th evaluation as well.
        loader: batches to use in place of the training loader's.
        feed: ``feed(model, batch)`` runs the model; by default a mapping is its arguments, and of a tuple the first
            element its input.
    """

    def __init__(
        self, *, batches: int = 50, every: int = 0, loader: Iterable[Any] | None = None, feed: Feed | None = None
    ) -> None:
        for name, value, least in (("batches", batches, 1), ("every", every, 0)):
            if value < least:
                raise RecipeError(f"{type(self).__name__}: {name} must be at least {least}; got {value}")
        super().__init__()
        self.batches, self.every, self.loader = batches, every, loader
        self.feed: Feed = feed or fed
        self.evaluations = 0

    def check(self, model: nn.Module) -> None:
        """Before hours of training, and not after them."""
        if not any(isinstance(m, Decorrelated) and not m.settings.freeze for m in model.modules()):
            raise RecipeError(
                f"{type(self).__name__}: the model has no ndpp layers whose statistics may change; "
                "ndpp.convert_(model) it before training, or leave out this callback"
            )

    def due(self) -> bool:
        """Count an evaluation that is about to come."""
        self.evaluations += 1
        return self.every > 0 and self.evaluations % self.every == 0

    def refresh_(
        self, model: nn.Module, loader: Any, context: Callable[[], contextlib.AbstractContextManager[Any]]
    ) -> dict[str, float]:
        """Recalibrate, and say what there is to log. Training goes on with the random numbers it would have had."""
        devices = {tensor.device.index for tensor in model.buffers() if tensor.device.type == "cuda"}
        with torch.random.fork_rng(sorted(devices)):
            batches = itertools.islice(_own_pass(loader if self.loader is None else self.loader), self.batches)
            ndpp.recalibrate_(model, (self._under(context, batch) for batch in batches), progress=False)
            return conditioning_summary(model)

    def _under(self, context: Callable[[], contextlib.AbstractContextManager[Any]], batch: Any) -> Callable[..., Any]:
        def forward(model: nn.Module) -> Any:
            with context():
                return self.feed(model, batch)

        return forward


def _own_pass(loader: Any) -> Iterator[Any]:
    """The batches of a loader whose own pass may be under way, and goes on undisturbed."""
    if isinstance(loader, (dict, list, tuple)) and any(isinstance(part, DataLoader) for part in _parts(loader)):
        raise RecipeError("expected one training loader; got several: say which batches to use with loader=")
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's wrapper keeps account of who is iterated
    if isinstance(loader, DataLoader):
        loader = copy.copy(loader)
        loader._iterator = None  # that of persistent workers is in use
    return iter(loader)


def _parts(loaders: Any) -> Iterable[Any]:
    return loaders.values() if isinstance(loaders, dict) else loaders


# --- the two libraries ---


def _library(names: tuple[str, ...], purpose: str) -> Any:
    """The first that there is; those that are imported already come first."""
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):
                raise
    raise MissingExtra(names[0].partition(".")[0], purpose)


@functools.cache
def _lightning_callback() -> type:
    library = _library(("lightning.pytorch", "pytorch_lightning"), "LightningCallback")

    class LightningCallback(Recalibration, library.Callback):  # type: ignore[misc, name-defined]
        """Recalibrates the ndpp layers of a LightningModule and logs their conditioning to the trainer's loggers."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.check(pl_module)

        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking and trainer.state.fn == "fit" and self.due():
                self._refresh(trainer, pl_module)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self._refresh(trainer, pl_module)

        def _refresh(self, trainer: Any, module: Any) -> None:
            values = self.refresh_(module, trainer.train_dataloader, trainer.precision_plugin.forward_context)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    return _public(LightningCallback)


@functools.cache
def _transformers_callback() -> type:
    library = _library(("transformers",), "TransformersCallback")

    class TransformersCallback(Recalibration, library.TrainerCallback):  # type: ignore[misc, name-defined]
        """Recalibrates the ndpp layers of a model in transformers' Trainer and logs their conditioning.

        log: ``trainer.log``, which a callback does not know by itself; without it, values go to ``state.log_history``.
        """

        def __init__(self, *, log: Callable[[dict[str, float]], None] | None = None, **options: Any) -> None:
            super().__init__(**options)
            self.log = log

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            self.check(model)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if control.should_evaluate and self.due():
                self._refresh(state, **given)

        def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.on_step_end(args, state, control, **given)

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self._refresh(state, **given)

        def _refresh(self, state: Any, model: Any, train_dataloader: Any, **_: Any) -> None:
            values = self.refresh_(model, train_dataloader, contextlib.nullcontext)
            if self.log is not None:
                self.log(values)
            else:
                state.log_history.append({**values, "step": state.global_step})

    return _public(TransformersCallback)


def _public(made: type) -> type:
    """Named as what this module's `__getattr__` gives, so that it can be pickled."""
    made.__qualname__ = made.__name__
    return made


_MADE: dict[str, Callable[[], type]] = {
    "LightningCallback": _lightning_callback,
    "TransformersCallback": _transformers_callback,
}


def __getattr__(name: str) -> Any:
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _MADE[name]()
