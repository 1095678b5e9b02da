"""Every stage of a training call: plain twins against float64 data matrices, kernels against their twins.

The tests of kernels (`test_kernel_of_*`) run on a CUDA device, and on the CPU in Triton's interpreter, where
`test_interpreter` runs this file again in a process of its own. `benchmarks` runs this file before it times anything.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import kernels as built_for
from torch import Tensor, nn

import ndpp
import oracles
from ndpp import kernels, rows
from ndpp.geometry import Layout, conv_grid, pointwise_grid
from ndpp.kernels import Plan, View, plain, plain_moments, plain_scale
from ndpp.sampling import choose, draw, row_budget
from ndpp.whitening import Moments

INTERPRETED = kernels.MODE == "interpret"
SLACK = 1 if INTERPRETED else 10  # float32 products of split factors on tensor cores, against float32 ones
needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
on_device = pytest.mark.parametrize("device", ["cpu" if INTERPRETED else pytest.param("cuda", marks=needs_cuda)])


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


# --- the twins against data matrices ---


@pytest.fixture(params=["as on a CPU", "a block at a time", "as on a device"])
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which the twins go through blocks, and the one that reads no value of a tensor."""
    if request.param == "a block at a time":
        monkeypatch.setattr(plain_moments, "AT_ONCE", 1)
    elif request.param == "as on a device":
        for module in (plain_moments, rows):
            monkeypatch.setattr(module, "readable", lambda _: False)
        monkeypatch.setattr(plain_moments.Looked, "runs", lambda looked: looked.plan.layout.runs(None))


@twins
@formats
@pytest.mark.usefixtures("how")
def test_moments(case: Case, channels_last: bool) -> None:
    x, plan, draws = case.input(torch.float64, channels_last), case.plan(), draw(torch.device("cpu"))
    stats = plain.moments(x, gain_of(x, plan), draws, case.view(), plan)
    means, covariances = moments_of(x, case, draws)
    for block, (mean, covariance) in enumerate(zip(means, covariances, strict=True)):
        f = len(mean)
        close(stats.mean[block, :f] * stats.unit, mean, 1e-10, "mean")
        close(stats.cov[block, :f, :f] * stats.unit.square(), covariance, 1e-10, "cov")
        assert not stats.cov[block, f:].any()


@twins
@formats
@pytest.mark.usefixtures("how")
def test_moments_adjoint(case: Case, channels_last: bool) -> None:
    x, plan, draws = case.input(torch.float64, channels_last).requires_grad_(), case.plan(), draw(torch.device("cpu"))
    means, covariances = moments_of(x, case, draws)
    view, start = case.view(), torch.randn(x.shape, dtype=x.dtype)
    with torch.no_grad():
        gain = gain_of(x, plan)
        stats = plain.moments(x, gain, draws, view, plan)
        of_mean, of_cov = torch.randn_like(stats.mean), torch.randn_like(stats.cov)
        grad = torch.empty_like(x).copy_(start)
        of_gain = plain.moments_adjoint_(grad, of_mean, of_cov, stats, x, gain, draws, view, plan)
        if gain is not None:
            assert of_gain is not None
            plain.scale_adjoint_(grad, x, gain, of_gain, plan)
    loss = torch.zeros((), dtype=x.dtype)
    for block, (mean, covariance) in enumerate(zip(means, covariances, strict=True)):
        f = len(mean)
        loss = loss + (of_mean[block, :f] * mean).sum() / stats.unit
        loss = loss + (of_cov[block, :f, :f] * covariance).sum() / stats.unit.square()
    close(grad - start, torch.autograd.grad(loss, x)[0], 1e-9)


@twins
@formats
def test_products_of_bfloat16(case: Case, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16-bit rows: as far from the exact ones as centred rows and factors rounded to eight bits are, at the most.

    Runs on any CPU: these products exist everywhere, and are chosen only where they are fast.
    """
    plan, view, draws = case.plan(solver="quartic", rows=10**6), case.view(), draw(torch.device("cpu"))
    x = case.input(torch.bfloat16, channels_last) + 20  # the mean is not part of the products
    gain, found = gain_of(x, plan), {}
    for narrow in (False, True):
        monkeypatch.setattr(plain_moments, "multiplies_bfloat16", lambda narrow=narrow: narrow)
        assert plain_moments.Looked(x, gain, draws, view, plan).narrow is narrow
        stats = plain.moments(x, gain, draws, view, plan)
        torch.manual_seed(3)
        of_mean, of_cov = torch.randn_like(stats.mean), torch.randn_like(stats.cov)
        grad = torch.zeros_like(x, dtype=torch.float32)
        of_gain = plain.moments_adjoint_(grad, of_mean, of_cov, stats, x, gain, draws, view, plan)
        found[narrow] = stats, grad, of_gain
    (want, want_grad, want_gain), (got, got_grad, got_gain) = found[False], found[True]
    assert got.unit == want.unit
    assert got.rows == want.rows
    assert torch.equal(got.cov, got.cov.mT)
    close(got.mean, want.mean, 1e-6, "mean")
    close(got.cov, want.cov, 2**-8, "cov")
    close(got_grad, want_grad, 2**-6, "gradient of the input")
    if want_gain is not None:
        assert got_gain is not None
        close(got_gain, want_gain, 2**-5, "gradient of the gain")


@pytest.mark.parametrize("changes", [{"solver": "newton"}, {"rows": None}, {"dtype": torch.float32}], ids=str)
def test_products_of_bfloat16_decline(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots that amplify small eigenvalues, statistics of every row and wider inputs get wide products."""
    monkeypatch.setattr(plain_moments, "multiplies_bfloat16", lambda: True)
    case, dtype = CASES[7], changes.pop("dtype", torch.bfloat16)
    plan = case.plan(**{"solver": "quartic", **changes})
    assert not plain_moments.Looked(case.input(dtype), None, draw(torch.device("cpu")), case.view(), plan).narrow


@formats
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("large", [1, 10**6], ids=["a call for every sample", "pieces"])
@pytest.mark.parametrize("bfloat16", [False, True], ids=["without products of bfloat16", "with products of bfloat16"])
def test_passes_of_the_scale(
    dtype: torch.dtype, channels_last: bool, large: int, bfloat16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """y·gain + b, dy·gain and ⟨dx, x⟩ / gain: one rounding of the result, whatever way through memory they take."""
    monkeypatch.setattr(plain_scale, "multiplies_bfloat16", lambda: bfloat16)
    monkeypatch.setattr(plain_scale, "LARGE_SAMPLE", large)
    monkeypatch.setattr(plain_scale, "PIECE", 150)
    case = Case("passes", 6, (5, 4), (3, 3), batch=7, scale="l1")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, grad = case.input(dtype, channels_last), case.input(dtype, channels_last) - 0.2
    gain, bias = torch.rand(7, 1, 1, 1, dtype=wide) + 0.5, torch.randn(6, 1, 1, dtype=wide)
    gain[3] = 0
    y, digits = x.clone(), torch.finfo(dtype).eps
    assert plain.scaled_output_(y, gain, bias) is y
    close(y, x.double() * gain + bias, 2 * digits)
    back = plain.scaled_gradient(grad, gain)
    assert back.dtype == dtype
    assert back.stride() == grad.stride()
    close(back, grad.double() * gain, digits)
    inner = (x.double() * grad.double()).sum((1, 2, 3), keepdim=True)
    want = torch.where(gain > 0, inner / gain.clamp_min(0.1), 0)
    close(plain.gain_adjoint(grad, x, gain, case.plan()), want, 9 * digits if dtype == wide else digits)
    apart = grad.contiguous(memory_format=torch.contiguous_format if channels_last else torch.channels_last)
    close(plain.gain_adjoint(apart, x, gain, case.plan()), want, 9 * digits if dtype == wide else digits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_passes_of_the_scale_of_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, where every row has its gain and features lie last."""
    monkeypatch.setattr(plain_scale, "PIECE", 40)
    case = Case("passes", 6, (5,), batch=7, scale="l1")
    x, grad = case.input(dtype), case.input(dtype) - 0.2
    gain, bias = torch.rand(7, 1, 5) + 0.5, torch.randn(6)
    y, digits = x.movedim(1, -1).clone(), torch.finfo(dtype).eps
    close(plain.scaled_output_(y, gain.movedim(1, -1), bias), (x.double() * gain).movedim(1, -1) + bias, 2 * digits)
    close(
        plain.scaled_gradient(grad.movedim(1, -1), gain.movedim(1, -1)), (grad.double() * gain).movedim(1, -1), digits
    )
    want = (x.double() * grad.double()).sum(1, keepdim=True) / gain
    close(plain.gain_adjoint(grad, x, gain, case.plan()), want, 1e-6)


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


ROOTS = [(1, 1, 0), (2, 5, 0), (3, 48, 0), (3, 64, 7), (2, 65, 0), (1, 128, 0)]


@pytest.mark.parametrize("solver", ["quartic", "newton", "minimax"])
@pytest.mark.parametrize(("blocks", "f", "last"), ROOTS[:4])
def test_root_adjoint(blocks: int, f: int, last: int, solver: str) -> None:
    """Against autograd through the iteration as the method writes it."""
    stats, plan = some_moments(blocks, f, last)
    stats, plan = Moments(*(t.double() for t in stats)), replace(plan, solver=solver, steps=4)
    cov = stats.cov.clone().requires_grad_()
    d = kernels.root(Moments(stats.rows, stats.mean, cov, stats.unit), plan)
    grad = torch.randn_like(d)
    if solver == "newton":
        width = torch.full((blocks,), f)
        width[-1] = last or f
        for block in range(blocks):
            w = int(width[block])
            part = stats.cov[block, :w, :w]
            ridge = 1e-5 / stats.unit.square() + 0.1 * part.trace() / w
            want = oracles.inverse_sqrt(part + ridge * torch.eye(w, dtype=cov.dtype), "newton", 4)
            close(d[block, :w, :w], want, 1e-9)
            grad[block, w:], grad[block, :, w:] = 0, 0
    got = plain.root_adjoint(stats, plain.root(stats, plan), grad, plan)
    want = torch.autograd.grad(d, cov, (grad + grad.mT) / 2)[0]
    close(got + got.mT, want + want.mT, 1e-9)


# --- kernels against their twins ---


@on_device
@formats
@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernel_of_moments(case: Case, channels_last: bool, dtype: torch.dtype, device: str) -> None:
    """Values, and every gradient, of moments; outputs start as NaN."""
    if INTERPRETED and channels_last != (dtype == torch.bfloat16):
        pytest.skip("half of the combinations: the interpreter is slow")
    x, plan, view = case.input(dtype, channels_last).to(device), case.plan(), case.view()
    gain, draws = gain_of(x, plan), draw(x.device)
    with poisoned():
        got = taken("moments")(x, gain, draws, view, plan)
    want = plain.moments(x, gain, draws, view, plan)
    # bfloat16 products round centred rows to eight bits: errors of single entries, averaged over rows
    tolerance = 5e-3 if dtype == torch.bfloat16 and not INTERPRETED else 2e-6 * SLACK
    assert got.unit == want.unit
    assert got.rows == want.rows
    close(got.mean, want.mean, tolerance, "mean")
    close(got.cov, want.cov, tolerance, "cov")
    assert torch.equal(got.cov, got.cov.mT)
    of_mean, of_cov = torch.randn_like(want.mean), torch.randn_like(want.cov)
    start = torch.randn_like(x) if dtype == torch.float32 else torch.zeros_like(x)  # which rounds to nothing else
    if INTERPRETED and plan.layout.taps > 1:
        start = start.float()  # the interpreter adds atomically in float32 only
    grads = start.clone(), start.float().clone()
    arguments = of_mean, of_cov, want, x, gain, draws, view, plan
    with poisoned():
        of_gain = taken("moments_adjoint_")(grads[0], *arguments)
    want_gain = plain.moments_adjoint_(grads[1], *arguments)
    loose = 2e-2 if dtype == torch.bfloat16 else 1e-5 * SLACK
    close(grads[0].float() - start.float(), grads[1] - start.float(), loose, "gradient of the input")
    if gain is not None:
        close(of_gain, want_gain, 2 * loose, "gradient of the gain")


def taken(stage: str) -> Any:
    """The kernel of a stage, whatever NDPP_KERNELS says."""
    return kernels._kernel(stage)


class poisoned:
    """torch.empty gives NaN within: an entry that is not written shows."""

    def __enter__(self) -> None:
        self.before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.utils.deterministic.fill_uninitialized_memory = self.before[0]
        torch.use_deterministic_algorithms(self.before[1])


@on_device
@pytest.mark.parametrize("solver", ["quartic", "newton", "minimax"])
@pytest.mark.parametrize(("blocks", "f", "last"), ROOTS)
def test_kernel_of_root(blocks: int, f: int, last: int, solver: str, device: str) -> None:
    stats, plan = some_moments(blocks, f, last, device)
    plan = replace(plan, solver=solver)
    with poisoned():
        got = taken("root")(stats, plan)
    close(got, plain.root(stats, plan), 2e-6 * SLACK, "D")
    grad = torch.randn_like(stats.cov)
    with poisoned():
        got = taken("root_adjoint")(stats, plain.root(stats, plan), grad, plan)
    close(got, plain.root_adjoint(stats, plain.root(stats, plan), grad, plan), 1e-5 * SLACK, "gradient")


@on_device
def test_kernel_of_nothing(device: str) -> None:
    """Values that are not finite: a count of NaN, zeros, D = I·unit and no gradient; the host is not asked."""
    case = CASES[7]
    for bad in (math.nan, math.inf):
        x, plan, view, draws = case.input().to(device), case.plan(), replace(case, rows=None).view(), draw(device)
        x[1, 2, 3, 3] = bad
        gain = torch.ones_like(x[:, :1, :1, :1])
        stats = taken("moments")(x, gain, draws, view, plan)
        assert stats.rows.isnan()
        assert not stats.mean.any()
        assert not stats.cov.any()
        assert stats.unit == plain.moments(x, gain, draws, view, plan).unit == 1
        f = stats.cov.shape[-1]
        assert torch.equal(taken("root")(stats, plan), torch.eye(f, device=device)[None])
        grad = torch.ones_like(x)
        of_gain = taken("moments_adjoint_")(grad, stats.mean, stats.cov, stats, x, gain, draws, view, plan)
        assert (grad == 1).all()
        assert not of_gain.any()


@on_device
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18, 1e37])
def test_kernel_of_extreme_magnitudes(size: float, device: str) -> None:
    case = CASES[7]
    x, plan, view, draws = case.input().to(device) * size, case.plan(eps=0.0), case.view(), draw(device)
    got, want = taken("moments")(x, None, draws, view, plan), plain.moments(x, None, draws, view, plan)
    assert got.unit == want.unit
    close(got.mean, want.mean, 2e-6 * SLACK)
    close(got.cov, want.cov, 2e-6 * SLACK)


@on_device
def test_kernel_of_data_off_centre(device: str) -> None:
    """A mean a thousand times the deviation, and a constant column, which has exactly no variance to speak of."""
    case = CASES[4]
    x, plan, view, draws = case.input().to(device) + 1000, case.plan(), case.view(), draw(device)
    x[:, 3] = 7.3
    got = taken("moments")(x, None, draws, view, plan)
    want = plain.moments(x.double(), None, draws, view, plan)
    close(got.cov * got.unit.square(), want.cov * want.unit.square(), 2e-3)
    assert got.cov[0, 3].abs().max() < 1e-12


@on_device
@pytest.mark.parametrize("momentum", [0.1, 0.001, None, 1.0])
def test_kernel_of_running_statistics(momentum: float | None, device: str) -> None:
    """Steps of one and of two calls, and calls with nothing to give, into all buffers."""
    states = []
    for observe_ in (taken("observe_"), plain.observe_):
        torch.manual_seed(2)
        buffers = torch.zeros(2, 5), torch.eye(5).repeat(2, 1, 1), torch.tensor(0)
        zeros = torch.tensor(0.0), torch.zeros(2, 5), torch.zeros(2, 5, 5)
        state = kernels.Running(*(t.to(device) for t in (*buffers, *zeros)))
        for bad in ("", "more", "rows", "", "cov", "mean", ""):
            rows = torch.randn(2, 20, 5) + 1
            mean, cov = rows.mean(1), torch.einsum("gni,gnj->gij", rows, rows) / 20
            batch = Moments(torch.tensor(math.nan if bad == "rows" else 7.0), mean, cov, torch.tensor(0.25))
            if bad in ("mean", "cov"):
                getattr(batch, bad)[0, 1] = math.inf
            observe_(state, Moments(*(t.to(device) for t in batch)), momentum, bad in ("more", "rows", "cov"))
        states.append(state)
    assert states[0].tracked == states[1].tracked == 3
    for got, want, name in zip(*states, kernels.Running._fields, strict=True):
        close(got, want, 2e-6, name)


@on_device
def test_kernel_of_the_first_running_statistics(device: str) -> None:
    """They are those of the first step, however small: nothing is left of the identity they started from."""
    for observe_ in (taken("observe_"), plain.observe_):
        buffers = torch.ones(1, 3), torch.eye(3)[None], torch.tensor(0)
        zeros = torch.tensor(0.0), torch.zeros(1, 3), torch.zeros(1, 3, 3)
        state = kernels.Running(*(t.to(device) for t in (*buffers, *zeros)))
        mean, cov = torch.tensor([[1.0, -0.5, 0.25]]), torch.eye(3)[None] + 0.5
        batch = Moments(torch.tensor(7.0), mean, cov, torch.tensor(2.0**-20))
        observe_(state, Moments(*(t.to(device) for t in batch)), 0.1, True)
        torch.testing.assert_close(state.mean.cpu(), mean * 2.0**-20, rtol=1e-6, atol=0)
        torch.testing.assert_close(state.cov.cpu(), cov * 2.0**-40, rtol=1e-6, atol=0)


LAYERS: dict[str, tuple[Any, tuple[int, ...], ndpp.Settings]] = {
    "linear": (lambda s: ndpp.Linear(6, 4, settings=s), (30, 6), ndpp.Settings(rows=11, scale="std")),
    "tokens": (lambda s: ndpp.Linear(6, 4, settings=s), (3, 7, 6), ndpp.Settings(scale="l1", solver="minimax")),
    "conv": (lambda s: ndpp.Conv2d(4, 5, 3, padding=1, settings=s), (3, 4, 6, 5), ndpp.Settings(rows=40)),
    "strided": (lambda s: ndpp.Conv2d(6, 4, 1, 2, settings=s), (3, 6, 6, 5), ndpp.Settings(block=4, scale="rms")),
    "shared": (
        lambda s: ndpp.Conv2d(8, 4, 3, settings=s),
        (3, 8, 6, 5),
        ndpp.Settings(block=4, shared=True, shrinkage=0.1, rows=20),
    ),
}


@on_device
@pytest.mark.parametrize("layer", LAYERS)
def test_kernel_of_layers(layer: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step of whole layers: output, running statistics and every gradient, by kernels and by twins."""
    build, shape, settings = LAYERS[layer]
    inputs, outcomes = torch.randn(shape).to(device) + 0.2, []
    for mode in ("interpret" if INTERPRETED else "triton", "plain"):
        monkeypatch.setattr(kernels, "MODE", mode)
        torch.manual_seed(1)
        module, x = build(settings).to(device), inputs.clone().requires_grad_()
        y = module(x)
        (y * torch.sin(torch.arange(y.numel(), device=device)).reshape(y.shape)).sum().backward()
        state = {"output": y, "dx": x.grad, "mean": module.running_mean, "cov": module.running_cov}
        outcomes.append(state | {f"d{name}": p.grad for name, p in module.named_parameters()})
    for name, value in outcomes[0].items():
        close(value, outcomes[1][name], 2e-5 * SLACK, name)


# --- a CUDA device alone ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [CASES[4], CASES[7]], ids=str)
def test_capture(case: Case) -> None:
    """All kernels in a CUDA graph: no stage waits for the host, and a replay sees new data."""
    x, plan, view = case.input().cuda(), case.plan(scale="none"), case.view()
    draws = draw(x.device)

    def run() -> tuple[Tensor, ...]:
        stats = taken("moments")(x, None, draws, view, plan)
        d = taken("root")(stats, plan) if stats.cov.shape[-1] <= kernels.WIDEST_ROOT else stats.cov
        grad = torch.zeros_like(x)
        taken("moments_adjoint_")(grad, stats.mean, d, stats, x, None, draws, view, plan)
        return stats.mean, stats.cov, d, grad

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    x.copy_(case.input())
    graph.replay()
    for got, want in zip(kept, run(), strict=True):
        close(got, want, 1e-6)


# --- the interpreter, and the compiler without a device ---


def test_interpreter() -> None:
    """The tests of kernels above, on the CPU. A process of its own: triton decides when it is imported."""
    if INTERPRETED:
        pytest.skip("this is it")
    pytest.importorskip("triton")
    root = Path(__file__).parent.parent
    environment = {**os.environ, "NDPP_KERNELS": "interpret", "TRITON_INTERPRET": "1"}
    paths = [str(root / "src"), str(root), str(root / "tests"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__, "-k", "kernel_of"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


H200 = 227 * 1024  # bytes of shared memory for a program


def check_builds(launches: list[Any], stack: int) -> None:
    from ndpp.kernels import triton_launch

    for started in launches:
        built = triton_launch.build(started)
        assert built.shared <= H200, started.kernel
        assert built.stack <= stack, (started.kernel, built)  # bytes of spilled registers


def test_kernels_build_for_a_device_that_is_not_here() -> None:
    """Triton's compiler and assembler need none."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("the interpreter has no compiler")
    check_builds(built_for.of_moments(20, 3, "none", torch.bfloat16), 0)
    check_builds([*built_for.of_roots(16), *built_for.of_observing(16)], 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_kernels_build(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    for shape in built_for.SHAPES.values():
        check_builds(built_for.of_moments(*shape, dtype), 512)
    for width in built_for.WIDTHS:
        check_builds(built_for.of_roots(width), 512)


# --- who takes a case ---


def test_kernels_are_opt_in(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[7]
    x, view, plan = case.input(), case.view(), case.plan()

    def reasons(x: Tensor = x, view: View = view, plan: Plan = plan) -> list[str]:
        return list(kernels.explain(x, view, plan).values())

    monkeypatch.setattr(kernels, "MODE", "plain")
    assert reasons() == ["plain: NDPP_KERNELS is plain"] * 4
    monkeypatch.setattr(kernels, "MODE", "triton")
    assert reasons() == ["plain: a tensor on cpu"] * 4
    monkeypatch.setattr(kernels, "MODE", "interpret")
    assert reasons() == ["kernel"] * 4
    assert reasons(x.double()) == ["plain: values of torch.float64"] * 4
    assert reasons(plan=replace(plan, padding_mode="reflect"))[:2] == ["plain: padding with 'reflect'"] * 2
    assert reasons(plan=replace(plan, solver="eigh"))[2:] == ["plain: an eigendecomposition"] * 2
    assert "more than 10 steps" in reasons(plan=replace(plan, steps=11))[2]
    wide = replace(plan, layout=replace(plan.layout, channels=15))
    assert reasons(plan=wide)[2:] == ["plain: blocks of 135 features, more than 128"] * 2
    uneven = replace(plan, layout=replace(plan.layout, shared=True, block=2))
    assert "smaller last block" in reasons(plan=uneven)[0]
    assert "share memory" in kernels.explain(x, view, plan, x[:1].expand_as(x))["moments_adjoint_"]
    torch.use_deterministic_algorithms(True)
    try:
        assert reasons()[1] == "plain: atomic additions are not deterministic"
        assert kernels.explain(x, CASES[4].view(), CASES[4].plan())["moments_adjoint_"] == "kernel"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(kernels, "_has_triton", lambda: False)
    assert reasons() == ["plain: triton is not installed"] * 4


def test_unknown_choice_names_the_choices() -> None:
    environment = {**os.environ, "NDPP_KERNELS": "fast"}
    done = subprocess.run([sys.executable, "-c", "import ndpp"], env=environment, capture_output=True, text=True)
    assert "NDPP_KERNELS must be plain, triton or interpret; got 'fast'" in done.stderr
