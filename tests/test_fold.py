"""fold_: stock layers that compute the evaluation output, and what they export to."""

import copy
import pickle

import pytest
import torch
from torch import nn

import ndpp
from cases import CASES
from ndpp import Settings
from test_convert import network, train_steps


def trained(settings: Settings | None = None) -> nn.Module:
    model = network()
    ndpp.convert_(model, settings)
    train_steps(model, torch.optim.SGD(model.parameters(), 0.1))
    return model.eval()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("scale", ["none", "l1", "rms", "std", "standardize"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layer(case, scale: str) -> None:
    layer = case.build(Settings(scale=scale, rows=None), dtype=torch.float64)
    x = case.input()
    layer(x).sum().backward()
    layer.eval()
    one = x[0]
    want, want_one = layer(x), layer(one)
    assert ndpp.fold_(layer) is layer
    stock = getattr(nn, case.layer)
    assert isinstance(layer, stock)
    assert type(layer) is stock or scale != "none"
    assert set(layer.state_dict()) == {"weight", "bias"}
    torch.testing.assert_close(layer(x), want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer(one), want_one, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", ["none", "l1", "standardize"])
def test_network(scale: str) -> None:
    model = trained(Settings(scale=scale))
    x = torch.randn(5, 3, 9, 9)
    want = model(x)
    folded = ndpp.fold_(copy.deepcopy(model))
    assert relative(folded(x), want) < 1e-5
    torch.testing.assert_close(model(x), want)  # the copy was folded, not this
    if scale == "none":
        assert {type(m).__module__.split(".")[0] for m in folded.modules()} == {"torch"}
    left = {name for m in folded.modules() for name in vars(m)}
    assert not left & {"_settings", "layout", "_label", "_cache", "_stock", "_collecting"}
    again = pickle.loads(pickle.dumps(folded))
    torch.testing.assert_close(again(x), folded(x))
    plain = network()
    assert len(list(folded.modules())) == len(list(plain.modules()))
    ndpp.convert_(folded)  # and back
    assert relative(folded.eval()(x), want) < 1e-5 or scale != "none"


def test_folding_leaves_old_parameters_alone() -> None:
    model = trained()
    held = model[0].weight
    before = held.detach().clone()
    ndpp.fold_(model)
    assert torch.equal(held, before)
    assert model[0].weight is not held


def test_untrained_layers_fold_to_themselves() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2)).eval()
    x = torch.randn(2, 3, 4, 4)
    want = model(x)
    ndpp.convert_(model)
    torch.testing.assert_close(ndpp.fold_(model)(x), want)


@pytest.mark.parametrize("scale", ["none", "l1", "standardize"])
def test_exports(scale: str, tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = trained(Settings(scale=scale))
    x = torch.randn(5, 3, 9, 9)
    want = model(x).detach()
    ndpp.fold_(model)
    assert relative(torch.export.export(model, (x,)).module()(x), want) < 1e-5
    assert relative(torch.compile(model, fullgraph=True)(x), want) < 1e-5
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(model, (x,), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert relative(torch.from_numpy(got), want) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = trained().to(dtype)
    x = torch.randn(5, 3, 9, 9, dtype=dtype)
    want = model(x)
    assert relative(ndpp.fold_(model)(x).float(), want.float()) < 1e-5


def test_bad_argument() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        ndpp.fold_({})
