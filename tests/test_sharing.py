"""share_: layers that read the same tensor compute one D, and everything is as if each had computed its own."""

import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import ndpp
from ndpp import Settings, kernels
from oracles import covariance

EXACT = Settings(rows=None, eps=1e-3)


class Attention(nn.Module):
    """Three layers that read one tensor, one that reads another, and one whose rows are others."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 6, bias=False)
        self.o = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin()
        return self.o(self.q(h) * self.v(h) + self.k(h).repeat(1, 2))


class Branches(nn.Module):
    """Two convolutions over the same patches, and three over others of the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(4, 6, 3, padding=1, groups=2)
        self.b = nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False)
        self.strided = nn.Conv2d(4, 6, 3, 2, padding=1, groups=2)
        self.whole = nn.Conv2d(4, 5, 3, padding=1)
        self.mirrored = nn.Conv2d(4, 6, 3, padding=1, groups=2, padding_mode="reflect")

    def forward(self, x: Tensor) -> Tensor:
        h = x.tanh()
        maps = self.a(h), self.b(h), self.strided(h).repeat(1, 1, 2, 2), self.whole(h), self.mirrored(h)
        return torch.cat(maps, 1).cos()


class Pyramid(nn.Module):
    """Two heads over several levels, as in a detector."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.boxes = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [x.sin(), x[:, :, ::2, ::2] * 2]
        return torch.cat([torch.cat([self.scores(h), self.boxes(h)], 1).flatten(2) for h in levels], 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[tuple[str, ...]]]] = {
    "attention": (Attention, (24, 6), [("q", "k", "v")]),
    "branches": (Branches, (5, 4, 6, 6), [("a", "b")]),
    "pyramid": (Pyramid, (6, 3, 4, 4), [("scores", "boxes")]),
}


def pair(name: str, settings: Settings = EXACT, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, ...]:
    """A model whose layers meet, its copy in which each computes for itself, and an input."""
    build, shape, groups = MODELS[name]
    model = build()
    ndpp.convert_(model, settings)
    model.to(dtype)
    alone, x = copy.deepcopy(model), (torch.randn(*shape) * 2 + 0.5).to(dtype)
    assert ndpp.share_(model, x) == groups
    return model, alone, x


def everything(model: nn.Module, x: Tensor, steps: int = 2) -> dict[str, Tensor]:
    """Output, gradients, second derivatives and buffers of some steps."""
    found = {}
    for step in range(steps):
        x = x.detach().clone().requires_grad_()
        y = model(x * (1 + step))
        names, leaves = zip(*[("x", x), *model.named_parameters()], strict=True)
        first = torch.autograd.grad(y.pow(3).mean(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        for name, g, gg in zip(names, first, second, strict=True):
            found |= {f"{step} ∇{name}": g.detach(), f"{step} ∇∇{name}": gg}
        found[f"{step} y"] = y.detach()
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-8, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The D that are computed."""
    seen: list[object] = []
    compute = kernels.plain.root

    def root(*args: object) -> Tensor:
        seen.append(args)
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels.plain, "root", root)
    return seen


@pytest.mark.parametrize("scale", ["none", "l1", "rms", "std", "standardize"])
@pytest.mark.parametrize("name", MODELS)
def test_as_if_each_had_computed_its_own(name: str, scale: str) -> None:
    model, alone, x = pair(name, EXACT.replace(scale=scale))
    assert_same(everything(model, x), everything(alone, x))


@pytest.mark.parametrize("name", MODELS)
def test_one_d_for_all(name: str, roots: list[object]) -> None:
    model, alone, x = pair(name)
    counts = []
    for one in (model, alone):
        roots.clear()
        one(x)
        counts.append(len(roots))
    calls = 2 if name == "pyramid" else 1
    assert counts[1] - counts[0] == calls * (len(MODELS[name][2][0]) - 1)


def test_against_the_data_matrix() -> None:
    """The oracle knows nothing of sharing."""
    model, _, x = pair("attention", Settings.exact())
    h = x.sin()
    mean, cov = covariance(h)
    values, vectors = torch.linalg.eigh(cov)
    root = vectors @ values.rsqrt().diag() @ vectors.T
    for layer in (model.q, model.k, model.v):
        want = (h - mean) @ root @ layer.weight.T + (0 if layer.bias is None else layer.bias)
        torch.testing.assert_close(layer(h), want, rtol=1e-7, atol=1e-8)


def test_sampled_rows_are_the_same_for_all() -> None:
    model, _, x = pair("attention", Settings(rows=8))
    model(x).sum().backward()
    for layer in (model.k, model.v):
        assert torch.equal(layer.running_cov, model.q.running_cov)
        assert layer.num_batches_tracked == 1
        assert layer.step_rows == 0


def test_a_tensor_that_was_written_to_is_another(roots: list[object]) -> None:
    model, alone, x = pair("attention")
    for one in (model, alone):
        h = x.clone()
        one.q(h)
        roots.clear()
        h.mul_(3).add_(torch.arange(6.0))
        got = one.k(h)
        assert len(roots) == 1
    torch.testing.assert_close(got, model.k(h))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.k.eval(),
        lambda m: setattr(m.k, "settings", m.k.settings.replace(steps=2)),
        lambda m: setattr(m.k, "settings", m.k.settings.replace(freeze=True)),
    ],
    ids=["mode", "settings", "frozen"],
)
def test_a_layer_that_differs_is_alone(change: Callable[[nn.Module], object]) -> None:
    model, alone, x = pair("attention")
    model(x), alone(x)
    change(model), change(alone)
    assert_same(everything(model, x), everything(alone, x))


def test_in_any_order_and_not_all() -> None:
    model, alone, x = pair("attention")
    for order in ("vq", "k", "kvq", "q", "qqk"):
        h = (x * len(order)).requires_grad_()
        got, want = ([getattr(one, name)(h).square().sum() for name in order] for one in (model, alone))
        grads = [torch.autograd.grad(sum(values), h)[0] for values in (got, want)]
        torch.testing.assert_close(grads[0], grads[1])
    assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))


@pytest.mark.parametrize("used", ["q", "k", "kv"])
def test_outputs_that_nothing_uses(used: str) -> None:
    """The first to come found D for all, whether or not its own output is used."""
    model, alone, x = pair("attention", EXACT.replace(scale="l1"))
    grads = []
    for one in (model, alone):
        h = x.clone().requires_grad_()
        outputs = {name: getattr(one, name)(h) for name in "qkv"}
        sum(outputs[name].square().sum() for name in used).backward()
        grads.append({"h": h.grad, **{n: p.grad for n, p in one.named_parameters() if p.grad is not None}})
    assert_same(*grads)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("parts", [["qkv"], ["q", "k", "v"], ["q", "kv"]], ids=str)
def test_checkpointing(parts: list[str], reentrant: bool) -> None:
    """Whatever is computed again sees the rows, and draws the numbers, that it saw and drew first."""
    model, alone, x = pair("attention", Settings(rows=8, scale="l1"))

    def step(one: nn.Module, again: bool) -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_()
        h = leaf.sin()
        torch.manual_seed(1)

        def run(h: Tensor, names: str) -> Tensor:
            outputs = [getattr(one, name)(h) for name in names]
            return sum((y * torch.rand(y.shape[1])).square().sum() for y in outputs)

        sum(
            checkpoint(run, h, names, use_reentrant=reentrant) if again else run(h, names) for names in parts
        ).backward()
        grads = {name: p.grad.clone() for name, p in one.named_parameters() if p.grad is not None}
        one.zero_grad()
        return {"x": leaf.grad, **grads, **dict(one.named_buffers())}

    want = step(copy.deepcopy(alone), again=False)
    assert_same(step(copy.deepcopy(alone), again=True), want)
    assert_same(step(model, again=True), want)


def test_a_backward_pass_between_the_calls() -> None:
    """What was found goes with its graph."""
    model, alone, x = pair("attention")
    found = []
    for one in (model, alone):
        leaf = x.clone().requires_grad_()
        for h in (x, leaf):
            for name in "qkvq":
                getattr(one, name)(h).square().sum().backward()
        found.append({"x": leaf.grad, **{n: p.grad for n, p in one.named_parameters() if p.grad is not None}})
        found[-1] |= dict(one.named_buffers())
    assert_same(*found)


def test_one_backward_pass_for_each_output_of_plain_data() -> None:
    model, alone, x = pair("attention")
    for one in (model, alone):
        for y in [getattr(one, name)(x) for name in "qkv"]:
            y.square().sum().backward()
    assert_same({n: p.grad for n, p in model.q.named_parameters()}, {n: p.grad for n, p in alone.q.named_parameters()})
    assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))


@pytest.mark.parametrize("change", [Tensor.requires_grad_, Tensor.detach_], ids=["begins", "ends"])
def test_a_graph_that_begins_or_ends_between_the_calls(change: Callable[[Tensor], Tensor]) -> None:
    model, alone, x = pair("attention")
    grads = []
    for one in (model, alone):
        leaf = x.clone().requires_grad_(change is Tensor.detach_)
        h = leaf if change is Tensor.requires_grad_ else leaf.sin()
        one.q(h)
        change(h)
        one.k(h).square().sum().backward()
        grads.append(leaf.grad)
    assert (grads[0] is None) == (grads[1] is None) == (change is Tensor.detach_)
    if grads[1] is not None:
        torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.parametrize("frozen", ["q", "k"])
@pytest.mark.parametrize("needs", [True, False], ids=["gradient of x", "none of x"])
def test_frozen_weights(frozen: str, needs: bool) -> None:
    model, alone, x = pair("attention", EXACT.replace(scale="std"))
    found = []
    for one in (model, alone):
        getattr(one, frozen).requires_grad_(False)
        loss, leaf = 0, x.clone().requires_grad_(needs)
        for factor in (1, 3):
            h = leaf * factor
            outputs = {name: getattr(one, name)(h) for name in "qkv"}
            assert outputs[frozen].requires_grad == needs
            loss = loss + sum(y.square().sum() for y in outputs.values())
        loss.backward()
        grads = {n: p.grad for n, p in one.named_parameters() if p.grad is not None}
        found.append({**grads, **({"x": leaf.grad} if needs else {}), **dict(one.named_buffers())})
    assert_same(*found)


def test_steps_without_a_backward_pass_while_somebody_is_missing() -> None:
    model, alone, x = pair("attention")
    for one in (model, alone):
        for factor in (1, 2, 3):
            h = x * factor
            one.q(h), one.k(h)
    assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))
    assert model.q.num_batches_tracked == 3


def test_other_threads_do_not_get_in_between() -> None:
    """One group, as replicas of a model share it; each thread has data of its own."""
    model, alone, x = pair("attention")
    wrong = []

    def work(number: int) -> None:
        twin, apart = copy.deepcopy(alone), copy.deepcopy(alone)
        for name in "qkv":
            getattr(twin, name)._meeting = model.q._meeting
        for step in range(30):
            h = x * (number + 1) + step
            for name in "qkv":
                got, want = getattr(twin, name)(h), getattr(apart, name)(h)
                if not torch.allclose(got, want):
                    wrong.append((number, step, name))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_is_kept() -> None:
    """After a backward pass, also if not all came; after a call with another tensor; after a change of mode."""
    model, _, x = pair("attention")
    for names in ("qkv", "qk"):
        h = x.sin().requires_grad_()
        loss = sum(getattr(model, name)(h).sum() for name in names)
        alive = weakref.ref(h)
        del h
        loss.backward()
        del loss
        gc.collect()
        assert alive() is None
    model.q(x.sin())
    model.k(x.cos())
    assert model.q._meeting._left[0].source.equal(x.cos())
    model.eval()
    assert model.q._meeting._left is None


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_meet_among_themselves(how: str, roots: list[object]) -> None:
    model, alone, x = pair("attention")
    model.q(x)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert twin.q._meeting is twin.k._meeting is not model.q._meeting
    alone.q(x)
    roots.clear()
    twin(x)
    assert len(roots) == 2
    alone(x)
    torch.testing.assert_close(twin.k.running_cov, alone.k.running_cov)


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_data_that_is_not_finite(nonfinite: str) -> None:
    model, alone, x = pair("attention", EXACT.replace(nonfinite=nonfinite))
    for one in (model, alone):
        one(x)
        one.k(x * 3 - 1)  # which has statistics of its own from here on
    before = copy.deepcopy(model.state_dict())
    bad = x.clone()
    bad[1, 2] = torch.nan
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match=r"q: .*Linear"):
            model(bad)
    else:
        torch.testing.assert_close(model(bad), alone(bad), equal_nan=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name])


def test_half_precision() -> None:
    model, alone, x = pair("attention", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = model(x), alone(x)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_without_a_graph() -> None:
    model, alone, x = pair("attention")
    with torch.no_grad():
        torch.testing.assert_close(model(x), alone(x))
    with torch.inference_mode():
        copy.deepcopy(model)(x)
    assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))


def test_compiled_code_computes_for_each() -> None:
    model, alone, x = pair("attention")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), alone(x))


@pytest.mark.parametrize("scale", ["none", "l1", "standardize"])
def test_gradients(scale: str) -> None:
    model, _, x = pair("attention", EXACT.replace(scale=scale))
    names, values = zip(*model.named_parameters(), strict=True)

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    assert gradcheck(run, (x[:9].requires_grad_(), *values), fast_mode=True)
    assert gradgradcheck(run, (x[:9], *values), fast_mode=True, atol=1e-4)


def test_the_run_changes_nothing_and_other_layers_are_left_alone() -> None:
    model = nn.ModuleDict({"x": Attention(), "y": Attention()})
    ndpp.convert_(model, overrides={"y.q": Settings(steps=2), "y.o": None})
    model.train()
    model.y.v.eval()
    before, keys = copy.deepcopy(model.state_dict()), set(model.state_dict())

    def run(model: nn.ModuleDict) -> None:
        model.y(model.x(torch.randn(4, 6)))

    state = torch.get_rng_state()
    torch.randn(4, 6)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    assert ndpp.share_(model, run) == [("x.q", "x.k", "x.v"), ("y.k", "y.v")]
    assert torch.equal(torch.get_rng_state(), after)
    assert set(model.state_dict()) == keys
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert [m.training for m in (model.x.q, model.y.k, model.y.v)] == [True, True, False]
    ndpp.fold_(model)
    assert type(model.x.q) is nn.Linear
    assert "_meeting" not in vars(model.x.q)


def test_a_second_run_begins_anew() -> None:
    model, _, x = pair("attention")

    def only_two(model: nn.Module) -> None:
        model.q(x), model.v(x)

    assert ndpp.share_(model, only_two) == [("q", "v")]
    assert model.k._meeting is None
    assert ndpp.share_(model, lambda model: None) == []
    assert model.q._meeting is None


def test_errors() -> None:
    model, _, x = pair("attention")
    with pytest.raises(TypeError, match=r"expected an nn\.Module; got int"):
        ndpp.share_(3, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"convert it first: ndpp.convert_"):
        ndpp.share_(nn.Linear(2, 2), x)
    with pytest.raises(TypeError, match=r"ndpp.share_: the model is wrapped \(OptimizedModule\); share"):
        ndpp.share_(torch.compile(model), x)
    with pytest.raises(RuntimeError, match=r"ndpp.share_: batch 0: RuntimeError: .*q: .*Linear"):
        ndpp.share_(model, torch.randn(3, 5).double())
    assert model.q._meeting is model.k._meeting is not None
    assert all("_product" not in vars(layer) for layer in model.modules())
