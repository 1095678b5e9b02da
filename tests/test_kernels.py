"""Every stage by its kernels against its plain twin.

The tests of kernels (`test_kernel_of_*`) run on a CUDA device, and on the CPU in Triton's interpreter, where
`test_interpreter` runs this file again in a process of its own. `benchmarks` runs this file before it times anything.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import kernels as built_for
from torch import Tensor, nn

import ndpp
from ndpp import kernels
from ndpp.geometry import Layout
from ndpp.kernels import Folded, Plan, cases, plain
from ndpp.sampling import draw
from ndpp.whitening import Moments
from stages import CASES, Case, close, formats, gain_of, some_moments

INTERPRETED = cases.MODE == "interpret"
SLACK = 1 if INTERPRETED else 10  # float32 products of split factors on tensor cores, against float32 ones
needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
on_device = pytest.mark.parametrize("device", ["cpu" if INTERPRETED else pytest.param("cuda", marks=needs_cuda)])
ROWS = [
    *CASES,
    Case("apart", 9, (20, 22), (3, 3), padding=1, batch=3, rows=14, block=8),  # no two rows read the same entry
    Case("apart-strided", 16, (19, 12), (3, 3), padding=1, stride=2, batch=2, rows=9, scale="l1"),
    Case("many-samples", 8, (7, 7), (3, 3), padding=1, batch=9, rows=40, block=8),
    Case("patchify", 3, (8, 8), (4, 4), stride=4, batch=2),
    Case("wide-rows", 32, (5, 6), (1, 1), batch=3, rows=70, block=16),
    Case("depthwise", 12, (6, 5), (3, 3), padding=1, groups=12, scale="l1"),
    Case("one-pixel-overhung", 16, (1, 1), (1, 2), padding=1, batch=4),
]
rows_of = pytest.mark.parametrize("case", ROWS, ids=str)


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


@pytest.fixture(autouse=True)
def promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels promise the compiler of addresses and masks must hold: a device takes their word for it."""
    if INTERPRETED:
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(interpreter.TensorHandle, "set_attr", check_promise)


def check_promise(handle: Any, name: str, runs: list[int]) -> None:
    """Of values along each axis, in runs of this many: one after the other, the first divisible, or all the same."""
    values = np.asarray(handle.data)
    for axis, length in enumerate(runs):
        if length == 1:
            continue
        if values.size == 1:
            assert name == "tt.divisibility", name
            assert values.item() % length == 0, (name, values)
            continue
        lines = np.moveaxis(values, axis, -1).reshape(-1, length)
        if name == "tt.divisibility":
            assert (lines[:, 0] % length == 0).all(), name
        elif name == "tt.contiguity":
            assert (lines - lines[:, :1] == np.arange(length)).all(), name
        else:
            assert name == "tt.constancy", name
            assert (lines == lines[:, :1]).all(), name


# --- rows and their moments ---


@on_device
@formats
@rows_of
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
    narrow = dtype == torch.bfloat16 and (not INTERPRETED or plan.layout.widths[0][1] > 64)
    tolerance = (1e-2 if INTERPRETED else 5e-3) if narrow else 2e-6 * SLACK  # the interpreter cuts bits off
    assert got.unit == want.unit
    assert got.rows == want.rows
    close(got.mean, want.mean, 2e-6 * SLACK, "mean")
    close(got.cov, want.cov, tolerance, "cov")
    assert torch.equal(got.cov, got.cov.mT)
    of_mean, of_cov = torch.randn_like(want.mean), torch.randn_like(want.cov)
    start = torch.randn_like(x) if dtype == torch.float32 else torch.zeros_like(x)  # which rounds to nothing else
    grads = start.clone(), start.float().clone()
    arguments = of_mean, of_cov, want, x, gain, draws, view, plan
    with poisoned():
        of_gain = taken("moments_adjoint_")(grads[0], *arguments)
    want_gain = plain.moments_adjoint_(grads[1], *arguments)
    loose = 2e-2 if dtype == torch.bfloat16 else 1e-5 * SLACK
    close(grads[0].float() - start.float(), grads[1] - start.float(), loose, "gradient of the input")
    if gain is not None:
        close(of_gain, want_gain, 2 * loose, "gradient of the gain")


@on_device
def test_kernel_of_gradients_in_one_order(device: str) -> None:
    """The same bits in every run, also where rows share entries; in a gradient that lies otherwise than the input."""
    case = next(case for case in ROWS if case.name == "patches")
    x, plan, view, draws = case.input().to(device), case.plan(scale="none"), case.view(), draw(device)
    stats = plain.moments(x, None, draws, view, plan)
    of_mean, of_cov = torch.randn_like(stats.mean), torch.randn_like(stats.cov)
    found = []
    for layout in (torch.contiguous_format, torch.contiguous_format, torch.channels_last):
        grad = torch.zeros_like(x, memory_format=layout)
        taken("moments_adjoint_")(grad, of_mean, of_cov, stats, x, None, draws, view, plan)
        found.append(grad)
    assert torch.equal(found[0], found[1])
    close(found[2], found[0], 1e-6)


@on_device
def test_kernel_of_nothing(device: str) -> None:
    """Values that are not finite: a count of NaN, zeros, and no gradient; the host is not asked."""
    case = next(case for case in ROWS if case.name == "patches")
    for bad in (math.nan, math.inf):
        x, plan, view, draws = case.input().to(device), case.plan(), replace(case, rows=None).view(), draw(device)
        x[1, 2, 3, 3] = bad
        gain = torch.ones_like(x[:, :1, :1, :1])
        stats = taken("moments")(x, gain, draws, view, plan)
        assert stats.rows.isnan()
        assert not stats.mean.any()
        assert not stats.cov.any()
        assert stats.unit == plain.moments(x, gain, draws, view, plan).unit == 1
        grad = torch.ones_like(x)
        of_gain = taken("moments_adjoint_")(grad, stats.mean, stats.cov, stats, x, gain, draws, view, plan)
        assert (grad == 1).all()
        assert not of_gain.any()


WIDE = Case("wide-block", 90, (7, 6), (1, 1), batch=5, rows=130, block=90)


@on_device
@pytest.mark.parametrize("case", [next(case for case in ROWS if case.name == "patches"), WIDE], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1e18, 1e37])
def test_kernel_of_extreme_magnitudes(size: float, case: Case, device: str) -> None:
    x, plan, view, draws = case.input().to(device) * size, case.plan(eps=0.0), case.view(), draw(device)
    got, want = taken("moments")(x, None, draws, view, plan), plain.moments(x, None, draws, view, plan)
    assert got.unit == want.unit
    close(got.mean, want.mean, 2e-6 * SLACK)
    close(got.cov, want.cov, 2e-6 * SLACK)


@on_device
@pytest.mark.parametrize("scale", ["none", "l1"])
def test_kernel_of_many_rows(scale: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide blocks whose rows are too many to be written first: both ways find the same."""
    gathered, adjoint = cases.module("triton_gathered"), cases.module("triton_moments_adjoint")
    case = Case("many", 20, (6, 7), (3, 3), padding=1, batch=4, rows=90, block=10, scale=scale)
    x, plan, view, draws = case.input().to(device), case.plan(), case.view(), draw(torch.device(device))
    gain = gain_of(x, plan)
    found = []
    for most in (gathered.MOST_ROWS, 0):
        monkeypatch.setattr(gathered, "MOST_ROWS", most)
        for remembered in (gathered.told_of, adjoint._told):
            remembered.cache_clear()
        assert (gathered.told_of(4, x.stride(), x.dtype, view, plan, None, (0, 0, 0, 0)) is None) == (most == 0)
        with poisoned():
            batch = taken("moments")(x, gain, draws, view, plan)
        grad = torch.zeros_like(x)
        of_mean, of_cov = torch.cos(batch.mean), torch.sin(batch.cov)
        of_gain = taken("moments_adjoint_")(grad, of_mean, of_cov, batch, x, gain, draws, view, plan)
        found.append([*batch, grad, *([] if of_gain is None else [of_gain])])
    for remembered in (gathered.told_of, adjoint._told):
        remembered.cache_clear()
    for one, other in zip(*found, strict=True):
        close(one, other, 2e-5 * SLACK)


@on_device
@pytest.mark.parametrize("wide", [False, True])
def test_kernel_of_data_off_centre(wide: bool, device: str) -> None:
    """A mean a thousand times the deviation, and a constant column, which has exactly no variance to speak of."""
    case = next(case for case in ROWS if case.name == "pointwise")
    if wide:
        case = WIDE
    x, plan, view, draws = case.input().to(device) + 1000, case.plan(), case.view(), draw(device)
    x[:, 3] = 7.3
    got = taken("moments")(x, None, draws, view, plan)
    want = plain.moments(x.double(), None, draws, view, plan)
    close(got.cov * got.unit.square(), want.cov * want.unit.square(), 2e-3)
    assert got.cov[0, 3].abs().max() < 1e-12


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("first", [0.3, 0.0, 1e-20, 1e18])
def test_kernel_of_rows_that_differ(first: float, dtype: torch.dtype, device: str) -> None:
    """Samples of another magnitude than the others, whose rows are constants: no overflow, no variance below zero."""
    case = replace(WIDE, rows=None)
    x, plan, view, draws = torch.ones(5, 90, 7, 6), case.plan(), case.view(), draw(device)
    x[0] = first * (1 + 0.1 * torch.randn(90, 7, 6))
    x = x.to(dtype).to(device, memory_format=torch.channels_last)
    got = taken("moments")(x, None, draws, view, plan)
    want = plain.moments(x.double(), None, draws, view, plan)
    loose = 2e-2 if dtype == torch.bfloat16 else 2e-5 * SLACK
    close(got.mean * got.unit, want.mean * want.unit, loose, "mean")
    close(got.cov * got.unit.square(), want.cov * want.unit.square(), loose, "cov")
    values = torch.linalg.eigvalsh(got.cov.double())
    assert values.min() > -1e-4 * values.max()


# --- D and D·W ---

FOLDS: dict[str, tuple[Callable[[], nn.Module], int, dict[str, Any]]] = {  # layer, channels of a block, settings
    "linear": (lambda: nn.Linear(5, 7), 64, {}),
    "linear-blocks": (lambda: nn.Linear(70, 9), 32, {"shrinkage": 0.1}),
    "linear-128": (lambda: nn.Linear(128, 66), 128, {}),
    "linear-wide": (lambda: nn.Linear(150, 6), 150, {"shrinkage": 0.2}),
    "linear-wide-blocks": (lambda: nn.Linear(310, 5, bias=False), 140, {}),
    "conv": (lambda: nn.Conv2d(8, 5, 3), 8, {}),
    "conv-blocks": (lambda: nn.Conv2d(10, 70, 3), 4, {"steps": 2}),
    "conv-wide": (lambda: nn.Conv2d(16, 4, 3), 16, {"steps": 5}),
    "conv-last": (lambda: nn.Conv2d(10, 6, (3, 2)).to(memory_format=torch.channels_last), 5, {}),
    "conv-last-even": (lambda: nn.Conv2d(24, 6, 3).to(memory_format=torch.channels_last), 16, {}),
    "grouped": (lambda: nn.Conv2d(12, 6, 3, groups=2), 4, {}),
    "depthwise": (lambda: nn.Conv1d(6, 6, 3, groups=6), 64, {}),
    "transposed": (lambda: nn.ConvTranspose2d(6, 8, 3, groups=2), 2, {}),
    "three-axes": (lambda: nn.Conv3d(3, 4, (1, 2, 3)), 3, {}),
    "shared": (lambda: nn.Conv2d(12, 5, 3), 4, {"shared": True, "shrinkage": 0.1}),
    "shared-grouped": (lambda: nn.Conv1d(16, 4, 2, groups=2), 4, {"shared": True}),
}
folds = pytest.mark.parametrize("name", FOLDS)


def folding(name: str, device: str) -> tuple[nn.Module, Plan, Moments, tuple[Tensor, Tensor, Tensor]]:
    """A layer, how it folds, moments of a batch, and running statistics."""
    build, block, changes = FOLDS[name]
    torch.manual_seed(4)
    layer: Any = build().to(device)
    transposed, weight = isinstance(layer, nn.ConvTranspose2d), layer.weight
    groups = getattr(layer, "groups", 1)
    channels = weight.shape[0] // groups if transposed else weight.shape[1]
    layout = Layout(groups, channels, math.prod(weight.shape[2:]), block, changes.pop("shared", False))
    FOLDS[name] = build, block, changes | ({"shared": True} if layout.shared else {})
    plan = CASES[0].plan(layout=layout, transposed=transposed, solver="quartic", **changes)
    found = []
    for _ in range(2):
        parts = []
        for blocks, width in layout.widths:
            rows = torch.randn(blocks, 2 * width + 8, width) * torch.linspace(0.5, 2, width) + 0.3
            rows = rows - rows.mean(1, keepdim=True) * 0.5
            parts.append((rows.mean(1), torch.einsum("gni,gnj->gij", rows, rows) / rows.shape[1]))
        mean, cov = layout.pack(parts)
        found.append((mean.to(device), cov.to(device)))
    (mean, cov), (running_mean, running_cov) = found
    batch = Moments(torch.tensor(9.0, device=device), mean, cov, torch.tensor(0.5, device=device))
    return layer, plan, batch, (running_mean, running_cov, torch.tensor(3, device=device))


def in_double(batch: Moments) -> Moments:
    return Moments(*(t.double() for t in batch))


@on_device
@folds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernel_of_fold(name: str, dtype: torch.dtype, device: str) -> None:
    """D·W and its constant in the layout of the weight, D itself, and the gradients of W, μ and Cov."""
    layer, plan, batch, running = folding(name, device)
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    with poisoned():
        got: Folded = taken("fold")(batch, running, weight, bias, plan, dtype)
    doubled = (in_double(batch), tuple(t.double() for t in running[:2]) + running[2:])
    want = plain.fold(*doubled, weight.double(), None if bias is None else bias.double(), plan, torch.float64)
    short = dtype == torch.bfloat16  # D by products of ten bits, results in eight
    exact = 3e-3 if short and not INTERPRETED else 3e-6 * SLACK
    for value, right, part in zip(got, want, Folded._fields, strict=True):
        close(value, right, max(exact, 8e-3) if short and part in ("weight", "constant") else exact, part)
    assert got.weight.stride() == weight.stride()
    assert got.weight.dtype == got.constant.dtype == dtype
    grads = torch.randn(weight.shape, device=device).to(weight), torch.randn_like(got.constant, dtype=torch.float32)
    grads = torch.empty_like(weight).copy_(grads[0]).to(dtype), grads[1].to(dtype)
    used = (want.d.float(), want.mean.float(), want.unit.float())
    with poisoned():
        back = taken("fold_adjoint")(batch, used, weight, *grads, (), plan)
    doubled_grads = (grads[0].double(), grads[1].double())
    right = plain.fold_adjoint(doubled[0], tuple(t.double() for t in used), weight.double(), *doubled_grads, (), plan)
    exact = 1e-2 if short and not INTERPRETED else 1e-5 * SLACK
    for value, wanted, part in zip(back, right, ("weight", "mean", "cov"), strict=True):
        wanted = (wanted + wanted.mT) / 2 if part == "cov" else wanted
        close((value + value.mT) / 2 if part == "cov" else value, wanted, exact, part)
    more = (torch.randn_like(used[0]), torch.randn_like(used[1]))
    back = taken("fold_adjoint")(batch, used, weight, *grads, more, plan)
    doubled_more = tuple(t.double() for t in more)
    right = plain.fold_adjoint(
        doubled[0], tuple(t.double() for t in used), weight.double(), *doubled_grads, doubled_more, plan
    )
    close(back[1], right[1], exact, "mean, with what others send")
    close(back[2], (right[2] + right[2].mT) / 2, exact, "cov, with what others send")


@on_device
@pytest.mark.parametrize("name", ["linear-128", "conv-blocks"])
def test_kernel_of_fold_in_parts(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where outputs are many, the gradient of D comes in parts of them."""
    stages = cases.module("triton_stages")
    monkeypatch.setattr(stages, "LEAST_STEPS", 1)
    monkeypatch.setattr(stages, "LEAST_OF_SMALL", 1)
    stages._adjoint_told.cache_clear()
    layer, plan, batch, running = folding(name, device)
    weight = layer.weight.detach()
    want = plain.fold(in_double(batch), running, weight.double(), None, plan, torch.float64)
    grads, more = (torch.randn_like(weight), torch.randn(len(weight), device=device)), torch.randn_like(batch.cov)
    try:
        told = stages._adjoint_told(weight.shape, weight.stride(), weight.dtype, weight.stride(), weight.dtype, plan)
        assert told.parts == 2
        used = tuple(t.float() for t in want[2:])
        with poisoned():
            back = taken("fold_adjoint")(batch, used, weight, *grads, (more, batch.mean), plan)
    finally:
        stages._adjoint_told.cache_clear()
    doubled = [t.double() for t in (*want[2:], weight, *grads, more, batch.mean)]
    right = plain.fold_adjoint(in_double(batch), doubled[:3], doubled[3], *doubled[4:6], doubled[6:], plan)
    for value, wanted, part in zip(back, right, ("weight", "mean", "cov"), strict=True):
        close(value, (wanted + wanted.mT) / 2 if part == "cov" else wanted, 1e-5 * SLACK, part)


@pytest.mark.skipif(not INTERPRETED, reason="a device takes promises at their word")
def test_kernel_of_broken_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are checked: weights in blocks of five channels do not lie in runs of eight."""
    stages = cases.module("triton_stages")
    monkeypatch.setattr(stages, "_even", lambda places, plan: True)
    stages._fold_told.cache_clear()
    layer, plan, batch, running = folding("conv-last", "cpu")
    try:
        with pytest.raises(Exception, match=r"tt\.(divisibility|contiguity|constancy)"):
            taken("fold")(batch, running, layer.weight.detach(), None, plan, torch.float32)
    finally:
        stages._fold_told.cache_clear()


@on_device
@pytest.mark.parametrize("name", ["linear", "linear-wide", "grouped"])
@pytest.mark.parametrize("tracked", [0, 3])
def test_kernel_of_fold_without_rows(name: str, tracked: int, device: str) -> None:
    """A batch that is not finite: the running statistics serve it, or where there are none D is the identity."""
    layer, plan, batch, running = folding(name, device)
    batch = Moments(batch.rows * math.nan, batch.mean * 0, batch.cov * 0, batch.unit * 0 + 1)
    running = (*running[:2], torch.full_like(running[2], tracked))
    weight, bias = layer.weight.detach(), layer.bias.detach()
    got = taken("fold")(batch, running, weight, bias, plan, torch.float32)
    want = plain.fold(batch, running, weight, bias, plan, torch.float32)
    close(got.d / got.unit, want.d / want.unit, 3e-6 * SLACK, "D")
    close(got.mean * got.unit, want.mean * want.unit, 3e-6 * SLACK, "mean")
    close(got.weight, want.weight, 3e-6 * SLACK, "weight")
    close(got.constant, want.constant, 3e-6 * SLACK, "constant")
    grads = torch.randn_like(weight), torch.randn_like(got.constant)
    back = taken("fold_adjoint")(batch, got[2:], weight, *grads, (), plan)
    assert not back[1].any()
    assert not back[2].any()
    right = plain.fold_adjoint(batch, want[2:], weight, *grads, (), plan)
    close(back[0], right[0], 1e-5 * SLACK, "weight")


@on_device
@pytest.mark.parametrize("size", [1e-18, 1e-3, 1e3, 1e18])
@pytest.mark.parametrize("f", [7, 140])
def test_kernel_of_fold_of_magnitudes(size: float, f: int, device: str) -> None:
    """In their unit moments of any magnitude are alike."""
    stats, plan = some_moments(2, f, 0, device)
    plan, weight = replace(plan, solver="quartic", eps=0.0), torch.randn(3, 2 * f, device=device)
    batch = stats._replace(unit=torch.tensor(size, device=device))
    running = (stats.mean, stats.cov, torch.tensor(1, device=device))
    got = taken("fold")(batch, running, weight, None, plan, torch.float32)
    want = plain.fold(in_double(batch), running, weight.double(), None, plan, torch.float64)
    for value, right, part in zip(got, want, Folded._fields, strict=True):
        close(value, right, 5e-6 * SLACK, part)


@on_device
@formats
@pytest.mark.parametrize("name", ["pointwise", "patches", "smaller-last-block", "seven", "shared", "linear-tokens"])
def test_kernel_of_forward(name: str, channels_last: bool, device: str) -> None:
    """As moments and fold one after the other."""
    case = next(case for case in ROWS if case.name == name)
    x, view, draws = case.input(torch.float32, channels_last).to(device), case.view(), draw(device)
    plan = case.plan(solver="quartic", shrinkage=0.1)
    gain = gain_of(x, plan)
    channels, groups = case.channels // case.groups, case.groups
    weight = torch.randn(3 * groups, channels, *case.kernel, device=device)
    own, f = sum(g for g, _ in plan.layout.widths), plan.layout.widths[0][1]
    running = torch.zeros(own, f, device=device), torch.eye(f, device=device).repeat(own, 1, 1), torch.tensor(0)
    running = (*running[:2], running[2].to(device))
    with poisoned():
        batch, folded = taken("forward")(x, gain, draws, running, weight, None, view, plan, torch.float32)
    want, right = plain.forward(
        x.double(), None if gain is None else gain.double(), draws, running, weight.double(), None, view, plan,
        torch.float64,
    )  # fmt: skip
    assert batch.unit == want.unit
    assert batch.rows == want.rows
    assert torch.equal(batch.cov, batch.cov.mT)
    for got, wanted, part in zip((*batch, *folded), (*want, *right), (*Moments._fields, *Folded._fields), strict=True):
        close(got, wanted, 1e-5 * SLACK, part)


# --- scale and bias ---

PASSES: dict[str, tuple[tuple[int, ...], bool]] = {  # shape, and whether features lie last
    "image": ((3, 10, 7, 5), False),
    "image-aligned": ((2, 16, 9, 8), False),
    "image-wide": ((2, 300, 3, 3), False),
    "image-long": ((2, 3, 30, 40), False),
    "sequence": ((4, 6, 11), False),
    "volume": ((2, 5, 3, 4, 2), False),
    "samples": ((5, 4), False),
    "rows": ((6, 24), True),
    "tokens": ((3, 5, 10), True),
}
passes = pytest.mark.parametrize("name", PASSES)


def passed(name: str, dtype: torch.dtype, device: str, channels_last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """An output, the gain of every sample or row, and a bias."""
    shape, features_last = PASSES[name]
    y = torch.randn(shape, device=device).to(dtype)
    if channels_last and not features_last:
        y = y.movedim(1, -1).contiguous().movedim(-1, 1)
    gain = torch.rand(*shape[:-1], 1, device=device) if features_last else torch.rand(len(y), device=device)
    gain.flatten()[1] = 0
    if features_last:
        return y, gain, torch.randn(shape[-1], device=device)
    ones = [1] * (y.dim() - 2)
    return y, gain.reshape(-1, 1, *ones), torch.randn(shape[1], *ones, device=device)


@on_device
@formats
@passes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernel_of_passes(name: str, dtype: torch.dtype, channels_last: bool, device: str) -> None:
    """y·gain + b and y + b in place; dy·gain and what reaches a bias; ⟨dx, x⟩ over the gain."""
    y, gain, bias = passed(name, dtype, device, channels_last)
    bias, digits = (bias if dtype == torch.float32 else bias.to(dtype)), torch.finfo(dtype).eps
    for own in (gain, None):
        got = y.clone(memory_format=torch.preserve_format)
        assert taken("scaled_output_")(got, own, bias) is got
        want = plain.scaled_output_(y.double(), None if own is None else own.double(), bias.double())
        close(got, want, 2 * digits, "output")
    grad = torch.randn_like(y)
    if cases.module("triton_passes").declines_output(grad, bias.dim(), True) is None:
        for own in (gain, None):
            with poisoned():
                got, total = taken("scaled_gradient")(grad, own, tuple(bias.shape), torch.float32)
            want, right = plain.scaled_gradient(
                grad.double(), None if own is None else own.double(), tuple(bias.shape), torch.float64
            )
            assert got.stride() == grad.stride()
            close(got, want, digits, "gradient")
            close(total, right, 1e-6, "bias")
    if not PASSES[name][1]:
        with poisoned():
            got = taken("gain_adjoint")(grad, y, gain, CASES[3].plan())
        close(got, plain.gain_adjoint(grad.double(), y.double(), gain.double(), CASES[3].plan()), 1e-5, "gain")


@on_device
@formats
@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize("scale", ["l1", "rms", "std"])
@pytest.mark.parametrize(
    "shape", [(3, 6, 9, 8), (2, 5, 13), (2, 3, 4, 5, 2), (4, 70, 20, 20), (2, 700, 12, 9)], ids=str
)
def test_kernel_of_scale(
    shape: tuple[int, ...], scale: str, eps: float, channels_last: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S of every sample from its grid, and the gradient by way of it; a constant sample, and one of zeros."""
    plan = CASES[3].plan(scale=scale, scale_eps=eps, scale_positions=100)
    plan = replace(plan, layout=Layout(1, shape[1], 1, 64, False))
    x = torch.randn(shape, device=device) + 0.4
    x[0] = 0
    x[1] = 3
    grad = torch.randn(shape, device=device)
    if channels_last:
        x, grad = x.movedim(1, -1).contiguous().movedim(-1, 1), grad.movedim(1, -1).contiguous().movedim(-1, 1)
    with poisoned():
        gain = taken("scale")(x, plan)
    want = plain.scale(x, plan)
    close(gain[2:] if len(gain) > 2 else gain[:1], want[2:] if len(gain) > 2 else want[:1], 1e-6, "gain")
    close(gain, want, 1e-3 if scale == "std" else 1e-6, "gain of constants, which is a floor's")
    of_gain = torch.randn_like(gain)
    got, right = grad.clone(), grad.clone()
    taken("scale_adjoint_")(got, x, want, of_gain, plan)
    plain.scale_adjoint_(right, x, want, of_gain, plan)
    skip = 2 if scale == "std" and len(x) > 2 else 0  # there the gradient is one of rounding
    close(got[skip:] - grad[skip:], right[skip:] - grad[skip:], 1e-5, "gradient")


@on_device
@pytest.mark.parametrize("eps", [0.0, 1e-2])
@pytest.mark.parametrize("mode", ["standardize", "rms"])
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 33), (2, 3, 2, 600), (40, 1)], ids=str)
def test_kernel_of_rows_of_their_own_scale(shape: tuple[int, ...], mode: str, eps: float, device: str) -> None:
    """Against the formula in float64: rows of any magnitude, also such that do not lie one after the other."""
    x = (torch.randn(*shape[:-1], shape[-1] + 3) + 0.5)[..., : shape[-1]].to(device)
    if eps == 0:
        x[0] *= 1e18
        x[1] *= 1e-18
    grad = torch.randn(shape, device=device)
    leaf = x.double().requires_grad_()
    center = leaf.mean(-1, keepdim=True) if mode == "standardize" and shape[-1] > 1 else 0.0
    if mode == "standardize" and shape[-1] == 1:
        center = leaf
    deviation = ((leaf - center).square().mean(-1, keepdim=True) + eps).sqrt()
    want = (leaf - center) / torch.where(deviation > 0, deviation, 1.0)
    with poisoned():
        got = taken("normalised")(x, mode, eps, torch.float32)
        back = taken("normalised_adjoint")(grad, x, mode, eps)
    close(got, want, 1e-5, "values")
    if shape[-1] > 1 or (mode == "rms" and eps > 0):
        want.backward(grad.double())
        for number in range(len(x)):  # of magnitudes of their own
            close(back[number], leaf.grad[number], 1e-4, f"gradient {number}")
    else:
        assert (back * x).abs().max() < 1e-5, "a single value has no gradient"


@on_device
def test_kernel_of_rows_without_scale(device: str) -> None:
    """Zeros, constants whose spread is rounding, and numbers that are none; rows of 16 bits from those of 32."""
    x = torch.stack([torch.zeros(50), torch.full((50,), 0.1), torch.linspace(-1, 1, 50)]).to(device)
    grad = torch.randn(3, 50, device=device)
    for mode in ("standardize", "rms"):
        got, want = taken("normalised")(x, mode, 0.0, torch.float32), plain.normalised(x, mode, 0.0, torch.float32)
        assert got[0].abs().max() == 0
        assert (got - want).abs().max() < 0.2, "rounding in units of rounding"
        back, right = taken("normalised_adjoint")(grad, x, mode, 0.0), plain.normalised_adjoint(grad, x, mode, 0.0)
        assert back[0].abs().max() == 0
        close(back[2], right[2], 1e-5, mode)
        if mode == "rms":
            close(back[1], right[1], 1e-4, mode)
        half = taken("normalised")(x, mode, 0.0, torch.float16)
        assert half.dtype == torch.float16
        close(half, got, 1e-3, "rounded")
    x[2, 7] = math.nan
    got = taken("normalised")(x, "standardize", 0.0, torch.float32)
    assert got[2].isnan().any()
    assert got[:2].isfinite().all()


@on_device
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_kernel_of_rows_with_an_epsilon(norm: Any, device: str) -> None:
    """What torch's norms make of rows of zeros, tiny and huge ones in float64, and their gradients."""
    mode, eps = ("standardize" if norm is nn.LayerNorm else "rms"), 1e-5
    x = torch.randn(6, 50, device=device) + 0.3
    for row, size in enumerate((0.0, 1e-25, 1e-3, 1.0, 1e15)):
        x[row] *= size
    grad, leaf = torch.randn_like(x), x.double().requires_grad_()
    want = norm(50, eps=eps, elementwise_affine=False)(leaf)
    want.backward(grad.double())
    got, back = taken("normalised")(x, mode, eps, torch.float32), taken("normalised_adjoint")(grad, x, mode, eps)
    for row in range(len(x)):
        close(got[row], want[row], 1e-5, f"values {row}")
        close(back[row], leaf.grad[row], 1e-4, f"gradient {row}")


@on_device
def test_kernel_of_rows_in_other_ways(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several gradients at once, one of a gradient, and a weight of another dtype, which is torch.nn's error."""
    monkeypatch.setattr(cases, "MODE", "interpret" if INTERPRETED else "triton")
    for scale, eps in (("standardize", 0.0), ("standardize", 1e-2), ("rms", 1e-2)):
        layer = ndpp.Linear(8, 4, settings=ndpp.Settings(scale=scale, scale_eps=eps)).to(device)
        x = torch.randn(5, 8, device=device)
        layer(x)
        layer.eval()
        at_once = torch.autograd.functional.jacobian(layer, x, vectorize=True)
        close(at_once, torch.autograd.functional.jacobian(layer, x), 1e-5, scale)
        hessian = torch.autograd.functional.hessian(lambda x, layer=layer: layer(x).sin().sum(), x)
        with monkeypatch.context() as plainly:
            plainly.setattr(cases, "MODE", "plain")
            close(hessian, torch.autograd.functional.hessian(lambda x, layer=layer: layer(x).sin().sum(), x), 1e-4)
        with pytest.raises(RuntimeError, match="dtype"):
            layer(x.bfloat16())


# --- running statistics ---


@on_device
@pytest.mark.parametrize("momentum", [0.1, 0.001, None, 1.0])
def test_kernel_of_running_statistics(momentum: float | None, device: str) -> None:
    """Steps of one and of two calls, calls with nothing to give, and a step that is begun over another's rows."""
    states = []
    for observe_ in (taken("observe_"), plain.observe_):
        torch.manual_seed(2)
        buffers = torch.zeros(2, 5), torch.eye(5).repeat(2, 1, 1), torch.tensor(0)
        zeros = torch.tensor(0.0), torch.zeros(2, 5), torch.zeros(2, 5, 5)
        state = kernels.Running(*(t.to(device) for t in (*buffers, *zeros)))
        for bad in ("", "more", "rows", "", "cov", "mean", "", "more", "begins"):
            rows = torch.randn(2, 20, 5) + 1
            mean, cov = rows.mean(1), torch.einsum("gni,gnj->gij", rows, rows) / 20
            batch = Moments(torch.tensor(math.nan if bad == "rows" else 7.0), mean, cov, torch.tensor(0.25))
            if bad in ("mean", "cov"):
                getattr(batch, bad)[0, 1] = math.inf
            found, more = Moments(*(t.to(device) for t in batch)), bad in ("more", "rows", "cov")
            observe_(state, found, momentum, more, bad == "begins")
        states.append(state)
    assert states[0].tracked == states[1].tracked == 5
    for got, want, name in zip(*states, kernels.Running._fields, strict=True):
        close(got, want, 2e-6, name)


@on_device
@pytest.mark.parametrize("momentum", [0.1, 0.02, 0.25, 0.9, 1e-4])
def test_kernel_of_the_first_running_statistics(momentum: float, device: str) -> None:
    """They are those of the first step, however small: nothing is left of the identity they started from."""
    for observe_ in (taken("observe_"), plain.observe_):
        buffers = torch.ones(1, 3), torch.eye(3)[None], torch.tensor(0)
        zeros = torch.tensor(0.0), torch.zeros(1, 3), torch.zeros(1, 3, 3)
        state = kernels.Running(*(t.to(device) for t in (*buffers, *zeros)))
        mean, cov = torch.tensor([[1.0, -0.5, 0.25]]), torch.eye(3)[None] + 0.5
        batch = Moments(torch.tensor(7.0), mean, cov, torch.tensor(2.0**-20))
        observe_(state, Moments(*(t.to(device) for t in batch)), momentum, True)
        torch.testing.assert_close(state.mean.cpu(), mean * 2.0**-20, rtol=1e-6, atol=0)
        torch.testing.assert_close(state.cov.cpu(), cov * 2.0**-40, rtol=1e-6, atol=0)


# --- whole layers ---

LAYERS: dict[str, tuple[Any, tuple[int, ...], ndpp.Settings]] = {
    "linear": (lambda s: ndpp.Linear(6, 4, settings=s), (30, 6), ndpp.Settings(rows=11, scale="std")),
    "tokens": (lambda s: ndpp.Linear(6, 4, settings=s), (3, 7, 6), ndpp.Settings(scale="l1")),
    "standardized": (lambda s: ndpp.Linear(6, 4, settings=s), (3, 7, 6), ndpp.Settings(scale="standardize")),
    "rms": (lambda s: ndpp.Linear(6, 4, settings=s), (3, 7, 6), ndpp.Settings(scale="rms", scale_eps=1e-5)),
    "newton": (lambda s: ndpp.Linear(6, 4, settings=s), (3, 7, 6), ndpp.Settings(solver="newton")),
    "wide": (lambda s: ndpp.Linear(140, 4, settings=s), (150, 140), ndpp.Settings()),
    "conv": (lambda s: ndpp.Conv2d(4, 5, 3, padding=1, settings=s), (3, 4, 6, 5), ndpp.Settings(rows=40)),
    "strided": (lambda s: ndpp.Conv2d(6, 4, 1, 2, settings=s), (3, 6, 6, 5), ndpp.Settings(block=4, scale="rms")),
    "pointwise": (lambda s: ndpp.Conv2d(6, 4, 1, settings=s), (3, 6, 6, 5), ndpp.Settings(rows=20)),
    "transposed": (lambda s: ndpp.ConvTranspose2d(4, 5, 3, settings=s), (3, 4, 6, 5), ndpp.Settings(rows=40)),
    "shared": (
        lambda s: ndpp.Conv2d(8, 4, 3, settings=s),
        (3, 8, 6, 5),
        ndpp.Settings(block=4, shared=True, shrinkage=0.1, rows=20),
    ),
}


@on_device
@formats
@pytest.mark.parametrize("layer", LAYERS)
def test_kernel_of_layers(layer: str, channels_last: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step of whole layers: output, running statistics and every gradient, by kernels and by twins."""
    build, shape, settings = LAYERS[layer]
    if channels_last and len(shape) != 4:
        pytest.skip("no channels to come last")
    layout = torch.channels_last if channels_last else torch.contiguous_format
    inputs, outcomes = torch.randn(shape).to(device) + 0.2, []
    for mode in ("interpret" if INTERPRETED else "triton", "plain"):
        monkeypatch.setattr(cases, "MODE", mode)
        torch.manual_seed(1)
        module = build(settings).to(device, memory_format=layout)
        x = inputs.clone(memory_format=layout).requires_grad_()
        y = module(x)
        (y * torch.sin(torch.arange(y.numel(), device=device)).reshape(y.shape)).sum().backward()
        state = {"output": y, "dx": x.grad, "mean": module.running_mean, "cov": module.running_cov}
        outcomes.append(state | {f"d{name}": p.grad for name, p in module.named_parameters()})
    for name, value in outcomes[0].items():
        close(value, outcomes[1][name], 2e-5 * SLACK, name)


# --- a CUDA device alone ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["pointwise", "patches", "seven"])
def test_capture(name: str) -> None:
    """All kernels in a CUDA graph: no stage waits for the host, and a replay sees new data."""
    case = next(case for case in ROWS if case.name == name)
    x, plan, view = case.input().cuda(), case.plan(scale="none", solver="quartic"), case.view()
    draws, weight = draw(x.device), torch.randn(3, case.channels, *case.kernel, device="cuda")
    own, f = sum(g for g, _ in plan.layout.widths), plan.layout.widths[0][1]
    running = torch.zeros(own, f).cuda(), torch.eye(f).repeat(own, 1, 1).cuda(), torch.tensor(0).cuda()

    def run() -> tuple[Tensor, ...]:
        stats, folded = taken("forward")(x, None, draws, running, weight, None, view, plan, torch.float32)
        back = taken("fold_adjoint")(stats, folded[2:], weight, folded.weight, folded.constant, (), plan)
        grad = torch.zeros_like(x)
        taken("moments_adjoint_")(grad, back[1], back[2], stats, x, None, draws, view, plan)
        return stats.mean, stats.cov, *folded[:3], *back, grad

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    x.copy_(case.input())
    graph.replay()
    for got, want in zip(kept, run(), strict=True):
        close(got, want, 1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", [1, 3])
def test_a_device_takes_default_layers(kernel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages by kernels, and from the third step on the driver starts all of them."""
    case = Case("default", 64, (14, 14), (kernel, kernel), padding=kernel // 2, batch=8, rows=512)
    weight = torch.zeros(64, 64, kernel, kernel, device="cuda")
    found = kernels.explain(case.input().cuda(), weight, case.view(), case.plan(solver="quartic"))
    assert set(found.values()) == {"kernel"}
    launch, direct = cases.module("triton_launch"), cases.module("triton_direct")
    layer = ndpp.Conv2d(64, 64, kernel, padding=kernel // 2).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(8, 64, 14, 14, device="cuda").to(memory_format=torch.channels_last)
    started, original = [], direct.Direct.__call__
    for step in range(3):
        if step == 2:
            monkeypatch.setattr(launch.Launcher, "start", lambda self, *_: pytest.fail(f"{self.kernel} by Triton"))
            monkeypatch.setattr(
                direct.Direct, "__call__", lambda self, *told: started.append(original(self, *told)) or started[-1]
            )
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x.clone().requires_grad_())
        y.float().square().sum().backward()
    assert len(started) >= 10
    assert all(started)


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


def check_builds(shape: built_for.Shape, dtype: torch.dtype, stack: int) -> None:
    from ndpp.kernels import triton_launch

    for started in built_for.launches_of(shape, dtype):
        built = triton_launch.build(started)
        assert built.shared <= H200, started.kernel
        assert built.stack <= stack, (started.kernel, built)  # bytes of spilled registers


def test_kernels_build_for_a_device_that_is_not_here() -> None:
    """Triton's compiler and assembler need none."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("the interpreter has no compiler")
    check_builds(built_for.SHAPES["1x1 by 64"], torch.bfloat16, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", built_for.SHAPES.values(), ids=built_for.SHAPES)
def test_all_kernels_build(shape: built_for.Shape, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    check_builds(shape, dtype, 128 if dtype == torch.bfloat16 else 640)


# --- who takes a case ---


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """What is known of devices is found out again, before and after."""
    cases._unfit.cache_clear()
    yield
    cases._unfit.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[7]
    x, view, plan = case.input(), case.view(), case.plan(solver="quartic")
    weight = torch.zeros(4, case.channels, *case.kernel)
    stages = ["moments", "fold", "moments_adjoint_"]

    def reasons(x: Tensor = x, weight: Tensor = weight, plan: Plan = plan) -> list[str]:
        found = kernels.explain(x, weight, view, plan)
        return [found[stage] for stage in stages]

    monkeypatch.setattr(cases, "MODE", "plain")
    assert reasons() == ["plain: NDPP_KERNELS is plain"] * 3
    monkeypatch.setattr(cases, "MODE", "triton")
    assert reasons() == ["plain: a tensor on cpu"] * 3
    if not INTERPRETED:
        monkeypatch.setattr(cases, "MODE", "interpret")  # so that this machine counts as a device
    assert reasons() == ["kernel"] * 3
    wide = "plain: values of torch.float64"
    assert reasons(x.double(), weight.double()) == [wide] * 3
    assert reasons(plan=replace(plan, padding_mode="reflect"))[::2] == ["plain: padding with 'reflect'"] * 2
    assert reasons(plan=replace(plan, solver="eigh"))[1] == "plain: solver 'eigh'"
    uneven = replace(plan, layout=replace(plan.layout, shared=True, block=2))
    assert ["smaller last block" in reason for reason in reasons(plan=uneven)] == [True] * 3
    assert reasons(weight=torch.zeros(4, case.channels, 6, 3)[:, :, ::2])[1] == (
        "plain: a weight that is part of another tensor"
    )
    many = replace(plan, layout=Layout(70000, 1, 1, 64, False))
    assert reasons(plan=many)[:2] == ["plain: more than 65535 blocks"] * 2
    shared = kernels.explain(x, weight, view, plan, x[:1].expand_as(x))
    assert shared["moments_adjoint_"] == "plain: a gradient whose entries share memory"
    monkeypatch.setattr(cases, "_has_triton", lambda: False)
    cases._unfit.cache_clear()
    assert reasons() == ["plain: triton is not installed, or does not load"] * 3


def test_unknown_choice_names_the_choices() -> None:
    environment = {**os.environ, "NDPP_KERNELS": "fast"}
    done = subprocess.run([sys.executable, "-c", "import ndpp"], env=environment, capture_output=True, text=True)
    assert "NDPP_KERNELS must be one of triton, plain, interpret; got 'fast'" in done.stderr


class OnDevice:
    """Where a stage would run: a GPU, as far as can be told."""

    is_cuda, device = True, torch.device("cuda", 0)

    def get_device(self) -> int:
        return 0


def failing(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Plan]:
    """A machine where no kernel can be built, for this reason."""

    def kernel(*_: Any) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "_kernel", lambda stage: kernel)
    monkeypatch.setattr(cases, "failed", {})
    monkeypatch.setattr(cases, "_unfit", lambda mode, kind, number: None)
    return torch.randn(3, 4, 5, 5), CASES[3].plan(scale="l1")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        subprocess.CalledProcessError(1, "gcc"),
        FileNotFoundError("ptxas"),
        ImportError("libtriton"),
    ],
    ids=str,
)
def test_without_a_compiler_training_goes_on(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said once; from then on that device is left to plain PyTorch."""
    x, plan = failing(error, monkeypatch)
    on: Any = OnDevice()
    assert cases.declines(on) is None
    with pytest.warns(UserWarning, match="plain PyTorch.*NDPP_KERNELS=plain"):
        got = kernels._run("scale", None, on, x, plan)
    assert torch.equal(got, plain.scale(x, plan))
    assert cases.declines(on) == f"its kernels could not be built: {type(error).__name__}"


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("scale", torch.OutOfMemoryError("CUDA out of memory")),
        ("scale", RuntimeError("CUDA error: an illegal memory access was encountered")),
        ("observe_", RuntimeError("Failed to find C compiler.")),  # after kernels that were built: it may have written
    ],
)
def test_other_errors_of_kernels_are_raised(stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    x, plan = failing(error, monkeypatch)
    monkeypatch.setattr(cases, "module", lambda name: SimpleNamespace(works={0}))
    on: Any = OnDevice()
    with pytest.raises(type(error)):
        kernels._run(stage, None, on, x, plan)
    assert cases.declines(on) is None


def test_without_a_compiler_a_first_stage_in_place_is_done_in_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel was ever built none has written anything."""
    failing(RuntimeError("Failed to find C compiler."), monkeypatch)
    monkeypatch.setattr(cases, "module", lambda name: SimpleNamespace(works=set()))
    buffers = torch.zeros(1, 3), torch.eye(3)[None], torch.tensor(0), torch.tensor(0.0)
    state = kernels.Running(*buffers, torch.zeros(1, 3), torch.zeros(1, 3, 3))
    batch = Moments(torch.tensor(5.0), torch.ones(1, 3), 2 * torch.eye(3)[None], torch.tensor(1.0))
    on: Any = OnDevice()
    with pytest.warns(UserWarning, match="cannot build kernels"):
        kernels._run("observe_", None, on, state, batch, 0.1, False)
    assert torch.equal(state.mean, torch.ones(1, 3))
    assert torch.equal(state.cov, 2 * torch.eye(3)[None])


def test_tensors_on_several_devices_are_left_to_torch() -> None:
    elsewhere: Any = OnDevice()
    weight = torch.zeros(3, 4)
    assert cases.declines_places(weight, None, weight) is None
    assert cases.declines_places(weight, elsewhere) == "tensors on several devices"


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((8, 6), True), ((12, 0), True)])
def test_kernels_are_for_recent_devices(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cases._too_old(0) == (None if fits else "compute capability 7.5")
