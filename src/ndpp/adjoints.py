"""Gradients of `whitening` by hand, for the path that does not record a graph: each is the adjoint of one function.

Differentiating the functions themselves gives the same numbers, and is what the tests compare with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .whitening import EighRoot, frobenius, newton_coefficients, variance_floor


def fold_adjoint(
    d: Tensor, mean: Tensor, weight: Tensor, grad_folded: Tensor, grad_shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of D, μ and W from those of D·W (blocks, f, o) and μ·D·W (blocks, o). D is symmetric."""
    grad_product = grad_folded + mean[:, :, None] * grad_shift[:, None, :]
    grad_d = grad_product @ weight.mT
    grad_mean = (d @ (weight @ grad_shift[:, :, None])).squeeze(2)
    if d.shape[0] == 1 and grad_d.shape[0] > 1:  # one D and one μ for all blocks
        grad_d, grad_mean = grad_d.sum(0, keepdim=True), grad_mean.sum(0, keepdim=True)
    return grad_d, grad_mean, d @ grad_product


def regularise_adjoint(grad: Tensor, *, shrinkage: float, widths: Tensor | int) -> Tensor:
    """The gradient of Cov from that of Cov + (ε + shrinkage·mean eigenvalue)·I."""
    if shrinkage == 0:
        return grad
    diagonal = grad.diagonal(dim1=-2, dim2=-1)
    if isinstance(widths, Tensor):
        inside = torch.arange(grad.shape[-1], device=grad.device) < widths[:, None]
        share = shrinkage * (diagonal * inside).sum(-1) / widths
    else:
        share = shrinkage * diagonal.sum(-1) / widths
    regular = grad.clone()
    regular.diagonal(dim1=-2, dim2=-1).add_(share[:, None])
    return regular


def moments_adjoint(centred: Tensor, grad_mean: Tensor, grad_cov: Tensor, total: float) -> Tensor:
    """The gradient of rows (g, n, f) from those of mean and covariance; `centred` are the rows less their mean."""
    symmetric = (grad_cov + grad_cov.mT) / total
    return torch.baddbmm(grad_mean[:, None] / total, centred, symmetric)


def scale_adjoint(x: Tensor, mode: str, dim: tuple[int, ...], gain: Tensor, grad_gain: Tensor) -> Tensor:
    """The gradient of a sample's values from that of its gain 1/size; in this order 1e18 and 1e-18 stay in range."""
    share = -(grad_gain * gain) * gain / math.prod([x.shape[i] for i in dim])
    if mode == "l1":
        return x.sign() * share
    scaled = x * gain
    if mode == "std":
        centred = scaled - scaled.mean(dim, keepdim=True)
        floor = variance_floor(x.dtype) * scaled.square().mean(dim, keepdim=True)
        spreads = centred.square().mean(dim, keepdim=True) > floor
        scaled = torch.where(spreads, centred, variance_floor(x.dtype) * scaled)
    return scaled * share


def inverse_sqrt_adjoint(a: Tensor, grad: Tensor, *, solver: str, steps: int, in_unit: bool = False) -> Tensor:
    """The gradient that reaches A from that of `inverse_sqrt`, by hand: the adjoint of the truncated iteration.

    The result is a polynomial of A, whose derivative is self-adjoint: the iteration run on (M, dM) side by side, with
    the gradient in the place of dM, is its own adjoint. Every product of it is symmetric.
    """
    grad = (grad + grad.mT) / 2
    if solver == "eigh":
        _, root, eigenvalues, vectors = EighRoot.forward(a)
        return EighRoot.adjoint(root, eigenvalues, vectors, grad)
    norm, present = frobenius(a, in_unit)
    m, dm = a / norm, grad * norm.rsqrt()
    start, g = m, grad
    x, dx = None, None
    coefficients = newton_coefficients(solver, steps)
    for step, (alpha, beta) in enumerate(coefficients):
        if x is None or dx is None:
            x, dx = beta * m, beta * dm
            x.diagonal(dim1=-2, dim2=-1).add_(alpha)
        else:
            x, dx = alpha * x + beta * (x @ m), alpha * dx + beta * (dx @ m + x @ dm)
        if step + 1 < len(coefficients):
            p = torch.baddbmm(m, m, m, beta=alpha, alpha=beta)
            k = m @ dm
            dp = alpha * dm + beta * (k + k.mT)
            m, dm = (
                torch.baddbmm(p, m, p, beta=alpha, alpha=beta),
                alpha * dp + beta * (dm @ p + m @ dp),
            )
    assert x is not None
    assert dx is not None
    # D = ν^(-1/2) q(A/ν) with ν = ‖A‖_F, which moves with A as well
    along = -(dx * start).sum((-2, -1), keepdim=True) - (g * x).sum((-2, -1), keepdim=True) * norm.rsqrt() / 2
    back = dx / norm + start * (along / norm)
    return back if present is None else torch.where(present, back, 0.0)
