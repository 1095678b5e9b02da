"""Callbacks: real tiny trainings in both libraries, against statistics computed from the data itself."""

import copy
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ndpp
from ndpp.decorrelated import Decorrelated
from ndpp_recipes import callbacks
from ndpp_recipes.errors import MissingExtra, RecipeError

lightning = pytest.importorskip("lightning.pytorch")
transformers = pytest.importorskip("transformers")

PAGE = Path(__file__).parents[2] / "docs" / "callbacks.md"
X = (torch.randn(96, 6, generator=torch.Generator().manual_seed(1)) @ torch.diag(torch.arange(1.0, 7.0))).contiguous()
NAMES = ["condition_median", "condition_worst", "decorrelated_median", "decorrelated_worst"]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def net() -> nn.Module:
    return nn.Sequential(ndpp.Linear(6, 8), nn.ReLU(), ndpp.Linear(8, 1))


def exact_first_moments(model: nn.Module) -> None:
    """The first layer sees the data as it is."""
    first = next(m for m in model.modules() if isinstance(m, Decorrelated))
    torch.testing.assert_close(first.running_mean[0], X.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(first.running_cov[0], torch.cov(X.T, correction=0), rtol=1e-4, atol=1e-4)


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net: Any = model
        self.seen: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.seen.append(batch[0][:, 0].tolist())
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        uncached = copy.deepcopy(self.net)(batch[0])
        self.current = torch.allclose(self(batch[0]), uncached)  # computes with the statistics it holds
        exact = torch.cov(X.T, correction=0)
        self.exact = torch.allclose(self.net[0].running_cov[0], exact, rtol=1e-4, atol=1e-4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Memory(lightning.loggers.logger.Logger):
    """A logger that keeps what it gets."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.got: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.got.append((step or 0, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def fit(callback: Any, model: nn.Module, *, validate: bool = False, **loading: Any) -> tuple[Module, Memory]:
    torch.manual_seed(0)
    module, logger = Module(model), Memory()
    loader = DataLoader(TensorDataset(X), batch_size=32, shuffle=True, **loading)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[callback] if callback else [],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        val_check_interval=2 if validate else None,  # within an epoch of three batches
    )
    trainer.fit(module, loader, DataLoader(TensorDataset(X[:8]), batch_size=8) if validate else None)
    return module, logger


def same_parameters(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def ours(logger: Memory) -> list[tuple[int, dict[str, float]]]:
    return [(step, values) for step, values in logger.got if "ndpp/condition_worst" in values]


def test_conditioning_is_that_of_the_covariance() -> None:
    model = net()
    ndpp.recalibrate_(model, [X])
    values = torch.linalg.eigvalsh(torch.cov(X.double().T, correction=0))
    found = callbacks.conditioning(model)
    assert list(found) == ["0", "2"]
    assert found["0"].before == pytest.approx(float(values[-1] / values[0]), rel=1e-3)
    assert found["0"].after < found["0"].before
    summary = callbacks.conditioning_summary(model)
    assert list(summary) == [f"ndpp/{name}" for name in NAMES]
    assert summary["ndpp/condition_worst"] == max(change.before for change in found.values())


def test_exact_settings_leave_nothing_to_correct() -> None:
    model = nn.Sequential(ndpp.Linear(6, 1, settings=ndpp.Settings.exact()))
    ndpp.recalibrate_(model, [X])
    assert callbacks.conditioning(model)["0"].after == pytest.approx(1.0, abs=1e-2)


def test_layers_without_data_are_left_out() -> None:
    assert callbacks.conditioning(net()) == {}
    assert callbacks.conditioning_summary(net()) == {}


def test_lightning_recalibrates_at_the_end_and_logs() -> None:
    module, logger = fit(callbacks.LightningCallback(), net())
    exact_first_moments(module)
    ((step, values),) = ours(logger)
    assert step == 6
    assert values == callbacks.conditioning_summary(module)


def test_lightning_uses_so_many_batches_only() -> None:
    module, _ = fit(callbacks.LightningCallback(batches=1), net())
    assert int(module.net[0].num_batches_tracked) == 1


@pytest.mark.parametrize("loading", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["plain", "persistent"])
def test_lightning_before_evaluations_leaves_training_as_it_was(loading: dict[str, Any]) -> None:
    model = net()
    plain, _ = fit(None, copy.deepcopy(model), validate=True, **loading)
    module, logger = fit(callbacks.LightningCallback(every=1), model, validate=True, **loading)
    assert module.exact
    assert module.current
    assert not plain.exact
    assert module.seen == plain.seen  # the same batches in the same order
    assert same_parameters(module, plain)
    assert [step for step, _ in ours(logger)] == [2, 5, 6]


def test_lightning_with_a_loader_and_a_feed_of_ones_own() -> None:
    callback = callbacks.LightningCallback(loader=[{"rows": X}], feed=lambda model, batch: model(batch["rows"]))
    module, _ = fit(callback, net())
    exact_first_moments(module)
    assert int(module.net[0].num_batches_tracked) == 1


def test_several_loaders_are_not_guessed_at() -> None:
    callback = callbacks.LightningCallback()
    with pytest.raises(RecipeError, match="loader="):
        callback.refresh_(net(), {"a": DataLoader(TensorDataset(X))}, None)


def test_a_model_without_ndpp_layers_is_refused_before_training() -> None:
    with pytest.raises(RecipeError, match="no ndpp layers"):
        fit(callbacks.LightningCallback(), nn.Sequential(nn.Linear(6, 1)))


@pytest.mark.parametrize("options", [{"batches": 0}, {"every": -1}])
def test_arguments(options: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match="must be at least"):
        callbacks.LightningCallback(**options)


def test_callbacks_pickle() -> None:
    for name in ("LightningCallback", "TransformersCallback"):
        again = pickle.loads(pickle.dumps(getattr(callbacks, name)(batches=7)))
        assert again.batches == 7
        assert type(again) is getattr(callbacks, name)


class Regression(nn.Module):
    """Takes and gives what transformers' Trainer does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net: Any = model
        self.seen: list[list[float]] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.net(x)
        if torch.is_grad_enabled():
            self.seen.append(x[:, 0].tolist())
        return {"loss": (y - labels).square().mean(), "logits": y}


def hf(tmp_path: Path, model: nn.Module, options: dict[str, Any] | None, **arguments: Any) -> tuple[Regression, Any]:
    arguments = {"max_steps": 6, "save_strategy": "no", "logging_strategy": "no", **arguments}
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=32,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    torch.manual_seed(0)
    data = [{"x": row, "labels": row[:1]} for row in X]
    module = Regression(model)
    trainer = transformers.Trainer(module, settings, train_dataset=data, eval_dataset=data[:8])
    if options is not None:
        log = {"log": trainer.log} if options.pop("logs", True) else {}
        trainer.add_callback(callbacks.TransformersCallback(**log, **options))
    trainer.train()
    return module, trainer


def conditions(trainer: Any) -> list[int]:
    return [line["step"] for line in trainer.state.log_history if "ndpp/condition_worst" in line]


@pytest.mark.parametrize("logs", [True, False], ids=["trainer.log", "log_history"])
def test_transformers_recalibrates_at_the_end_and_logs(logs: bool, tmp_path: Path) -> None:
    module, trainer = hf(tmp_path, net(), {"logs": logs})
    exact_first_moments(module)
    assert conditions(trainer) == [6]
    line = trainer.state.log_history[-1]
    assert {name: line[name] for name in line if name.startswith("ndpp/")} == callbacks.conditioning_summary(module)


def test_transformers_before_evaluations_leaves_training_as_it_was(tmp_path: Path) -> None:
    often: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 2}
    model = net()
    plain, _ = hf(tmp_path / "plain", copy.deepcopy(model), None, **often)
    module, trainer = hf(tmp_path / "ours", model, {"every": 2, "batches": 1}, **often)
    assert module.seen == plain.seen
    assert same_parameters(module, plain)
    active = trainer.accelerator.gradient_state.active_dataloader
    assert active is trainer.callback_handler.train_dataloader  # accelerate has not taken notice of our pass
    assert conditions(trainer) == [2, 4, 6, 6]  # every second evaluation, and the end


def test_transformers_refuses_a_plain_model(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no ndpp layers"):
        hf(tmp_path, nn.Linear(6, 1), {})


def test_without_the_libraries() -> None:
    """In a process where neither can be imported."""
    code = (
        "import sys\n"
        "absent = ('lightning', 'lightning.pytorch', 'pytorch_lightning', 'transformers')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "from ndpp_recipes import callbacks\n"
        "for name in ('LightningCallback', 'TransformersCallback'):\n"
        "    try:\n"
        "        getattr(callbacks, name)\n"
        "    except callbacks.MissingExtra as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["LightningCallback", "needs", "lightning:"],
        ["TransformersCallback", "needs", "transformers:"],
    ]
    assert issubclass(MissingExtra, RecipeError)


def test_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(compile(code, PAGE.name, "exec"), {"__name__": "documentation"})
    assert "net.2: condition number" in capsys.readouterr().out
