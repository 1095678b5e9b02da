"""One table of layer cases that every test uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import ndpp
from ndpp import Settings


@dataclass(frozen=True)
class Case:
    """A layer by name, its arguments as torch.nn takes them, and the shape of an input."""

    layer: str
    args: tuple[Any, ...]
    shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)
    block: int | None = None

    def __str__(self) -> str:
        options = "-".join(f"{k}={v}" for k, v in self.options.items())
        block = f"-block={self.block}" if self.block else ""
        return f"{self.layer}{self.args}-{'x'.join(map(str, self.shape))}-{options}{block}".replace(" ", "")

    def build(self, settings: Settings | None = None, **options: Any) -> nn.Module:
        settings = (settings or Settings(rows=None)).replace(**({"block": self.block} if self.block else {}))
        torch.manual_seed(1)
        return getattr(ndpp, self.layer)(*self.args, **self.options, **options, settings=settings)

    def stock(self, **options: Any) -> nn.Module:
        torch.manual_seed(1)
        return getattr(nn, self.layer)(*self.args, **self.options, **options)

    def input(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
        """Correlated, off-centre data."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        x = x + 0.6 * x.roll(1, -1) + (0.5 * x.roll(1, 1) if x.dim() > 1 else 0) + 0.7
        return x.to(dtype)


def _conv(n: int, shape: tuple[int, ...], args: tuple[Any, ...], block: int | None = None, **options: Any) -> Case:
    return Case(f"Conv{n}d", args, shape, options, block)


def _up(n: int, shape: tuple[int, ...], args: tuple[Any, ...], block: int | None = None, **options: Any) -> Case:
    return Case(f"ConvTranspose{n}d", args, shape, options, block)


CASES = [
    Case("Linear", (6, 4), (40, 6)),
    Case("Linear", (6, 4), (40, 6), {"bias": False}),
    Case("Linear", (7, 3), (5, 4, 3, 7), block=3),
    Case("Linear", (6, 5), (9, 8, 6), block=2),
    _conv(1, (4, 5, 12), (5, 4, 3)),
    _conv(1, (4, 6, 12), (6, 4, 3), stride=2, padding=1, groups=2),
    _conv(1, (4, 5, 12), (5, 4, 3), block=2, padding="same", dilation=2),
    _conv(1, (4, 4, 12), (4, 4, 4), padding="same", padding_mode="reflect"),
    _conv(2, (4, 3, 7, 6), (3, 4, 3)),
    _conv(2, (4, 4, 7, 6), (4, 4, 3), stride=2, padding=1),
    _conv(2, (4, 4, 7, 8), (4, 6, (3, 2)), stride=(1, 2), padding=(2, 0), dilation=(2, 1), bias=False),
    _conv(2, (4, 6, 6, 6), (6, 6, 3), groups=3, padding=1),
    _conv(2, (4, 6, 6, 6), (6, 6, 3), groups=6, padding=1),
    _conv(2, (4, 8, 6, 6), (8, 4, 2), groups=2, block=3),
    _conv(2, (4, 5, 6, 6), (5, 3, 3), block=2, padding=1),
    _conv(2, (4, 6, 6, 6), (6, 5, 1), block=3),
    _conv(2, (4, 6, 7, 7), (6, 5, 1), stride=2),
    _conv(2, (4, 3, 6, 7), (3, 4, 3), padding=(1, 2), padding_mode="circular"),
    _conv(2, (4, 3, 6, 7), (3, 4, 3), padding=2, padding_mode="replicate", stride=2),
    _conv(2, (4, 3, 6, 7), (3, 4, (3, 5)), padding="same", padding_mode="reflect"),
    _conv(2, (4, 3, 6, 7), (3, 4, 3), padding="valid"),
    _conv(3, (3, 2, 5, 5, 5), (2, 3, 2), stride=2, padding=1),
    _conv(3, (3, 4, 4, 5, 4), (4, 6, (1, 2, 3)), groups=2, padding=(0, 1, 1)),
    _conv(3, (3, 3, 5, 4, 5), (3, 3, 2), block=2, dilation=(2, 1, 2)),
    _up(1, (4, 5, 9), (5, 4, 3)),
    _up(1, (4, 5, 9), (5, 4, 3), stride=2, padding=1, output_padding=1),
    _up(1, (4, 6, 9), (6, 4, 4), stride=3, groups=2, bias=False),
    _up(1, (4, 5, 9), (5, 4, 5), stride=2, dilation=2, block=2),
    _up(1, (4, 4, 9), (4, 4, 2), stride=3),
    _up(2, (4, 3, 5, 4), (3, 4, 3), padding=1),
    _up(2, (4, 4, 5, 4), (4, 4, 2), stride=2),
    _up(2, (4, 4, 5, 4), (4, 6, 3), stride=2, padding=1, output_padding=1, groups=2),
    _up(2, (4, 5, 4, 5), (5, 3, (2, 3)), stride=(1, 2), padding=(0, 1), block=2),
    _up(2, (4, 4, 5, 5), (4, 3, 4), stride=3, padding=2),
    _up(3, (3, 3, 3, 4, 3), (3, 3, 2), stride=2),
    _up(3, (3, 4, 3, 3, 3), (4, 2, 3), stride=(1, 2, 1), padding=1, groups=2),
]

BY_LAYER = {
    "Linear": CASES[0],
    **{
        name: next(case for case in CASES if case.layer == name)
        for name in ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
    },
}
"""One plain case of each of the seven layers."""
