"""Precision: autocast, half precision, magnitudes far from one, data without variance."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import ndpp
from cases import BY_LAYER, CASES, Case
from ndpp import Settings
from oracles import as_rows, covariance, data_matrix, layer_output, sample_scale

SOLVERS = {
    "newton": Settings(rows=None),
    "minimax": Settings(rows=None, solver="minimax"),
    "eigh": Settings(rows=None, solver="eigh", eps=1e-6),
    "relative": Settings(rows=None, eps=0.0, shrinkage=0.01),
    "exact": Settings.exact(),
}


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def gradients(layer: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    (y * torch.sin(torch.arange(y.numel(), device=y.device)).reshape(y.shape)).sum().backward()
    return {"output": y.detach(), "dinput": x.grad, **{f"d{n}": p.grad.clone() for n, p in layer.named_parameters()}}


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_every_layer_gradchecks(case: Case) -> None:
    layer = case.build(Settings(rows=None, scale="std", eps=1e-2), dtype=torch.float64)
    x = case.input()[:2].requires_grad_()
    parameters = dict(layer.named_parameters())
    names = list(parameters)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(run, (x, *parameters.values()), fast_mode=True)
    assert gradgradcheck(lambda *a: run(*a).square(), (x, *parameters.values()), fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("name", BY_LAYER)
def test_single_precision_is_close_to_double(name: str) -> None:
    case = BY_LAYER[name]
    for settings in SOLVERS.values():
        if settings.eps == 0 and settings.shrinkage == 0:
            continue  # the smallest eigenvalue alone decides there
        want = gradients(case.build(settings).double(), case.input())
        got = gradients(case.build(settings), case.input(torch.float32))
        for key, value in want.items():
            assert relative(got[key], value) < 2e-3, (settings, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", ["none", "l1", "rms", "std", "standardize"])
@pytest.mark.parametrize("name", BY_LAYER)
def test_autocast(name: str, scale: Any, dtype: torch.dtype) -> None:
    case = BY_LAYER[name]
    layer = case.build(Settings(rows=None, scale=scale))
    x = case.input(torch.float32)
    want = gradients(case.build(Settings(rows=None, scale=scale)), x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
        assert y.dtype == dtype
    assert layer.running_cov.dtype == torch.float32
    rows = data_matrix(layer, sample_scale(x.double(), scale, name == "Linear"))[0].flatten(1)
    assert relative(layer.running_cov[0], covariance(rows)[1]) < 1e-5  # statistics do not see the cast
    assert relative(y.detach(), want["output"]) < 0.05
    y.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.dtype == torch.float32 for p in layer.parameters())
    with torch.autocast("cpu", dtype=dtype):
        assert layer(x.to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BY_LAYER)
def test_half_precision_modules(name: str, dtype: torch.dtype) -> None:
    case = BY_LAYER[name]
    layer = case.build(Settings(rows=None)).to(dtype)
    x = case.input(dtype)
    got = gradients(layer, x)
    want = gradients(case.build(Settings(rows=None)), x.float())
    assert got["output"].dtype == dtype
    assert relative(got["output"], want["output"]) < 0.05
    assert all(torch.isfinite(v).all() for v in got.values())


@pytest.mark.parametrize("magnitude", [1e18, 1e-18, 1e6])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", BY_LAYER)
def test_huge_and_tiny_inputs(name: str, solver: str, magnitude: float) -> None:
    """Values and gradients are those of double precision, not merely finite."""
    case = BY_LAYER[name]
    settings = SOLVERS[solver]
    got = gradients(case.build(settings), case.input(torch.float32) * magnitude)
    assert all(torch.isfinite(v).all() for v in got.values())
    if solver == "exact":
        return  # which directions count as empty depends on the precision
    want = gradients(case.build(settings).double(), case.input(torch.float32).double() * magnitude)
    for key, value in want.items():
        assert relative(got[key], value) < 5e-3, key


@pytest.mark.parametrize("kind", ["constant", "zero", "one row", "rank deficient", "one channel dead", "two rows"])
@pytest.mark.parametrize("scale", ["none", "l1", "rms", "std", "standardize"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_data_without_variance(solver: str, scale: Any, kind: str) -> None:
    settings = SOLVERS[solver].replace(scale=scale)
    for magnitude in (1.0, 0.1, 1e18, 1e-18):
        for name in ("Linear", "Conv2d", "ConvTranspose2d"):
            case = BY_LAYER[name]
            x = case.input(torch.float32)
            if kind == "constant":
                x = torch.ones_like(x)
            elif kind == "zero":
                x = torch.zeros_like(x)
            elif kind == "one row":
                x = x[:1]
            elif kind == "two rows":
                x = x[:2]
            elif kind == "rank deficient":
                x = (x[:, :1] if name != "Linear" else x[..., :1]).expand_as(x).contiguous()
            else:
                x.select(-1 if name == "Linear" else 1, 0).zero_()
            layer = case.build(settings)
            got = gradients(layer, x * magnitude)
            for key, value in got.items():
                assert torch.isfinite(value).all(), (name, magnitude, key)
            assert torch.isfinite(layer.running_cov).all()
            assert torch.isfinite(layer.eval()(x * magnitude)).all()


@pytest.mark.parametrize("ratio", [100.0, 1000.0])
def test_mean_far_above_deviation(ratio: float) -> None:
    case = Case("Linear", (6, 4), (400, 6))
    x = (case.input() + ratio).float()
    got = gradients(case.build(Settings(rows=None)), x)
    want = gradients(case.build(Settings(rows=None)).double(), x.double())
    assert relative(got["output"], want["output"]) < 1e-3
    assert relative(got["dweight"], want["dweight"]) < 1e-2


@pytest.mark.parametrize("scale", ["l1", "rms", "std", "standardize"])
@pytest.mark.parametrize("factor", [1e-8, 1e-3, 2e4, 1e9])
def test_float16_samples_of_other_scales_do_not_disturb(scale: Any, factor: float) -> None:
    """The product of unscaled samples would leave the range of float16, and so would a gain common to the batch."""
    layer = ndpp.Linear(64, 8, settings=Settings(rows=None, scale=scale))
    x = torch.randn(16, 64)
    layer(x)
    layer.eval()
    uneven = x.clone()
    uneven[4:] *= factor
    with torch.autocast("cpu", dtype=torch.float16):
        got, want = layer(uneven), layer(x)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=1e-2)


def test_denormal_inputs() -> None:
    for scale in ("l1", "rms", "std", "standardize"):
        layer = ndpp.Linear(4, 3, settings=Settings(rows=None, scale=scale))
        values = gradients(layer, torch.randn(16, 4) * 1e-40)
        assert all(torch.isfinite(v).all() for v in values.values()), scale


def test_double_precision_end_to_end() -> None:
    """float64 in, float64 everywhere: the oracle to 1e-12, which one float32 intermediate would break."""
    case = CASES[9]
    layer = case.build(Settings(rows=None, eps=1e-3), dtype=torch.float64)
    s = layer.settings
    want = layer_output(
        layer, case.input(), layer.weight, layer.bias, block=64, shared=s.shared, solver=s.solver, steps=s.steps,
        eps=s.eps, shrinkage=s.shrinkage,
    )  # fmt: skip
    assert relative(as_rows(layer, layer(case.input())), want) < 1e-12
    assert layer.running_cov.dtype == torch.float64


@pytest.mark.parametrize("scale", ["l1", "rms", "std", "standardize"])
def test_second_derivatives_of_a_loss_that_bends(scale: str) -> None:
    """Against numbers: with a scale, two ways lead to each sample's gain."""
    layer = ndpp.Linear(4, 3, settings=Settings(rows=None, scale=scale, eps=1e-2), dtype=torch.float64)
    x = (torch.randn(7, 4, dtype=torch.float64) + 0.3).requires_grad_()

    def penalty(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
        return grad.square().sum()

    assert gradcheck(penalty, (x,), fast_mode=True, atol=1e-4)


def test_rows_without_spread_have_bounded_gradients() -> None:
    """A scale that is the floor of the spread does not move with it: 1/σ² would be 1e15 here."""
    layer = ndpp.Linear(1, 3, settings=Settings(rows=None, scale="std", eps=1e-2), dtype=torch.float64)
    x = (torch.arange(4.0, dtype=torch.float64)[:, None] + 1).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.abs().max() < 10


def test_outputs_of_linear_layers_are_no_views() -> None:
    for x in (torch.randn(5, 4), torch.randn(2, 3, 4)):
        for scale in ("none", "l1"):
            assert not ndpp.Linear(4, 2, settings=Settings(scale=scale))(x)._is_view()


@pytest.mark.parametrize("side", [64, 320], ids=["few", "many"])
def test_scale_of_many_values_keeps_its_digits(side: int) -> None:
    layer = ndpp.Conv2d(16, 4, 1, settings=Settings(scale="l1", scale_positions=None))
    with torch.no_grad():
        layer(torch.randn(2, 16, 8, 8))
    layer.eval()
    x = torch.randn(1, 16, side, side)
    with torch.no_grad():
        want = copy.deepcopy(layer).double()(x.double())
        torch.testing.assert_close(layer(x).double(), want, rtol=1e-5, atol=1e-5)


def test_traces_hold_no_scale_of_their_example() -> None:
    layer = ndpp.Conv2d(3, 4, 3, padding=1, settings=Settings(scale="rms")).eval()
    first, other = torch.randn(2, 3, 160, 160), 100 * torch.randn(3, 3, 160, 160)
    with torch.no_grad():
        traced = torch.jit.trace(layer, (first,), check_trace=False)
        torch.testing.assert_close(traced(other), layer(other))


def test_groups_of_one_sample_with_channels_last() -> None:
    """Axes of size 1 keep their strides on the way to the stock operation."""
    grads = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        layer = ndpp.Conv2d(6, 6, 3, 1, 1, 1, 2, dtype=torch.float64, settings=Settings(rows=None))
        x = torch.randn(1, 6, 5, 7, dtype=torch.float64)
        layer, x = layer.to(memory_format=memory_format), x.to(memory_format=memory_format).requires_grad_()
        layer(x).square().sum().backward()
        grads.append((layer.weight.grad, x.grad))
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", [case for case in CASES if case.layer != "Linear"], ids=str)
def test_channels_last_in_single_precision(case: Case, training: bool) -> None:
    """The bias has a gradient of its own there; outputs may be written over, and gradients differentiated."""

    def run(dtype: torch.dtype, last: bool) -> list[Tensor]:
        layer = case.build(Settings(rows=None, eps=1e-2)).to(dtype)
        layer(case.input(dtype)[:3])  # something to evaluate with
        layer.train(training)
        x = case.input(dtype)
        x = (x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x).requires_grad_()
        y = layer(x)
        assert not y._is_view()
        loss = y.mul_(2).square().mul(torch.sin(torch.arange(y.numel())).reshape(y.shape)).sum()
        leaves = [x, *layer.parameters()]
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), leaves)
        return [y, *first, *second]

    for got, want in zip(run(torch.float32, last=True), run(torch.float64, last=False), strict=True):
        assert relative(got, want) < 2e-3


def test_the_exact_root_has_no_second_derivative_and_says_so() -> None:
    """By either way to ask for it; the first derivative may be recorded."""
    layer = ndpp.Linear(3, 3, settings=Settings.exact(eps=0.1), dtype=torch.float64)
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    (want,) = torch.autograd.grad(layer(x).pow(3).sum(), x)
    torch.testing.assert_close(grad, want)
    for ask in (lambda: torch.autograd.grad(grad.sum(), x, retain_graph=True), lambda: grad.sum().backward()):
        with pytest.raises(RuntimeError, match=r"solver='eigh' has no second derivative; use another"):
            ask()


@pytest.mark.parametrize("name", BY_LAYER)
@pytest.mark.parametrize("frozen", [False, True])
def test_forward_mode_in_training(name: str, frozen: bool) -> None:
    """Against differences, with weights that need gradients, or none."""
    case = BY_LAYER[name]
    layer = case.build(Settings(rows=None, eps=1e-2), dtype=torch.float64).requires_grad_(not frozen)
    x, step = case.input(), 1e-6
    tangent = torch.randn_like(x)
    with torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(x, tangent))
        got = torch.autograd.forward_ad.unpack_dual(y).tangent
    want = (layer(x + step * tangent) - layer(x - step * tangent)) / (2 * step)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
