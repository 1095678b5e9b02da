"""Classification of images: cross-entropy, and how many are right at the first and within five guesses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Config, ImageData
from ..data.images import open_images
from ..errors import ConfigError
from ..models.classifiers import build_classifier
from ..models.weights import load_
from .base import Meter, Task

Batch = tuple[Tensor, Tensor]


class Classification(Task):
    """Batches are images (batch, channels, size, size) and labels (batch)."""

    metric: ClassVar[str] = "top1"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not isinstance(config.data, ImageData):
            raise ConfigError(f"classification takes its data from ImageData; got {type(config.data).__name__}")
        self.data = config.data
        self.train_set, self.eval_set, self.names = open_images(config.data)

    def build(self) -> nn.Module:
        model = self.config.model
        return build_classifier(model.name, len(self.names), len(self.data.mean), self.data.size, model.options)

    def load_weights(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """The last layer stays as it is where the weights are for another number of classes."""
        layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        load_(model, state, heads=layers[-1:])

    def collate(self, items: Sequence[tuple[Tensor, int]]) -> Batch:
        images, labels = zip(*items, strict=True)
        return torch.stack(images), torch.tensor(labels)

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(batch[0])
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits = self.forward(model, batch)
        return {"loss": F.cross_entropy(logits.float(), batch[1], label_smoothing=self.config.run.label_smoothing)}

    def meter(self) -> Accuracy:
        return Accuracy(self)

    def example(self) -> tuple[Tensor, ...]:
        shape = (1, len(self.data.mean), self.data.size, self.data.size)
        return (torch.randn(shape, generator=torch.Generator().manual_seed(0)),)

    def files(self) -> dict[str, str]:
        return {"classes.json": json.dumps(self.names, ensure_ascii=False, indent=1)}


class Accuracy(Meter):
    """top1 and top5 in percent, and the cross-entropy without label smoothing."""

    def __init__(self, task: Classification) -> None:
        self.task = task
        self.sums: list[Tensor] = []  # one for each batch, still on its device: adding them up here would wait for it

    def update(self, model: nn.Module, batch: Batch) -> None:
        labels = batch[1]
        logits = self.task.forward(model, batch).float()
        guesses = logits.topk(min(5, logits.shape[1])).indices == labels.unsqueeze(1)
        loss = F.cross_entropy(logits, labels, reduction="sum")
        self.sums.append(torch.stack([guesses[:, 0].sum(), guesses.sum(), loss, loss.new_tensor(len(labels))]))

    def state(self) -> list[float]:
        sums: list[float] = torch.stack(self.sums).double().sum(0).tolist() if self.sums else [0.0] * 4
        return sums

    def result(self, states: list[list[float]]) -> dict[str, float]:
        first, five, loss, count = (sum(values) for values in zip(*states, strict=True))
        return {"top1": 100 * first / count, "top5": 100 * five / count, "eval_loss": loss / count}
