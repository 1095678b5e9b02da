"""On a CUDA device: values and gradients against the CPU in double precision, capture, compilation."""

from typing import Any

import pytest
import torch
from torch import Tensor

import ndpp
from cases import BY_LAYER, CASES, Case
from ndpp import Settings
from test_integration import EXACT, Net, assert_same_state, data, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VARIANTS = {
    "default": Settings(rows=None),
    "own": Settings(rows=None, shared=False, steps=5),
    "l1": Settings(rows=None, scale="l1"),
    "standardize": Settings(rows=None, scale="standardize", solver="minimax"),
    "eigh": Settings(rows=None, solver="eigh", eps=1e-2),
}


def outcome(layer: torch.nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    cotangent = torch.sin(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape).to(y)
    (y * cotangent).sum().backward()
    grads = {f"d{n}": p.grad for n, p in layer.named_parameters()}
    values = {"output": y.detach(), "dinput": x.grad, "cov": layer.running_cov, "mean": layer.running_mean, **grads}
    return {name: value.double().cpu() for name, value in values.items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_equals_cpu(case: Case, variant: str) -> None:
    settings = VARIANTS[variant]
    want = outcome(case.build(settings).double(), case.input())
    got = outcome(case.build(settings).double().cuda(), case.input().cuda())
    for name, value in want.items():
        assert (got[name] - value).norm() <= 1e-9 * value.norm() + 1e-12, name
    single = outcome(case.build(settings).cuda(), case.input(torch.float32).cuda())
    for name, value in want.items():
        assert (single[name] - value).norm() <= 5e-3 * value.norm() + 1e-6, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BY_LAYER)
def test_autocast_and_memory_format(name: str, dtype: torch.dtype) -> None:
    case = BY_LAYER[name]
    layer = case.build().cuda()
    x = case.input(torch.float32).cuda()
    want = case.build().cuda()(x)
    if x.dim() == 4:
        layer = layer.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    with torch.autocast("cuda", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    assert (y.float() - want).norm() < 0.05 * want.norm()
    if x.dim() == 4:
        assert y.is_contiguous(memory_format=torch.channels_last)


def steps(model: Any, net: Net, count: int) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        loss = (model(data(step).cuda()) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_no_synchronisation_in_a_training_step() -> None:
    net = make(Settings(rows=40)).cuda()
    x = data().cuda()
    net(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        net(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            net = make(Settings(rows=40)).cuda()
            torch.manual_seed(0)
            runs.append(steps(net, net, 3))
        assert runs[0] == runs[1]
    finally:
        torch.use_deterministic_algorithms(False)


def test_cuda_graph_training_equals_eager() -> None:
    """Whole steps replayed: losses, weights and statistics, the layer used twice included; then evaluation."""
    eager, net = make().cuda(), make().cuda()
    expected = steps(eager, eager, 5)
    static = torch.empty_like(data().cuda())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start = {k: v.clone() for k, v in net.state_dict().items()}

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = (net(static) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    static.copy_(data())
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    net.load_state_dict(start)
    got = []
    for number in range(5):
        static.copy_(data(number))
        graph.replay()
        got.append(loss.item())
    assert got == pytest.approx(expected, rel=1e-3)
    assert_same_state(net, eager, rtol=1e-3)
    x = data(11).cuda()
    torch.testing.assert_close(net.eval()(x), eager.eval()(x), rtol=1e-3, atol=1e-3)
    net.train()
    for _ in range(3):
        graph.replay()
    assert not torch.allclose(net.eval()(x), eager(x))  # evaluation follows statistics that a replay changed


def test_graphed_callables_train_as_eager() -> None:
    """Eager mode recorded by torch: losses, weights and statistics; its rehearsals count as calls, as for BatchNorm."""
    eager, net = make().cuda(), make().cuda()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    graphed = torch.cuda.make_graphed_callables(net, (data().cuda(),))
    net.load_state_dict(start)
    assert steps(graphed, net, 5) == pytest.approx(steps(eager, eager, 5), rel=1e-3)
    assert_same_state(net, eager, rtol=1e-3)


def test_sampling_is_new_in_every_replay() -> None:
    layer = ndpp.Conv2d(3, 4, 1, settings=Settings(rows=8)).cuda()
    x = torch.randn(4, 3, 16, 16, device="cuda")
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        seen = set()
        for _ in range(4):
            graph.replay()
            seen.add(y.sum().item())
    assert len(seen) == 4


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training_equals_eager(mode: str) -> None:
    torch._dynamo.reset()
    eager, net = make(EXACT).cuda(), make(EXACT).cuda()
    with torch._dynamo.config.patch(error_on_recompile=True):
        got = steps(torch.compile(net, fullgraph=True, mode=mode), net, 4)
    assert got == pytest.approx(steps(eager, eager, 4), rel=2e-3)
    assert_same_state(net, eager, rtol=5e-3)
    assert net.twice.num_batches_tracked == 4


def test_huge_and_tiny() -> None:
    for magnitude in (1e18, 1e-18):
        for name in BY_LAYER:
            case = BY_LAYER[name]
            values = outcome(case.build().cuda(), (case.input(torch.float32) * magnitude).cuda())
            assert all(torch.isfinite(v).all() for v in values.values()), (name, magnitude)
