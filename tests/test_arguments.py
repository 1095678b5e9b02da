"""Every combination of arguments that torch.nn accepts gives its output shape; what it refuses, we refuse alike."""

import copy
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import ndpp
from cases import BY_LAYER, CASES, Case
from ndpp import Settings
from oracles import as_rows, layer_output

LAYERS = list(BY_LAYER)


@pytest.mark.parametrize("name", LAYERS)
def test_signature_is_torchs_plus_settings(name: str) -> None:
    ours = inspect.signature(getattr(ndpp, name)).parameters
    stock = inspect.signature(getattr(nn, name)).parameters
    assert list(ours) == [*stock, "settings"]
    assert all(ours[p].default == stock[p].default for p in stock)
    assert ours["settings"].kind is inspect.Parameter.KEYWORD_ONLY
    assert isinstance(BY_LAYER[name].build(), getattr(nn, name))


@st.composite
def conv_calls(draw: Any) -> tuple[str, dict[str, Any], tuple[int, ...]]:
    n = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    groups = draw(st.integers(1, 3))

    def sizes(low: int, high: int) -> Any:
        one = st.integers(low, high)
        return draw(st.one_of(one, st.tuples(*[one] * n)))

    options: dict[str, Any] = {
        "in_channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": sizes(1, 4),
        "stride": sizes(1, 3),
        "dilation": sizes(1, 3),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding": sizes(0, 3),
    }
    if transposed:
        options["output_padding"] = sizes(0, 2)
    else:
        options["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
        options["padding"] = draw(st.one_of(st.just(options["padding"]), st.sampled_from(["same", "valid"])))
    batch = draw(st.one_of(st.just(()), st.tuples(st.integers(0, 3))))
    shape = (*batch, options["in_channels"], *draw(st.tuples(*[st.integers(1, 6)] * n)))
    return f"Conv{'Transpose' if transposed else ''}{n}d", options, shape


def outcome(build: Any, x: torch.Tensor) -> tuple[Any, Any]:
    """The kind of error, or the output."""
    try:
        layer = build()
        return None, layer(x)
    except Exception as error:
        return type(error), None


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    conv_calls(),
    st.sampled_from([1, 2, 64]),
    st.booleans(),
    st.sampled_from(["none", "l1", "rms", "std", "standardize"]),
    st.sampled_from([None, 7]),
)
def test_any_convolution(call: Any, block: int, shared: bool, scale: Any, rows: int | None) -> None:
    """Same shape or same kind of error as torch.nn; and with every position sampled, the values of the oracle."""
    name, options, shape = call
    chosen = Settings(block=block, shared=shared, scale=scale, rows=rows, eps=1e-2)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = {**options, "dtype": torch.float64}
    stock_error, expected = outcome(lambda: getattr(nn, name)(**options), x)
    built: list[nn.Module] = []

    def build() -> nn.Module:
        built.append(getattr(ndpp, name)(**options, settings=chosen))
        return built[0]

    x = x.requires_grad_()
    error, y = outcome(build, x)
    assert error == stock_error
    if error is not None:
        if built:
            assert built[0].num_batches_tracked == 0
        return
    assert y.shape == expected.shape
    assert torch.isfinite(y).all()
    y.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in (x, *built[0].parameters()))
    assert built[0].num_batches_tracked == (1 if x.numel() else 0)
    n = len(built[0].kernel_size)
    if rows is None and x.numel() and scale in ("none", "l1"):
        layer, batched = built[0], x.detach() if x.dim() == n + 2 else x.detach()[None]
        want = layer_output(
            layer, batched, layer.weight, layer.bias, block=block, shared=shared, solver="quartic", steps=3,
            eps=1e-2, shrinkage=0.0, scale=scale,
        )  # fmt: skip
        got = as_rows(layer, y if x.dim() == n + 2 else y[None])
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("lead", [(), (1,), (7,), (2, 3), (2, 3, 4), (0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("scale", ["none", "l1", "rms", "std", "standardize"])
def test_linear_takes_any_leading_dimensions(lead: tuple[int, ...], scale: Any) -> None:
    layer = ndpp.Linear(5, 3, settings=Settings(rows=4, scale=scale))
    x = torch.randn(*lead, 5, requires_grad=True)
    y = layer(x)
    assert y.shape == (*lead, 3)
    y.sum().backward()
    assert layer.weight.grad is not None
    assert torch.isfinite(layer.weight.grad).all()
    assert layer.num_batches_tracked == (1 if x.numel() else 0)


@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_batch_flows_and_leaves_no_trace(name: str) -> None:
    case = BY_LAYER[name]
    layer = case.build()
    before = copy.deepcopy(layer.state_dict())
    x = torch.zeros(0, *case.shape[1:], requires_grad=True)
    y = layer(x)
    assert y.shape == case.stock()(x).shape
    y.sum().backward()
    assert (layer.weight.grad == 0).all()
    assert x.grad.shape == x.shape
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


@pytest.mark.parametrize("name", LAYERS)
def test_a_batch_of_one(name: str) -> None:
    case = BY_LAYER[name]
    layer = case.build()
    x = case.input(torch.float32)[:1].requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "Linear"])
def test_unbatched_is_a_batch_of_one(name: str) -> None:
    case = BY_LAYER[name]
    x = case.input(torch.float32)[0]
    y, batched = case.build()(x), case.build()(x[None])
    torch.testing.assert_close(y, batched[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_layout_does_not_matter(case: Case) -> None:
    plain = case.build()
    x = case.input(torch.float32)
    want = plain(x)
    spread = torch.empty(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]
    spread.copy_(x)
    torch.testing.assert_close(case.build()(spread), want)
    transposed = x.movedim(0, -1).contiguous().movedim(-1, 0)
    torch.testing.assert_close(case.build()(transposed), want)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and case.layer != "Linear":
        layer = case.build().to(memory_format=formats[x.dim()])
        y = layer(x.to(memory_format=formats[x.dim()]))
        torch.testing.assert_close(y, want)
        y.sum().backward()


def test_output_size_chooses_the_output() -> None:
    layer = ndpp.ConvTranspose2d(3, 4, 3, stride=2, padding=1, dtype=torch.float64, settings=Settings(rows=None))
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64)
    for size in ([9, 11], [10, 12], [9, 12]):
        y = layer(x, output_size=size)
        assert list(y.shape[2:]) == size
        want = layer_output(
            layer, x, layer.weight, layer.bias, block=64, shared=True, solver="quartic", steps=3,
            eps=layer.settings.eps, shrinkage=layer.settings.shrinkage, output_size=size,
        )  # fmt: skip
        torch.testing.assert_close(as_rows(layer, y), want)
    for bad in ([8, 11], [11, 11], [9]):
        with pytest.raises(ValueError, match=r"output.size"):
            layer(x, output_size=bad)


CONV = {"in_channels": 3, "out_channels": 2, "kernel_size": 3}
BAD_CALLS = [
    ("Linear", {"in_features": 4, "out_features": 2}, (3, 5)),
    ("Linear", {"in_features": 4, "out_features": 2}, ()),
    ("Conv2d", CONV, (2, 4, 8, 8)),
    ("Conv2d", CONV, (8, 8)),
    ("Conv2d", {"in_channels": 3, "out_channels": 2, "kernel_size": 9}, (2, 3, 8, 8)),
    ("Conv2d", {**CONV, "groups": 2}, (2, 3, 8, 8)),
    ("Conv2d", {**CONV, "padding": "full"}, (2, 3, 8, 8)),
    ("Conv2d", {**CONV, "padding": "same", "stride": 2}, (2, 3, 8, 8)),
    ("Conv2d", {**CONV, "padding_mode": "mirror"}, (2, 3, 8, 8)),
    ("Conv2d", {**CONV, "groups": 0}, (2, 3, 8, 8)),
    ("Conv1d", {**CONV, "padding": 9, "padding_mode": "reflect"}, (3, 4)),
    ("ConvTranspose1d", {**CONV, "padding_mode": "reflect"}, (2, 3, 8)),
    ("ConvTranspose1d", {**CONV, "output_padding": 5}, (2, 3, 8)),
    ("ConvTranspose1d", {"in_channels": 3, "out_channels": 2, "kernel_size": 1, "padding": 5}, (2, 3, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "shape"), BAD_CALLS)
def test_what_torch_refuses_is_refused_alike(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    stock, _ = outcome(lambda: getattr(nn, name)(**options), x)
    ours, _ = outcome(lambda: getattr(ndpp, name)(**options), x)
    assert stock is not None
    assert ours is stock


def test_no_features_is_no_error() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        layer = ndpp.Linear(0, 3)
    assert layer(torch.zeros(2, 0)).shape == (2, 3)


def test_no_outputs_is_no_error() -> None:
    with pytest.warns(UserWarning, match="zero-element"):
        layer = ndpp.Linear(4, 0)
    assert layer(torch.randn(5, 4)).shape == (5, 0)


def test_call_errors_name_the_layer_and_what_it_saw() -> None:
    with pytest.raises(ValueError, match=r"ndpp.ConvTranspose1d\(3, 2.*shape \(2, 3, 8\).*output size of \[99\]"):
        ndpp.ConvTranspose1d(3, 2, 2, stride=2)(torch.randn(2, 3, 8), output_size=[99])
    with pytest.raises(RuntimeError, match=r"ndpp.Linear\(in_features=3.*torch.complex64"):
        ndpp.Linear(3, 2)(torch.randn(4, 3, dtype=torch.complex64))
    with pytest.raises(RuntimeError, match=r"ndpp.Conv2d\(3, 2, kernel_size=\(3, 3\).*shape \(2, 4, 8, 8\).*channels"):
        ndpp.Conv2d(3, 2, 3)(torch.randn(2, 4, 8, 8))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("bad", [None, np.zeros((4, 3)), [1.0]])
def test_what_is_no_tensor_is_refused_alike(name: str, bad: Any) -> None:
    case = BY_LAYER[name]
    stock, _ = outcome(case.stock, bad)
    ours, _ = outcome(case.build, bad)
    assert stock is not None
    assert ours is stock


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"stride": [2, 2]},
        {"stride": 2, "padding": [1, 1]},
        {"padding": [1, 2]},
        {"dilation": [1, 2]},
        {"padding": "same"},
    ],
    ids=str,
)
def test_attributes_changed_after_construction(changes: dict[str, Any], convert: bool) -> None:
    """As in torch.nn: what the stock operation then does, the statistics follow. Numbers and lists do."""
    every = Settings(rows=None)
    torch.manual_seed(0)
    layer: Any = nn.Conv2d(3, 4, 3) if convert else ndpp.Conv2d(3, 4, 3, settings=every)
    built = {k: v if isinstance(v, (str, int)) else tuple(v) for k, v in changes.items()}
    other = ndpp.Conv2d(3, 4, 3, **built, settings=every)
    for name, value in changes.items():
        setattr(layer, name, getattr(other, name) if value == "same" else value)
    if "same" in changes.values():  # torch.nn reads another attribute then
        layer._reversed_padding_repeated_twice = other._reversed_padding_repeated_twice
    if convert:
        layer = nn.Sequential(layer)
        ndpp.convert_(layer, every)
        layer = layer[0]
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 3, 9, 8)
    torch.testing.assert_close(layer(x), other(x))
    torch.testing.assert_close(layer.running_cov, other.running_cov)


def test_settings_of_a_living_layer() -> None:
    layer = ndpp.Linear(4, 2)
    layer.settings = layer.settings.replace(freeze=True)
    assert layer.settings.freeze
    with pytest.raises(ValueError, match="block, features and shared are fixed once a layer is built"):
        layer.settings = layer.settings.replace(block=2)
    with pytest.raises(TypeError, match=r"must be an ndpp.Settings"):
        layer.settings = {"freeze": True}


def test_construction_errors_say_what_came_and_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"ndpp.Linear\(in_features=3.*must be an ndpp.Settings; got 'paper'"):
        ndpp.Linear(3, 2, settings="paper")
    with pytest.raises(TypeError, match=r"real floating-point dtype; got torch.complex64"):
        ndpp.Conv1d(3, 2, 1, dtype=torch.complex64)


# --- devices ---


@pytest.mark.parametrize("name", LAYERS)
def test_meta_device_then_real(name: str) -> None:
    case = BY_LAYER[name]
    layer = case.build(device="meta")
    assert all(t.is_meta for t in (*layer.parameters(), *layer.buffers()))
    assert layer(torch.empty(case.shape, device="meta")).shape == case.stock()(torch.zeros(case.shape)).shape
    layer = layer.to_empty(device="cpu")
    assert layer.num_batches_tracked == 0  # statistics never start from what memory held
    layer.reset_parameters()
    fresh = case.build()
    for (key, value), (_, other) in zip(layer.named_buffers(), fresh.named_buffers(), strict=True):
        assert torch.equal(value, other), key
    y = layer(case.input(torch.float32))
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("name", LAYERS)
def test_skip_init(name: str) -> None:
    case = BY_LAYER[name]
    layer = nn.utils.skip_init(getattr(ndpp, name), *case.args, settings=Settings(rows=8))
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    assert layer.settings.rows == 8
    assert torch.isfinite(layer(case.input(torch.float32))).all()
    assert layer.num_batches_tracked == 1


def test_reset_parameters_forgets_data() -> None:
    layer = ndpp.Linear(4, 3)
    layer(torch.randn(9, 4))
    layer.reset_parameters()
    assert layer.num_batches_tracked == 0
    assert torch.equal(layer.running_cov[0], torch.eye(4))
    bound = 1 / math.sqrt(4)
    assert layer.weight.abs().max() <= bound
