"""Independent float64 references: explicit data matrices and eigendecompositions. Imports nothing of ndpp.

The data matrix comes from the stock operation itself: a layer is linear in its weight, so its column (channel, tap) is
the output of the stock layer whose weight is 1 there and 0 elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sample_scale(x: Tensor, mode: str, per_row: bool) -> Tensor:
    """S·x. Convolutions: x is (N, C, *S) and a sample is x[n]; Linear: a sample is a row."""
    if mode == "none":
        return x
    dims = (-1,) if per_row else tuple(range(1, x.dim()))
    if mode == "l1":
        return x / x.abs().mean(dims, keepdim=True)
    if mode == "rms":
        return x / x.square().mean(dims, keepdim=True).sqrt()
    sigma = x.std(dims, correction=0, keepdim=True)
    if mode == "std":
        return x / sigma
    return (x - x.mean(dims, keepdim=True)) / sigma


def data_matrix(layer: nn.Module, x: Tensor, **call: object) -> Tensor:
    """X of shape (groups, rows, channels of a group, taps), rows in the order of (sample, output position)."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1], 1)
    groups, transposed = layer.groups, layer.transposed
    options = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": groups}
    if transposed:
        options["output_padding"] = layer.output_padding
    kind = type(layer).__mro__
    stock = next(k for k in kind if k.__module__.startswith("torch.nn"))
    probe = stock(layer.in_channels, groups, layer.kernel_size, bias=False, padding_mode=layer.padding_mode, **options)
    probe = probe.double()
    channels = layer.in_channels // groups
    taps = probe.weight[0, 0].numel()
    columns = []
    for channel in range(channels):
        for tap in range(taps):
            weight = torch.zeros(*probe.weight.shape[:2], taps, dtype=x.dtype)
            for group in range(groups):
                weight[(group * channels + channel, 0) if transposed else (group, channel)][tap] = 1.0
            column = torch.func.functional_call(probe, {"weight": weight.reshape(probe.weight.shape)}, (x,), call)
            columns.append(column.movedim(1, 0).reshape(groups, -1))  # (groups, rows)
    return torch.stack(columns, -1).reshape(groups, -1, channels, taps)


def weight_matrix(layer: nn.Module, weight: Tensor) -> Tensor:
    """(groups, channels, taps, outputs of a group)."""
    if isinstance(layer, nn.Linear):
        return weight.t()[None, :, None, :]
    g = layer.groups
    if layer.transposed:
        return weight.reshape(g, weight.shape[0] // g, weight.shape[1], -1).permute(0, 1, 3, 2)
    return weight.reshape(g, weight.shape[0] // g, weight.shape[1], -1).permute(0, 2, 3, 1)


def block_ranges(channels: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, channels)) for start in range(0, channels, block)]


def covariance(rows: Tensor) -> tuple[Tensor, Tensor]:
    mean = rows.mean(0)
    return mean, (rows - mean).t() @ (rows - mean) / rows.shape[0]


# Of the quartic closest to three Newton steps; test_whitening.py shows that there is none closer.
QUARTIC = (3.3573489723558545, -8.587162410870388, 14.750283668022684, -12.910446542283186, 4.395206246891819)


def inverse_sqrt(a: Tensor, solver: str, steps: int) -> Tensor:
    if solver == "eigh":
        values, vectors = torch.linalg.eigh(a)
        return vectors @ torch.diag(values**-0.5) @ vectors.t()
    norm = a.square().sum().sqrt()
    if solver == "quartic":
        assert steps == 3
        values, vectors = torch.linalg.eigh(a / norm)
        curve = sum(c * values**power for power, c in enumerate(QUARTIC))
        return vectors @ torch.diag(curve) @ vectors.t() / norm.sqrt()
    assert solver == "newton"
    eye = torch.eye(a.shape[0], dtype=a.dtype)
    x, m = eye, a / norm
    for _ in range(steps):  # as written in the method, all three products of every step
        t = (3 * eye - m) / 2
        x, m = x @ t, t @ t @ m
    return x / norm.sqrt()


def layer_output(
    layer: nn.Module,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    block: int,
    shared: bool,
    solver: str,
    steps: int,
    eps: float,
    shrinkage: float,
    scale: str = "none",
    **call: object,
) -> Tensor:
    """y = (S·X - μ)·D·w + b in training mode, every position sampled: rows (samples·positions, outputs)."""
    per_row = isinstance(layer, nn.Linear)
    matrix = data_matrix(layer, sample_scale(x, scale, per_row), **call)
    weights = weight_matrix(layer, weight)
    groups, n, channels = matrix.shape[:3]
    ranges = block_ranges(channels, block)
    outputs: list[Tensor] = [torch.zeros(n, weights.shape[-1], dtype=x.dtype) for _ in range(groups)]

    def solve(rows: Tensor) -> tuple[Tensor, Tensor]:
        mean, cov = covariance(rows)
        ridge = eps + shrinkage * cov.trace() / cov.shape[0]
        return mean, inverse_sqrt(cov + ridge * torch.eye(cov.shape[0], dtype=cov.dtype), solver, steps)

    for size in sorted({stop - start for start, stop in ranges}):
        same = [(g, start, stop) for g in range(groups) for start, stop in ranges if stop - start == size]
        rows = [matrix[g, :, start:stop].reshape(n, -1) for g, start, stop in same]
        stacked = solve(torch.cat(rows)) if shared else None
        for (g, start, stop), block_rows in zip(same, rows, strict=True):
            mean, d = stacked if stacked is not None else solve(block_rows)
            outputs[g] = outputs[g] + (block_rows - mean) @ d @ weights[g, start:stop].reshape(-1, weights.shape[-1])
    y = torch.cat(outputs, 1)
    return y if bias is None else y + bias


def as_rows(layer: nn.Module, y: Tensor) -> Tensor:
    """A layer's output as (samples·positions, outputs), the order of `data_matrix`."""
    return y.reshape(-1, y.shape[-1]) if isinstance(layer, nn.Linear) else y.movedim(1, -1).reshape(-1, y.shape[1])
