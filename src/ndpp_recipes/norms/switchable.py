"""Switchable Whitening: learned shares of several whitenings (Pan et al., ICCV 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .iternorm import Whitening, inverse_root, largest_divisor, moments

SW_A = ("bw", "iw")
SW_B = ("bw", "iw", "bn", "in", "ln")
_OF_AN_INSTANCE = ("iw", "in")


class SwitchableWhitening(Whitening):
    """Whitens by softmax-weighted means and covariances of the batch (bw), the instance (iw), and their diagonals.

    kinds: SW_A, or SW_B with batch, instance and layer normalisation (bn, in, ln) among the choices. Input of a single
    position has no statistics of its own instances: iw and in are then left out.
    """

    running_mean: Tensor
    running_cov: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        kinds: tuple[str, ...] = SW_A,
        group_size: int = 16,
        steps: int = 5,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        if "bw" not in kinds or not set(kinds) <= set(SW_B) or len(set(kinds)) != len(kinds):
            raise ValueError(f"SwitchableWhitening: kinds must be bw and others of {', '.join(SW_B)}; got {kinds}")
        size = largest_divisor(num_features, group_size)
        super().__init__(num_features, group_size=size, steps=steps, eps=eps, momentum=momentum, affine=affine)
        self.kinds = kinds
        self.mean_weight = nn.Parameter(torch.ones(len(kinds)))
        self.cov_weight = nn.Parameter(torch.ones(len(kinds)))
        groups = num_features // size
        self.register_buffer("running_mean", torch.zeros(1, groups, size))
        self.register_buffer("running_cov", torch.eye(size).repeat(1, groups, 1, 1))

    def whitened(self, z: Tensor) -> Tensor:
        used = [i for i, kind in enumerate(self.kinds) if z.shape[3] > 1 or kind not in _OF_AN_INSTANCE]
        found = self._statistics(z, [self.kinds[i] for i in used])
        share_of_mean = self.mean_weight[used].to(z.dtype).softmax(0)
        share_of_cov = self.cov_weight[used].to(z.dtype).softmax(0)
        mean: Tensor = sum(share * m for share, (m, _) in zip(share_of_mean, found, strict=True))
        cov: Tensor = sum(share * c for share, (_, c) in zip(share_of_cov, found, strict=True))
        return torch.einsum("ngij,ngjm->ngim", inverse_root(cov, self.steps), z - mean[..., None])

    def _statistics(self, z: Tensor, kinds: list[str]) -> list[tuple[Tensor, Tensor]]:
        """Mean (n or 1, g or 1, d or 1) and covariance + ε·I of each kind."""
        found = {"bw": self._of_batch(z)}
        if set(kinds) & set(_OF_AN_INSTANCE):
            found["iw"] = moments(z, (3,), self.eps)
        for diagonal, whole in (("bn", "bw"), ("in", "iw")):
            if diagonal in kinds:
                mean, cov = found[whole]
                found[diagonal] = mean, torch.diag_embed(cov.diagonal(dim1=-2, dim2=-1))
        if "ln" in kinds:
            mean = z.mean((1, 2, 3), keepdim=True)
            var = (z - mean).square().mean((1, 2, 3), keepdim=True)
            found["ln"] = mean[..., 0], (var + self.eps) * torch.eye(z.shape[2], dtype=z.dtype, device=z.device)
        return [found[kind] for kind in kinds]

    def _of_batch(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if not (self.training and z.numel()):
            return self.running_mean.to(z.dtype), self.running_cov.to(z.dtype)
        mean, cov = moments(z, (0, 3), self.eps)
        self.track(self.running_mean, mean)
        self.track(self.running_cov, cov)
        return mean, cov

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kinds={self.kinds}"
