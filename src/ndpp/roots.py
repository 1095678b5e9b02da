"""D = (Cov + εI)^(-1/2) as pure functions: regularisation, polynomials of a symmetric matrix, and the exact root.

Everything here is differentiable, and its gradient is the adjoint of what was computed, truncated iterations included.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .whitening import Moments, magnitude, reciprocal

STRIPS = 4  # in which a symmetric product is computed on a CPU, 10 of its 16 parts, where that is worth the copies:
HALVED, LARGE_PRODUCT = 512, 1 << 26  # if each entry sums so many terms, and there are so many terms in all


def decorrelate(
    stats: Moments, *, solver: str, steps: int, eps: float, shrinkage: float, widths: Tensor | int
) -> Tensor:
    """D of the data itself, in the unit of `stats`: D(X) = D(X / unit) / unit; the caller divides."""
    a = regularise(stats.cov, stats.unit, eps=eps, shrinkage=shrinkage, widths=widths)
    return inverse_sqrt(a, solver=solver, steps=steps, in_unit=True)


def regularise(cov: Tensor, unit: Tensor, *, eps: float, shrinkage: float, widths: Tensor | int) -> Tensor:
    """Cov + (ε + shrinkage·mean eigenvalue)·I, in the unit of Cov.

    ε is never below the rounding of the data: a variance that small cannot be told from none, and dividing by it would
    turn rounding errors into features, and gradients into infinities.
    widths (g,): the features a block really has, or one number where all have as many. Columns beyond are padding of a
    smaller last block: they stay zero, and zero columns do not touch the others in any polynomial of the matrix.
    """
    ridge = (math.sqrt(eps) / unit).clamp_min(torch.finfo(cov.dtype).eps).square()
    if shrinkage:
        ridge = ridge + shrinkage * cov.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) / _column(widths)
    if isinstance(widths, Tensor):
        ridge = ridge * (torch.arange(cov.shape[-1], device=cov.device) < widths[:, None])
    if _recorded(cov, unit):
        return cov + torch.diag_embed(ridge.expand(cov.shape[:-1]))
    a = cov.clone()
    a.diagonal(dim1=-2, dim2=-1).add_(ridge)
    return a


def _column(widths: Tensor | int) -> Tensor | int:
    return widths[:, None] if isinstance(widths, Tensor) else widths


def inverse_sqrt(a: Tensor, *, solver: str, steps: int, in_unit: bool = False) -> Tensor:
    """A^(-1/2) of symmetric positive semi-definite A (g, f, f). Zero for A = 0: no variance, nothing to amplify.

    in_unit: A is what `regularise` returned for moments in their unit. Its squares are then within range, and not zero.
    """
    if solver == "eigh":
        root: Tensor = EighRoot.apply(a)[0]
        return root
    norm, present = frobenius(a, in_unit)
    m = a / norm
    if solver == "quartic":
        root = _quartic(m, quartic_coefficients(steps))
    else:
        root = _coupled_newton(m, newton_coefficients(solver, steps))
    root = root * norm.rsqrt()
    return root if present is None else torch.where(present, root, 0.0)


def frobenius(a: Tensor, in_unit: bool) -> tuple[Tensor, Tensor | None]:
    """‖A‖_F (g, 1, 1), without overflow, and where it is not zero (1 stands there for it); None: everywhere."""
    if in_unit:
        return torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True), None
    peak = magnitude(a, (-2, -1))
    norm = (a / peak).square().sum((-2, -1), keepdim=True)
    present = norm > 0
    return torch.where(present, norm, 1.0).sqrt() * peak, present


def _quartic(m: Tensor, c: Square) -> Tensor:
    """The polynomial by two products, each of a matrix with itself."""
    q = quartic_factor(m, c)
    return plus_identity(symmetric_product((q, q), plus=m, share=c.slope, times=c.times), c.constant)


def quartic_factor(m: Tensor, c: Square) -> Tensor:
    """M² + inner·M + shift·I."""
    return plus_identity(symmetric_product((m, m), plus=m, share=c.inner), c.shift)


def _coupled_newton(m: Tensor, coefficients: Sequence[tuple[float, float]]) -> Tensor:
    """X ← X·T, M ← T²·M with T = αI + βM, from X = I.

    Neither X₀·T nor the last M is needed, and the last two steps are one polynomial: 2, 5, 8, 11 products for 2 to 5.
    """
    if len(coefficients) == 1:
        return plus_identity(coefficients[0][1] * m, coefficients[0][0])
    start, x = m, None
    for number, (alpha, beta) in enumerate(coefficients[:-2]):
        if number == 1:
            x = plus_identity(coefficients[0][1] * start, coefficients[0][0])
        if x is not None:
            x = symmetric_product((x, m), plus=x, share=alpha, times=beta)
        p = symmetric_product((m, m), plus=m, share=alpha, times=beta)  # T·M
        m = symmetric_product((m, p), plus=p, share=alpha, times=beta)
    q = last_steps(m, *coefficients[-2:])[0]
    if x is not None:
        return symmetric_product((x, q))
    alpha, beta = coefficients[0]
    return q if m is start else symmetric_product((start, q), plus=q, share=alpha, times=beta)


def last_steps(m: Tensor, step: tuple[float, float], last: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    """q = T·T′ of two steps, with T = αI + βM and T′ = α′I + β′·T²·M; and the factors P = T·M and αM + P of T³·M.

    T²·P = α²P + β·P·(αM + P), in which nothing cancels that does not in T² itself.
    """
    alpha, beta = step
    p = symmetric_product((m, m), plus=m, share=alpha, times=beta)
    r = torch.add(p, m, alpha=alpha)
    sum_ = torch.add(last[0] * beta * m, p, alpha=last[1] * alpha**2)
    q = symmetric_product((p, r), plus=sum_, times=last[1] * beta)
    return plus_identity(q, last[0] * alpha), p, r


def plus_identity(m: Tensor, share: float) -> Tensor:
    """M + share·I; in place, where no graph is made."""
    if _recorded(m):
        return m + torch.diag_embed(torch.full_like(m[..., 0], share))
    m.diagonal(dim1=-2, dim2=-1).add_(share)
    return m


class EighRoot(torch.autograd.Function):
    """The exact root. Directions without variance (within rounding) map to zero, as in a pseudo-inverse.

    The adjoint is written by divided differences of λ^(-1/2); torch's own, through the eigenvectors, divides by
    differences of eigenvalues and is not finite where two are equal.
    """

    @staticmethod
    def forward(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        eigenvalues, vectors = torch.linalg.eigh((a + a.mT) / 2)
        floor = a.shape[-1] * torch.finfo(a.dtype).eps * eigenvalues[..., -1:].clamp_min(0)
        root = reciprocal(eigenvalues, where=eigenvalues > floor).sqrt()
        return (vectors * root[..., None, :]) @ vectors.mT, root, eigenvalues, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, root, eigenvalues, vectors = output
        ctx.mark_non_differentiable(root, eigenvalues, vectors)
        ctx.save_for_backward(root, eigenvalues, vectors, *inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
        root, eigenvalues, vectors, a = ctx.saved_tensors
        with torch.no_grad():
            back = EighRoot.adjoint(root, eigenvalues, vectors, (grad + grad.mT) / 2)
        return _Once.apply(back, a, grad) if torch.is_grad_enabled() else back

    @staticmethod
    def adjoint(root: Tensor, eigenvalues: Tensor, vectors: Tensor, grad: Tensor) -> Tensor:
        r_i, r_j = root[..., :, None], root[..., None, :]
        l_i, l_j = eigenvalues[..., :, None], eigenvalues[..., None, :]
        kept = (r_i > 0) & (r_j > 0)
        either = (r_i > 0) ^ (r_j > 0)
        both = -r_i * r_j * (r_i * r_j / torch.where(kept, r_i + r_j, 1.0))
        across = torch.where(either, (r_i - r_j) / torch.where(either, l_i - l_j, 1.0), 0.0)
        difference = torch.where(kept, both, across)
        return vectors @ (vectors.mT @ grad @ vectors * difference) @ vectors.mT


class _Once(torch.autograd.Function):
    """A gradient that has none of its own, and says so, by whatever way its derivative is asked for.

    What torch's `once_differentiable` puts in its place is on no way to an input: `autograd.grad` passes it by.
    """

    @staticmethod
    def forward(back: Tensor, *_: Tensor) -> Tensor:
        return back.view_as(back)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "ndpp: solver='eigh' has no second derivative; use another solver for losses that contain gradients"
        )


def newton_coefficients(solver: str, steps: int) -> tuple[tuple[float, float], ...]:
    """(α, β) of each step T = αI + βM."""
    return ((1.5, -0.5),) * steps if solver == "newton" else minimax_coefficients(steps)


def _closest_quartic(steps: int) -> tuple[float, ...]:
    """c₀ … c₄ of the polynomial of λ in [0, 1] that comes closest to `steps` Newton steps.

    Its largest relative error is the least possible, 0.5% for three steps. Found by exchange (Remez): at six points the
    error is equally large, with alternating signs.
    """
    grid = (1 - np.cos(np.linspace(0, np.pi, 2001))) / 2
    x, m = np.ones_like(grid), grid
    for _ in range(steps):
        t = 1.5 - 0.5 * m
        x, m = x * t, t * t * m
    powers = grid[:, None] ** np.arange(5) / x[:, None]
    points = np.linspace(0, len(grid) - 1, 6).round().astype(int)
    for _ in range(30):
        signs = (-1.0) ** np.arange(6)
        *c, _ = np.linalg.solve(np.column_stack([powers[points], signs]), np.ones(6))
        error = powers @ np.array(c) - 1
        runs = np.split(np.arange(len(grid)), np.flatnonzero(np.diff(np.sign(error))) + 1)
        if len(runs) != 6:  # the polynomial is exact, but for rounding
            break
        points = np.array([run[np.abs(error[run]).argmax()] for run in runs])
    return tuple(float(value) for value in c)


class Square(NamedTuple):
    """constant + slope·λ + times·(λ² + inner·λ + shift)², which every polynomial of degree four is."""

    constant: float
    slope: float
    times: float
    inner: float
    shift: float


def _as_square(c: tuple[float, ...]) -> Square:
    inner = c[3] / (2 * c[4])
    shift = (c[2] / c[4] - inner**2) / 2
    return Square(c[0] - c[4] * shift**2, c[1] - 2 * c[4] * inner * shift, c[4], inner, shift)


_QUARTICS = {steps: _as_square(_closest_quartic(steps)) for steps in range(1, 6)}  # not by code that is traced


def quartic_coefficients(steps: int) -> Square:
    """Of the polynomial that follows so many Newton steps."""
    return _QUARTICS[steps]


@functools.cache
def minimax_coefficients(steps: int, error: float = 0.01) -> tuple[tuple[float, float], ...]:
    """(α, β) of each step such that the steps bring the widest interval [ℓ, 1] of eigenvalues to 1 within `error`.

    In σ = √λ a step is the odd cubic σ(α + βσ²); the best one on [l, u] touches 1 - e, 1 + e, 1 - e at l, in between
    and at u, and maps the interval to [1 - e, 1 + e], where the next step starts (the idea of Polar Express).
    """

    def schedule(lower: float) -> tuple[list[tuple[float, float]], float]:
        low, high, found = lower, 1.0, []
        for _ in range(steps):
            square = high * high + high * low + low * low
            inner = math.sqrt(square / 3)
            beta = -2.0 / (2 * inner**3 + low * high * (high + low))
            found.append((-beta * square, beta))
            low, high = -beta * low * high * (high + low), -2 * beta * inner**3
        return found, high - 1.0

    below, above = math.log(1e-12), 0.0  # bisection over the logarithm of the interval's lower end
    for _ in range(60):
        middle = (below + above) / 2
        below, above = (below, middle) if schedule(math.exp(middle))[1] < error else (middle, above)
    return tuple(schedule(math.exp(above))[0])


# --- products ---


def symmetric_product(
    *pairs: tuple[Tensor, Tensor], plus: Tensor | None = None, share: float = 1.0, times: float = 1.0
) -> Tensor:
    """share·plus + times·Σ a @ b (g, f, f), known to be symmetric: on a CPU half of a large one is copied."""
    a, b = pairs[0]
    f, terms = a.shape[1:]
    small = terms < HALVED or a.shape[0] * f * f * terms < LARGE_PRODUCT
    if small or a.device.type != "cpu" or _recorded(a, b, plus):
        return _products(pairs, plus, share, times)
    product = a.new_empty(a.shape[0], f, f)
    for start in range(0, f, -(-f // STRIPS)):
        stop = min(start + -(-f // STRIPS), f)
        strips = [(a[:, start:stop], b[:, :, start:]) for a, b in pairs]
        added = None if plus is None else plus[:, start:stop, start:]
        product[:, start:stop, start:] = _products(strips, added, share, times)
        product[:, stop:, start:stop] = product[:, start:stop, stop:].mT
    return product


def _recorded(*tensors: Tensor | None) -> bool:
    """Whether a graph is made of what is done with these: then nothing is written in place."""
    return torch.compiler.is_compiling() or any(t is not None and t.requires_grad for t in tensors)


def _products(pairs: Sequence[tuple[Tensor, Tensor]], plus: Tensor | None, share: float, times: float) -> Tensor:
    for a, b in pairs:
        if plus is None:
            plus = a @ b if times == 1.0 else torch.baddbmm(a[:, :1, :1], a, b, beta=0.0, alpha=times)
        else:
            plus = torch.baddbmm(plus, a, b, beta=share, alpha=times)
        share = 1.0
    assert plus is not None
    return plus
