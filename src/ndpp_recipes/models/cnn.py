"""A small network for small images, quick on a CPU."""

from __future__ import annotations

from torch import nn


def small_cnn(classes: int, channels: int, width: int = 24) -> nn.Module:
    """Four 3×3 convolutions with BatchNorm, three of which halve the image, and a linear layer on the mean."""
    sizes = [(channels, width, 2), (width, 2 * width, 2), (2 * width, 2 * width, 1), (2 * width, 4 * width, 2)]
    layers = [layer for inputs, outputs, stride in sizes for layer in _convolution(inputs, outputs, stride)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def _convolution(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
