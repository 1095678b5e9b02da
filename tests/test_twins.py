"""The plain twin of every stage of a training call against float64 data matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import oracles
from ndpp import rows
from ndpp.kernels import plain, plain_moments, plain_scale
from ndpp.sampling import draw
from ndpp.whitening import Moments
from stages import CASES, Case, close, formats, gain_of, moments_of, some_moments, twins


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
    back, of_bias = plain.scaled_gradient(grad, gain, bias.shape, wide)
    assert back.dtype == dtype
    assert back.stride() == grad.stride()
    close(back, grad.double() * gain, digits)
    assert of_bias.dtype == wide
    close(of_bias, grad.double().sum((0, 2, 3)).reshape(bias.shape), 9 * digits)
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
    back, of_bias = plain.scaled_gradient(grad.movedim(1, -1), gain.movedim(1, -1), bias.shape, torch.float32)
    close(back, (grad.double() * gain).movedim(1, -1), digits)
    close(of_bias, grad.double().sum((0, 2)), 9 * digits)
    want = (x.double() * grad.double()).sum(1, keepdim=True) / gain
    close(plain.gain_adjoint(grad, x, gain, case.plan()), want, 1e-6)


ROOTS = [(1, 1, 0), (2, 5, 0), (3, 48, 0), (3, 64, 7), (2, 65, 0), (1, 128, 0)]


@pytest.mark.parametrize("solver", ["quartic", "newton", "minimax"])
@pytest.mark.parametrize(("blocks", "f", "last"), ROOTS[:4])
def test_root_adjoint(blocks: int, f: int, last: int, solver: str) -> None:
    """Against autograd through the iteration as the method writes it."""
    stats, plan = some_moments(blocks, f, last)
    stats, plan = Moments(*(t.double() for t in stats)), replace(plan, solver=solver, steps=4)
    cov = stats.cov.clone().requires_grad_()
    d = plain.root(Moments(stats.rows, stats.mean, cov, stats.unit), plan)
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
