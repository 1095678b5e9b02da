"""ResNets for 32×32 images: a 3×3 stem, no pooling before the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock


def resnet18_cifar(classes: int, channels: int, width: int = 64) -> nn.Module:
    return CifarResNet([2, 2, 2, 2], [width, 2 * width, 4 * width, 8 * width], classes, channels, projection=True)


def resnet_cifar(depth: int, classes: int, channels: int, width: int = 16) -> nn.Module:
    """He et al. 2015, section 4.2: 6n+2 layers in three stages, and shortcuts without parameters."""
    blocks = (depth - 2) // 6
    return CifarResNet([blocks] * 3, [width, 2 * width, 4 * width], classes, channels, projection=False)


class CifarResNet(nn.Module):
    """Stages of so many blocks of such widths; every stage but the first halves the image."""

    def __init__(
        self, blocks: Sequence[int], widths: Sequence[int], classes: int, channels: int, *, projection: bool
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        stages, inputs = [], widths[0]
        for count, width in zip(blocks, widths, strict=True):
            stages.append(_stage(inputs, width, count, projection))
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.relu(self.bn1(self.conv1(x))))
        y: Tensor = self.fc(x.mean((2, 3)))
        return y


class Shortcut(nn.Module):
    """Every second pixel, and zeros for the channels that are new."""

    def __init__(self, new: int) -> None:
        super().__init__()
        self.new = new

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.new // 2, self.new - self.new // 2))


def _stage(inputs: int, width: int, count: int, projection: bool) -> nn.Module:
    if inputs == width:
        return nn.Sequential(*(BasicBlock(width, width) for _ in range(count)))
    shortcut: nn.Module = Shortcut(width - inputs)
    if projection:
        shortcut = nn.Sequential(nn.Conv2d(inputs, width, 1, stride=2, bias=False), nn.BatchNorm2d(width))
    first = BasicBlock(inputs, width, stride=2, downsample=shortcut)
    return nn.Sequential(first, *(BasicBlock(width, width) for _ in range(count - 1)))
