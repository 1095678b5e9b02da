"""The invariants of the method: one step solves regression, GL(n), scale, whiteness, fold."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import BY_LAYER, CASES, Case
from ndpp import Settings
from oracles import as_rows, block_ranges, covariance, data_matrix, inverse_sqrt, weight_matrix

WITH_BIAS = [case for case in CASES if case.options.get("bias", True)]


def least_squares_fit(layer: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The best output of the stock layer with bias, from its explicit data matrix."""
    matrix = data_matrix(layer, x)
    columns = []
    for rows, goal in zip(matrix.flatten(2), as_rows(layer, target).chunk(matrix.shape[0], 1), strict=True):
        design = torch.cat([rows, torch.ones(rows.shape[0], 1, dtype=rows.dtype)], 1)
        columns.append(design @ torch.linalg.lstsq(design, goal, driver="gelsd").solution)
    return torch.cat(columns, 1)


@pytest.mark.parametrize("case", WITH_BIAS, ids=str)
def test_one_step_at_learning_rate_one_solves_regression(case: Case) -> None:
    case = Case(case.layer, case.args, case.shape, case.options)  # one block
    layer = case.build(Settings.exact(), dtype=torch.float64)
    x = case.input()
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    target = torch.randn(layer(x).shape, dtype=x.dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    y = layer(x)
    positions = as_rows(layer, y).shape[0]
    (0.5 / positions * (y - target).square().sum()).backward()
    optimizer.step()
    got, want = as_rows(layer, layer(x)), least_squares_fit(layer, x, target)
    assert (got - want).norm() / want.norm() < 1e-6


@pytest.mark.parametrize("name", BY_LAYER)
def test_mixing_channels_does_not_change_what_is_learned(name: str) -> None:
    case = BY_LAYER[name]
    channel_axis = -1 if name == "Linear" else 1
    x = case.input()
    channels = x.shape[channel_axis]
    left, _ = torch.linalg.qr(torch.randn(channels, channels, dtype=x.dtype))
    right, _ = torch.linalg.qr(torch.randn(channels, channels, dtype=x.dtype))
    mixture = left @ torch.diag(torch.logspace(0, 2, channels, dtype=x.dtype)) @ right  # condition 100
    mixed = (x.movedim(channel_axis, -1) @ mixture).movedim(-1, channel_axis)

    def train(x: Tensor) -> Tensor:
        layer = case.build(Settings.exact(), dtype=torch.float64)
        with torch.no_grad():
            layer.weight.zero_()
        target = torch.sin(3 * torch.arange(layer(x).numel(), dtype=x.dtype)).reshape(layer(x).shape)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.5)
        for _ in range(10):
            optimizer.zero_grad()
            y = layer(x)
            (torch.cosh(y - target) - 1).mean().backward()
            optimizer.step()
        return layer(x).detach()

    plain, other = train(x), train(mixed)
    assert (plain - other).norm() / plain.norm() < 1e-6


@pytest.mark.parametrize("scale", ["l1", "rms", "std", "standardize"])
@pytest.mark.parametrize("name", BY_LAYER)
def test_scale_of_each_sample_does_not_matter(name: str, scale: Any) -> None:
    case = BY_LAYER[name]
    layer = case.build(Settings(rows=None, scale=scale), dtype=torch.float64)
    x = case.input()
    factors = torch.logspace(-8, 8, x.shape[0], dtype=x.dtype).reshape(-1, *(1,) * (x.dim() - 1))
    y, scaled = layer(x), layer(x * factors)
    assert (y - scaled).norm() / y.norm() < 1e-9
    layer.eval()
    y, scaled = layer(x), layer(x * factors)
    assert (y - scaled).norm() / y.norm() < 1e-9


def white_features(case: Case, settings: Settings, x: Tensor) -> Tensor:
    """S·X·D as (groups, rows, channels, taps), shown by the layer itself through an identity for a weight."""
    groups = case.options.get("groups", 1)
    channels = case.args[0] // groups
    taps = 1 if case.layer == "Linear" else data_matrix(case.stock(dtype=x.dtype), x).shape[-1]
    columns = channels * taps
    args = (case.args[0], groups * columns, *case.args[2:])
    layer = Case(case.layer, args, case.shape, {**case.options, "bias": False}, case.block).build(settings)
    layer = layer.double()
    matrix = torch.eye(columns, dtype=x.dtype).expand(groups, -1, -1).reshape(groups, channels, taps, columns)
    with torch.no_grad():
        layer.weight.copy_(_stock_weight(layer, matrix))
    y = as_rows(layer, layer(x)).detach()
    return y.reshape(-1, groups, channels, taps).movedim(1, 0)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("solver", ["eigh", "newton"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_features_are_white(case: Case, solver: Any, shared: bool) -> None:
    settings = Settings.exact(shared=shared, solver=solver, steps=4, block=case.block or 64)
    features = white_features(case, settings, case.input())
    channels = features.shape[2]
    ranges = block_ranges(channels, case.block or 64)
    for size in {b - a for a, b in ranges}:
        blocks = [features[g, :, a:b].flatten(1) for g in range(len(features)) for a, b in ranges if b - a == size]
        for rows in [torch.cat(blocks)] if shared else blocks:
            _, cov = covariance(rows)
            values = torch.linalg.eigvalsh(cov)
            if solver == "eigh":  # 1, or 0 in directions where padding left no variance
                assert torch.minimum(values.abs(), (values - 1).abs()).max() < 1e-6
                assert values[-1] > 0.5
            else:  # truncated: from below, never beyond
                assert values.min() > -1e-12
                assert values.max() < 1 + 1e-9
                assert values.max() > 0.9


@pytest.mark.parametrize("case", CASES, ids=str)
def test_evaluation_is_a_stock_layer(case: Case) -> None:
    """Fold: D·W and the centred bias, computed here from the buffers, in the stock layer give the evaluation output."""
    settings = Settings(rows=None, solver="newton", steps=4, eps=1e-3, shrinkage=0.1, shared=False)
    layer = case.build(settings, dtype=torch.float64)
    for seed in range(3):
        layer(case.input(seed=seed))
    layer.eval()
    groups = case.options.get("groups", 1)
    channels = case.args[0] // groups
    weights = weight_matrix(layer, layer.weight.detach()).clone()
    block = min(layer.settings.block or (256 if case.layer == "Linear" else 64), channels)
    ranges = block_ranges(channels, block)
    # Statistics hold the full blocks of all groups, then the smaller last block of each group.
    order = [(g, r) for full in (True, False) for g in range(groups) for r in ranges if (r[1] - r[0] == block) == full]
    shift = torch.zeros(groups, weights.shape[-1], dtype=torch.float64)
    for index, (g, (start, stop)) in enumerate(order):
        part = weights[g, start:stop].flatten(0, 1)
        f = part.shape[0]
        cov, mean = layer.running_cov[index, :f, :f], layer.running_mean[index, :f]
        a = cov + (1e-3 + 0.1 * cov.trace() / f) * torch.eye(f, dtype=cov.dtype)
        folded = inverse_sqrt(a, "newton", 4) @ part
        weights[g, start:stop] = folded.reshape(weights[g, start:stop].shape)
        shift[g] += mean @ folded
    stock = case.stock(dtype=torch.float64)
    with torch.no_grad():
        stock.weight.copy_(_stock_weight(stock, weights))
    bias = -shift.flatten() if layer.bias is None else layer.bias.detach() - shift.flatten()
    stock.bias = nn.Parameter(bias)
    x = case.input(seed=9)
    got, want = layer(x), stock(x)
    assert (got - want).norm() / want.norm() < 1e-10


def _stock_weight(stock: nn.Module, matrix: Tensor) -> Tensor:
    if isinstance(stock, nn.Linear):
        return matrix[0, :, 0].t()
    return (matrix.permute(0, 1, 3, 2) if stock.transposed else matrix.permute(0, 3, 1, 2)).reshape(stock.weight.shape)
