"""IterNorm: whitening by Newton's method (Huang et al., Iterative Normalization, CVPR 2019)."""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor, nn

from ndpp.whitening import statistics_dtype


def inverse_root(sigma: Tensor, steps: int) -> Tensor:
    """Σ^(-1/2) of positive definite Σ (..., d, d): Newton's method on A = Σ / tr Σ, whose eigenvalues are in (0, 1].

    The paper's P ← (3P - P³A)/2, with P²A carried along as M: the same iterates, without the paper's growth of rounding
    errors, which in float32 overtake the result after some ten steps.
    """
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    m = sigma / trace
    identity = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
    root = identity
    for _ in range(steps):
        factor = 1.5 * identity - 0.5 * m
        root, m = root @ factor, factor @ factor @ m
    return root * trace.rsqrt()


def moments(z: Tensor, dims: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    """Mean (·, g, d) and covariance + ε·I (·, g, d, d) of z (n, g, d, m), over m and, if among dims, over n."""
    mean = z.mean(dims, keepdim=True)
    centred = z - mean
    summed = "ngim,ngjm->gij" if 0 in dims else "ngim,ngjm->ngij"
    cov = torch.einsum(summed, centred, centred) / math.prod(z.shape[dim] for dim in dims)
    cov = cov[None] if 0 in dims else cov
    return mean[..., 0], cov + eps * torch.eye(z.shape[2], dtype=z.dtype, device=z.device)


def largest_divisor(number: int, most: int) -> int:
    return next(d for d in range(max(1, min(number, most)), 0, -1) if number % d == 0)


class Whitening(nn.Module, abc.ABC):
    """What norms that whiten groups of channels share. Input (N, C, *spatial); computed in float32 or float64."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, num_features: int, *, group_size: int, steps: int, eps: float, momentum: float, affine: bool
    ) -> None:
        super().__init__()
        if num_features < 1 or num_features % group_size:
            raise ValueError(
                f"{type(self).__name__}: num_features must be a multiple of group_size; "
                f"got num_features={num_features}, group_size={group_size}"
            )
        if not eps > 0:
            raise ValueError(f"{type(self).__name__}: eps must be above 0 (channels may be constant); got {eps}")
        self.num_features, self.group_size = num_features, group_size
        self.steps, self.eps, self.momentum = steps, eps, momentum
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None

    @abc.abstractmethod
    def whitened(self, z: Tensor) -> Tensor:
        """z (n, groups, channels of a group, positions), decorrelated within the groups."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__}: expected input of shape (N, {self.num_features}, ...); got {tuple(x.shape)}"
            )
        positions = x.shape[2:].numel()
        with torch.autocast(x.device.type, enabled=False):
            z = x.to(statistics_dtype(x.dtype)).reshape(
                len(x), self.num_features // self.group_size, self.group_size, positions
            )
            y = self.whitened(z).reshape(len(x), self.num_features, positions)
            if self.weight is not None and self.bias is not None:
                y = y * self.weight[:, None] + self.bias[:, None]
        return y.reshape(x.shape).to(x.dtype)

    @torch.no_grad()
    def track(self, running: Tensor, new: Tensor) -> None:
        running.lerp_(new.to(running.dtype), self.momentum)

    def extra_repr(self) -> str:
        return f"{self.num_features}, group_size={self.group_size}, steps={self.steps}, eps={self.eps}"


class IterNorm(Whitening):
    """Whitens by the batch in training, and by the running mean and whitening matrix in evaluation."""

    running_mean: Tensor
    running_root: Tensor

    def __init__(
        self,
        num_features: int,
        *,
        group_size: int = 64,
        steps: int = 5,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        size = largest_divisor(num_features, group_size)
        super().__init__(num_features, group_size=size, steps=steps, eps=eps, momentum=momentum, affine=affine)
        groups = num_features // size
        self.register_buffer("running_mean", torch.zeros(1, groups, size))
        self.register_buffer("running_root", torch.eye(size).repeat(1, groups, 1, 1))

    def whitened(self, z: Tensor) -> Tensor:
        if self.training and z.numel():
            mean, cov = moments(z, (0, 3), self.eps)
            root = inverse_root(cov, self.steps)
            self.track(self.running_mean, mean)
            self.track(self.running_root, root)
        else:
            mean, root = self.running_mean.to(z.dtype), self.running_root.to(z.dtype)
        return torch.einsum("ngij,ngjm->ngim", root, z - mean[..., None])
