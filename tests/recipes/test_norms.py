"""The norms that ndpp is compared to: their formulas, written a second time here, and putting them into networks."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import ndpp
from ndpp_recipes.config import NORMS, NormConfig
from ndpp_recipes.errors import RecipeError
from ndpp_recipes.norms import FRN, IterNorm, SwitchableWhitening, apply_norm_, replace_norms_
from ndpp_recipes.norms.switchable import SW_A, SW_B

REPLACED = [name for name in NORMS if name not in ("ndpp", "nd")]
SMALL = ndpp.Settings(scale="l1", block=16, rows=32)


def config(name: str) -> NormConfig:
    return NormConfig(name=name, settings=SMALL)


def correlated(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Channels (dimension 1) that share a part, of different means and scales."""
    x = torch.randn(*shape, dtype=dtype)
    steps = torch.arange(shape[1], dtype=dtype).reshape(-1, *(1,) * (len(shape) - 2))
    return (x + 0.7 * x.mean(1, keepdim=True) * shape[1] ** 0.5) * (1 + 0.3 * steps) + steps


def randomise(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return module


# --- the formulas ---


def newton(sigma: Tensor, steps: int) -> Tensor:
    trace = sum(sigma[i, i] for i in range(len(sigma)))
    p = torch.eye(len(sigma), dtype=sigma.dtype)
    for _ in range(steps):
        p = (3 * p - torch.linalg.matrix_power(p, 3) @ (sigma / trace)) / 2
    return p / trace**0.5


def exact(sigma: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(sigma)
    return vectors @ torch.diag(values**-0.5) @ vectors.T


def covariance(columns: Tensor) -> Tensor:
    return torch.cov(columns, correction=0).reshape(len(columns), len(columns))


def iternorm_reference(x: Tensor, module: IterNorm) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    parts, means, roots = [], [], []
    for part in x.split(module.group_size, dim=1):
        columns = part.transpose(0, 1).flatten(1)
        mean = columns.mean(1)
        root = newton(covariance(columns) + module.eps * torch.eye(len(columns), dtype=x.dtype), module.steps)
        white = root @ (columns - mean[:, None])
        parts.append(white.reshape(part.transpose(0, 1).shape).transpose(0, 1))
        means.append(mean)
        roots.append(root)
    gamma, beta = (value.reshape(-1, *(1,) * (x.dim() - 2)) for value in (module.weight, module.bias))
    return torch.cat(parts, 1) * gamma + beta, means, roots


@pytest.mark.parametrize("shape", [(40, 6), (4, 6, 9), (4, 6, 5, 4), (3, 6, 3, 2, 3)], ids=str)
def test_iternorm(shape: tuple[int, ...]) -> None:
    module = randomise(IterNorm(6, group_size=3, momentum=0.25).double())
    x = correlated(*shape)
    expected, means, roots = iternorm_reference(x, module)
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(module.running_mean[0], 0.25 * torch.stack(means))
    torch.testing.assert_close(module.running_root[0], 0.75 * torch.eye(3).double() + 0.25 * torch.stack(roots))


def test_iternorm_in_evaluation_uses_the_running_matrix() -> None:
    module = IterNorm(4, group_size=4, momentum=1.0, affine=False).double()
    first, second = correlated(8, 4, 3, 3), correlated(2, 4, 3, 3)
    _, (mean,), (root,) = iternorm_reference(first, randomise(IterNorm(4, group_size=4).double()))
    module(first)
    expected = torch.einsum("ij,njhw->nihw", root, second - mean[:, None, None])
    torch.testing.assert_close(module.eval()(second), expected)
    torch.testing.assert_close(module(second[:1]), expected[:1])  # of the rest of the batch nothing depends


@pytest.mark.parametrize("kind", [IterNorm, SwitchableWhitening])
def test_many_steps_reach_the_exact_root(kind: type) -> None:
    module = kind(4, group_size=4, steps=25, eps=1e-3, affine=False).double()
    x = correlated(4, 4, 6, 6)
    if kind is SwitchableWhitening:
        nn.init.constant_(module.mean_weight.data[1:], -1e3)
        nn.init.constant_(module.cov_weight.data[1:], -1e3)
    columns = x.transpose(0, 1).flatten(1)
    root = exact(covariance(columns) + 1e-3 * torch.eye(4).double())
    y = module(x).transpose(0, 1).flatten(1)
    torch.testing.assert_close(y, root @ (columns - columns.mean(1, keepdim=True)), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(covariance(y), torch.eye(4).double(), rtol=0, atol=1e-2)


def switchable_reference(x: Tensor, module: SwitchableWhitening, batch: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One sample and one group at a time; `batch` holds mean and covariance + ε of the batch for each group."""
    shares = [weight.detach().softmax(0) for weight in (module.mean_weight, module.cov_weight)]
    size, out = module.group_size, torch.empty_like(x)
    unit = torch.eye(size, dtype=x.dtype)
    for n, sample in enumerate(x):
        for g, (mean_b, cov_b) in enumerate(batch):
            columns = sample[g * size : (g + 1) * size].flatten(1)
            mean_i, cov_i = columns.mean(1), covariance(columns) + module.eps * unit
            found = {
                "bw": (mean_b, cov_b),
                "iw": (mean_i, cov_i),
                "bn": (mean_b, cov_b * unit),
                "in": (mean_i, cov_i * unit),
                "ln": (sample.mean(), (sample.var(correction=0) + module.eps) * unit),
            }
            mean = sum(s * found[kind][0] for s, kind in zip(shares[0], module.kinds, strict=True))
            cov = sum(s * found[kind][1] for s, kind in zip(shares[1], module.kinds, strict=True))
            white = newton(cov, module.steps) @ (columns - mean[:, None])
            out[n, g * size : (g + 1) * size] = white.reshape(size, *x.shape[2:])
    return out * module.weight.reshape(-1, 1, 1) + module.bias.reshape(-1, 1, 1)


@pytest.mark.parametrize("kinds", [SW_A, SW_B, ("in", "bw")], ids=str)
def test_switchable_whitening(kinds: tuple[str, ...]) -> None:
    module = randomise(SwitchableWhitening(6, kinds=kinds, group_size=3, momentum=0.5).double())
    x = correlated(3, 6, 4, 5)
    groups = [part.transpose(0, 1).flatten(1) for part in x.split(3, 1)]
    batch = [(c.mean(1), covariance(c) + module.eps * torch.eye(3).double()) for c in groups]
    torch.testing.assert_close(module(x), switchable_reference(x, module, batch))
    running = [(0.5 * mean, 0.5 * torch.eye(3).double() + 0.5 * cov) for mean, cov in batch]
    torch.testing.assert_close(module.running_cov[0], torch.stack([cov for _, cov in running]))
    x = correlated(2, 6, 3, 3)
    torch.testing.assert_close(module.eval()(x), switchable_reference(x, module, running))


def test_switchable_whitening_of_single_positions_is_that_of_the_batch() -> None:
    """An instance of one position is its own mean: x minus it would be nothing."""
    module = randomise(SwitchableWhitening(4, group_size=4, affine=False).double())
    x = correlated(30, 4)
    expected = newton(covariance(x.T) + module.eps * torch.eye(4).double(), 5) @ (x - x.mean(0)).T
    torch.testing.assert_close(module(x), expected.T)


@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (2, 3, 4, 5)], ids=str)
def test_frn(shape: tuple[int, ...], learnable: bool) -> None:
    module = randomise(FRN(3, eps=1e-2, learnable_eps=learnable).double())
    if learnable:
        nn.init.constant_(module.learned_eps, -0.3)
    x = correlated(*shape)
    y = module(x)
    for n in range(shape[0]):
        for c in range(3):
            power = float((x[n, c] ** 2).sum()) / x[n, c].numel()
            expected = module.weight[c] * x[n, c] / (power + 1e-2 + 0.3 * learnable) ** 0.5 + module.bias[c]
            torch.testing.assert_close(y[n, c], expected)


OWN = {
    "iternorm": lambda: IterNorm(4, group_size=2),
    "sw-a": lambda: SwitchableWhitening(4, group_size=2),
    "sw-b": lambda: SwitchableWhitening(4, group_size=2, kinds=SW_B),
    "frn": lambda: FRN(4),
    "frn-learnable": lambda: FRN(4, learnable_eps=True),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OWN)
def test_gradients(name: str, training: bool) -> None:
    module = randomise(OWN[name]().double()).train(training)
    names, values = zip(*module.named_parameters(), strict=True)

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, values, strict=True)), (x,))

    x = correlated(3, 4, 2, 2).requires_grad_()
    assert torch.autograd.gradcheck(call, (x, *values))


@pytest.mark.parametrize("value", [0.0, 3.0, -1e4])
@pytest.mark.parametrize("name", OWN)
def test_constant_input(name: str, value: float) -> None:
    module = OWN[name]()
    x = torch.full((2, 4, 3, 3), value, requires_grad=True)
    y = module(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    assert all(b.isfinite().all() for b in module.buffers())
    assert module.eval()(x).isfinite().all()


@pytest.mark.parametrize("name", OWN)
def test_state_dict(name: str) -> None:
    module, other = randomise(OWN[name]()), OWN[name]()
    for _ in range(3):
        module(correlated(8, 4, 3, 3, dtype=torch.float32))
    other.load_state_dict(module.state_dict())
    x = torch.randn(2, 4, 3, 3)
    assert torch.equal(module.eval()(x), other.eval()(x))
    assert not torch.equal(other(x), OWN[name]().eval()(x))


@pytest.mark.parametrize("name", OWN)
def test_bfloat16_is_that_of_the_data_only(name: str) -> None:
    module = randomise(OWN[name]())
    other = copy.deepcopy(module)
    x = correlated(8, 4, 5, 5, dtype=torch.float32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, other(x.float()).bfloat16())
    for buffer, expected in zip(module.buffers(), other.buffers(), strict=True):
        assert torch.equal(buffer, expected)


@pytest.mark.parametrize("name", OWN)
def test_empty_batch_and_wrong_channels(name: str) -> None:
    module = OWN[name]()
    before = copy.deepcopy(module.state_dict())
    assert module(torch.zeros(0, 4, 3, 3)).shape == (0, 4, 3, 3)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    with pytest.raises(ValueError, match=r"expected input of shape \(N, 4, ...\); got \(2, 5, 3\)"):
        module(torch.zeros(2, 5, 3))


def test_arguments() -> None:
    assert IterNorm(96).group_size == 48
    assert SwitchableWhitening(40).group_size == 10
    with pytest.raises(ValueError, match="kinds must be bw and others"):
        SwitchableWhitening(4, kinds=("iw",))
    for kind in (IterNorm, SwitchableWhitening, FRN):
        with pytest.raises(ValueError, match="eps must be above 0"):
            kind(4, eps=0.0)


# --- replacing: what each name computes ---


def expected_first(name: str, x: Tensor) -> Tensor:
    """A fresh norm of that name in training, for (N, 8, H, W)."""
    if name in ("bn", "syncbn"):
        return (x - x.mean((0, 2, 3), keepdim=True)) / (x.var((0, 2, 3), keepdim=True, correction=0) + 1e-5).sqrt()
    if name in ("gn", "ln"):
        return F.group_norm(x, 8 if name == "gn" else 1)
    if name == "frn":
        return x / (x.square().mean((2, 3), keepdim=True) + 1e-6).sqrt()
    if name == "iternorm":
        return iternorm_reference(x, IterNorm(8).double())[0]
    if name == "sw":
        columns = x.transpose(0, 1).flatten(1)
        batch = [(columns.mean(1), covariance(columns) + 1e-5 * torch.eye(8).double())]
        return switchable_reference(x, SwitchableWhitening(8).double(), batch)
    return x / (1 + 1e-5) ** 0.5 if name == "frozenbn" else x


def expected_token(name: str, x: Tensor) -> Tensor:
    """The same for channels that come last, of which there are 16."""
    rows = x.reshape(-1, x.shape[-1])
    if name in ("bn", "syncbn"):
        y = (rows - rows.mean(0)) / (rows.var(0, correction=0) + 1e-5).sqrt()
    elif name in ("gn", "ln"):
        parts = rows.reshape(len(rows), -1, 8 if name == "gn" else 16)
        y = (parts - parts.mean(2, keepdim=True)) / (parts.var(2, keepdim=True, correction=0) + 1e-5).sqrt()
    elif name == "frn":
        y = rows / (rows.square() + 1e-6 + 1e-4).sqrt()
    elif name in ("iternorm", "sw"):
        y = newton(covariance(rows.T) + 1e-5 * torch.eye(16).double(), 5) @ (rows - rows.mean(0)).T
        y = y.T
    else:
        y = rows
    return y.reshape(x.shape)


@pytest.mark.parametrize("name", REPLACED)
def test_channels_first(name: str) -> None:
    x = correlated(3, 8, 5, 4)
    model = nn.Sequential(nn.BatchNorm2d(8)).double()
    replace_norms_(model, name)
    torch.testing.assert_close(model(x), expected_first(name, x), rtol=1e-6, atol=1e-6)
    assert model.training


@pytest.mark.parametrize("name", [name for name in REPLACED if name != "frozenbn"])
@pytest.mark.parametrize("shape", [(40, 16), (5, 8, 16), (2, 4, 5, 16)], ids=str)
def test_channels_last(name: str, shape: tuple[int, ...]) -> None:
    x = correlated(*shape).movedim(-1, 0).contiguous().movedim(0, -1)
    model = nn.Sequential(nn.LayerNorm(16)).double()
    replace_norms_(model, name)
    torch.testing.assert_close(model(x), expected_token(name, x), rtol=1e-6, atol=1e-6)


def test_rms_norm_becomes_layer_norm() -> None:
    model = nn.Sequential(nn.RMSNorm(16))
    assert replace_norms_(model, "ln").replaced == {"RMSNorm": 1}
    assert type(model[0]) is nn.LayerNorm


@pytest.mark.parametrize("library", ["timm.layers", "torchvision.models.convnext"])
def test_layer_norm_2d_has_channels_first(library: str) -> None:
    kind = pytest.importorskip(library).LayerNorm2d
    x = correlated(3, 8, 5, 4)
    for name in ("bn", "gn", "iternorm"):
        model = nn.Sequential(kind(8)).double()
        replace_norms_(model, name)
        torch.testing.assert_close(model(x), expected_first(name, x), rtol=1e-6, atol=1e-6)
    model = nn.Sequential(kind(8))
    assert replace_norms_(model, "ln").kept == {"LayerNorm2d": 1}
    assert type(model[0]) is kind


@pytest.mark.parametrize("name", REPLACED)
def test_activation_within_a_norm_stays(name: str) -> None:
    layers = pytest.importorskip("timm.layers")
    model = nn.Sequential(layers.BatchNormAct2d(8, act_layer=nn.ReLU)).double()
    act = model[0].act
    x = correlated(3, 8, 5, 4) - 3
    replace_norms_(model, name)
    torch.testing.assert_close(model(x), expected_first(name, x).clamp_min(0), rtol=1e-6, atol=1e-6)
    assert model[0].act is act


def test_groups_of_group_norm() -> None:
    model = nn.Sequential(*(nn.BatchNorm2d(channels) for channels in (256, 48, 3, 37)), nn.LayerNorm(512))
    replace_norms_(model, "gn")
    assert [norm.num_groups for norm in model[:4]] == [32, 24, 3, 1]
    assert model[4].norm.num_groups == 32


# --- what is kept ---


@pytest.mark.parametrize("name", REPLACED)
def test_values_device_dtype_and_flags_are_kept(name: str) -> None:
    norm = nn.BatchNorm2d(8, dtype=torch.float64)
    nn.init.zeros_(norm.weight)  # as the last norm of a residual branch
    nn.init.constant_(norm.bias, 2.0)
    norm.weight.requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(3, 8, 1, dtype=torch.float64), norm).eval()
    replace_norms_(model, name)
    assert not any(module.training for module in model.modules())
    assert {t.dtype for t in model.state_dict().values() if t.is_floating_point()} == {torch.float64}
    if name != "none":
        assert torch.equal(model(torch.randn(2, 3, 4, 4).double()), torch.full((2, 8, 4, 4), 2.0).double())
        assert [p.requires_grad for key, p in model.named_parameters() if key.endswith("weight")][1:2] in ([False], [])
    model = nn.Sequential(nn.BatchNorm2d(8, device="meta"))
    replace_norms_(model, name)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize(
    ("name", "norm"), [("bn", nn.BatchNorm1d(4)), ("ln", nn.LayerNorm(4)), ("gn", nn.GroupNorm(2, 4))]
)
def test_norms_of_the_wanted_kind_stay(name: str, norm: nn.Module) -> None:
    model, weight = nn.Sequential(norm), norm.weight
    done = replace_norms_(model, name)
    assert not done.replaced
    assert done.kept.total() == 1
    assert model[0] is norm
    assert norm.weight is weight


def test_statistics_carry_over_between_batch_norms() -> None:
    frozen = pytest.importorskip("torchvision.ops").FrozenBatchNorm2d
    model = nn.Sequential(nn.Conv2d(3, 8, 1), randomise(nn.BatchNorm2d(8, eps=1e-2))).double()
    for _ in range(4):
        model(correlated(8, 3, 4, 4))
    x = torch.randn(2, 3, 5, 5).double()
    expected = model.eval()(x).detach()
    for name in ("syncbn", "bn", "frozenbn", "bn"):
        replace_norms_(model, name)
        torch.testing.assert_close(model(x), expected)
        trainable = {key for key, p in model.named_parameters() if p.requires_grad}
        assert ("1.weight" in trainable) == (name != "frozenbn")
    replace_norms_(model, "frozenbn")
    torch.testing.assert_close(model.train()(x), expected)
    model[1] = frozen(8).double()
    replace_norms_(model, "bn")
    assert isinstance(model[1].weight, nn.Parameter)


def test_frozen_batch_norm_leaves_other_norms_alone() -> None:
    model = nn.ModuleDict({"backbone": nn.BatchNorm2d(4), "head": nn.LayerNorm(4)})
    assert apply_norm_(model, config("frozenbn")) == "frozenbn: 1 BatchNorm2d replaced; 1 LayerNorm kept"
    assert type(model["head"]) is nn.LayerNorm
    with pytest.raises(RecipeError, match="applies to networks with BatchNorm only; this one has LayerNorm"):
        apply_norm_(nn.Sequential(nn.LayerNorm(4)), config("frozenbn"))
    with pytest.raises(RecipeError, match="running statistics"):
        apply_norm_(nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False)), config("frozenbn"))


@pytest.mark.parametrize("name", REPLACED)
def test_root_shared_norms_and_hooks(name: str) -> None:
    root = nn.BatchNorm2d(8).double()
    calls = []
    handle = root.register_forward_hook(lambda *_: calls.append(1))
    replace_norms_(root, name)
    x = correlated(3, 8, 5, 4)
    torch.testing.assert_close(root(x), expected_first(name, x), rtol=1e-6, atol=1e-6)
    handle.remove()
    root(x)
    assert calls == [1]
    shared = nn.BatchNorm2d(8)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(nn.ReLU(), shared)})
    done = replace_norms_(model, name)
    assert (done.replaced + done.kept).total() == 1
    assert model["a"][0] is model["b"][1]


def test_norms_without_affine_stay_without() -> None:
    for name in ("bn", "gn", "iternorm", "frn", "sw"):
        model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16, elementwise_affine=False)).double()
        replace_norms_(model, name)
        assert not any(key.endswith(("norm.weight", "frn.weight")) for key in model.state_dict())
        assert model(correlated(5, 16)).shape == (5, 16)


def test_without_norms_nothing_is_overwritten() -> None:
    """In a pre-activation block the ReLU worked in place on what the norm gave."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(2), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.norm(x)) + x

    model, x = Block(), -torch.ones(1, 2, 1, 1)
    replace_norms_(model, "none")
    assert torch.equal(model(x), -torch.ones(1, 2, 1, 1))


# --- nn.TransformerEncoder in evaluation ---


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("name", [name for name in NORMS if name != "frozenbn"])
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning", "ignore:.*nested tensors:UserWarning")
def test_fast_path_of_transformer_encoders(name: str, norm_first: bool) -> None:
    """Without gradients evaluation takes the fast path, with them it does not: both give what the norm computes."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32))
    apply_norm_(model, config(name))
    x, padding = torch.randn(4, 7, 32), torch.arange(7) >= torch.tensor([7, 7, 5, 4])[:, None]
    for _ in range(3):
        model(x)
    model.eval()
    expected = model(x, src_key_padding_mask=padding).detach()
    with torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(y[~padding], expected[~padding], rtol=1e-4, atol=1e-5)


# --- errors and summaries ---


def test_summaries() -> None:
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.LocalResponseNorm(2)
        )

    assert apply_norm_(network(), config("ndpp")) == "ndpp: 2 layers converted, 1 norms removed"
    assert apply_norm_(network(), config("bn")) == "bn: 1 BatchNorm2d kept; 1 LocalResponseNorm unknown and kept"
    assert apply_norm_(network()[:3], config("gn")) == "gn: 1 BatchNorm2d replaced"
    assert apply_norm_(nn.Sequential(nn.ReLU()), config("none")) == "none: there were no norms"


def test_scale_is_that_of_ndpp_and_not_of_nd() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    apply_norm_(model, config("ndpp"))
    assert model[0].settings == SMALL
    model = nn.Sequential(nn.Linear(4, 4))
    apply_norm_(model, config("nd"))
    assert model[0].settings == SMALL.replace(scale="none")


def test_calibration_keeps_the_function() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), randomise(nn.BatchNorm2d(8)), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(4, 3, 6, 6)
    expected = model(x).detach()
    with pytest.raises(RecipeError, match=r"norm ndpp: .*hold trained values"):
        apply_norm_(model, config("ndpp"))
    apply_norm_(model, config("ndpp"), calibration=[x])
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-3)


def test_nothing_to_do_is_an_error() -> None:
    for name in NORMS:
        if name != "none":
            with pytest.raises(RecipeError, match=f"norm {name}: "):
                apply_norm_(nn.Sequential(nn.ReLU()), config(name))
    with pytest.raises(RecipeError, match="1 LocalResponseNorm is none that is known"):
        apply_norm_(nn.Sequential(nn.LocalResponseNorm(2)), config("gn"))
    with pytest.raises(RecipeError, match=r"expected one of bn, syncbn, .*; got 'batchnorm'"):
        replace_norms_(nn.Sequential(nn.BatchNorm2d(2)), "batchnorm")
    with pytest.raises(TypeError, match="is wrapped"):
        replace_norms_(nn.DataParallel(nn.BatchNorm2d(2)), "gn")


# --- whole networks ---


def resnet() -> tuple[nn.Module, tuple[object, ...]]:
    vision = pytest.importorskip("torchvision")
    return vision.models.resnet18(num_classes=4), (torch.randn(3, 3, 32, 32),)


def densenet() -> tuple[nn.Module, tuple[object, ...]]:
    vision = pytest.importorskip("torchvision")
    return vision.models.densenet121(num_classes=4), (torch.randn(2, 3, 32, 32),)


def vit() -> tuple[nn.Module, tuple[object, ...]]:
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=4)
    return model, (torch.randn(2, 3, 32, 32),)


def encoder() -> tuple[nn.Module, tuple[object, ...]]:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2), (torch.randn(4, 7, 32),)


def detector() -> tuple[nn.Module, tuple[object, ...]]:
    detection = pytest.importorskip("torchvision.models.detection")
    backbone = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    head = detection.faster_rcnn.TwoMLPHead(256 * 9, 16)
    pool = detection.faster_rcnn.MultiScaleRoIAlign(["0", "1", "2", "3"], output_size=3, sampling_ratio=1)
    model = detection.FasterRCNN(
        backbone,
        min_size=32,
        max_size=32,
        box_roi_pool=pool,
        box_head=head,
        box_predictor=detection.faster_rcnn.FastRCNNPredictor(16, 2),
        rpn_pre_nms_top_n_train=20,
        box_batch_size_per_image=8,
    )
    target = {"boxes": torch.tensor([[4.0, 4.0, 20.0, 25.0]]), "labels": torch.tensor([1])}
    return model, ([torch.rand(3, 32, 32) for _ in range(2)], [target, target])


NETWORKS = {"resnet": (resnet, 20), "densenet": (densenet, 121), "vit": (vit, 5), "encoder": (encoder, 4)}
NETWORKS["detector"] = (detector, 20)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor:UserWarning")
def test_network(network: str, name: str) -> None:
    make, count = NETWORKS[network]
    model, inputs = make()
    if name == "frozenbn" and network in ("vit", "encoder"):
        with pytest.raises(RecipeError, match="BatchNorm only"):
            apply_norm_(model, config(name))
        return
    assert f"{count} " in apply_norm_(model, config(name))
    out = model(*inputs)
    loss = sum(out.values()) if isinstance(out, dict) else out.square().mean()
    loss.backward()
    missing = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing
    assert any(p.grad.any() for p in model.parameters())
    with torch.no_grad():
        out = model.eval()(inputs[0])
    assert isinstance(out, list) or out.isfinite().all()


@pytest.mark.parametrize("name", NORMS)
def test_training(name: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(144, 4),
    )
    apply_norm_(model, config(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(32, 3, 8, 8), torch.arange(32) % 4
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
