"""Works with: torch.compile, export, ONNX, GradScaler, checkpointing, copies, functional calls, averaging."""

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import ndpp
from cases import BY_LAYER
from ndpp import Settings

EXACT = Settings(rows=None)


class Net(nn.Module):
    """All kinds of layers, one of them used twice."""

    def __init__(self, settings: Settings = EXACT) -> None:
        super().__init__()
        self.stem = ndpp.Conv2d(3, 8, 3, padding=1, settings=settings)
        self.depthwise = ndpp.Conv2d(8, 8, 3, padding="same", groups=8, settings=settings)
        self.twice = ndpp.Conv2d(8, 8, 1, settings=settings.replace(scale="l1"))
        self.up = ndpp.ConvTranspose2d(8, 6, 2, stride=2, settings=settings.replace(scale="standardize"))
        self.head = ndpp.Linear(6, 4, settings=settings.replace(scale="std", block=4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = self.depthwise(x).relu()
        x = self.twice(self.twice(x).relu()).relu()
        x = self.up(x).relu()
        return self.head(x.flatten(2).mT).mean(1)


def make(settings: Settings = EXACT) -> Net:
    torch.manual_seed(0)
    return Net(settings)


def data(step: int = 0) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))


def train(model: Any, parameters: Any, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(data(step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_state(a: nn.Module, b: nn.Module, rtol: float = 1e-4) -> None:
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture
def strict_compiler() -> Iterator[None]:
    """A recompilation is an error, as is a graph break under fullgraph."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.parametrize("scale", ["none", "l1", "std"])
def test_compiled_code_keeps_no_output_for_the_scale(scale: str) -> None:
    """What reaches the gain is found at the input, where its gradient arrives."""
    found = []

    def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        values = [node.meta["val"] for node in outputs if isinstance(node, torch.fx.Node)]
        found.append(sum(value.shape == (3, 6, 5, 5) for value in values))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    layer = ndpp.Conv2d(4, 6, 1, settings=Settings(scale=scale))
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    torch.compile(layer, backend=backend)(torch.randn(3, 4, 5, 5, requires_grad=True)).sin().sum().backward()
    assert found[0] == 1, "of the layer alone there is its output, which sin() keeps outside of the graph"


@pytest.mark.usefixtures("strict_compiler")
def test_compiled_training_equals_eager() -> None:
    """One graph, no recompilation over the steps, the same losses, weights and statistics; a layer used twice too."""
    eager, model = make(), make()
    compiled = torch.compile(model, fullgraph=True)
    expected, got = train(eager, eager.parameters()), train(compiled, model.parameters())
    assert got == pytest.approx(expected, rel=1e-3)
    assert_same_state(model, eager, rtol=1e-3)
    assert model.twice.num_batches_tracked == 3


@pytest.mark.usefixtures("strict_compiler")
def test_compiled_sampling_and_raising() -> None:
    settings = Settings(rows=40, nonfinite="raise")
    model = make(settings)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    losses = train(compiled, model.parameters(), 8)
    assert losses[-1] < losses[0]
    with pytest.raises(FloatingPointError, match="NaN or Inf"):
        compiled(torch.full_like(data(), torch.nan))
    assert torch.isfinite(model.stem.running_cov).all()


@pytest.mark.usefixtures("strict_compiler")
def test_compiled_evaluation_and_masks() -> None:
    model = make()
    train(model, model.parameters())
    model.eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(data(7)), model(data(7)))
    torch._dynamo.reset()
    layer = ndpp.Linear(4, 2, settings=EXACT)
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 5, 4)
    for lengths in ([5, 3, 1], [2, 2, 4]):
        with ndpp.mask(torch.arange(5) < torch.tensor(lengths)[:, None]):
            torch.testing.assert_close(fast(x), layer(x))
    with torch._dynamo.config.patch(error_on_recompile=False):  # without a mask: one other graph
        torch.testing.assert_close(fast(x), layer(x))


@pytest.mark.parametrize("dynamic", [None, False])
def test_compiled_batches_of_other_sizes(dynamic: bool | None) -> None:
    """The last batch of an epoch: another graph, not an error and not a hang."""
    torch._dynamo.reset()
    layer = ndpp.Conv2d(3, 8, 3, padding=1)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for batch in (32, 20, 32, 9):
        y = compiled(torch.randn(batch, 3, 16, 16))
        y.sum().backward()
        assert y.shape[0] == batch
    assert layer.num_batches_tracked == 4


def _counts_twice_itself() -> bool:
    """Older torch runs the side effects of a compiled, checkpointed region twice, BatchNorm's too."""
    torch._dynamo.reset()
    norm = nn.BatchNorm1d(3)
    run = torch.compile(lambda x: checkpoint(norm, x, use_reentrant=False), backend="aot_eager")
    run(torch.randn(4, 3, requires_grad=True)).sum().backward()
    return int(norm.num_batches_tracked) != 1


def test_compiled_checkpointing() -> None:
    if _counts_twice_itself():
        pytest.skip("this torch counts twice")
    torch._dynamo.reset()
    eager, model = make(), make()
    compiled = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager")
    expected, got = train(eager, eager.parameters()), train(compiled, model.parameters())
    assert got == pytest.approx(expected, rel=1e-3)
    assert_same_state(model, eager, rtol=1e-3)


@pytest.mark.parametrize("solver", ["newton", "minimax", "eigh"])
def test_export(solver: Any) -> None:
    model = make(EXACT.replace(solver=solver))
    train(model, model.parameters())
    model.eval()
    program = torch.export.export(model, (data(),))
    torch.testing.assert_close(program.module()(data(9)), model(data(9)))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    torch.testing.assert_close(torch.export.load(stream).module()(data(9)), model(data(9)))


@pytest.mark.parametrize("solver", ["newton", "minimax"])
def test_onnx(solver: Any, tmp_path: Any) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = make(EXACT.replace(solver=solver))
    train(model, model.parameters())
    model.eval()
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(model, (data(),), path, dynamo=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: data(9).numpy()})
    torch.testing.assert_close(torch.from_numpy(got), model(data(9)).detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_grad_scaler_skip_overflowing_steps(dtype: torch.dtype) -> None:
    model = make(Settings(rows=64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
    for step in range(4):
        optimizer.zero_grad()
        x = data(step)
        if step == 2:
            x[0, 0, 0, 0] = torch.inf
        with torch.autocast("cpu", dtype=dtype):
            loss = (model(x) - 1).square().mean()
        if not scaler.is_enabled() and not torch.isfinite(loss):
            continue  # what a loop without a scaler does about a bad batch
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    assert model.stem.num_batches_tracked == 3


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointed_training_equals_plain(reentrant: bool) -> None:
    """Reentrant checkpointing runs forward without a graph, where every call is a step: for layers used once."""
    plain, model = make(), make()
    for net in (plain, model):
        net.twice = ndpp.Conv2d(8, 8, 1, settings=EXACT) if not reentrant else nn.Conv2d(8, 8, 1)
        torch.manual_seed(1)
        net.twice.reset_parameters()

    def run(x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    expected, got = train(plain, plain.parameters()), train(run, model.parameters())
    assert got == pytest.approx(expected, rel=1e-5)
    assert_same_state(model, plain)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_go_on_alike(way: str) -> None:
    model = make()
    pending = model(data())  # copied in the middle of a step
    if way == "deepcopy":
        other = copy.deepcopy(model)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    pending.sum().backward()
    model.zero_grad()
    assert other.stem.settings == model.stem.settings
    assert train(model, model.parameters()) == train(other, other.parameters())
    assert_same_state(model, other)


@pytest.mark.parametrize("name", BY_LAYER)
def test_functional_call_and_gradients(name: str) -> None:
    """functional_call swaps parameters and buffers; torch.func.grad works where statistics are not updated."""
    case = BY_LAYER[name]
    layer = case.build(EXACT.replace(freeze=True), dtype=torch.float64)
    x = case.input()
    parameters = {n: p.detach().clone() * 2 for n, p in layer.named_parameters()}
    want = copy.deepcopy(layer)
    want.load_state_dict(parameters, strict=False)
    torch.testing.assert_close(torch.func.functional_call(layer, parameters, (x,)), want(x))
    grads = torch.func.grad(lambda p: torch.func.functional_call(layer, p, (x,)).square().sum())(parameters)
    want(x).square().sum().backward()
    for n, p in want.named_parameters():
        torch.testing.assert_close(grads[n], p.grad, msg=n)


def test_functional_call_updates_the_buffers_it_is_given() -> None:
    layer = ndpp.Linear(4, 2, settings=EXACT)
    given = {n: b.clone() for n, b in layer.named_buffers()}
    torch.func.functional_call(layer, given, (torch.randn(8, 4),))
    assert given["num_batches_tracked"] == 1
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averaged_models_average_the_statistics(kind: str) -> None:
    """μ and Cov are what one may average; D is then that of the average."""
    model = make()
    options: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.5)} if kind == "ema" else {}
    averaged = AveragedModel(model, use_buffers=True, **options)
    seen = []
    for step in range(3):
        model(data(step) * (step + 1)).sum().backward()
        averaged.update_parameters(model)
        averaged.eval()
        averaged(data())  # fills the cache between updates
        seen.append(model.stem.running_cov.clone())
    want = seen[0]
    for count, cov in enumerate(seen[1:], start=1):
        want = want * 0.5 + cov * 0.5 if kind == "ema" else want + (cov - want) / (count + 1)
    torch.testing.assert_close(averaged.module.stem.running_cov, want)
    fresh = copy.deepcopy(averaged.module)
    torch.testing.assert_close(averaged(data()), fresh(data()))


def test_double_backward() -> None:
    """A gradient penalty differentiates through the statistics twice."""
    layer = ndpp.Conv2d(3, 4, 3, settings=EXACT)
    x = data().requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert torch.isfinite(layer.weight.grad).all()
    assert layer.weight.grad.abs().max() > 0


def test_parametrized_weights() -> None:
    layer = nn.utils.parametrizations.weight_norm(ndpp.Linear(4, 2, settings=EXACT))
    layer(torch.randn(9, 4)).sum().backward()
    assert layer.parametrizations.weight.original0.grad is not None


# --- what compiled code is made of ---


def test_compiled_code_holds_whole_stages() -> None:
    """Operators of ndpp, forward and backward, in place of what is inside them."""
    torch._dynamo.reset()
    seen: set[str] = set()

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        for module in graph.modules():
            if isinstance(module, torch.fx.GraphModule):
                seen.update(str(node.target) for node in module.graph.nodes)
        return graph

    layer = ndpp.Conv2d(3, 4, 3, padding=1, settings=Settings(rows=32))
    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(2, 3, 8, 8, requires_grad=True)).sum().backward()
    stages = {f"ndpp.{name}.default" for name in ("forward", "observe_", "fold_adjoint", "moments_adjoint_")}
    assert stages <= seen
    assert not any("bmm" in name or "matmul" in name for name in seen)


def test_sampled_rows_of_many_sizes_are_one_graph() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    layer = ndpp.Conv2d(3, 4, 3, padding=1, settings=Settings(rows=32))
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for batch, size in ((2, 8), (4, 8), (4, 10), (5, 12), (6, 14), (7, 9)):
        compiled(torch.randn(batch, 3, size, size, requires_grad=True)).sum().backward()
    assert counter.frame_count <= 3  # as given, then with any batch, then with any size


@pytest.mark.parametrize("scale", ["none", "l1", "std", "standardize"])
@pytest.mark.parametrize("name", ["Linear", "Conv2d", "ConvTranspose1d"])
def test_compiled_gradients_are_those_of_eager_code(name: str, scale: str) -> None:
    torch._dynamo.reset()
    case = BY_LAYER[name]
    results = []
    for compiled in (False, True):
        layer = case.build(Settings(rows=None, scale=scale), dtype=torch.float64)
        x = case.input().requires_grad_()
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        run(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()])
    torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-12)
