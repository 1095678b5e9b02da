"""ResNet-18 and its like for 32×32 images (3×3 stem, no pooling before the end), with BatchNorm or on ndpp layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

import ndpp


def layer(inputs: int, outputs: int, kernel: int, stride: int, settings: ndpp.Settings | None) -> nn.Module:
    """Convolution and BatchNorm, or the one ndpp layer that stands for both."""
    if settings is not None:
        return ndpp.Conv2d(inputs, outputs, kernel, stride, kernel // 2, settings=settings)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two 3×3 layers and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, settings: ndpp.Settings | None) -> None:
        super().__init__()
        self.first = layer(inputs, outputs, 3, stride, settings)
        self.second = layer(outputs, outputs, 3, 1, settings)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else layer(inputs, outputs, 1, stride, settings)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of `depth` blocks: 2 is ResNet-18. `settings` None is BatchNorm."""

    def __init__(self, classes: int, width: int, settings: ndpp.Settings | None, depth: int = 2) -> None:
        super().__init__()
        self.stem = layer(3, width, 3, 1, settings)
        blocks: list[nn.Module] = []
        inputs = width
        for stage, outputs in enumerate((width, 2 * width, 4 * width, 8 * width)):
            blocks.append(Block(inputs, outputs, 1 if stage == 0 else 2, settings))
            blocks += [Block(outputs, outputs, 1, settings) for _ in range(depth - 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head: nn.Module = (
            nn.Linear(inputs, classes) if settings is None else ndpp.Linear(inputs, classes, settings=settings)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        y: Tensor = self.head(x.mean((2, 3)))
        return y


def he_(model: nn.Module) -> None:
    """torchvision's start for ResNets, in place of torch.nn's own."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
