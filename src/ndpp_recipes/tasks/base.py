"""What a task adds to the engine: data, a network, a loss and a metric."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..config import Config


class Meter(abc.ABC):
    """Collects what a model does on the evaluation data, over several ranks if need be."""

    @abc.abstractmethod
    def update(self, model: nn.Module, batch: Any) -> None:
        """Look at one batch; the model is in evaluation mode, without gradients."""

    @abc.abstractmethod
    def state(self) -> Any:
        """What was collected, to be sent to other ranks (picklable, on the CPU)."""

    @abc.abstractmethod
    def result(self, states: list[Any]) -> dict[str, float]:
        """The metrics of all that was collected: the states of every rank. The task's headline metric is among them."""


class Task(abc.ABC):
    """Made from a configuration; opens the data, and says in one DataError what is wrong with it.

    The data sets are map-style. An item may draw random numbers from torch's, numpy's or Python's global generators:
    they are seeded for each item. A record that cannot be used raises DataError with its file and number.
    """

    metric: ClassVar[str]  # the headline, among those a meter gives
    maximise: ClassVar[bool] = True
    unit: ClassVar[str] = "images"  # what throughput counts
    free_dims: ClassVar[tuple[int, ...]] = (0,)  # of the inputs of an exported network: batch, and length of texts

    train_set: Dataset[Any]
    eval_set: Dataset[Any]

    def __init__(self, config: Config) -> None:
        self.config = config

    @abc.abstractmethod
    def build(self) -> nn.Module:
        """The plain network with the normalisation its authors gave it, freshly initialised."""

    @abc.abstractmethod
    def collate(self, items: Sequence[Any]) -> Any:
        """A batch: tensors in tuples, lists and mappings."""

    @abc.abstractmethod
    def forward(self, model: nn.Module, batch: Any) -> Any:
        """What the model gives for a batch (moved to its device)."""

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """`loss` is what training descends; others are logged beside it."""

    @abc.abstractmethod
    def meter(self) -> Meter:
        """A new, empty one."""

    @abc.abstractmethod
    def example(self) -> tuple[Tensor, ...]:
        """Inputs for `exportable`, of the size met in evaluation."""

    def exportable(self, model: nn.Module) -> nn.Module:
        """What export traces: tensors in, tensors out."""
        return model

    def load_weights(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Start from the weights of a plain network; an error says what does not fit."""
        model.load_state_dict(state)

    def batches(self, size: int, generator: torch.Generator) -> list[list[int]]:
        """One epoch of training as lists of records, in order. How many there are depends on the data alone."""
        order = torch.randperm(len(self.train_set), generator=generator).tolist()  # type: ignore[arg-type]
        return [order[i : i + size] for i in range(0, len(order) - size + 1, size)]

    def eval_batches(self, size: int) -> list[list[int]]:
        count = len(self.eval_set)  # type: ignore[arg-type]
        return [list(range(i, min(i + size, count))) for i in range(0, count, size)]

    def count(self, batch: Any) -> int:
        """How many units are in a batch."""
        first = batch[0] if isinstance(batch, (tuple, list)) else next(iter(batch.values()))
        return len(first)

    def files(self) -> dict[str, str]:
        """Small files that belong to the trained model (vocabulary, names of classes): name → text."""
        return {}
