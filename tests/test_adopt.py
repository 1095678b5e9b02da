"""Adopting trained weights: what the model computes stays, and training goes on."""

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

import ndpp
from cases import CASES, Case
from ndpp import Settings
from ndpp.feeding import tensors
from test_convert import network, train_steps

SETTINGS = [
    Settings(),
    Settings(shared=True, steps=5),
    Settings(solver="minimax", block=3),
    Settings(solver="eigh", eps=1e-3),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layer_keeps_its_function(case: Case, settings: Settings) -> None:
    layer = case.stock(dtype=torch.float64)
    x = case.input()
    other = case.input(seed=3) * 3 + 1  # not only on the data it saw
    want, want_other = layer(x).detach(), layer(other).detach()
    report = ndpp.convert_(layer, settings, calibration=[x[: len(x) // 2], x[len(x) // 2 :]])
    assert report.change is not None
    assert report.change < 1e-9
    layer.eval()
    torch.testing.assert_close(layer(x), want, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(layer(other), want_other, rtol=1e-8, atol=1e-8)
    assert layer.num_batches_tracked == 2
    layer.train()(x)


def after_training(model: nn.Module, data: Tensor, target: Tensor, steps: int = 12, lr: float = 0.05) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data), target).backward()
        optimizer.step()
    return model


def images(n: int = 16, size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(n) % 4
    x = torch.randn(n, 3, size, size, generator=generator)
    x = nn.functional.avg_pool2d(x, 3, 1, 1) * 2 + target[:, None, None, None] * 0.2
    return x, target


def adopted(model: nn.Module, x: Tensor, target: Tensor, **arguments) -> ndpp.Report:
    """Convert with calibration; the function is preserved, and one step of the same optimizer lowers the loss."""
    model.eval()
    with torch.no_grad():
        want = model(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    report = ndpp.convert_(model, calibration=[x[:8], x[8:]], **arguments)
    assert report.change is not None
    assert report.change <= 1e-3
    with torch.no_grad():
        assert (model(x) - want).norm() / want.norm() < 1e-3
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
    return report


def test_batch_norm_network() -> None:
    model = network()
    train_steps(model, torch.optim.SGD(model.parameters(), 0.1), 8)
    beta, weight = model[1].bias, model[0].weight
    report = adopted(model, torch.randn(16, 3, 9, 9), torch.arange(16) % 4)
    assert [row.note for row in report.removed] == ["folded into 0", "folded into 3"]
    assert model[0].bias is beta
    assert model[0].weight is weight
    assert report.added == ()


def test_resnet() -> None:
    models = pytest.importorskip("torchvision").models
    x, target = images()
    model = after_training(models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=4), x, target)
    report = adopted(model, x, target)
    assert len(report.removed) == len(report.norms)
    assert not report.skipped


def test_mobilenet() -> None:
    models = pytest.importorskip("torchvision").models
    x, target = images()
    setting = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]]
    model = models.MobileNetV2(4, inverted_residual_setting=setting, dropout=0.0)
    report = adopted(after_training(model, x, target), x, target)
    assert len(report.removed) == len(report.norms)


def test_densenet_keeps_the_norms_before_activations() -> None:
    models = pytest.importorskip("torchvision").models
    x, target = images()
    model = after_training(models.DenseNet(8, (2, 2), 16, num_classes=4), x, target)
    report = adopted(model, x, target)
    assert {row.path.rpartition(".")[2] for row in report.removed} == {"norm0", "norm2"}
    assert {row.path.rpartition(".")[2] for row in report.kept} == {"norm1", "norm", "norm5"}
    assert all("straight from one layer" in row.note for row in report.kept)


def test_pre_norm_vision_transformer() -> None:
    models = pytest.importorskip("torchvision").models
    x, target = images()
    model = models.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=4)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    report = adopted(after_training(model, x, target, steps=20), x, target)
    notes = {row.path.rpartition(".")[2]: row.note for row in report.removed}
    assert notes["ln_1"].startswith("folded into encoder.layers.encoder_layer_1.self_attention, as scale")
    assert "encoder.layers.encoder_layer_1.mlp.0" in notes["ln_2"]
    assert model.encoder.layers[0].mlp[0].settings.scale == "standardize"
    assert model.encoder.layers[0].mlp[3].settings.scale == "none"
    assert [row.path for row in report.kept] == ["encoder.ln"]  # indexed before the head reads it
    kept = copy.deepcopy(model.eval())
    assert (ndpp.fold_(model)(x) - kept(x)).norm() / kept(x).norm() < 1e-5


def test_gpt2() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.arange(160).reshape(10, 16) * 7 % 50
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(20):
        step()
    model.eval()
    with torch.no_grad():
        want = model(**batch).logits
    report = ndpp.convert_(model, calibration=[batch])
    assert (model(**batch).logits - want).norm() / want.norm() < 1e-3
    assert [row.path for row in report.skipped] == ["lm_head"]
    assert sorted({row.path.rpartition(".")[2] for row in report.removed}) == ["ln_1", "ln_2"]
    assert [row.path for row in report.kept] == ["transformer.ln_f"]
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    losses = [step() for _ in range(3)]
    assert losses[-1] < losses[0]


# --- what must not be folded ---


class Branch(nn.Module):
    """The output of a convolution is used beside its norm."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.conv, self.norm, self.use = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), use
        self.other = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.use == "residual":
            return self.other(self.norm(y) + y)
        if self.use == "view":
            return self.other(self.norm(y)) * y.transpose(2, 3).mean()
        if self.use == "item":
            return self.other(self.norm(y)) * y.mean().item()
        if self.use == "output":
            return torch.stack([self.norm(y), self.norm(y)]), y  # type: ignore[return-value]
        if self.use == "twice":
            return self.norm(self.conv(self.norm(y)[:, :3]))
        return self.norm(y * 2)


@pytest.mark.parametrize("use", ["residual", "view", "item", "output", "input"])
def test_norms_that_are_not_alone_are_kept(use: str) -> None:
    model = Branch(use)
    with torch.no_grad():
        model.norm.running_mean.fill_(0.3)
    report = ndpp.convert_(model, calibration=[torch.randn(4, 3, 6, 6)])
    assert [row.path for row in report.kept] == ["norm"]
    assert report.change is not None
    assert report.change < 1e-5


def test_convolution_shared_by_two_norms() -> None:
    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norms = nn.Conv2d(3, 4, 3), nn.ModuleList([nn.BatchNorm2d(4), nn.BatchNorm2d(4)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([norm(self.conv(x)) for norm in self.norms])

    model = Pyramid()
    model.norms[1].running_mean.fill_(1.0)
    report = ndpp.convert_(model, calibration=[torch.randn(4, 3, 6, 6)])
    assert len(report.kept) == 2


def test_post_norm_and_sample_norms_are_kept() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    with torch.no_grad():
        model.norm1.weight.uniform_(0.5, 2)
    report = ndpp.convert_(model, calibration=[torch.randn(5, 3, 8)])
    assert {row.path for row in report.kept} == {"norm1", "norm2"}
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Linear(4, 3))
    report = ndpp.convert_(model, calibration=[torch.randn(4, 3, 6, 6)])
    assert all("depends on each sample" in row.note for row in report.kept)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.RMSNorm(6), nn.RMSNorm(6, eps=1e-3), nn.LayerNorm(6, bias=False)])
def test_norms_before_linear_layers_are_their_scale(norm: nn.Module, size: float) -> None:
    """At any size of the data: the ε of the norm comes along."""
    model = nn.Sequential(copy.deepcopy(norm), nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 2)
    report = ndpp.convert_(model, calibration=[size * torch.randn(99, 6)])
    assert len(report.removed) == 1
    assert report.change is not None
    assert report.change < 1e-5


def test_norms_that_are_not_what_their_name_says_are_kept() -> None:
    class OddRMSNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(OddRMSNorm(6), nn.Linear(6, 3))
    report = ndpp.convert_(model, calibration=[torch.randn(9, 6)])
    assert "differs from the formula of a rms norm" in report.kept[0].note


@pytest.mark.parametrize("packed", [True, False])
def test_layer_norm_before_attention(packed: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {} if packed else {"kdim": 8, "vdim": 8}
            self.norm = nn.LayerNorm(8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True, bias=packed, **sizes)
            if not packed:
                self.attention._qkv_same_embed_dim = False
                for name in "qkv":
                    setattr(self.attention, f"{name}_proj_weight", nn.Parameter(torch.randn(8, 8) / 3))
                self.attention.in_proj_weight = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return x + self.attention(y, y, y, need_weights=False)[0]

    model = Block()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2)
        model.norm.bias.normal_()
    report = ndpp.convert_(model, calibration=[torch.randn(9, 5, 8)])
    assert [row.path for row in report.removed] == ["norm"]
    assert report.change is not None
    assert report.change < 1e-4


def test_cross_attention_keeps_its_norm() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(self.norm(x), x, x, need_weights=False)[0]

    report = ndpp.convert_(Block(), calibration=[torch.randn(9, 5, 8)])
    assert "also reads something else" in report.kept[0].note


class Using(nn.Module):
    """Uses of a norm or a layer that do not show on ordinary data, or not in the output."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.first, self.batch, self.layer = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LayerNorm(16)
        self.last, self.use = nn.Linear(16, 4), use
        nn.init.uniform_(self.layer.weight, 0.5, 2)
        nn.init.normal_(self.layer.bias)

    def forward(self, x: Tensor) -> object:
        h = self.first(x)
        if self.use == "clamped in place":
            nn.functional.hardtanh(h, -9.0, 9.0, inplace=True)
        if self.use == "assigned":
            h[x[:, 0] > 5] = 7.0
        h = self.batch(h)
        h = self.layer(h)
        if self.use == "activated in place":
            nn.functional.relu(h, inplace=True)
        if self.use == "scripted":
            h = h + closed(h, x.abs().max())
        if self.use == "kept by the model":
            self.features = h
        y = self.last(h)
        return (y, Box(h)) if self.use == "in an object" else y


class Box:
    def __init__(self, features: Tensor) -> None:
        self.features = features


@torch.jit.script
def closed(h: Tensor, size: Tensor) -> Tensor:
    return torch.zeros_like(h) if bool(size < 100) else h * 9


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(
    ("use", "kept"),
    [
        ("", []),
        ("clamped in place", ["batch"]),
        ("assigned", ["batch"]),
        ("activated in place", ["layer"]),
        ("scripted", ["layer"]),
        ("kept by the model", ["layer"]),
        ("in an object", ["layer"]),
    ],
)
def test_hidden_uses_are_found(use: str, kept: list[str]) -> None:
    torch.manual_seed(0)
    model = Using(use).eval()
    other = torch.randn(64, 8) * 20  # on which it shows
    want = tensors(copy.deepcopy(model)(other))[0]
    report = ndpp.convert_(model, calibration=[torch.randn(64, 8)])
    assert [row.path for row in report.kept] == kept
    torch.testing.assert_close(tensors(model(other))[0], want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("where", ["first", "batch", "layer"])
def test_norms_beside_hooks_are_kept(where: str) -> None:
    model = Using("").eval()
    seen = []
    model.get_submodule(where).register_forward_hook(lambda m, x, y: seen.append(y))
    report = ndpp.convert_(model, calibration=[torch.randn(64, 8)])
    assert {row.path for row in report.kept} == ({"layer"} if where == "layer" else {"batch"})
    assert all("hooks" in row.note for row in report.kept)


def test_layers_left_alone_stay_as_they_are() -> None:
    model = Using("").eval()
    weight = model.first.weight.detach().clone()
    report = ndpp.convert_(model, where=lambda m, name: name != "first", calibration=[torch.randn(64, 8)])
    assert torch.equal(model.first.weight, weight)
    assert "first was left alone" in {row.path: row.note for row in report.kept}["batch"]


def test_norms_of_another_axis_are_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).eval()
    model[1].running_mean.normal_()
    report = ndpp.convert_(model, calibration=[torch.randn(16, 5, 8)])
    assert "not the features" in report.kept[0].note


def test_an_epsilon_of_another_name() -> None:
    class OwnRMSNorm(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.weight, self.name = nn.Parameter(torch.rand(16) + 0.5), name
            setattr(self, name, 1e-5)

        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + getattr(self, self.name)) * self.weight

    for name, removed in (("epsilon", 1), ("tiny", 0)):
        model = nn.Sequential(OwnRMSNorm(name), nn.Linear(16, 4)).eval()
        small = 3e-3 * torch.randn(64, 16)
        want = model(small)
        report = ndpp.convert_(model, calibration=[torch.randn(64, 16)])
        assert len(report.removed) == removed
        torch.testing.assert_close(model(small), want, rtol=1e-3, atol=1e-4)


def test_tied_parameters_of_any_name() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.Linear(8, 8)])
    model[1].in_proj_weight = model[0].in_proj_weight
    model[3].bias = model[2].bias
    with pytest.warns(UserWarning, match="nothing changed"):
        report = ndpp.convert_(model)
    assert all("is tied to" in row.note for row in report.skipped if "out_proj" not in row.path)


def test_paths_that_only_a_later_batch_takes() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.last(self.norm(y) if len(x) > 8 else y)

    model = Growing().eval()
    model.norm.running_mean.fill_(1.0)
    report = ndpp.convert_(model, calibration=[torch.randn(16, 4), torch.randn(8, 4)])
    assert [row.path for row in report.kept] == ["norm"]


# --- verification ---


def test_a_head_of_zeros_hides_nothing(monkeypatch) -> None:
    """The layers before it are compared, too."""
    from ndpp.conversion import adopt

    body, head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 4)
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    model = nn.Sequential(body, head).eval()
    original = adopt._transformed
    monkeypatch.setattr(adopt, "_transformed", lambda *a: tuple(1.1 * t for t in original(*a)))
    with pytest.raises(RuntimeError, match=r"the output of 0\.\d differs by"):
        ndpp.convert_(model, calibration=[torch.randn(64, 8)])


@pytest.mark.parametrize(
    "settings", [Settings(solver="minimax", steps=20), Settings(solver="newton", steps=40, eps=0)], ids=repr
)
def test_solvers_that_fail_are_noticed(settings: Settings) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()
    x = torch.randn(32, 64)
    want = model(x)
    with contextlib.suppress(RuntimeError):
        ndpp.convert_(model, settings, calibration=[x])
    torch.testing.assert_close(model(x), want, rtol=1e-3, atol=1e-3)


def test_directions_without_variance_are_not_lost() -> None:
    model = nn.Linear(8, 4)
    x = torch.randn(64, 8)
    x[:, 3] = 1.0
    with pytest.raises(RuntimeError, match="eps > 0"):
        ndpp.convert_(model, Settings.exact(), calibration=[x])
    ndpp.convert_(model, calibration=[x])


def test_complex_outputs_and_half_precision_outputs() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.layer(x)
            return torch.fft.fft(y), y

    change = ndpp.convert_(Complex(), calibration=[torch.randn(9, 4)]).change
    assert change is not None
    assert change < 1e-5

    def half(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.ones(9, 4) + torch.arange(9)[:, None])

    ndpp.convert_(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4)), calibration=[half])


def test_modes_after_adoption() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True).train()
    model.dropout.eval()
    ndpp.convert_(model, calibration=[torch.randn(32, 6, 16)] * 2)
    assert [name for name, m in model.named_modules() if not m.training] == ["dropout"]


def test_encoder_with_padding() -> None:
    """torch's fast path leaves zeros at padded positions, and reads weights that mean something else by then."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, padding = torch.randn(6, 5, 8), torch.arange(5) >= torch.tensor([5, 3, 2, 5, 4, 1])[:, None]
    want = model(x, src_key_padding_mask=padding)
    for where in (None, lambda m, name: isinstance(m, nn.Linear)):
        copied = copy.deepcopy(model)
        ndpp.convert_(copied, where=where, calibration=[lambda m: m(x, src_key_padding_mask=padding)])
        with torch.no_grad():
            torch.testing.assert_close(copied(x, src_key_padding_mask=padding)[~padding], want[~padding])


def test_few_rows_are_noted() -> None:
    report = ndpp.convert_(nn.Linear(16, 4), calibration=[torch.randn(8, 16)])
    assert report.converted[0].note == "only 8 rows of calibration data for blocks of 16"


@pytest.mark.parametrize("call", [2, 3, 4])
def test_interrupts_restore_what_was_folded(call: int) -> None:
    """Also γ in the weight, which is no longer 1."""
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).eval()
    nn.init.normal_(model[0].weight)
    x, calls = torch.randn(64, 8), []
    want = model(x)

    def batch(m: nn.Module) -> Tensor:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return m(x)

    with pytest.raises(KeyboardInterrupt):
        ndpp.convert_(model, calibration=[batch])
    assert torch.equal(model(x), want)


def test_norms_that_share_a_bias() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
    ).eval()
    model[4].bias = model[1].bias
    nn.init.normal_(model[1].bias)
    report = ndpp.convert_(model, calibration=[torch.randn(4, 3, 8, 8)])
    assert len(report.removed) == 2


def test_values_that_are_meant_to_be_infinite() -> None:
    """A fully padded sample attends to nothing, and the model takes care of it."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            padding = torch.arange(5) >= torch.tensor([5, 3, 0, 2])[:, None]
            y = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
            return self.last(y.nan_to_num())

    change = ndpp.convert_(Padded().eval(), calibration=[torch.randn(4, 5, 8)]).change
    assert change is not None
    assert change < 1e-4


class Unusual(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.how = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), how
        self.bad = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "vmap":
            return torch.vmap(lambda row: self.b(self.norm(self.a(row))))(x)
        if self.how == "caught":
            with contextlib.suppress(RuntimeError):
                self.bad(x)
        y = self.norm(self.a(x.type_as(self.b.weight)))
        if self.how == "cond":
            y = torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (y,))
        if self.how == "cycle":

            def again(n: int) -> Tensor:
                return y if n == 0 else again(n - 1)

            return self.b(again(2))
        return self.b(y)


@pytest.mark.parametrize("how", ["vmap", "caught", "cond", "cycle"])
def test_unusual_models(how: str) -> None:
    """Converted as they should be, or refused and put back."""
    if how == "cond" and torch.__version__ < (2, 10):
        pytest.skip("torch.cond does not run eagerly here")
    model = Unusual(how).eval()
    x = torch.randn(16, 8)
    with torch.no_grad():
        want = model(x)
    if how == "vmap":
        with pytest.raises(RuntimeError, match=r"ndpp\.convert_"):
            ndpp.convert_(model, overrides={"bad": None}, calibration=[x])
        assert type(model.b) is nn.Linear
    else:
        report = ndpp.convert_(model, overrides={"bad": None}, calibration=[x])
        assert [row.path for row in report.kept] == (["norm"] if how == "cond" else [])
    with torch.no_grad():
        torch.testing.assert_close(model(x), want, rtol=1e-3, atol=1e-4)


# --- refusals ---


def test_a_model_that_changes_is_put_back() -> None:
    class Weighty(nn.Module):
        """Computes with its weight in a way that no source shows."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x) * getattr(self.layers[0], "wei" + "ght").mean()

    model = Weighty()
    before = copy.deepcopy(model.state_dict())
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(RuntimeError, match=r"differs by .* and the plain one was put back"):
        ndpp.convert_(model, calibration=[torch.randn(64, 4) + 3])
    assert [type(m) for m in model.modules()] == kinds
    torch.testing.assert_close(model.state_dict(), before)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([], ValueError, "no batches"),
        ([torch.full((4, 3, 9, 9), float("nan"))], ValueError, "NaN or Inf"),
        ([torch.randn(4, 5, 9, 9)], RuntimeError, "batch 0: .*channels"),
    ],
)
def test_bad_calibration(batches: list, error: type[Exception], message: str) -> None:
    model = network().train()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(error, match=message):
        ndpp.convert_(model, calibration=batches)
    assert [type(m) for m in model.modules()] == kinds
    assert model.training


def test_random_models_cannot_be_verified() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.randn(())

    with pytest.raises(ValueError, match="different outputs for the same batch"):
        ndpp.convert_(Model(), calibration=[torch.randn(5, 4)])


def test_layers_without_calibration_data_stay() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    model.forward = lambda x: model["used"](x)
    weight = model["unused"].weight.detach().clone()
    report = ndpp.convert_(model, calibration=[torch.randn(8, 3)])
    assert "not used by the calibration data" in {row.path: row.note for row in report.converted}["unused"]
    assert torch.equal(model["unused"].weight, weight)


def test_scale_of_settings_gives_way() -> None:
    model = network()
    ndpp.convert_(model, "detection", calibration=[torch.randn(4, 3, 9, 9)])
    assert model[0].settings == Settings.paper(stride=5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = network()
    train_steps(model, torch.optim.SGD(model.parameters(), 0.1), 5)
    report = ndpp.convert_(model.to(dtype), calibration=[torch.randn(8, 3, 9, 9, dtype=dtype)])
    assert report.change is not None
    assert report.change < (1e-10 if dtype == torch.float64 else 3e-2)
