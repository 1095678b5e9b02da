"""Conversion on a CUDA device; run with -m gpu."""

import copy

import pytest
import torch
from torch import nn

import ndpp
from ndpp import Settings
from test_convert import network

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _float32_products():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm())


def step(model: nn.Module, x: torch.Tensor, **autocast) -> float:
    model.zero_grad()
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast("cuda", **autocast):
        loss = nn.functional.cross_entropy(model(x), torch.arange(len(x), device=x.device) % 4)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("scale", ["none", "l1", "standardize"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_train_evaluate_fold(scale: str, autocast: torch.dtype | None) -> None:
    model = network().cuda().to(memory_format=torch.channels_last)
    parameters = set(model.parameters())
    ndpp.convert_(model, Settings(scale=scale))
    assert set(model.parameters()) <= parameters
    assert all(b.is_cuda for b in model.buffers())
    x = torch.randn(16, 3, 9, 9, device="cuda").contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        assert step(model, x, enabled=autocast is not None, dtype=autocast or torch.bfloat16) < 5
    model.eval()
    with torch.no_grad():
        want = model(x)
        assert relative(ndpp.fold_(copy.deepcopy(model))(x), want) < 1e-5
        ndpp.recalibrate_(model, [x.cpu(), (x.cpu(), None)])  # moved to where the model is
        assert model[0].num_batches_tracked == 2


def test_adoption_agrees_with_the_cpu() -> None:
    model = network()
    for _ in range(5):
        model(torch.randn(16, 3, 9, 9) * 2 + 1)
    on_gpu, batches = copy.deepcopy(model).cuda(), [torch.randn(16, 3, 9, 9) * 2 + 1 for _ in range(3)]
    change = ndpp.convert_(on_gpu, calibration=batches).change
    ndpp.convert_(model, calibration=batches)
    assert change is not None
    assert change < 1e-4
    for ours, theirs in zip(on_gpu.parameters(), model.parameters(), strict=True):
        assert relative(ours, theirs) < 1e-3


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).cuda()
    x = torch.randn(8, 10, 32, device="cuda")
    padding = torch.arange(10, device="cuda") >= torch.tensor([10, 3, 7, 9, 10, 1, 5, 6], device="cuda")[:, None]
    ndpp.convert_(model, "transformer")
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x, src_key_padding_mask=padding)
    y[~padding].square().mean().backward()
    model.eval()
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        got = ndpp.fold_(copy.deepcopy(model))(x, src_key_padding_mask=padding)
    assert relative(got[~padding], want[~padding]) < 1e-5


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_after_conversion(mode: str) -> None:
    model = network().cuda()
    ndpp.convert_(model)
    compiled = torch.compile(model, mode=mode)
    x = torch.randn(16, 3, 9, 9, device="cuda")
    for _ in range(3):
        assert step(compiled, x, enabled=False) < 5
    assert model[0].num_batches_tracked == 3
    model.eval()
    with torch.no_grad():
        want = model(x)
        folded = torch.compile(ndpp.fold_(copy.deepcopy(model)), mode=mode, fullgraph=True)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            assert relative(folded(x), want) < 1e-4


def test_inspection() -> None:
    model = network().cuda()
    found = ndpp.inspect(model, torch.randn(16, 3, 9, 9))
    assert all(layer.rows > 0 for layer in found.layers)
