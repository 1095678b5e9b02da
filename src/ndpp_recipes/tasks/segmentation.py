"""Segmentation: a class for every pixel, and how far the regions found are the regions there are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import Config, SegmentationData
from ..data.segmentation import Item, Pixels, open_segmentation, padded
from ..errors import ConfigError, RecipeError
from ..models.segmenters import build_segmenter, load_weights_
from .base import Meter, Task

AUXILIARY = 0.4  # weight of the loss of the auxiliary head, as in the reference training of torchvision

Batch = tuple[Tensor, Tensor]


class Segmentation(Task):
    """Batches are images (batch, channels, height, width) and labels (batch, height, width)."""

    metric: ClassVar[str] = "miou"
    free_dims: ClassVar[tuple[int, ...]] = (0, 2, 3)

    train_set: Pixels
    eval_set: Pixels

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if not isinstance(config.data, SegmentationData):
            raise ConfigError(f"segmentation takes its data from SegmentationData; got {type(config.data).__name__}")
        self.data = config.data
        self.train_set, self.eval_set, self.names = open_segmentation(config.data)

    def build(self) -> nn.Module:
        model = self.config.model
        return build_segmenter(model.name, len(self.names), len(self.data.mean), model.options)

    def load_weights(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        load_weights_(model, state)

    def collate(self, items: Sequence[Item]) -> Batch:
        """Images of different sizes are padded to the largest height and width."""
        size = [max(labels.shape[axis] for _, labels in items) for axis in (0, 1)]
        images, labels = zip(*(padded(*item, size, self.data.ignore) for item in items), strict=True)
        return torch.stack(images), torch.stack(labels)

    def forward(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = model(batch[0])
        return outputs

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        outputs = self.forward(model, batch)
        losses = {"loss": self._cross_entropy(outputs["out"], batch[1])}
        if "aux" in outputs:
            losses["aux"] = self._cross_entropy(outputs["aux"], batch[1])
            losses["loss"] = losses["loss"] + AUXILIARY * losses["aux"]
        return losses

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over labelled pixels; 0 where there is none. In rows, as torch's for images is not deterministic."""
        rows = logits.float().movedim(1, -1).flatten(0, -2)
        smoothing, ignore = self.config.run.label_smoothing, self.data.ignore
        total = F.cross_entropy(rows, labels.flatten(), ignore_index=ignore, reduction="sum", label_smoothing=smoothing)
        return total / (labels != ignore).sum().clamp(min=1)

    def meter(self) -> Overlap:
        return Overlap(self, len(self.names), self.data.ignore)

    def example(self) -> tuple[Tensor, ...]:
        return (torch.randn(1, len(self.data.mean), *self.data.crop, generator=torch.Generator().manual_seed(0)),)

    def exportable(self, model: nn.Module) -> nn.Module:
        return Logits(model)

    def files(self) -> dict[str, str]:
        return {"classes.json": json.dumps(self.names, indent=1)}


class Logits(nn.Module):
    """Of a network that gives a dictionary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)["out"]
        return logits


class Overlap(Meter):
    """miou (intersection over union, the mean over the classes that are there or are found) and pixel_accuracy."""

    def __init__(self, task: Segmentation, classes: int, ignore: int) -> None:
        self.task, self.classes, self.ignore = task, classes, ignore
        self.confusion: Any = 0  # a tensor once there was a batch: (true class, found class) → pixels

    def update(self, model: nn.Module, batch: Batch) -> None:
        labels = batch[1].flatten()
        found = self.task.forward(model, batch)["out"].argmax(1).flatten()
        # Ignored pixels are counted in a row of their own, which is cut off: no wait for how many there are.
        rows = torch.where(labels == self.ignore, self.classes, labels)
        counts = torch.bincount(rows * self.classes + found, minlength=(self.classes + 1) * self.classes)
        self.confusion = self.confusion + counts.reshape(self.classes + 1, self.classes)[: self.classes]

    def state(self) -> Tensor:
        if isinstance(self.confusion, int):
            return torch.zeros(self.classes, self.classes, dtype=torch.int64)
        confusion: Tensor = self.confusion.cpu()
        return confusion

    def result(self, states: list[Tensor]) -> dict[str, float]:
        confusion = torch.stack(states).sum(0).double()
        right, total = confusion.diagonal(), confusion.sum()
        if total == 0:
            raise RecipeError(f"every pixel of the evaluation data is labelled {self.ignore} (data.ignore)")
        union = confusion.sum(0) + confusion.sum(1) - right
        overlap = (right / union)[union > 0]
        return {"miou": 100 * overlap.mean().item(), "pixel_accuracy": 100 * (right.sum() / total).item()}
