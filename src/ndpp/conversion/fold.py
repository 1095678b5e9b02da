"""fold_: back to stock torch.nn layers, with D·W and the centred bias baked in."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .. import whitening
from ..attention import MultiheadAttention, Projection
from ..decorrelated import Decorrelated
from ..sampling import lattice
from .convert import refuse_wrapped
from .norms import forget_removed_
from .surgery import OWN, STATE, combined, enable_fast_paths_, is_ours, stock_class


@torch.no_grad()
def fold_(model: nn.Module) -> nn.Module:
    """Turn every ndpp layer into the stock layer that computes its evaluation output, in place.

    A layer with a scale becomes a stock layer that scales its input first. The weights are new Parameters: optimizers
    and tied modules keep the old ones. To go on training, fold a ``copy.deepcopy(model)``.

    Returns:
        The model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ndpp.fold_: expected an nn.Module; got {type(model).__name__}")
    refuse_wrapped(model, "ndpp.fold_", "fold")
    if not any(map(is_ours, model.modules())):
        warnings.warn("ndpp.fold_: nothing to fold: the model has no ndpp layers", stacklevel=2)
    for module in list(model.modules()):
        if isinstance(module, MultiheadAttention):
            module._restore_stock_()
        elif isinstance(module, Decorrelated) and not isinstance(module, Projection):
            _fold_layer_(module)
        else:
            forget_removed_(module)
    enable_fast_paths_(model)
    return model


def _fold_layer_(layer: Decorrelated) -> None:
    old: Any = layer.bias
    weight, bias = layer._folded(*layer._evaluation_root(), layer.weight, old)
    settings, per_row, stock = layer.settings, layer._per_row_scale, stock_class(layer)
    scale = settings.scale
    trains = layer.weight.requires_grad
    for name in STATE:
        del layer._buffers[name]
    layer._non_persistent_buffers_set.difference_update(STATE)
    for name in OWN:
        layer.__dict__.pop(name, None)
    module: Any = layer
    kind: Any = stock
    module.__class__ = stock if scale == "none" else combined(Scaled, kind, f"Scaled{stock.__name__}")
    module.weight = nn.Parameter(weight, requires_grad=trains)
    module.bias = nn.Parameter(bias, requires_grad=trains if old is None else old.requires_grad)
    if scale != "none":
        module.scale, module.scale_eps, module.scale_per_row = scale, settings.scale_eps, per_row
        module.scale_positions = settings.scale_positions


class Scaled(nn.Module):
    """S before a stock layer: each row, or each sample, over its own scale. Stock operations only."""

    scale: str
    scale_eps: float
    scale_per_row: bool
    scale_positions: int | None

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y: Tensor = super().forward(self._scaled(input), *args, **kwargs)
        return y

    def _scaled(self, input: Tensor) -> Tensor:
        part, dims = input, tuple(range(input.dim() - 1, input.dim()))
        if not self.scale_per_row:  # without a batch, the input is one sample
            sizes = len(self.kernel_size)  # type: ignore[arg-type]
            dims = tuple(range(1 if input.dim() == sizes + 2 else 0, input.dim()))
            channels, *each = input.shape[-sizes - 1 :]
            at: tuple[Any, ...] = (..., *lattice(channels, tuple(each), self.scale_positions))
            part = input[at]
        center, gain = whitening.sample_scale(part, self.scale, dims, eps=self.scale_eps)
        return ((input.to(gain.dtype) - center) * gain).to(input.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale!r}"
