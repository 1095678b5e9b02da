"""Running statistics: what enters the buffers, when, and what comes out of them."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import ndpp
from cases import BY_LAYER, CASES, Case
from ndpp import Settings
from oracles import covariance, data_matrix

EXACT = Settings(rows=None)


def linear(settings: Settings = EXACT, **options: Any) -> ndpp.Linear:
    return ndpp.Linear(4, 3, dtype=torch.float64, settings=settings, **options)


def batches(count: int, rows: int = 12) -> list[Tensor]:
    return [torch.randn(rows, 4, dtype=torch.float64) * (i + 1) + i for i in range(count)]


def buffers(layer: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in layer.state_dict().items() if name not in ("weight", "bias")}


def assert_same_buffers(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_buffers_are_the_moments_of_the_data_matrix(case: Case) -> None:
    case = Case(case.layer, case.args, case.shape, case.options)
    layer = case.build(Settings.exact(), dtype=torch.float64)
    layer(case.input())
    for g, rows in enumerate(data_matrix(layer, case.input()).flatten(2)):
        mean, cov = covariance(rows)
        torch.testing.assert_close(layer.running_mean[g], mean)
        torch.testing.assert_close(layer.running_cov[g], cov)


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, None])
def test_running_average_is_debiased(momentum: float | None) -> None:
    """After t steps: the average weighted by (1 - m)^age, normalised; no trace of the initial values."""
    layer = linear(EXACT.replace(momentum=momentum))
    data = batches(5)
    for x in data:
        layer(x).sum().backward()
    age = torch.arange(4, -1, -1, dtype=torch.float64)
    weights = torch.ones(5, dtype=torch.float64) if momentum is None else (1 - momentum) ** age
    weights = weights / weights.sum()
    moments = [covariance(x) for x in data]
    torch.testing.assert_close(layer.running_mean[0], sum(w * m for w, (m, _) in zip(weights, moments, strict=True)))
    torch.testing.assert_close(layer.running_cov[0], sum(w * c for w, (_, c) in zip(weights, moments, strict=True)))
    assert layer.num_batches_tracked == 5


@pytest.mark.parametrize("momentum", [1e-4, 1e-8])
def test_small_momentum_starts_unbiased_in_single_precision(momentum: float) -> None:
    layer = ndpp.Linear(4, 3, settings=EXACT.replace(momentum=momentum))
    x = torch.randn(64, 4) + 10
    layer(x)
    torch.testing.assert_close(layer.running_mean[0], x.mean(0))


def test_calls_of_one_step_count_as_one_batch() -> None:
    """A head on several pyramid levels: moments merge as if the rows had come together, level sizes weighing in."""
    torch.manual_seed(3)
    levels = [torch.randn(2, 3, s, s, dtype=torch.float64) + s for s in (8, 4, 2)]
    head = ndpp.Conv2d(3, 3, 1, dtype=torch.float64, settings=EXACT)
    together = ndpp.Linear(3, 3, dtype=torch.float64, settings=EXACT)
    for step in range(3):
        outputs = [head(level * (step + 1)) for level in levels]
        sum(y.square().mean() for y in outputs).backward()
        rows = torch.cat([(level * (step + 1)).movedim(1, -1).reshape(-1, 3) for level in levels])
        together(rows).sum().backward()
    assert head.num_batches_tracked == 3
    assert_same_buffers(buffers(head), buffers(together))


@pytest.mark.parametrize("mode", ["discarded", "no_grad", "frozen", "optimizer"])
def test_every_call_outside_a_common_step_is_a_batch(mode: str) -> None:
    layer = linear()
    if mode == "frozen":
        layer.requires_grad_(False)
    kept = []
    for x in batches(4):
        with torch.set_grad_enabled(mode != "no_grad"):
            y = layer(x)
        if mode == "optimizer":
            y.sum().backward()
            kept.append(y)  # the output stays alive, as a logged loss would
        elif mode == "discarded":
            del y  # nothing can ask for its gradient any more
        else:
            kept.append(y)
    assert layer.num_batches_tracked == 4


@pytest.mark.parametrize("after", ["a load", "eager", "a change of mode"])
def test_a_step_that_compiled_code_left_open(after: str) -> None:
    """A call whose backward pass never came is a step of its own, whoever makes the next one."""
    layers = [ndpp.Linear(3, 2, settings=EXACT) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for layer, call in zip(layers, (torch.compile(layers[0], backend="eager"), layers[1]), strict=True):
        torch.manual_seed(0)
        call(torch.randn(9, 3)).sum().backward()
        state = {name: value.clone() for name, value in layer.state_dict().items()}
        call(torch.randn(9, 3) + 1)  # and no more
        if after == "a load":
            layer.load_state_dict(state)
        elif after == "a change of mode":
            layer.eval().train()
        layer(torch.randn(9, 3) - 1).sum().backward()
    assert_same_buffers(buffers(layers[0]), buffers(layers[1]))
    assert layers[0].num_batches_tracked == (2 if after == "a load" else 3)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", BY_LAYER)
def test_recomputation_does_not_count(name: str, reentrant: bool) -> None:
    """Same buffers and gradients with and without activation checkpointing, sampling included."""
    case = BY_LAYER[name]
    results = []
    for use in (False, True):
        layer = case.build(Settings(rows=20), dtype=torch.float64)
        x = case.input().requires_grad_()
        for step in range(3):
            torch.manual_seed(step)
            y = checkpoint(layer, x, use_reentrant=reentrant) if use else layer(x)
            y.square().sum().backward()
        results.append((buffers(layer), x.grad, layer.weight.grad))
    assert results[0][0]["num_batches_tracked"] == 3
    assert_same_buffers(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1:], results[1][1:])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", BY_LAYER)
def test_non_finite_batches_never_enter_the_buffers(name: str, bad: float) -> None:
    case = BY_LAYER[name]
    layer = case.build(EXACT)
    layer(case.input(torch.float32)).sum().backward()
    before = buffers(layer)
    x = case.input(torch.float32)
    x.view(-1)[3] = bad
    y = layer(x)
    assert_same_buffers(before, buffers(layer))
    assert torch.isfinite(y[1:]).all()  # the other samples are served by the running statistics
    layer(case.input(torch.float32, seed=2)).sum().backward()
    assert layer.num_batches_tracked == 2
    assert torch.isfinite(layer.running_cov).all()


def test_non_finite_batches_raise_if_asked() -> None:
    layer = linear(EXACT.replace(nonfinite="raise"))
    layer(batches(1)[0])
    before = buffers(layer)
    with pytest.raises(FloatingPointError, match=r"Linear.*NaN or Inf.*nonfinite='skip'"):
        layer(torch.full((3, 4), math.nan, dtype=torch.float64))
    assert_same_buffers(before, buffers(layer))


def test_statistics_that_overflow_are_not_stored() -> None:
    layer = ndpp.Linear(4, 3, settings=EXACT)
    layer(torch.randn(8, 4))
    before = buffers(layer)
    y = layer(torch.randn(8, 4) * 1e30)  # the covariance would be 1e60
    assert torch.isfinite(y).all()
    assert_same_buffers(before, buffers(layer))


def test_an_error_in_the_layer_leaves_the_statistics_alone() -> None:
    layer = ndpp.Linear(4, 3, settings=EXACT)
    before = buffers(layer)
    with pytest.raises(RuntimeError, match=r"ndpp.Linear\(in_features=4.*shape \(5, 4\), torch.float64"):
        layer(torch.ones(5, 4, dtype=torch.float64))  # wrong dtype, as in torch.nn
    assert_same_buffers(before, buffers(layer))


def test_frozen_statistics_serve_training() -> None:
    layer = linear()
    layer(batches(1)[0]).sum().backward()
    frozen = linear(EXACT.replace(freeze=True))
    frozen.load_state_dict(layer.state_dict())
    before = buffers(frozen)
    x = batches(3)[2]
    y = frozen(x)
    y.sum().backward()
    assert_same_buffers(before, buffers(frozen))
    torch.testing.assert_close(y, layer.eval()(x))
    assert frozen.weight.grad is not None


def test_a_layer_without_data_evaluates_as_the_stock_layer() -> None:
    for case in CASES:
        layer, stock = case.build(Settings()).eval(), case.stock()
        stock.load_state_dict({k: v for k, v in layer.state_dict().items() if k in ("weight", "bias")})
        x = case.input(torch.float32)
        torch.testing.assert_close(layer(x), stock(x))


# --- evaluation cache ---


def test_evaluation_root_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear(EXACT.replace(solver="eigh"))
    for x in batches(2):
        layer(x).sum().backward()
    layer.eval()
    calls = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: calls.append(1) or original(a))
    x = batches(1)[0]
    first = layer(x)
    for _ in range(3):
        layer(x)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(layer(x), first)


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("change", ["weight", "bias", "settings", "data", "fused optimizer", "assigned"])
def test_evaluation_follows_weights_and_settings(change: str, no_grad: bool) -> None:
    x, layer = batches(1)[0], linear()
    layer(batches(2)[1]).sum().backward()
    layer.eval()
    with torch.set_grad_enabled(not no_grad):
        stale = layer(x)
        if change == "settings":
            layer.settings = layer.settings.replace(eps=100.0)
        elif change == "data":
            layer.weight.data.add_(1.0)
        elif change == "fused optimizer":
            torch.optim.AdamW(layer.parameters(), lr=1.0, fused=True).step()
        elif change == "assigned":
            layer.weight = nn.Parameter(layer.weight.detach() + 1)
        else:
            with torch.no_grad():
                getattr(layer, change).add_(1.0)
        fresh = layer(x)
        assert not torch.allclose(fresh, stale)
        torch.testing.assert_close(fresh, copy.deepcopy(layer)(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_evaluation_survives_a_cast(dtype: torch.dtype) -> None:
    layer = ndpp.Linear(4, 3, settings=EXACT)
    x = torch.randn(9, 4)
    layer(x).sum().backward()
    layer.eval()
    with torch.no_grad():
        want = layer(x)
        got = layer.to(dtype)(x.to(dtype))
    torch.testing.assert_close(got.float(), want, atol=5e-2, rtol=5e-2)


def test_tracing_leaves_nothing_behind() -> None:
    layer = linear().eval()
    x = batches(1)[0]
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            layer(mode.from_tensor(x))
        assert type(layer(x)) is Tensor
        torch.func.vmap(layer)(x)
        assert type(layer(x)) is Tensor


def test_layers_made_in_inference_mode_change_mode() -> None:
    with torch.inference_mode():
        layer = linear()
    layer.eval()
    with torch.inference_mode():
        layer(batches(1)[0])


def test_a_shallow_copy_leaves_the_original_alone() -> None:
    layer = linear()
    first = layer(batches(1)[0])
    copy.copy(layer)
    second = layer(batches(2)[1])
    (first.sum() + second.sum()).backward()
    assert layer.num_batches_tracked == 1


def test_states_of_a_later_version_are_refused() -> None:
    layer = linear()
    state = layer.state_dict()
    state._metadata[""]["version"] = 99
    with pytest.raises(RuntimeError, match="version 99, this ndpp knows up to 2; load it with the newer ndpp"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("change", ["load", "in place", "to", "deepcopy", "train", "reset", "swap", "pickle"])
def test_evaluation_follows_the_buffers(change: str) -> None:
    x = batches(1)[0]
    layer, other = linear(), linear()
    other.load_state_dict(layer.state_dict())
    layer(batches(3)[2]).sum().backward()
    other(x).sum().backward()
    layer.eval()
    stale = layer(x)
    if change == "load":
        layer.load_state_dict(other.state_dict())
    elif change == "in place":
        layer.running_cov.copy_(other.running_cov)
        layer.running_mean.copy_(other.running_mean)
    elif change == "to":
        layer.to(torch.float32)
        layer.load_state_dict(other.state_dict())
        layer.to(torch.float64)
        other = copy.deepcopy(other).float().double()
    elif change == "deepcopy":
        layer = copy.deepcopy(layer)
        layer.running_cov.mul_(4)
        other = copy.deepcopy(layer)
    elif change == "pickle":
        layer = pickle.loads(pickle.dumps(layer))
        layer.running_cov.mul_(4)
        other = copy.deepcopy(layer)
    elif change == "train":
        layer.train()
        layer(x).sum().backward()
        layer.eval()
        other = copy.deepcopy(layer)
    elif change == "reset":
        layer.reset_running_stats()
        other.reset_running_stats()
    elif change == "swap":
        replaced = {"running_cov": other.running_cov, "running_mean": other.running_mean}
        got = torch.func.functional_call(layer, replaced, (x,))
        torch.testing.assert_close(got, other.eval()(x))
        torch.testing.assert_close(layer(x), stale)
        return
    fresh = layer(x)
    assert not torch.allclose(fresh, stale)
    torch.testing.assert_close(fresh, other.eval()(x))


# --- state ---


@pytest.mark.parametrize("name", BY_LAYER)
def test_state_dict_round_trip(name: str, tmp_path: Any) -> None:
    case = BY_LAYER[name]
    layer = case.build(EXACT)
    layer(case.input(torch.float32)).sum().backward()
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    state = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert set(state) == {"weight", "bias", "running_mean", "running_cov", "num_batches_tracked"}
    assert layer.state_dict()._metadata[""]["version"] == 2
    other = case.build(EXACT)
    other.reset_parameters()
    other.load_state_dict(state, strict=True)
    x = case.input(torch.float32, seed=5)
    torch.testing.assert_close(other.eval()(x), layer.eval()(x))


def test_loading_keeps_the_buffers_that_a_captured_graph_writes_to() -> None:
    layer = linear()
    before = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    layer.load_state_dict(linear().state_dict())
    assert before == {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}


def test_strict_loading_names_what_is_missing() -> None:
    state = dict(nn.Linear(4, 3).state_dict())
    with pytest.raises(RuntimeError, match=r"no statistics in this state.*running_cov"):
        ndpp.Linear(4, 3).load_state_dict(state)
    missing = ndpp.Linear(4, 3).load_state_dict(state, strict=False).missing_keys
    assert missing[-3:] == ["running_mean", "running_cov", "num_batches_tracked"]


def test_loading_other_blocks_says_what_to_do() -> None:
    a, b = linear(EXACT.replace(block=2)), linear()
    with pytest.raises(RuntimeError, match=r"running_cov.*\(1, 4, 4\).*\(2, 2, 2\).*block, features and shared"):
        b.load_state_dict(a.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_loading_by_assignment_onto_a_meta_layer(dtype: torch.dtype) -> None:
    trained = linear().to(torch.float32)
    trained(torch.randn(9, 4)).sum().backward()
    state = {k: v.to(dtype) if v.is_floating_point() else v for k, v in trained.state_dict().items()}
    with torch.device("meta"):
        layer = ndpp.Linear(4, 3, settings=EXACT)
    layer.load_state_dict(state, assign=True)
    assert layer.weight.dtype == dtype
    assert layer.running_cov.dtype == torch.float32
    layer(torch.randn(9, 4, dtype=dtype)).sum().backward()
    assert layer.num_batches_tracked == 2


def test_an_unusable_first_batch_is_served_by_the_stock_layer() -> None:
    layer = ndpp.Linear(64, 4, settings=EXACT)
    x = torch.randn(8, 64)
    x[0, 0] = math.nan
    torch.testing.assert_close(layer(x)[1:], nn.functional.linear(x, layer.weight, layer.bias)[1:])


def test_raising_looks_at_the_whole_input() -> None:
    layer = ndpp.Conv2d(3, 2, 1, settings=Settings(rows=16, nonfinite="raise"))
    x = torch.randn(4, 3, 32, 32)
    x[1, 2, 3, 4] = math.nan
    with pytest.raises(FloatingPointError, match="NaN or Inf"):
        layer(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_modules_keep_precise_statistics(dtype: torch.dtype) -> None:
    layer = ndpp.Linear(4, 3, settings=EXACT)
    layer(torch.randn(16, 4)).sum().backward()
    before = buffers(layer)
    layer = layer.to(dtype)
    assert layer.weight.dtype == dtype
    assert_same_buffers(before, buffers(layer))
    y = layer(torch.randn(16, 4, dtype=dtype))
    assert y.dtype == dtype
    assert ndpp.Linear(4, 3, dtype=dtype).running_cov.dtype == torch.float32
    assert layer.double().running_cov.dtype == torch.float64
    assert layer.half().running_cov.dtype == torch.float32
