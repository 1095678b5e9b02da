"""Gradients of `whitening` and `roots` by hand, for the path that does not record a graph.

Differentiating the functions themselves gives the same numbers, and is what the tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .roots import (
    EighRoot,
    Square,
    frobenius,
    last_steps,
    newton_coefficients,
    plus_identity,
    quartic_coefficients,
    quartic_factor,
    symmetric_product,
)
from .whitening import variance_floor


def fold_adjoint(
    d: Tensor, mean: Tensor, weight: Tensor, grad_folded: Tensor, grad_shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of D, μ and W from those of D·W (blocks, o, f) and μ·D·W (blocks, o). D is symmetric."""
    grad_product = torch.addcmul(grad_folded, grad_shift[:, :, None], mean[:, None, :])
    grad_d = weight.mT @ grad_product
    grad_mean = (grad_shift[:, None, :] @ weight @ d).squeeze(1)
    if d.shape[0] == 1 and grad_d.shape[0] > 1:  # one D and one μ for all blocks
        grad_d, grad_mean = grad_d.sum(0, keepdim=True), grad_mean.sum(0, keepdim=True)
    return grad_d, grad_mean, grad_product @ d


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


def moments_adjoint(centred: Tensor, grad_mean: Tensor, grad_cov: Tensor, total: float | Tensor) -> Tensor:
    """The gradient of rows (g, n, f) from those of mean and covariance, of each or of all g together.

    `centred` are the rows less their mean.
    """
    symmetric = ((grad_cov + grad_cov.mT) / total).expand(len(centred), -1, -1)
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


def inverse_sqrt_adjoint(
    a: Tensor, root: Tensor, grad: Tensor, *, solver: str, steps: int, in_unit: bool = False
) -> Tensor:
    """The gradient that reaches A from that of root = `inverse_sqrt`(A): the adjoint of the truncated iteration.

    The result is a polynomial of A, whose derivative is self-adjoint: the iteration run on (M, dM) side by side, with
    the gradient in the place of dM, is its own adjoint. Its sums of two products are symmetric.
    """
    both = grad + grad.mT
    if solver == "eigh":
        _, inverse, eigenvalues, vectors = EighRoot.forward(a)
        return EighRoot.adjoint(inverse, eigenvalues, vectors, both / 2)
    norm, present = frobenius(a, in_unit)
    m = a / norm
    dm = both * (norm.rsqrt() / 2)
    if solver == "quartic":
        dx = _quartic_derivative(m, dm, quartic_coefficients(steps))
    else:
        dx = _newton_derivative(m, dm, newton_coefficients(solver, steps))
    # D = ν^(-1/2) q(A/ν) with ν = ‖A‖_F, which moves with A as well
    along = torch.addcmul(dx * m, grad, root, value=0.5).sum((-2, -1), keepdim=True)
    back = torch.addcmul(dx, m, along, value=-1.0) / norm
    return back if present is None else torch.where(present, back, 0.0)


def _quartic_derivative(m: Tensor, dm: Tensor, c: Square) -> Tensor:
    """dX of `roots._quartic`: three products, one of which is computed again."""
    q, dq = quartic_factor(m, c), _of_square(m, dm, 1.0, plus=dm, share=c.inner)
    return _of_square(q, dq, c.times, plus=dm, share=c.slope)


def _newton_derivative(m: Tensor, dm: Tensor, coefficients: Sequence[tuple[float, float]]) -> Tensor:
    """dX of `roots._coupled_newton`, step by step beside it: 5, 12, 20 products for 2, 3, 4 steps."""
    if len(coefficients) == 1:
        return coefficients[0][1] * dm
    start, d_start, x, dx = m, dm, None, None
    for number, (alpha, beta) in enumerate(coefficients[:-2]):
        if number == 1:
            x, dx = plus_identity(coefficients[0][1] * start, coefficients[0][0]), coefficients[0][1] * d_start
        if x is not None and dx is not None:
            dx = symmetric_product((dx, m), (x, dm), plus=dx, share=alpha, times=beta)
            x = symmetric_product((x, m), plus=x, share=alpha, times=beta)
        p = symmetric_product((m, m), plus=m, share=alpha, times=beta)
        dp = _of_square(m, dm, beta, plus=dm, share=alpha)
        dm = symmetric_product((dm, p), (m, dp), plus=dp, share=alpha, times=beta)
        m = symmetric_product((m, p), plus=p, share=alpha, times=beta)
    (alpha, beta), last = coefficients[-2:]
    q, p, r = last_steps(m, (alpha, beta), last)
    dp = _of_square(m, dm, beta, plus=dm, share=alpha)
    sum_ = torch.add(last[0] * beta * dm, dp, alpha=last[1] * alpha**2)
    dq = symmetric_product((dp, r), (p, torch.add(dp, dm, alpha=alpha)), plus=sum_, times=last[1] * beta)
    if x is not None and dx is not None:
        return symmetric_product((dx, q), (x, dq))
    alpha, beta = coefficients[0]
    return dq if m is start else symmetric_product((d_start, q), (start, dq), plus=dq, share=alpha, times=beta)


def _of_square(m: Tensor, dm: Tensor, times: float, *, plus: Tensor, share: float) -> Tensor:
    """share·plus and the derivative of times·M²: one product K, as MdM + dMM is K + Kᵀ of symmetric matrices."""
    k = torch.baddbmm(plus, m, dm, beta=share / 2, alpha=times)
    return k + k.mT
