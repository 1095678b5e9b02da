"""Drop-in layers that compute y = S·X·D·w: Linear, Conv1d/2d/3d and ConvTranspose1d/2d/3d.

Each is the torch.nn layer of the same name, with its parameters under the same names, and applies the stock operation
with D·W for a weight and b - μ·D·W for a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .decorrelated import Decorrelated
from .geometry import Grid, conv_grid, pointwise_grid, transposed_grid
from .keeping import remembered
from .products import Operation, linear, pointwise, suits_pointwise
from .recorded import product_dtype
from .settings import Settings

Sizes = int | tuple[int, ...]
known_positions = remembered(pointwise_grid)


class Linear(Decorrelated, nn.Linear):
    """torch.nn.Linear on decorrelated features; any leading dimensions, each position of which is a row."""

    _default_block = 256
    _per_row_scale = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._decorrelate(settings)

    def _decorrelate(self, settings: Settings | None) -> None:
        self._setup(settings, groups=1, channels=self.in_features, kernel=())

    def forward(self, input: Tensor) -> Tensor:
        is_tensor = isinstance(input, Tensor) and input.dim() > 0
        if not is_tensor or input.shape[-1] != self.in_features or self.weight.numel() == 0:
            return self._call(super().forward, input)  # type: ignore[no-any-return]  # torch.nn's own error
        x = input[None] if input.dim() == 1 else input
        y: Tensor = self._call(self._forward, x.movedim(-1, 1), known_positions(x.shape[1:-1]), linear, input)
        return y[0] if input.dim() == 1 else y


def _has_channels(layer: _ConvNd, input: object) -> bool:
    """Whether this is an input (batch, channels, *sizes) or (channels, *sizes) of the layer."""
    n = len(layer.kernel_size)
    fits = isinstance(input, Tensor) and input.dim() in (n + 1, n + 2) and input.shape[-n - 1] == layer.in_channels
    return fits and layer.weight.numel() > 0


def numbers(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """One for every axis, of an attribute that was changed to a number or a list."""
    if isinstance(value, tuple):
        return value
    return (value,) * count if isinstance(value, int) else tuple(value)


def padding_pairs(flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Of every axis, from what `F.pad` takes."""
    return tuple([(flat[i], flat[i + 1]) for i in range(len(flat) - 2, -1, -2)])


@remembered
def accepted_grid(
    sizes: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    mode: str,
) -> Grid | None:
    """Of an input of these sizes, or None for one that torch.nn does not take."""
    pairs, most = padding_pairs(padding), {"reflect": -1, "circular": 0}.get(mode)
    grid = conv_grid(sizes, kernel, stride, pairs, dilation)
    axes = grid.phases[0]
    fits = most is None or all(max(pair) <= axis.size + most for pair, axis in zip(pairs, axes, strict=True))
    return grid if fits and all([axis.size > 0 and axis.count > 0 for axis in axes]) else None


class _Conv(Decorrelated, _ConvNd):
    """Convolution of any dimension; the stock class of that dimension follows in the order of bases."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        stock: Any = super()
        stock.__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._decorrelate(settings)

    def _decorrelate(self, settings: Settings | None) -> None:
        self._setup(settings, self.groups, self.in_channels, self.kernel_size)

    def forward(self, input: Tensor) -> Tensor:
        grid = self._accepted(input)
        if grid is None:
            return self._call(self._stock_forward, input)  # type: ignore[no-any-return]  # torch.nn's own error
        x = input if input.dim() == len(self.kernel_size) + 2 else input[None]
        y: Tensor = self._call(self._forward, x, grid, self._operation(x), input)
        return y if input.dim() == x.dim() else y[0]

    def _stock_forward(self, input: Tensor) -> Tensor:
        stock: Any = super()
        y: Tensor = stock.forward(input)
        return y

    def _operation(self, x: Tensor) -> Operation:
        """The stock operation, or what computes the same in training on a GPU."""
        by_pixel = self.training and self.kernel_size == self.stride == (1, 1) and self.groups == 1
        if by_pixel and not any(self._padding()) and suits_pointwise(x, product_dtype(x, self.weight)):
            return pointwise
        convolve: Operation = self._conv_forward
        return convolve

    def _accepted(self, input: Tensor) -> Grid | None:
        """The grid of an input with or without a batch; None for what is left to torch.nn, for its own error."""
        if not _has_channels(self, input):
            return None
        n = len(self.kernel_size)
        sizes: Any = input.shape[-n:]
        kernel, stride, dilation = numbers(self.kernel_size, n), numbers(self.stride, n), numbers(self.dilation, n)
        return accepted_grid(sizes, kernel, stride, self._padding(), dilation, self.padding_mode)

    def _padding(self) -> tuple[int, ...]:
        """As `F.pad` takes it: what the stock operation will pad by, if attributes have changed since, too."""
        padding: Any = self.padding
        if isinstance(padding, str) or self.padding_mode != "zeros":
            return tuple(self._reversed_padding_repeated_twice)  # 'same' and 'valid' are numbers here
        return tuple([size for size in reversed(numbers(padding, len(self.kernel_size))) for _ in range(2)])


class Conv1d(_Conv, nn.Conv1d):
    """torch.nn.Conv1d on decorrelated patches."""


class Conv2d(_Conv, nn.Conv2d):
    """torch.nn.Conv2d on decorrelated patches."""


class Conv3d(_Conv, nn.Conv3d):
    """torch.nn.Conv3d on decorrelated patches."""


class _ConvTranspose(Decorrelated, _ConvTransposeNd):
    """Transposed convolution of any dimension, by its own data matrix: one row for every output position."""

    _transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        settings: Settings | None = None,
    ) -> None:
        stock: Any = super()
        shape = (in_channels, out_channels, kernel_size, stride, padding, output_padding)
        stock.__init__(*shape, groups, bias, dilation, padding_mode, device, dtype)
        self._decorrelate(settings)

    def _decorrelate(self, settings: Settings | None) -> None:
        self._setup(settings, self.groups, self.in_channels, self.kernel_size)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        n = len(self.kernel_size)
        if not _has_channels(self, input):
            return self._call(self._stock_forward, input, output_size)  # type: ignore[no-any-return]  # its own error
        padding: Any = self.padding
        find_extra: Any = self._output_padding
        sizes = (output_size, self.stride, padding, self.kernel_size, n, self.dilation)
        extra = self._call(find_extra, input, *sizes)
        x = input if input.dim() == n + 2 else input[None]
        grid = transposed_grid(x.shape[2:], self.kernel_size, self.stride, padding, self.dilation, extra)
        if not any(grid.positions(phase) for phase in grid.phases) or 0 in x.shape[2:]:
            return self._call(self._stock_forward, input, output_size)  # type: ignore[no-any-return]
        operation: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]

        def transpose(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y: Tensor = operation(x, weight, bias, self.stride, padding, extra, self.groups, self.dilation)
            return y

        y: Tensor = self._call(self._forward, x, grid, transpose, input)
        return y if input.dim() == x.dim() else y[0]

    def _stock_forward(self, input: Tensor, output_size: list[int] | None) -> Tensor:
        stock: Any = super()
        y: Tensor = stock.forward(input, output_size)
        return y


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d on decorrelated data."""


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """torch.nn.ConvTranspose2d on decorrelated data."""


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d on decorrelated data."""
