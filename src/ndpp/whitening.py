"""The math of ND++ as pure functions: y = S·X·D·w with D = (Cov + εI)^(-1/2).

Index letters: n rows, f features (columns) of a block, g blocks that have a D of their own, o outputs.
Everything here is differentiable, and its gradient is the adjoint of what was computed, truncated iterations included.
Mean and covariance are kept in a `unit` near the data's magnitude, so that inputs of 1e18 or 1e-18 neither overflow
nor underflow on the way, forward or backward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

STRIPS = 4  # in which a symmetric product is computed on a CPU, 10 of its 16 parts,
HALVED = 256  # if it has so many columns
SMALLEST_UNIT = 2.0**-100  # squares of anything in this unit stay normal numbers in float32


class Moments(NamedTuple):
    """Mean and covariance of the columns of X / unit, over a number of rows (output positions)."""

    rows: Tensor  # (); NaN where there was data that is not finite
    mean: Tensor  # (g, f)
    cov: Tensor  # (g, f, f), normalised by the rows
    unit: Tensor  # ()


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Statistics are never kept or computed in less than float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def magnitude(x: Tensor, dim: tuple[int, ...] | None = None) -> Tensor:
    """The power of two at or below max |x| (exact to divide by); 1 where x is all zeros. Never differentiated."""
    peak = x.detach().abs().amax() if dim is None else x.detach().abs().amax(dim, keepdim=True)
    return torch.exp2(torch.log2(torch.where(peak > 0, peak, 1.0)).floor())


# --- S: each sample's own scale ---


def sample_scale(
    x: Tensor, mode: str, dim: tuple[int, ...], valid: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(center, gain) of each sample such that S·x = (x - center)·gain; center is zero but for "standardize".

    `eps` is added to the square of the scale (to the scale itself for "l1"). `valid` (broadcastable to x, boolean)
    leaves padding out. A sample without any scale (all zeros) has gain 0: its features are then 0, and so are their
    gradients, instead of a division by nothing.
    """
    x = x.to(statistics_dtype(x.dtype))
    if valid is not None:
        x = torch.where(valid, x, 0.0)

    def mean(values: Tensor) -> Tensor:
        if valid is None:
            return values.mean(dim, keepdim=True)
        share = valid.expand_as(values).to(values.dtype)
        return (values * share).sum(dim, keepdim=True) / share.sum(dim, keepdim=True).clamp_min(1.0)

    if mode == "l1":
        count = math.prod([x.shape[i] for i in dim])  # the norm makes no copy of |x|
        size = (torch.linalg.vector_norm(x, 1, dim, keepdim=True) / count if valid is None else mean(x.abs())) + eps
        return torch.zeros_like(size), _reciprocal(size, where=size > torch.finfo(size.dtype).tiny)
    unit = magnitude(x, dim).clamp_min(SMALLEST_UNIT)
    z = x / unit
    center, power = mean(z), mean(z.square())
    # A spread below the rounding of the data is none. The floor is relative, so that scale invariance stays exact.
    floor = variance_floor(z.dtype) * power
    variance = power if mode == "rms" else torch.maximum(mean((z - center).square()), floor)
    variance = variance if eps == 0 else variance + (math.sqrt(eps) / unit).square()
    deviation = torch.where(power > 0, variance, 1.0).sqrt()
    present = (power > 0) & (deviation * unit > torch.finfo(z.dtype).tiny)  # 1/σ is beyond the dtype otherwise
    gain = _reciprocal(deviation, where=present) / unit  # in this order: 1/σ² of the gradient stays in range, too
    return (center * unit if mode == "standardize" else torch.zeros_like(center)), gain


def variance_floor(dtype: torch.dtype) -> float:
    """The least variance of a sample that is not rounding, relative to its mean square."""
    return float((8 * torch.finfo(dtype).eps) ** 2)


def _reciprocal(size: Tensor, where: Tensor) -> Tensor:
    """1/size where asked and 0 elsewhere, with finite gradients in both places."""
    return torch.where(where, 1.0 / torch.where(where, size, 1.0), 0.0)


# --- μ and Cov ---


def moments(rows: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean (g, f) and covariance (g, f, f) of rows (g, n, f); `weight` (n,) of zeros and ones marks rows that count.

    Centred first: E[xx] - E[x]E[x] loses 1% at mean/std = 100 in float32. The second centring removes the rounding of
    the first, so that constant columns have exactly no variance.
    """
    column = None if weight is None else weight[:, None]
    total = rows.shape[1] if weight is None else weight.sum().clamp_min(1.0)

    def mean(values: Tensor) -> Tensor:
        return (values if column is None else values * column).sum(1, keepdim=True) / total

    shift = mean(rows.detach())
    rows = rows - shift
    residual = mean(rows)
    rows = rows - residual
    if column is not None:
        rows = rows * column
    return (shift + residual).squeeze(1), rows.mT @ rows / total


def symmetric_product(
    *pairs: tuple[Tensor, Tensor], plus: Tensor | None = None, share: float = 1.0, times: float = 1.0
) -> Tensor:
    """share·plus + times·Σ a @ b (g, f, f), known to be symmetric: on a CPU half of a large one is copied."""
    a, b = pairs[0]
    f = a.shape[1]
    if f < HALVED or a.device.type != "cpu" or _recorded(a, b, plus):
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


def merge(first: Moments, second: Moments) -> Moments:
    """Moments of the joined rows, by the exact parallel-variance formula. Either may be empty."""
    unit = torch.maximum(first.unit, second.unit)
    total = first.rows + second.rows
    share = torch.where(total > 0, second.rows / total.clamp_min(1.0), 0.0)
    mean_1, mean_2 = first.mean * (first.unit / unit), second.mean * (second.unit / unit)
    cov_1, cov_2 = first.cov * (first.unit / unit).square(), second.cov * (second.unit / unit).square()
    delta = mean_2 - mean_1
    between = share * (1 - share) * delta[:, :, None] * delta[:, None, :]
    return Moments(total, torch.lerp(mean_1, mean_2, share), torch.lerp(cov_1, cov_2, share) + between, unit)


def in_unit(rows: Tensor, mean: Tensor, cov: Tensor, eps: float) -> Moments:
    """Moments of the data as it is, in a unit near its magnitude; √ε at least, so that ε/unit² stays in range."""
    deviation = cov.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    largest = torch.maximum(mean.abs(), deviation).amax((0, 1))
    unit = largest.clamp_min(max(math.sqrt(eps), SMALLEST_UNIT))
    return Moments(rows, mean / unit, cov / unit / unit, unit)


def assemble_phases(
    parts: Sequence[tuple[Tensor, Tensor]], taps: Sequence[Tensor], shares: Sequence[Tensor], all_taps: int
) -> tuple[Tensor, Tensor]:
    """Moments of rows that come in phases, each of which is zero outside its own taps (transposed convolution).

    parts: (mean, cov) of each phase over its own columns (channel, own tap), taps: where those stand among all taps,
    shares: each phase's fraction of all rows.
    The zeros are never made: the covariance is block-diagonal within the phases, plus what the phases' means differ by.
    """
    reference = parts[0][0]
    g, f = reference.shape
    channels = f // len(taps[0])
    mean = reference.new_zeros(all_taps, g, channels)
    share = reference.new_zeros(all_taps)
    phase_of = torch.zeros(all_taps, dtype=torch.long, device=reference.device)
    within = reference.new_zeros(all_taps, all_taps, g, channels, channels)
    for number, ((mean_p, cov_p), index, share_p) in enumerate(zip(parts, taps, shares, strict=True)):
        k = len(index)
        mean[index] = mean_p.reshape(g, channels, k).permute(2, 0, 1)
        share[index] = share_p
        phase_of.index_fill_(0, index, number)
        block = (cov_p * share_p).reshape(g, channels, k, channels, k)
        within[index[:, None], index[None, :]] = block.permute(2, 4, 0, 1, 3)
    # Rows of phase p have mean m_p in their own columns and 0 elsewhere: the covariance of those means.
    same_phase = phase_of[:, None] == phase_of[None, :]
    coupling = torch.where(same_phase, share[:, None], 0.0) - share[:, None] * share[None, :]
    between = coupling[:, :, None, None, None] * mean[:, None, :, :, None] * mean[None, :, :, None, :]
    total = channels * all_taps
    cov = (within + between).permute(2, 3, 0, 4, 1).reshape(g, total, total)
    return (share[:, None, None] * mean).permute(1, 2, 0).reshape(g, total), cov


# --- D ---


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
    coefficients = newton_coefficients(solver, steps)
    norm, present = frobenius(a, in_unit)
    root = _coupled_newton(a / norm, coefficients).mul(norm.rsqrt())
    return root if present is None else torch.where(present, root, 0.0)


def frobenius(a: Tensor, in_unit: bool) -> tuple[Tensor, Tensor | None]:
    """‖A‖_F (g, 1, 1), without overflow, and where it is not zero (1 stands there for it); None: everywhere."""
    if in_unit:
        return torch.linalg.vector_norm(a, dim=(-2, -1), keepdim=True), None
    peak = magnitude(a, (-2, -1))
    norm = (a / peak).square().sum((-2, -1), keepdim=True)
    present = norm > 0
    return torch.where(present, norm, 1.0).sqrt() * peak, present


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
        root = _reciprocal(eigenvalues, where=eigenvalues > floor).sqrt()
        return (vectors * root[..., None, :]) @ vectors.mT, root, eigenvalues, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, root, eigenvalues, vectors = output
        ctx.mark_non_differentiable(root, eigenvalues, vectors)
        ctx.save_for_backward(root, eigenvalues, vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Tensor:
        root, eigenvalues, vectors = ctx.saved_tensors
        return EighRoot.adjoint(root, eigenvalues, vectors, (grad + grad.mT) / 2)

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


def newton_coefficients(solver: str, steps: int) -> tuple[tuple[float, float], ...]:
    """(α, β) of each step T = αI + βM."""
    return ((1.5, -0.5),) * steps if solver == "newton" else minimax_coefficients(steps)


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


def decorrelate(
    stats: Moments, *, solver: str, steps: int, eps: float, shrinkage: float, widths: Tensor | int
) -> Tensor:
    """D of the data itself, in the unit of `stats`: D(X) = D(X / unit) / unit; the caller divides."""
    a = regularise(stats.cov, stats.unit, eps=eps, shrinkage=shrinkage, widths=widths)
    return inverse_sqrt(a, solver=solver, steps=steps, in_unit=True)


def fold(d: Tensor, mean: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """D·W (blocks, o, f) and μ·D·W (blocks, o) of weights (blocks, o, f); one D for all blocks, or one for each."""
    folded = weight @ d
    return folded, (folded @ mean[:, :, None]).squeeze(2)


def unfold(d: Tensor, mean: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """D⁻¹·W and μ·W, the way back from weights of the plain layer. What D drops (no variance) stays dropped."""
    return weight @ torch.linalg.pinv(d, hermitian=True), (weight @ mean[:, :, None]).squeeze(2)
