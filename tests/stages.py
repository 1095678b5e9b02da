"""Layers and inputs by which every stage of a training call is tested, and the data matrix behind each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracles
from ndpp.geometry import Layout, conv_grid, pointwise_grid
from ndpp.kernels import Plan, View, plain
from ndpp.sampling import choose, row_budget
from ndpp.whitening import Moments


@dataclass(frozen=True)
class Case:
    """A layer and its input. No kernel size: Linear, whose features lie last."""

    name: str
    channels: int
    sizes: tuple[int, ...] = ()
    kernel: tuple[int, ...] = ()
    batch: int = 4
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    groups: int = 1
    block: int = 64
    shared: bool = False
    rows: int | None = None
    scale: str = "none"
    shrinkage: float = 0.0

    def __str__(self) -> str:
        return self.name

    def plan(self, **changes: Any) -> Plan:
        layout = Layout(self.groups, self.channels // self.groups, math.prod(self.kernel), self.block, self.shared)
        per_row = not self.kernel
        plan = Plan(
            layout, False, per_row, "zeros", self.scale, 0.0, None, "newton", 3, 1e-5, self.shrinkage, self.rows, None
        )
        return replace(plan, **changes)

    def view(self) -> View:
        if not self.kernel:
            phase = pointwise_grid(self.sizes).phases[0]
        else:
            each = [[value] * len(self.sizes) for value in (self.stride, self.dilation)]
            sides = [(self.padding, self.padding)] * len(self.sizes)
            phase = conv_grid(self.sizes, self.kernel, each[0], sides, each[1]).phases[0]
        return View(phase, row_budget(self.batch, phase, self.rows, None))

    def input(self, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> Tensor:
        """(batch, channels, *sizes), correlated and off centre."""
        if not self.kernel or channels_last:
            x = torch.randn(self.batch, *self.sizes, self.channels)
            x = (x + 0.5 * x.roll(1, -1) + 0.3).movedim(-1, 1)
        else:
            x = torch.randn(self.batch, self.channels, *self.sizes)
            x = x + 0.5 * x.roll(1, -1) + 0.3
        return x.to(dtype)

    def layer(self) -> nn.Module:
        """The stock layer, which says what the data matrix is."""
        if not self.kernel:
            return nn.Linear(self.channels, 1, bias=False)
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(self.kernel) - 1]
        options: Any = {"stride": self.stride, "dilation": self.dilation, "padding": self.padding}
        return kind(self.channels, self.groups, self.kernel, groups=self.groups, bias=False, **options)


CASES = [
    Case("linear", 5, batch=70),
    Case("linear-few-rows", 48, batch=40, rows=7, scale="l1"),
    Case("linear-tokens", 65, (6, 3), batch=3, block=100, scale="std"),
    Case("one-pixel", 3, (1, 1), (1, 1), batch=1),
    Case("pointwise", 65, (5, 4), (1, 1), batch=3, rows=21),
    Case("pointwise-strided", 48, (7, 6), (1, 1), stride=2, block=16, scale="rms"),
    Case("smaller-last-block", 10, (6, 5), (1, 1), block=4, shrinkage=0.1),
    Case("patches", 5, (6, 7), (3, 3), padding=1, rows=30, scale="l1"),
    Case("patches-blocks", 9, (6, 7), (3, 3), padding=1, block=4, rows=40),
    Case("seven", 3, (9, 8), (7, 7), stride=2, padding=3, batch=2),
    Case("dilated", 4, (8, 7), (3, 3), dilation=2, padding=2, groups=2, rows=25),
    Case("grouped-smaller-last", 10, (5, 5), (2, 2), groups=2, block=2),
    Case("shared", 12, (6, 5), (3, 3), padding=1, block=4, shared=True, groups=1, rows=23, scale="rms"),
    Case("one-axis", 6, (11,), (4,), stride=2, padding=1, rows=3, batch=5, scale="std"),
    Case("three-axes", 3, (4, 3, 5), (2, 1, 3), padding=1, rows=20),
]
cases = pytest.mark.parametrize("case", CASES, ids=str)
formats = pytest.mark.parametrize("channels_last", [False, True], ids=["first", "last"])
TWINS = [
    *CASES,
    Case("shared-smaller-last", 10, (5, 5), (2, 2), block=3, shared=True, rows=17, scale="l1"),
    Case("grouped-shared-smaller-last", 10, (5, 6), (3, 3), groups=2, padding=1, block=2, shared=True),
    Case("depthwise", 6, (5, 6), (3, 3), groups=6, padding=1, rows=33),
]
twins = pytest.mark.parametrize("case", TWINS, ids=str)


def close(got: Tensor, want: Tensor, tolerance: float, name: str = "") -> None:
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert got.shape == want.shape, name
    assert torch.isfinite(got).all(), name
    assert (got - want).norm() <= tolerance * want.norm() + 1e-30, (name, float((got - want).norm() / want.norm()))


def gain_of(x: Tensor, plan: Plan) -> Tensor | None:
    return plain.scale(x, plan) if plan.scale != "none" else None


def moments_of(x: Tensor, case: Case, draws: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Mean and covariance of every block that has a D, by the whole data matrix in float64. Differentiable."""
    scaled = x
    if case.scale != "none":
        scaled = oracles.sample_scale(x.movedim(1, -1), case.scale, True).movedim(-1, 1)
        if case.kernel:
            scaled = oracles.sample_scale(x, case.scale, False)
    matrix = oracles.data_matrix(case.layer(), scaled if case.kernel else scaled.movedim(1, -1))
    matrix = matrix[:, row_numbers(case, draws)]  # (groups, rows, channels, taps)
    means, covariances = [], []
    ranges = oracles.block_ranges(matrix.shape[2], case.block)
    full = [r for r in ranges if r[1] - r[0] == ranges[0][1] - ranges[0][0]]
    blocks = [(g, *r) for part in (full, ranges[len(full) :]) for g in range(case.groups) for r in part]
    stacked = [matrix[g, :, start:stop].flatten(1) for g, start, stop in blocks]
    if case.shared:  # one D for all blocks of the same size
        widths = dict.fromkeys(block.shape[1] for block in stacked)
        stacked = [torch.cat([block for block in stacked if block.shape[1] == width]) for width in widths]
    for matrix in stacked:
        mean, covariance = oracles.covariance(matrix)
        means.append(mean)
        covariances.append(covariance)
    return means, covariances


def row_numbers(case: Case, draws: Tensor) -> Tensor:
    """The sampled rows among all output positions, sample by sample."""
    view = case.view()
    sample = choose(case.batch, view.phase, view.budget, draws)
    number = torch.arange(case.batch) if sample.samples is None else sample.samples
    index = number[:, None]
    for axis, position in zip(view.phase, sample.positions, strict=True):
        index = (index[:, :, None] * axis.count + position[:, None, :]).flatten(1)
    return index.flatten()


def some_moments(blocks: int, f: int, last: int = 0, device: str = "cpu") -> tuple[Moments, Plan]:
    """Of well-conditioned data; `last` features of the last block."""
    rows = torch.randn(blocks, 3 * f + 8, f, dtype=torch.float64) * torch.linspace(0.5, 2, f)
    if last:
        rows[-1, :, last:] = 0
    channels = f * blocks if not last else f * (blocks - 1) + last
    plan = replace(CASES[0].plan(shrinkage=0.1), layout=Layout(1, channels, 1, f, False))
    cov = rows.mT @ rows / rows.shape[1]
    stats = Moments(torch.tensor(9.0), rows.mean(1).float(), cov.float(), torch.tensor(0.5))
    return Moments(*(t.to(device) for t in stats)), plan
