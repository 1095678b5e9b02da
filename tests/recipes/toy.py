"""A task of a few numbers, for what the engine does with any task."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ndpp_recipes.config import Config, ImageData, ModelConfig, OptimizerConfig, RunConfig
from ndpp_recipes.errors import DataError
from ndpp_recipes.tasks import Meter, Task


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Record i is (i, noise of all three generators); those in `bad` cannot be read."""

    def __init__(self, count: int, bad: Sequence[int] = ()) -> None:
        self.count, self.bad = count, set(bad)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.bad:
            raise DataError("numbers.txt", "not a number", index)
        noise = float(torch.rand(()) + np.random.rand() + random.random())
        return torch.tensor([float(index), noise]), torch.tensor(index % 2)


class Accuracy(Meter):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def update(self, model: nn.Module, batch: Any) -> None:
        self.seen += batch[0][:, 0].int().tolist()

    def state(self) -> list[int]:
        return self.seen

    def result(self, states: list[list[int]]) -> dict[str, float]:
        return {"seen": float(sum(map(len, states)))}


class Toy(Task):
    metric = "seen"

    def __init__(self, config: Config, count: int = 20, bad: Sequence[int] = ()) -> None:
        super().__init__(config)
        self.train_set, self.eval_set = Numbers(count, bad), Numbers(7, bad)

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))

    def collate(self, items: Sequence[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.forward(model, batch), batch[1])}

    def meter(self) -> Meter:
        return Accuracy()

    def example(self) -> tuple[Tensor, ...]:
        return (torch.zeros(1, 2),)


def config(*, workers: int = 0, skip_bad: int = 0, **run: Any) -> Config:
    return Config(
        recipe="toy",
        task="classification",
        model=ModelConfig(name="toy"),
        data=ImageData(path="numbers.txt", workers=workers, skip_bad=skip_bad),
        optimizer=OptimizerConfig(lr=0.05),
        run=RunConfig(**{"batch_size": 4, "epochs": 2, **run}),
    )
