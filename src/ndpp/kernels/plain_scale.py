"""S and what it multiplies, and their adjoints, in PyTorch operations.

On a CPU the passes over an input or output go by pieces that stay in its cache. Factors of a wider dtype meet 16-bit
values there, and not in one operation, for which torch brings the whole tensor to the wider dtype first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import adjoints, whitening
from ..keeping import multiplies_bfloat16, readable
from ..sampling import lattice
from .plan import Plan

PIECE = 1 << 17  # values that stay in the cache of a CPU
LARGE_SAMPLE = 1 << 16  # values of an output that are worth a call of their own


def scale(x: Tensor, plan: Plan) -> Tensor:
    """The gain of every row (batch, 1, *sizes) or sample (batch, 1, 1…); not for "standardize"."""
    part, dim = scaled_part(x, plan)
    return whitening.sample_scale(part, plan.scale, dim, eps=plan.scale_eps)[1]


def scale_adjoint_(grad: Tensor, x: Tensor, gain: Tensor, grad_gain: Tensor, plan: Plan) -> None:
    """Add to the gradient of x what comes by way of the gain."""
    part, dim = scaled_part(x, plan)
    added = adjoints.scale_adjoint(part.to(gain.dtype), plan.scale, dim, gain, grad_gain)
    scaled_part(grad, plan)[0].add_(added.to(grad.dtype))


def normalised(rows: Tensor, mode: str, eps: float, dtype: torch.dtype) -> Tensor:
    """(rows - center)·gain, with a scale of its own for each row of (…, columns); with an ε torch's own norms."""
    if eps > 0:
        norm: Any = F.layer_norm if mode == "standardize" else F.rms_norm
        y: Tensor = norm(rows, rows.shape[-1:], eps=eps).to(dtype)
        return y
    center, gain = whitening.sample_scale(rows, mode, (-1,), eps=eps)
    return ((rows.to(gain.dtype) - center) * gain).to(dtype)


def normalised_adjoint(grad: Tensor, rows: Tensor, mode: str, eps: float) -> Tensor:
    """The gradient of the rows from that of `normalised`."""
    with torch.enable_grad():
        leaf = rows.detach().requires_grad_()
        return torch.autograd.grad(normalised(leaf, mode, eps, grad.dtype), leaf, grad)[0]


def scaled_part(x: Tensor, plan: Plan) -> tuple[Tensor, tuple[int, ...]]:
    """What of x enters the scale, and over which axes."""
    if plan.per_row:
        return x, (1,)
    channels = plan.layout.groups * plan.layout.channels  # not those of x, which may be a mask
    at: tuple[Any, ...] = (..., *lattice(channels, tuple(x.shape[2:]), plan.scale_positions))
    return x[at], tuple(range(1, x.dim()))


def gain_adjoint(grad: Tensor, x: Tensor, gain: Tensor, plan: Plan) -> Tensor:
    """The gradient of the gain of f(x)·gain, with f linear, from what f hands back to x: ⟨x, fᵀ(dy)⟩, over the gain."""
    total = None if plan.per_row else _inner(grad, x)
    if total is None:
        dim = (1,) if plan.per_row else tuple(range(1, x.dim()))
        total = torch.cat([torch.sum(g.to(gain.dtype) * v, dim, keepdim=True) for g, v in _pieces(grad, x)])
    return total.to(gain.dtype).reshape(gain.shape) * whitening.reciprocal(gain, where=gain > 0)


def _inner(a: Tensor, b: Tensor) -> Tensor | None:
    """⟨a, b⟩ of every sample, where a CPU has products for it and both lie in memory in one order."""
    order = sorted(range(a.dim()), key=a.stride, reverse=True)
    if not readable(a) or order[0] != 0 or a.stride() != b.stride() or not a.permute(order).is_contiguous():
        return None
    a, b = a.permute(order), b.permute(order)
    if a.dtype == b.dtype == torch.bfloat16 and multiplies_bfloat16():
        left, right = (t.flatten(0, 1).flatten(1) for t in (a, b))  # sums come out of eight bits: by lines more remains
        return (left[:, None] @ right[:, :, None]).float().reshape(len(a), -1).sum(1)
    if a.dtype == b.dtype == whitening.statistics_dtype(a.dtype):
        return torch.stack([torch.dot(p.flatten(), q.flatten()) for p, q in zip(a, b, strict=True)])
    return None


def scaled_output_(y: Tensor, gain: Tensor | None, bias: Tensor) -> Tensor:
    """y·gain + b in place."""
    if gain is None:
        return y.add_(bias)
    if _large_samples(y, gain):
        bias = bias.to(y.dtype)
        for one, own in zip(y, gain.flatten().tolist(), strict=True):  # one pass through memory in place of two
            torch.add(bias, one, alpha=own, out=one)
        return y
    for part, own in _pieces(y, gain):
        if part.dtype == own.dtype or not readable(y):
            part.mul_(own).add_(bias)
        else:
            part.copy_(part.to(own.dtype).mul_(own).add_(bias))
    return y


def scaled_gradient(
    grad: Tensor, gain: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """dy·gain, in the dtype of dy, and Σ dy as it reaches a bias of this shape and dtype."""
    return grad if gain is None else _times(grad, gain), grad.sum_to_size(shape).to(dtype)


def _times(grad: Tensor, gain: Tensor) -> Tensor:
    if grad.dtype == gain.dtype or not readable(grad):
        return (grad * gain).to(grad.dtype)
    found = torch.empty_like(grad)
    if _large_samples(grad, gain):
        for one, of_one, own in zip(found, grad, gain.flatten().tolist(), strict=True):
            torch.mul(of_one, own, out=one)
        return found
    for part, of_part, own in _pieces(found, grad, gain):
        part.copy_(of_part.to(own.dtype).mul_(own))
    return found


def _large_samples(y: Tensor, gain: Tensor) -> bool:
    """Whether every sample is worth a call of its own with its gain as a number, which has the digits of float32."""
    return readable(y) and gain.numel() == len(y) and y.numel() > LARGE_SAMPLE * len(y)


def _pieces(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same samples of all of these, as many at a time as stay in a cache; all of them, where there is none."""
    if not readable(first) or first.numel() <= PIECE:
        return iter([(first, *others)])
    samples = max(PIECE * len(first) // first.numel(), 1)
    return zip(*(torch.split(t, samples) for t in (first, *others)), strict=True)
