"""Layers of other libraries that are one of the seven in disguise. None of these libraries is imported."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from .decorrelated import Decorrelated
from .geometry import conv_grid, pointwise_grid
from .layers import Conv2d, Linear, _has_channels
from .settings import Settings


class Conv1D(Decorrelated):
    """transformers' Conv1D: a linear layer whose weight is (in, out)."""

    _default_block = 256
    _per_row_scale = True
    _transposed = True

    def _decorrelate(self, settings: Settings | None) -> None:
        self._setup(settings, groups=1, channels=self.weight.shape[0], kernel=())

    def forward(self, x: Tensor) -> Tensor:
        rows = x[None] if x.dim() == 1 else x
        y: Tensor = self._call(self._forward, rows.movedim(-1, 1), pointwise_grid(rows.shape[1:-1]), _product, x)
        return y[0] if x.dim() == 1 else y


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.movedim(1, -1), weight.mT, bias)


class Conv2dSame(Conv2d):
    """timm's Conv2dSame: TensorFlow's padding, of which the size of the input decides how much there is."""

    def _padding_pairs(self, sizes: Sequence[int] = (1, 1)) -> tuple[tuple[int, int], ...]:
        pairs = []
        for size, kernel, stride, dilation in zip(sizes, self.kernel_size, self.stride, self.dilation, strict=True):
            missing = max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
            pairs.append((missing // 2, missing - missing // 2))
        return tuple(pairs)

    def forward(self, input: Tensor) -> Tensor:
        if not _has_channels(self, input) or 0 in input.shape:
            return self._call(self._stock_forward, input)  # type: ignore[no-any-return]  # torch.nn's own error
        x = input if input.dim() == 4 else input[None]
        pairs = self._padding_pairs(x.shape[2:])
        grid = conv_grid(x.shape[2:], self.kernel_size, self.stride, pairs, self.dilation)

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            x = F.pad(x, (*pairs[1], *pairs[0]))
            return F.conv2d(x, weight, bias, self.stride, 0, self.dilation, self.groups)

        y: Tensor = self._call(self._forward, x, grid, convolve, input)
        return y if input.dim() == 4 else y[0]


# By the qualified name of the class, so that nothing is imported.
COUNTERPARTS: dict[str, type[Decorrelated]] = {
    "transformers.pytorch_utils.Conv1D": Conv1D,
    "timm.layers.conv2d_same.Conv2dSame": Conv2dSame,
    "timm.layers.linear.Linear": Linear,
    "transformers.models.falcon.modeling_falcon.FalconLinear": Linear,
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear": Linear,
}


def qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
