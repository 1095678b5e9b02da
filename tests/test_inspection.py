"""inspect: its numbers against explicit data matrices, that it changes nothing, and how it shows what it found."""

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import ndpp
from cases import BY_LAYER
from ndpp import Settings
from ndpp.__main__ import main
from ndpp.conversion.surgery import match
from ndpp.inspection import FEW_ROWS, Inspection, inspect
from oracles import data_matrix, inverse_sqrt

# --- the oracle: numpy and float64 ---


def spectrum(cov: np.ndarray, dead: int = 0) -> tuple[float, float, float]:
    """Condition without the `dead` weakest directions, effective rank as a share, off-diagonal energy."""
    values = np.linalg.eigvalsh(cov).clip(0)
    p = values[values > 0] / values.sum()
    rank = math.exp(-(p * np.log(p)).sum()) / len(cov)
    return values[-1] / values[dead], rank, 1 - (np.diag(cov) ** 2).sum() / (cov**2).sum()


def root(a: np.ndarray, solver: str = "quartic", steps: int = 3) -> np.ndarray:
    found: np.ndarray = inverse_sqrt(torch.from_numpy(a), solver, steps).numpy()
    return found


def expected(blocks: list[Tensor], eps: float = 1e-5, **how: Any) -> dict[str, tuple[float, float]]:
    """The numbers of a layer by the rows of its blocks, each (rows, features)."""
    before, after, widths = [], [], [block.shape[1] for block in blocks]
    for block in blocks:
        x = block.double().numpy()
        cov = np.cov(x, rowvar=False, bias=True).reshape(x.shape[1], x.shape[1])
        d = root(cov + eps * np.eye(len(cov)), **how)
        before.append(spectrum(cov))
        after.append(spectrum(d @ cov @ d))
    found: dict[str, tuple[float, float]] = {}
    for i, name in enumerate(("condition", "rank", "offdiagonal")):
        sides = [[numbers[i] for numbers in side] for side in (before, after)]
        found[name] = tuple(max(s) if i == 0 else float(np.average(s, weights=widths)) for s in sides)  # type: ignore[assignment]
    return found


def check(layer: Any, blocks: list[Tensor], rel: float = 1e-9, **how: Any) -> None:
    for name, numbers in expected(blocks, **how).items():
        assert tuple(getattr(layer, name)) == pytest.approx(numbers, rel=rel, abs=1e-12), (layer.path, name)


def correlated(*shape: int, seed: int = 0) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x + 0.6 * x.roll(1, -1) + 0.5 * x.roll(1, 1) + 0.7


# --- numbers ---


def test_linear() -> None:
    x = correlated(20, 5, 7)
    (layer,) = inspect(nn.Linear(7, 3).double(), x).layers
    check(layer, [x.reshape(-1, 7)])
    assert (layer.path, layer.kind, layer.features, layer.blocks, layer.rows) == ("", "Linear", 7, "1×7", 100)
    assert (layer.dead, layer.nonfinite, layer.notes) == (0, 0, ())
    assert layer.scale == pytest.approx(x.abs().mean().item())


def test_blocks_are_measured_apart_and_weighted_by_features() -> None:
    x = correlated(50, 7)
    settings = Settings(block=3, solver="newton", steps=5, eps=1e-2)
    (layer,) = inspect(nn.Linear(7, 3).double(), x, settings=settings).layers
    check(layer, [x[:, :3], x[:, 3:6], x[:, 6:]], solver="newton", steps=5, eps=1e-2)
    assert layer.blocks == "2×3 + 1×1"
    (shared,) = inspect(nn.Linear(6, 3).double(), x[:, :6], settings=settings.replace(shared=True)).layers
    check(shared, [torch.cat([x[:, :3], x[:, 3:6]])], solver="newton", steps=5, eps=1e-2)
    assert (shared.blocks, shared.features, shared.rows) == ("1×3", 6, 50)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_convolution(dtype: torch.dtype) -> None:
    x = correlated(6, 4, 9, 8)
    conv = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2).to(dtype)
    (layer,) = inspect(conv, x.to(dtype)).layers
    rows = F.unfold(x, 3, padding=1, stride=2).movedim(1, -1).reshape(-1, 36)
    check(layer, [rows[:, :18], rows[:, 18:]], 1e-9 if dtype == torch.float64 else 1e-3)
    assert (layer.features, layer.blocks, layer.rows) == (36, "2×18", 6 * 5 * 4)


@pytest.mark.parametrize("name", BY_LAYER)
def test_every_layer_sees_its_data_matrix(name: str) -> None:
    case = BY_LAYER[name]
    layer = case.stock().double()
    (found,) = inspect(layer, case.input(), settings=Settings(eps=1e-3)).layers
    matrix = data_matrix(layer, case.input())
    check(found, [group.reshape(group.shape[0], -1) for group in matrix], eps=1e-3)


def test_the_exact_solver_leaves_nothing() -> None:
    (layer,) = inspect(nn.Linear(6, 3).double(), correlated(90, 6), settings=Settings.exact()).layers
    assert layer.condition.before > 3
    assert (*layer.condition[1:], *layer.rank[1:]) == pytest.approx((1.0, 1.0), abs=1e-6)
    assert layer.offdiagonal.after < 1e-9


def test_dead_directions_are_counted_and_left_out() -> None:
    x = correlated(200, 5)
    x = torch.cat([x, x[:, :1], torch.full((200, 1), 3.0, dtype=x.dtype)], 1)  # a copy, and a constant
    (layer,) = inspect(nn.Linear(7, 3).double(), x).layers
    cov = np.cov(x.numpy(), rowvar=False, bias=True)
    d = root(cov + 1e-5 * np.eye(7))
    assert layer.dead == 2
    assert tuple(layer.condition) == pytest.approx((spectrum(cov, 2)[0], spectrum(d @ cov @ d, 2)[0]))


def test_data_without_variance_and_without_rows() -> None:
    (constant,) = inspect(nn.Linear(4, 2), torch.ones(30, 4)).layers
    assert math.isnan(constant.condition.before)
    assert (constant.rank.before, constant.offdiagonal.before, constant.dead) == (0.0, 0.0, 4)
    found = inspect(nn.Linear(4, 2), torch.ones(0, 4))
    assert (found.layers[0].rows, found.layers[0].notes) == (0, ("called without data",))
    assert "called without data" in str(found)
    assert str(inspect(nn.ReLU(), torch.ones(2))) == "no linear or convolutional layers, or none that where= chooses"


def test_scale_is_part_of_what_is_decorrelated() -> None:
    x = correlated(60, 5)
    (layer,) = inspect(nn.Linear(5, 2).double(), x, settings=Settings(scale="l1")).layers
    check(layer, [x / x.abs().mean(1, keepdim=True)])


def test_magnitude_does_not_matter() -> None:
    x = correlated(80, 6).float()
    settings = Settings(eps=0.0)
    sizes = [inspect(nn.Linear(6, 2), x * size, settings=settings).layers[0] for size in (1.0, 2.0**60, 2.0**-60)]
    assert sizes[0].condition == pytest.approx(sizes[1].condition)
    assert sizes[0].condition == pytest.approx(sizes[2].condition)


def test_few_rows_are_pointed_out() -> None:
    found = inspect(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 2)), torch.randn(8, 9))
    assert all(layer.notes == (FEW_ROWS,) and layer.dead >= 2 for layer in found.layers)
    assert str(found).count("fewer rows") == 1


# --- which layers ---


class Odd(nn.Linear):
    """Not provably a linear layer."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.sin())


class Various(nn.Module):
    """Layers called twice, not at all, and of kinds that cannot be converted."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.read = nn.Linear(6, 6)
        self.odd = Odd(6, 6)
        self.normed = parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x).relu())
        return self.normed(self.odd(F.linear(x, self.read.weight)))


def test_calls_add_up_and_what_was_not_measured_says_why() -> None:
    model, x = Various().double(), correlated(40, 6)
    found = inspect(model, x)
    twice, read, odd, normed = found.layers
    check(twice, [torch.cat([x, model.twice(x).relu().detach()])])
    assert (twice.rows, read.rows, odd.rows, normed.rows) == (80, 0, 0, 0)
    assert read.notes == ("not called",)
    assert odd.notes == (match(model.odd).reason,)  # type: ignore[union-attr]
    assert "parametrized" in normed.notes[0]
    assert found.measured == found.worst == (twice,)
    assert all(
        text in str(found)
        for text in ("layers measured: 1, not measured: 3", "not called: read", f"{odd.notes[0]}: odd")
    )


def test_where_chooses() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    seen: list[str] = []

    def where(module: nn.Module, path: str) -> bool:
        seen.append(path)
        return path == "1"

    found = inspect(model, lambda m: m[1](torch.randn(20, 4)), where=where)
    assert [layer.path for layer in found.layers] == ["1"]
    assert seen == ["0", "1", "2"]


@pytest.mark.parametrize(
    "batch",
    [
        lambda x: x,
        lambda x: (x, "a label"),
        lambda x: {"input": x},
        lambda x: lambda model: model(x),
    ],
    ids=["tensor", "tuple", "mapping", "function"],
)
def test_batches_are_those_of_the_other_functions(batch: Callable[[Tensor], Any]) -> None:
    assert inspect(nn.Linear(5, 2), batch(torch.randn(30, 5))).layers[0].rows == 30


# --- attention ---


def attention_rows(model: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> dict[str, Tensor]:
    """Inputs (rows, features) of the four projections of self-attention on (batch, time, embed)."""
    heads, size = model.num_heads, model.head_dim
    packed = zip((q, k, v), model.in_proj_weight.chunk(3), model.in_proj_bias.chunk(3), strict=True)
    q_, k_, v_ = (F.linear(x, w, b).unflatten(-1, (heads, size)).transpose(1, 2) for x, w, b in packed)
    scores = (q_ @ k_.mT / math.sqrt(size)).masked_fill(~keep[:, None, None], -math.inf)
    y = (scores.softmax(-1) @ v_).transpose(1, 2).flatten(2).detach()
    return {name: x[keep] for name, x in (("q_proj", q), ("k_proj", k), ("v_proj", v), ("out_proj", y))}


@pytest.mark.parametrize("converted", [False, True])
def test_attention_shows_its_four_projections(converted: bool) -> None:
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2, batch_first=True)}).double()
    x = correlated(6, 9, 8)
    padding = torch.arange(9) >= torch.tensor([9, 4, 9, 9, 2, 9])[:, None]
    rows = attention_rows(model["a"], x, x, x, ~padding)  # type: ignore[arg-type]
    if converted:
        ndpp.convert_(model)
    found = inspect(model, lambda m: m["a"](x, x, x, key_padding_mask=padding, need_weights=False))
    assert {layer.path for layer in found.layers} == {f"a.{name}" for name in rows}
    for layer in found.layers:
        check(layer, [rows[layer.path[2:]]])


def test_the_fast_path_of_transformers_is_not_taken() -> None:
    """It would read the weights and call no layer; with padding it would make nested tensors."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    padding = torch.arange(7) >= torch.tensor([7, 3, 7])[:, None]
    found = inspect(model, lambda m: m(torch.randn(3, 7, 8), src_key_padding_mask=padding))
    assert len(found.measured) == len(found.layers) == 12
    assert {layer.rows for layer in found.layers if "proj" in layer.path} == {17}
    assert torch.backends.mha.get_fastpath_enabled()


# --- data that is not finite ---


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    model, good, bad = nn.Linear(5, 2).double(), correlated(30, 5), correlated(30, 5, seed=1)
    bad[3, 2], bad[7, 0], bad[8, 1] = math.nan, math.inf, -math.inf
    (layer,) = inspect(model, lambda m: (m(good), m(bad))).layers
    check(layer, [good])
    assert (layer.rows, layer.nonfinite, layer.notes) == (30, 3, ("3 values of the input are not finite",))
    (layer,) = inspect(model, bad).layers
    assert (layer.rows, layer.nonfinite) == (0, 3)
    assert math.isfinite(layer.scale)


def test_padding_does_not_count() -> None:
    model, x, valid = nn.Linear(5, 2).double(), correlated(8, 6, 5), torch.arange(6) < 4
    x[:, 5] = math.nan
    with ndpp.mask(valid.expand(8, 6)):
        (layer,) = inspect(model, x).layers
    check(layer, [x[:, :4].reshape(-1, 5)])
    assert (layer.rows, layer.nonfinite) == (32, 0)


# --- converted models ---


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(4 * 64, 5),
    ).double()


def numbers(found: Inspection) -> list[float]:
    names = ("condition", "rank", "offdiagonal")
    return [number for layer in found.layers for name in names for number in getattr(layer, name)]


def test_plain_and_converted_agree() -> None:
    plain, x = network(), correlated(300, 3, 4, 4)
    settings = Settings(block=4, eps=1e-3)
    converted = copy.deepcopy(plain)
    ndpp.convert_(converted, settings, calibration=[x])
    wanted = numbers(inspect(plain, x, settings=settings))
    assert numbers(inspect(converted, x)) == pytest.approx(wanted, rel=1e-6)
    assert [layer.kind for layer in inspect(converted, x).layers] == [
        "ndpp.Conv2d",
        "ndpp.ConvTranspose2d",
        "ndpp.Linear",
    ]
    other = Settings(shared=True, steps=5)  # which a living layer would not take
    assert numbers(inspect(converted, x, settings=other)) == pytest.approx(
        numbers(inspect(plain, x, settings=other)), rel=1e-6
    )
    assert numbers(inspect(plain, x, settings="classification")) == pytest.approx(
        numbers(inspect(plain, x, settings=Settings.paper()))
    )


# --- nothing changes ---


def state(model: nn.Module) -> dict[str, Any]:
    """Everything there is to see of a model, with tensors as bytes."""
    seen: dict[str, Any] = {"rng": torch.get_rng_state().numpy().tobytes()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        seen[name] = (id(tensor), tensor._version, tensor.detach().numpy().tobytes())
    for path, module in model.named_modules():
        hooks = {key: dict(value) for key, value in vars(module).items() if "hooks" in key}
        seen[f"{path} module"] = (id(module), type(module), module.training, sorted(vars(module)), hooks)
    return seen


class Restless(nn.Module):
    """Draws random numbers, counts its calls and caches, in evaluation as well; and may fail at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.table = nn.Embedding(5, 3, max_norm=0.1)
        self.layer = nn.Linear(3, 3)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.cached = x
        x = self.layer(x + torch.rand_like(x) + self.table(torch.arange(3)).sum())
        if self.fails:
            raise RuntimeError("as asked")
        return x


def everything() -> nn.Module:
    """A converted model in the middle of a step, attention, a norm, a user's hook and mixed modes."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "restless": Restless(),
            "plain": nn.Conv1d(3, 3, 1),
            "ours": ndpp.Linear(3, 3),
            "norm": nn.BatchNorm1d(3),
            "attention": nn.MultiheadAttention(3, 1, dropout=0.1),
        }
    )
    model["ours"].register_forward_pre_hook(lambda module, args: None)
    model["plain"].eval()
    return model


def run(model: Any) -> None:
    x = torch.randn(10, 3)
    x = model["norm"](model["ours"](x))
    model["attention"](x[:, None], x[:, None], x[:, None])
    model["restless"](model["plain"](x[:, :, None])[:, :, 0])


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_changes(fails: bool) -> None:
    model = everything()
    with torch.no_grad():
        run(model)
    awaiting = model["ours"](torch.randn(10, 3)).sum()  # type: ignore[operator]
    model["restless"].fails = fails  # type: ignore[assignment]
    before = state(model)
    if fails:
        with pytest.raises(RuntimeError, match="as asked"):
            inspect(model, run)
    else:
        assert len(inspect(model, run).measured) == 7
    after = state(model)
    touched = {"restless.calls", "restless.table.weight", "ours.step_rows"}  # in place, and put back
    for key, value in before.items():
        same = after[key] if key not in touched else (after[key][0], value[1], after[key][2])
        assert same == value, key
    assert before.keys() == after.keys()
    awaiting.backward()
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_compiled_model_is_looked_into() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(30, 4)
    compiled: Any = torch.compile(model, backend="eager")
    compiled(x)
    assert [layer.rows for layer in inspect(compiled, x).layers] == [30, 30]


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected an nn\.Module; got int"):
        inspect(3, torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 is lazy"):
        inspect(nn.Sequential(nn.LazyLinear(3)), torch.ones(2, 4))
    with pytest.raises(ValueError, match="no preset"):
        inspect(nn.Linear(2, 2), torch.ones(2, 2), settings="nonsense")


# --- showing ---


def deep(names: str = "a_rather_long_name", n: int = 3) -> nn.Module:
    model: nn.Module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))
    for _ in range(8):
        model = nn.Sequential(*[model]) if not names else nn.ModuleDict({names: model})
    return model


def through(model: Any) -> Tensor:
    while isinstance(model, nn.ModuleDict):
        model = next(iter(model.values()))
    return model(torch.randn(40, 4))


def test_the_plain_table_fits() -> None:
    found = inspect(deep(), through)
    lines = str(found).splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[2].startswith("a_rather")
    assert "…" in lines[2]
    assert " ".join(lines[0].split()) == "layer class blocks rows |x| condition → rank → off-diag → dead"
    median = np.median([layer.condition.before for layer in found.layers])
    assert found.medians["condition"].before == pytest.approx(median)
    assert f"({found.worst[0].condition.before:,.0f})" in str(found)
    assert found.worst[0].condition.before == max(layer.condition.before for layer in found.layers)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_table_of_rich(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    console = pytest.importorskip("rich.console").Console(width=width)
    inspect(nn.Sequential(nn.Linear(4, 4), Odd(4, 4)), torch.randn(40, 4)).print(console)
    shown = capsys.readouterr().out
    assert all(text in " ".join(shown.split()) for text in ("condition", "layers measured: 1", "forward: 1"))
    assert max(map(len, shown.splitlines())) <= width
    assert ("class" in shown.splitlines()[0]) == (width > 60)


@pytest.mark.parametrize("n", [0, 1, 3, 130])
def test_the_figure(n: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = inspect(nn.Sequential(*(nn.Linear(4, 4) for _ in range(n))), torch.randn(40, 4))
    figure = found.figure(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == 3
    assert len(figure.axes[-1].get_xticks()) <= 60


@pytest.mark.parametrize(("package", "show"), [("rich", Inspection.print), ("matplotlib", Inspection.figure)])
def test_missing_extras_name_the_remedy(package: str, show: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    found = inspect(nn.Linear(2, 2), torch.randn(9, 2))
    with pytest.raises(ImportError, match=rf"needs {package}: pip install 'ndpp\[inspect\]'"):
        show(found)
    assert "condition" in str(found)


# --- the command line ---

FACTORY = """
import torch
from torch import nn

def build(width=6, name="x", bias=True):
    return nn.Sequential(nn.Linear(4, width, bias), nn.Linear(width, 2))

def broken():
    raise RuntimeError("two\\nlines")

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
    def forward(self, words, weight):
        return self.layer(words * weight)

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_factory", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    np.save("rows.npy", np.random.default_rng(0).normal(size=(50, 4)))
    return tmp_path


def defined() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "my_factory"}
    exec(FACTORY, names)
    return names


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ndpp", *arguments], capture_output=True, text=True)


def test_a_process_of_its_own(folder: Path) -> None:
    done = command("inspect", "my_factory:build", "--shape", "50,4", "--set", "width=9", "--figure", "out.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1×9" in done.stdout
    assert "random data: it shows little about real data" in done.stdout
    assert (folder / "out.png").exists()


def test_an_error_is_one_line(folder: Path) -> None:
    done = command("inspect", "my_factory:broken", "--shape", "50,4")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m ndpp inspect: my_factory:broken failed: RuntimeError: two lines\n"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "inspect" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert (exit.value.code, capsys.readouterr().out) == (0, f"ndpp {ndpp.__version__}\n")


def test_files_in_and_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = defined()["build"]()
    torch.save({"state_dict": model.state_dict()}, "weights.pt")
    x = np.load("rows.npy").astype(np.float32)
    np.savez("rows.npz", x)
    torch.save((torch.from_numpy(x), torch.zeros(50)), "rows.pt")
    wanted = inspect(model, torch.from_numpy(x))
    for data in ("rows.npy", "rows.npz", "rows.pt"):
        options = ["--batch", data, "--weights", "weights.pt", "--json", "out.json"]
        assert main(["inspect", "my_factory:build", *options]) == 0
        assert capsys.readouterr().out == f"{wanted}\n"
    layers = json.loads((folder / "out.json").read_text())["layers"]
    assert [layer["condition"]["after"] for layer in layers] == [layer.condition.after for layer in wanted.layers]
    assert layers[0]["path"] == "0"


def test_mappings_safetensors_and_presets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"words": torch.randn(30, 4), "weight": torch.ones(4)}, "words.pt")
    options = ["--batch", "words.pt", "--settings", "transformer", "--json", "out.json"]
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(defined()["Words"]().state_dict(), "w.safetensors")
    assert main(["inspect", "my_factory:Words", *options, "--weights", "w.safetensors"]) == 0
    assert json.loads((folder / "out.json").read_text())["layers"][0]["rows"] == 30
    assert "random" not in capsys.readouterr().out


ERRORS = {
    "build --shape 3,4": "MODEL must be package.module:factory",
    "no_such_module:build --shape 3,4": "cannot import no_such_module",
    "my_factory:nothing --shape 3,4": "my_factory has no nothing",
    "my_factory:number --shape 3,4": "my_factory:number failed: TypeError",
    "my_factory:build --shape 3,4 --set wide=3": "unexpected keyword argument 'wide'",
    "my_factory:build --shape 3,4 --set wide": "--set takes KEY=VALUE",
    "builtins:dict --shape 3,4": "made a dict; expected an nn.Module",
    "my_factory:build --shape 3,x": "--shape takes positive sizes",
    "my_factory:build --shape 3,5": "did not take data of shape (3, 5)",
    "my_factory:build": "one of the arguments --batch --shape is required",
    "my_factory:build --batch none.npy": "cannot read none.npy: FileNotFoundError",
    "my_factory:build --batch my_factory.py": "--batch takes .npy, .npz, .pt",
    "my_factory:build --batch rows.npy --weights my_factory.py": "cannot read my_factory.py: not tensors alone",
    "my_factory:build --batch rows.npy --weights other.pt": "other.pt does not fit the model",
    "my_factory:build --batch rows.npy --settings best": "invalid choice: 'best'",
    "my_factory:build --batch rows.npy --figure no/where.png": "No such file or directory",
}


@pytest.mark.parametrize("line", ERRORS)
def test_errors(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"weight": torch.ones(1)}, "other.pt")
    try:
        code = main(["inspect", *line.split()])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    shown = capsys.readouterr().err
    assert code == 2
    assert ERRORS[line] in shown
    assert shown.startswith("python -m ndpp inspect: ")
    assert shown.count("\n") == 1


def test_values_of_set(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--batch", "rows.npy", "--set", "width=7", "--set", "name=some text", "--set", "bias=False"]
    assert main(["inspect", "my_factory:build", *arguments]) == 0
    assert "1×7" in capsys.readouterr().out


def test_importing_ndpp_imports_no_extra() -> None:
    code = "import sys, ndpp.inspection; print([m for m in ('rich', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
