"""Filter Response Normalization (Singh & Krishnan, CVPR 2020)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ndpp.whitening import statistics_dtype


class FRN(nn.Module):
    """y = γ·x / √(ν² + ε) + β, where ν² is the mean of x² over the positions of one channel of one sample.

    learnable_eps: for input of a single position, where ν² = x² would leave but the sign: ε + |ε_l| with a learned ε_l.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    learned_eps: nn.Parameter | None

    def __init__(
        self, num_features: int, *, eps: float = 1e-6, learnable_eps: bool = False, affine: bool = True
    ) -> None:
        super().__init__()
        if not eps > 0:
            raise ValueError(f"FRN: eps must be above 0 (channels may be all zeros); got {eps}")
        self.num_features, self.eps = num_features, eps
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.learned_eps = nn.Parameter(torch.tensor(1e-4)) if learnable_eps else None

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(f"FRN: expected input of shape (N, {self.num_features}, ...); got {tuple(x.shape)}")
        z = x.to(statistics_dtype(x.dtype))
        power = z.square()
        power = power.mean(tuple(range(2, x.dim())), keepdim=True) if x.dim() > 2 else power
        eps = self.eps if self.learned_eps is None else self.eps + self.learned_eps.to(z.dtype).abs()
        y = z * (power + eps).rsqrt()
        if self.weight is not None and self.bias is not None:
            y = y * per_channel(self.weight, y) + per_channel(self.bias, y)
        return y.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, learnable_eps={self.learned_eps is not None}"


def per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Values of channels, shaped to broadcast over (N, C, *spatial)."""
    return values.reshape(-1, *(1,) * (like.dim() - 2))
