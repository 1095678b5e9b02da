"""convert_: what becomes of every kind of module, what survives, and what is refused."""

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import ndpp
from cases import CASES
from ndpp import Settings


def network(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2, bias=False),
        norm(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def train_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(16, 3, 9, 9, generator=generator), torch.arange(16) % 4
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_becomes_the_ndpp_layer(case) -> None:
    """The root itself is a layer: converted, it computes what the ndpp layer of the same weights computes."""
    layer, built = case.stock(dtype=torch.float64), case.build(dtype=torch.float64)
    block = {"block": case.block} if case.block else {}
    parameters = list(layer.parameters())
    report = ndpp.convert_(layer, Settings(rows=None, **block))
    assert type(layer) is type(built)
    assert [p is q for p, q in zip(layer.parameters(), parameters, strict=True)] == [True] * len(parameters)
    x = case.input()
    torch.testing.assert_close(layer(x), built(x), rtol=0, atol=0)
    torch.testing.assert_close(layer.eval()(x), built.eval()(x), rtol=0, atol=0)
    assert [row.path for row in report.converted] == [""]


def test_network() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept = dict(model.named_parameters())
    report = ndpp.convert_(model)
    assert [type(m) for m in (model[0], model[3], model[8])] == [ndpp.Conv2d, ndpp.Conv2d, ndpp.Linear]
    assert all(isinstance(model[i], nn.Identity) for i in (1, 4))
    assert model[0].weight is kept["0.weight"]
    assert model[0].bias is kept["1.bias"]  # the norm's β goes on as the layer's bias, known to the optimizer
    assert report.added == ()
    assert report.parameters_after == report.parameters_before - 8 - 6  # γ
    losses = train_steps(model, optimizer)
    assert losses[-1] < losses[0]
    assert all(m.num_batches_tracked == 3 for m in model if isinstance(m, (ndpp.Conv2d, ndpp.Linear)))


def test_state_of_the_module_survives() -> None:
    model = network().to(torch.bfloat16).to(memory_format=torch.channels_last)
    model[3].eval()
    model[0].weight.requires_grad_(False)
    calls = []
    handle = model[0].register_forward_hook(lambda *_: calls.append(1))
    model[3].note = "mine"
    ndpp.convert_(model)
    assert not model[3].training
    assert model[0].training
    assert not model[0].weight.requires_grad
    assert model[3].note == "mine"
    assert model[0].weight.dtype == torch.bfloat16
    assert model[0].running_cov.dtype == torch.float32
    model(torch.randn(2, 3, 9, 9, dtype=torch.bfloat16))
    assert calls == [1]
    handle.remove()
    assert not model[0]._forward_hooks


def test_meta_device() -> None:
    with torch.device("meta"):
        model = network()
    ndpp.convert_(model)
    assert model[0].running_cov.is_meta
    model.to_empty(device="cpu")
    assert torch.equal(model[0].running_cov, torch.eye(27)[None])


def test_shared_module_has_one_set_of_statistics() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.ModuleDict({"same": self.a})
            self.held = [self.a]  # unknown to torch.nn

        def forward(self, x: Tensor) -> Tensor:
            return self.held[0](self.b["same"](self.a(x)))

    model = Twice()
    report = ndpp.convert_(model)
    assert model.a is model.b["same"] is model.held[0]
    assert len(report.converted) == 1
    model(torch.randn(8, 4)).sum().backward()
    assert model.a.num_batches_tracked == 1


def test_tied_weights_are_left_alone_unless_named() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.body = nn.Linear(4, 4)
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight

    model = Language()
    report = ndpp.convert_(model)
    (skipped,) = report.skipped
    assert skipped.path == "head"
    assert "embedding.weight" in skipped.note
    assert type(model.head) is nn.Linear
    assert type(model.norm) is nn.LayerNorm  # what follows it does not decorrelate
    assert "head" in report.kept[0].note
    report = ndpp.convert_(model, overrides={"head": Settings(scale="l1")})
    assert type(model.head) is ndpp.Linear
    assert model.head.weight is model.embedding.weight
    assert [row.path for row in report.removed] == ["norm"]


def test_parametrized_and_hooked_weights_are_skipped() -> None:
    model = nn.ModuleDict(
        {
            "spectral": parametrizations.spectral_norm(nn.Linear(4, 4)),
            "weight": parametrizations.weight_norm(nn.Linear(4, 4)),
            "plain": nn.Linear(4, 4),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model["old"] = nn.utils.weight_norm(nn.Linear(4, 4))
    report = ndpp.convert_(model)
    assert [row.path for row in report.converted] == ["plain"]
    notes = {row.path: row.note for row in report.skipped}
    assert "parametrized" in notes["spectral"]
    assert "parametrized" in notes["weight"]
    assert "not a Parameter" in notes["old"]


class Renamed(nn.Linear):
    """Only another constructor."""

    def __init__(self, n: int) -> None:
        super().__init__(n, n)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Helped(nn.Linear):
    def helper(self) -> int:
        return self.in_features


def test_subclasses() -> None:
    """What only adds to the stock layer stays an instance of its class; what overrides it is left alone."""
    model = nn.ModuleList([Renamed(3), Doubled(3, 3), Helped(3, 3)])
    report = ndpp.convert_(model)
    assert [isinstance(m, ndpp.Linear) for m in model] == [True, False, True]
    assert [isinstance(m, kind) for m, kind in zip(model, (Renamed, Doubled, Helped), strict=True)] == [True] * 3
    assert "forward" in report.skipped[0].note
    assert report.converted[0].before == "Renamed"
    assert model[2].helper() == 3
    x = torch.randn(9, 3)
    model[2](x).sum().backward()
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(again[2]) is type(model[2])
        torch.testing.assert_close(again.eval()[2](x), model.eval()[2](x))
    ndpp.fold_(model)
    assert [type(m) for m in model] == [Renamed, Doubled, Helped]


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyConv1d(3, 2))
    with pytest.raises(ValueError, match=r"0: LazyLinear.*run a batch"):
        ndpp.convert_(model)
    assert type(model[0]) is nn.LazyLinear
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    model(torch.randn(5, 3))
    ndpp.convert_(model)
    assert type(model[0]) is ndpp.Linear


class Functional(nn.Module):
    """Uses the weight of a layer without calling it, and asks another for its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.linear(self.norm(x), weight=self.qkv.weight, bias=self.qkv.bias)
        if self.other.bias is not None and isinstance(self.other.weight, Tensor):
            x = x.to(self.other.weight.dtype)
        return self.other(x)


def test_layers_that_are_never_called_are_skipped() -> None:
    model = Functional()
    report = ndpp.convert_(model)
    assert [row.path for row in report.converted] == ["other"]
    assert "Functional computes with its weight" in report.skipped[0].note
    assert report.kept[0].path == "norm"


class Asking(nn.Module):
    """Asks a norm for its dtype, and reads the weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.read, self.last = nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.norm(x.to(self.norm.weight.dtype)))
        return self.last(self.read(y) * self.read.weight)


def test_norms_that_other_code_reads() -> None:
    model = Asking()
    report = ndpp.convert_(model)
    assert [row.path for row in report.removed] == ["norm"]
    assert "Asking reads its weight" in report.kept[0].note
    model.double()(torch.randn(5, 4)).sum().backward()
    assert "norm.weight" not in model.state_dict()


class Block(nn.Module):
    """Its norms are registered after the layers that read them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)


class TwoNorms(nn.Module):
    """One norm before a layer that cannot be converted, one before a layer that can."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.own, self.norm2, self.layer = nn.LayerNorm(4), Doubled(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)


def test_norms_of_the_last_block_go_with_the_others() -> None:
    """And only those: not the norm before the plain head, and not a norm with another number in its name."""
    model = nn.ModuleDict(
        {"blocks": nn.ModuleList([Block(), Block()]), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
    )
    report = ndpp.convert_(model, overrides={"head": None})
    assert [row.path for row in report.removed] == ["blocks.0.norm", "blocks.1.norm"]
    assert [row.path for row in report.kept] == ["norm"]
    report = ndpp.convert_(nn.ModuleList([TwoNorms(), TwoNorms()]))
    assert [row.path for row in report.removed] == ["0.norm2", "1.norm2"]
    assert [row.path for row in report.kept] == ["0.norm1", "1.norm1"]


class Regular(nn.Module):
    """Reads the weight of a layer that it calls, but not where it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

    def penalty(self) -> Tensor:
        return self.layer.weight.square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


def test_weights_read_elsewhere_do_not_matter() -> None:
    report = ndpp.convert_(Regular())
    assert (len(report.converted), len(report.removed)) == (1, 1)


def test_layers_that_are_read_can_be_asked_for() -> None:
    report = ndpp.convert_(Functional(), overrides={"qkv": Settings()})
    assert len(report.converted) == 2


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.BatchNorm2d(8),
        lambda: nn.SyncBatchNorm(8),
        lambda: nn.GroupNorm(2, 8),
        lambda: nn.InstanceNorm2d(8, affine=True),
        lambda: nn.InstanceNorm2d(8),
        lambda: nn.GroupNorm(1, 8),
    ],
)
def test_norms_of_convolutions(norm) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm(), nn.ReLU(), nn.Conv2d(8, 4, 3))
    has_beta = getattr(model[1], "bias", None) is not None
    ndpp.convert_(model)
    assert isinstance(model[1], nn.Identity)
    assert (model[0].bias is not None) == has_beta
    model(torch.randn(2, 3, 9, 9))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_before_linear_layers(norm) -> None:
    model = nn.Sequential(norm(8), nn.Linear(8, 4, bias=False))
    report = ndpp.convert_(model)
    assert isinstance(model[0], nn.Identity)
    assert (model[1].bias is not None) == (norm is nn.LayerNorm)  # RMSNorm has no β to replace
    assert report.added == (("1.bias",) if norm is nn.LayerNorm else ())
    assert report.new_parameters(model) == ([model[1].bias] if norm is nn.LayerNorm else [])


def test_frozen_batch_norm() -> None:
    torchvision = pytest.importorskip("torchvision")
    frozen = torchvision.ops.FrozenBatchNorm2d
    model = network(frozen)
    ndpp.convert_(model)
    assert isinstance(model[1], nn.Identity)
    model = network(frozen)
    model[1].running_var.fill_(2.0)
    with pytest.raises(ValueError, match="calibration"):
        ndpp.convert_(model)


def test_norm_with_activation_keeps_the_activation() -> None:
    timm_layers = pytest.importorskip("timm.layers")
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), timm_layers.BatchNormAct2d(8, act_layer=nn.SiLU), nn.Conv2d(8, 4, 1)
    )
    report = ndpp.convert_(model)
    assert report.removed[0].after == "activation only"
    x = torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(model[1](x.clone()), nn.functional.silu(x))
    assert isinstance(model[1].act, nn.SiLU)


def test_activations_do_not_overwrite_what_the_norm_was_given() -> None:
    """A norm gave the activation a tensor of its own; without it, that is the residual stream."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act, self.layer = nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(self.act(self.norm(x)))

    model, x = Residual(), torch.randn(8, 4)
    ndpp.convert_(model, norms="keep")
    assert model.act.inplace
    model = Residual()
    ndpp.convert_(model)
    before = x.clone()
    model(x)
    assert torch.equal(x, before)


def test_norm_that_no_layer_reads_is_kept() -> None:
    """Norms of queries and keys: of the size of a head, which no layer sees."""
    model = nn.ModuleDict({"qkv": nn.Linear(8, 24), "q_norm": nn.LayerNorm(2), "proj": nn.Linear(8, 8)})
    report = ndpp.convert_(model)
    assert report.kept[0].path == "q_norm"
    assert "neighbouring" in report.kept[0].note


class GroupNormSiLU(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(super().forward(x))


class GroupNorm32(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


class GatedRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) * (1 if gate is None else gate)


def test_norms_that_do_more_are_kept() -> None:
    for norm, removed in ((GroupNormSiLU(2, 8), False), (GroupNorm32(2, 8), True), (GatedRMSNorm(8), False)):
        report = ndpp.convert_(nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 8, 3)))
        assert bool(report.removed) == removed, norm


def test_removed_norms_take_any_name_for_their_input() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    ndpp.convert_(model)
    assert model[0](hidden_states=torch.ones(4)).sum() == 4
    ndpp.fold_(model)
    assert model[0](hidden_states=torch.ones(4)).sum() == 4


class OwnLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.seen.append(output)


def test_norms_are_tried_without_touching_them() -> None:
    norm = OwnLayerNorm(4)
    norm.lock = threading.Lock()  # cannot be copied
    norm.register_forward_hook(Recorder())
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4))
    model(torch.randn(2, 4))
    with torch.device("meta"):
        assert len(ndpp.convert_(model).removed) == 1


def test_norms_with_another_forward_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[1].forward = lambda x: x * 2
    report = ndpp.convert_(model)
    assert len(report.kept) == 1
    model(torch.randn(3, 4))


def test_norms_by_class_and_not_by_name_alone() -> None:
    class Standardised(nn.LayerNorm):
        pass

    report = ndpp.convert_(nn.Sequential(nn.Linear(4, 4), Standardised(4), nn.Linear(4, 4)))
    assert [row.before for row in report.removed] == ["Standardised"]


def test_frozen_models_stay_frozen() -> None:
    model = network().requires_grad_(False)
    ndpp.convert_(model)
    assert not any(p.requires_grad for p in model.parameters())
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False)).requires_grad_(False)
    ndpp.convert_(model, calibration=[torch.randn(9, 4)])
    assert not any(p.requires_grad for p in model.parameters())


def test_attention_that_is_not_what_it_seems() -> None:
    class Gated(nn.MultiheadAttention):
        def __init__(self) -> None:
            super().__init__(8, 2)
            self.gate = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x)[0] * self.gate(x)

    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2), Gated(), nn.Linear(8, 8)])
    model[0].out_proj = nn.Sequential(nn.Linear(8, 8))
    parametrizations.spectral_norm(model[1], "in_proj_weight")
    report = ndpp.convert_(model)
    assert {row.path for row in report.converted} == {"2.gate", "3"}
    assert "cannot be converted" in {row.path: row.note for row in report.skipped}["0"]
    assert {row.path for row in report.skipped} >= {"0", "1", "2", "2.out_proj"}


def test_objects_with_something_of_their_own() -> None:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)])
    model[0].forward = lambda x: x
    model[1].register_buffer("running_mean", torch.zeros(3))
    prune.l1_unstructured(model[2], "bias", 1)
    with pytest.warns(UserWarning, match="nothing changed"):
        report = ndpp.convert_(model)
    notes = [row.note for row in report.skipped]
    assert "forward was replaced" in notes[0]
    assert "running_mean" in notes[1]
    assert "bias is not a Parameter" in notes[2]


def test_names_of_a_shared_layer() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3)})
    model["b"] = model["a"]
    ndpp.convert_(model, overrides={"b": Settings(scale="l1")})
    assert model["a"].settings.scale == "l1"


def test_conditional_norms_are_kept() -> None:
    class AdaLayerNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            return x * condition

    model = nn.ModuleList([nn.Linear(4, 4), AdaLayerNorm(), nn.Linear(4, 4)])
    report = ndpp.convert_(model)
    assert isinstance(model[1], AdaLayerNorm)
    assert "knows" in report.kept[0].note


def test_zero_at_the_end_of_a_residual_branch_survives() -> None:
    model = network()
    nn.init.zeros_(model[4].weight)
    report = ndpp.convert_(model)
    assert not model[3].weight.any()
    assert "weight times 0 of 4" in {row.path: row.note for row in report.converted}["3"]


@pytest.mark.parametrize("value", ["weight", "bias", "running_mean", "running_var"])
def test_trained_norms_are_not_dropped(value: str) -> None:
    model = network()
    with torch.no_grad():
        getattr(model[1], value)[0] += 0.5
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=rf"1 \(BatchNorm2d: {value}\).*calibration=.*norms=\"keep\""):
        ndpp.convert_(model)
    assert [type(m) for m in model] == [type(m) for m in before]  # nothing was touched
    assert model.state_dict().keys() == before.state_dict().keys()
    report = ndpp.convert_(model, norms="keep")
    assert len(report.kept) == 2
    assert isinstance(model[1], nn.BatchNorm2d)


def test_where_and_overrides() -> None:
    model = network()
    default, first, head = Settings(steps=2), Settings(rows=64), Settings(scale="std")
    report = ndpp.convert_(
        model, default, where=lambda module, name: name != "3", overrides={"0": first, "8": head, "[0-8]": Settings()}
    )
    assert [row.path for row in report.converted] == ["0", "8"]
    assert (model[0].settings, model[8].settings) == (first, head)
    assert report.skipped[0].note == "excluded by where"
    report = ndpp.convert_(network(), overrides={"8": None})
    assert "overrides['8']" in report.skipped[0].note


def test_overrides_that_match_nothing() -> None:
    with pytest.raises(
        ValueError, match=r"overrides\['layers\.9'\] matches no layer of the model; layers are called '0', '3', '8'"
    ):
        ndpp.convert_(network(), overrides={"layers.9": Settings()})


@pytest.mark.parametrize(
    ("name", "scale", "stride"),
    [
        ("classification", "none", 3),
        ("detection", "l1", 5),
        ("segmentation", "none", 3),
        ("transformer", "standardize", 1),
    ],
)
def test_presets(name: str, scale: str, stride: int) -> None:
    model = network()
    ndpp.convert_(model, name)
    settings = model[0].settings
    assert (settings.scale, settings.stride, settings.steps, settings.shared) == (scale, stride, 5, True)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"where": ["0"]}, "where must be a function"),
        ({"overrides": [1]}, "overrides must map names"),
        ({"calibration": torch.randn(4, 3, 9, 9)}, r"iterable of batches.*\[batch\]"),
        ({"calibration": {"input": torch.randn(4, 3, 9, 9)}}, "iterable of batches"),
        ({"calibration": True}, "iterable of batches"),
        ({"settings": "classificaton"}, "no preset 'classificaton'"),
        ({"settings": 3}, "expected an ndpp.Settings"),
        ({"norms": "drop"}, "'remove' or 'keep'"),
    ],
)
def test_bad_arguments(arguments: dict, error: str) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        ndpp.convert_(network(), **arguments)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        ndpp.convert_([network()])


def test_wrapped_and_compiled_models_are_refused() -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(TypeError, match=r"torch\.compile afterwards"):
        ndpp.convert_(compiled)
    with pytest.raises(TypeError, match="wrap it afterwards"):
        ndpp.convert_(nn.DataParallel(model))
    inner = nn.Sequential(network())
    inner[0].compile(backend="eager")
    with pytest.raises(TypeError, match=r"torch\.compile afterwards"):
        ndpp.convert_(inner)
    with pytest.raises(TypeError, match=r"ndpp\.fold_.*fold the module first"):
        ndpp.fold_(compiled)


def test_distributed_wrappers_are_refused(tmp_path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match=r"DistributedDataParallel.*wrap it afterwards"):
            ndpp.convert_(nn.parallel.DistributedDataParallel(network()))
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sharded = network()
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TypeError, match="fully_shard afterwards"):
            ndpp.convert_(sharded)
        model = network()
        ndpp.convert_(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert train_steps(wrapped, torch.optim.SGD(wrapped.parameters(), 0.1))[-1] < 2
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_to_do_warns() -> None:
    with pytest.warns(UserWarning, match="nothing changed: the model has no linear"):
        ndpp.convert_(nn.Sequential(nn.ReLU()))
    with pytest.warns(UserWarning, match="nothing changed: 3 layers were left alone: excluded by where"):
        ndpp.convert_(network(), where=lambda *_: False, norms="keep")


def test_idempotent() -> None:
    model = network()
    ndpp.convert_(model)
    model(torch.randn(4, 3, 9, 9)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="an ndpp layer already"):
        report = ndpp.convert_(model, Settings(scale="l1"))
    assert not report.converted
    torch.testing.assert_close(model.state_dict(), before)
    model.append(nn.Linear(4, 2))
    assert [row.path for row in ndpp.convert_(model).converted] == ["9"]


def test_report_is_data_that_prints() -> None:
    model = network()
    report = ndpp.convert_(model, overrides={"0": Settings(scale="l1", block=2)}, where=lambda m, n: n != "8")
    text = str(report)
    for part in ("0", "Conv2d → ndpp.Conv2d", "1×18 + 1×9", "scale='l1'", "gained a bias", "excluded by where"):
        assert part in text, part
    assert "layers: 2 converted, 1 left alone; norms: 1 removed, 1 kept" in text
    assert copy.deepcopy(report) == report


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("place", ["become_", "disable_fast_paths_", "remove_", "_evaluation_root"])
def test_failure_in_the_middle_restores_everything(place: str, calibrated: bool, monkeypatch) -> None:
    """Interrupted after some of the work was done."""
    from ndpp.conversion import adopt, convert, norms
    from ndpp.statistics import RunningMoments

    owners = {"remove_": [norms], "_evaluation_root": [RunningMoments]}.get(place, [convert, adopt])
    calls = []
    for owner in owners:
        if hasattr(owner, place):
            original = getattr(owner, place)

            def fail(*args, original=original, **kwargs):
                calls.append(1)
                if len(calls) == (1 if place == "disable_fast_paths_" else 2):
                    raise KeyboardInterrupt
                return original(*args, **kwargs)

            monkeypatch.setattr(owner, place, fail)
    model = network()
    nn.init.zeros_(model[4].weight)
    model.append(nn.TransformerEncoderLayer(4, 2, 8))
    with torch.no_grad():
        model[9].norm1.bias.zero_()
    handle = model[8].register_forward_hook(lambda *_: None)
    before, state = copy.deepcopy(model), {m: copy.deepcopy(vars(m)) for m in model.modules()}
    parameters = dict(model.named_parameters())
    loss = model[8](torch.randn(2, 6)).sum()  # a graph that awaits its backward pass
    try:
        ndpp.convert_(model, calibration=[torch.randn(4, 3, 9, 9)] if calibrated else None)
    except KeyboardInterrupt:
        pass
    else:
        assert place == "_evaluation_root"
        assert not calibrated  # nothing is evaluated
        return
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    torch.testing.assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)
    for module, was in state.items():
        assert vars(module).keys() == was.keys()
        assert module._non_persistent_buffers_set == was["_non_persistent_buffers_set"]
        assert module.training == was["training"]
    handle.remove()
    assert not model[8]._forward_hooks
    loss.backward()


def test_failure_restores_the_model() -> None:
    model = network()
    before = copy.deepcopy(model)

    def settings_that_fail(module: nn.Module, name: str) -> bool:
        if name == "8":
            raise RuntimeError("stop")
        return True

    with pytest.raises(RuntimeError, match="stop"):
        ndpp.convert_(model, where=settings_that_fail)
    assert [type(m) for m in model] == [type(m) for m in before]
    handle = model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="no batches"):
        ndpp.convert_(model, calibration=[])
    handle.remove()
    assert not model[0]._forward_hooks
    torch.testing.assert_close(model.state_dict(), before.state_dict())


def test_errors_name_the_path() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 4)))
    ndpp.convert_(model)
    with pytest.raises(RuntimeError, match=r"^0\.0: ndpp\.Linear\("):
        model(torch.randn(2, 5))


# --- attention ---


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).double()
    x, padding = torch.randn(3, 5, 8).double(), torch.arange(5) >= torch.tensor([5, 3, 2])[:, None]
    plain = copy.deepcopy(model).eval()
    report = ndpp.convert_(model, norms="keep")
    assert sum("MultiheadAttention" in row.before for row in report.converted) == 2
    model.eval()
    with torch.no_grad():
        want = plain(x, src_key_padding_mask=padding)
        got = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], want[~padding])  # no statistics yet: the plain model, on its slow path
    model.train()
    model(x, src_key_padding_mask=padding).sum().backward()
    assert model.layers[0].self_attn.q_proj.num_batches_tracked == 1
    model.eval()
    with torch.no_grad():
        want = model(x, src_key_padding_mask=padding)
        ndpp.fold_(model)
        got = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], want[~padding])
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    assert model.layers[0].activation_relu_or_gelu == 1


def test_transformer_without_norms() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    source, target = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    report = ndpp.convert_(model, "transformer")
    assert not report.skipped
    model(source, target).square().mean().backward()
    model.eval()
    with torch.no_grad():
        want = model(source, target)
        torch.testing.assert_close(ndpp.fold_(model)(source, target), want, rtol=1e-5, atol=1e-6)


def test_subclassed_attention_is_skipped_whole() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x)[0]

    model = nn.Sequential(Own(8, 2), nn.Linear(8, 8))
    report = ndpp.convert_(model)
    assert [row.path for row in report.converted] == ["1"]
    assert "forward" in report.skipped[0].note
    assert not isinstance(model[0].out_proj, ndpp.Linear)


# --- layers of other libraries ---


def test_transformers_conv1d() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    layer, reference = conv1d(5, 7).double(), ndpp.Linear(7, 5, dtype=torch.float64)
    with torch.no_grad():
        reference.weight.copy_(layer.weight.T)
        reference.bias.copy_(layer.bias)
    ndpp.convert_(layer)
    x = torch.randn(4, 3, 7).double()
    torch.testing.assert_close(layer(x), reference(x))
    torch.testing.assert_close(layer.eval()(x[0, 0]), reference.eval()(x[0, 0]))
    want = layer(x)
    ndpp.fold_(layer)
    assert type(layer) is conv1d
    torch.testing.assert_close(layer(x), want)


@pytest.mark.parametrize("scale", ["none", "standardize"])
@pytest.mark.parametrize(("size", "stride"), [(7, 2), (8, 2), (9, 3), (6, 1)])
def test_timm_same_padding(size: int, stride: int, scale: str) -> None:
    conv = pytest.importorskip("timm.layers").Conv2dSame
    torch.manual_seed(0)
    layer = conv(3, 4, 3, stride).double()
    x = torch.randn(5, 3, size, size).double()
    missing = max((-(-size // stride) - 1) * stride + 3 - size, 0)
    reference = ndpp.Conv2d(3, 4, 3, stride, dtype=torch.float64, settings=Settings(scale=scale))
    reference.load_state_dict({**reference.state_dict(), **layer.state_dict()})
    plain = layer(x)
    ndpp.convert_(layer, Settings(scale=scale))
    layer.eval()
    if scale == "none":
        torch.testing.assert_close(layer(x), plain)
    layer.train()
    if scale == "none":
        left = missing // 2
        padded = nn.functional.pad(x, (left, missing - left, left, missing - left))
        torch.testing.assert_close(layer(x), reference(padded))
    else:
        layer(x)
    layer.eval()
    want = layer(x)
    ndpp.fold_(layer)
    torch.testing.assert_close(layer(x), want)


# --- checkpoints ---


def test_plain_checkpoint_loads_where_names_allow(tmp_path) -> None:
    """A model without norms: all names are there, and evaluation is that of the plain model."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    model = copy.deepcopy(plain)
    ndpp.convert_(model)
    x = torch.randn(6, 3, 4, 4)
    model(x).sum().backward()
    with torch.no_grad():
        model[0].weight.zero_()
    model.load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    torch.testing.assert_close(model.eval()(x), plain(x))
    bare = dict(plain.state_dict())  # as from safetensors: nothing says who wrote it
    with pytest.raises(
        RuntimeError, match=r"before ndpp\.convert_\(model, calibration=batches\), or with strict=False"
    ):
        model.load_state_dict(bare)
    model.load_state_dict(bare, strict=False)
    torch.testing.assert_close(model.eval()(x), plain(x))


def test_checkpoint_of_an_adopted_model() -> None:
    """What LayerNorm became is a setting: another one is noticed, and the same conversion makes room for it."""

    def build() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))

    x = torch.randn(64, 8) * 5 + 2
    model, fresh = build(), build()
    ndpp.convert_(model, calibration=[x])
    ndpp.convert_(fresh)
    with pytest.raises(RuntimeError, match=r"scale='standardize', scale_eps=1e-05.*convert with the same arguments"):
        fresh.load_state_dict(model.state_dict())
    fresh = build()
    ndpp.convert_(fresh, calibration=[torch.randn(9, 8)])
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(fresh.eval()(x), model.eval()(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_training_resumes_exactly(norm_first: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, norm_first=norm_first)
        model = nn.Sequential(layer, nn.Linear(8, 4, bias=False))
        ndpp.convert_(model)
        return model

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            optimizer.zero_grad()
            model(torch.randn(6, 5, 8)).square().mean().backward()
            optimizer.step()

    whole = build()
    train(whole, torch.optim.Adam(whole.parameters(), 1e-2), range(4))
    first = build()
    optimizer = torch.optim.Adam(first.parameters(), 1e-2)
    train(first, optimizer, range(2))
    second = build()
    second.load_state_dict(first.state_dict())
    resumed = torch.optim.Adam(second.parameters(), 1e-2)
    resumed.load_state_dict(optimizer.state_dict())
    train(second, resumed, range(2, 4))
    torch.testing.assert_close(second.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_checkpoint_with_trained_norms_says_what_to_do() -> None:
    plain, model = network(), network()
    ndpp.convert_(model)
    train_steps(plain, torch.optim.SGD(plain.parameters(), 0.1))
    with pytest.raises(RuntimeError, match=r"1: the checkpoint holds a trained normalisation.*calibration=batches"):
        model.load_state_dict(plain.state_dict())
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(own)
