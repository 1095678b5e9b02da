"""The loop: exact resumption from any step, accumulation, averages, and errors that say what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes.toy import Toy, config
from torch import nn

import ndpp
from ndpp_recipes import building, engine, parallel
from ndpp_recipes.config import Config, NormConfig
from ndpp_recipes.engine import Trainer
from ndpp_recipes.errors import ConfigError, NonFiniteError, RecipeError
from ndpp_recipes.loading import random_state
from ndpp_recipes.parallel import Place

PLACE = Place(0, 1, torch.device("cpu"))


class WithDropout(Toy):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "make_task", WithDropout)


def _config(out: Path, norm: str = "ndpp", **run: Any) -> Config:
    settings = ndpp.Settings(scale="standardize", rows=3)  # rows: its random numbers have to go on as well
    base = config(out=str(out), **{"epochs": 3, "log_every": 1, "save_every": 1, "eval_every": 2, "keep": 99, **run})
    return Config(**{**base.__dict__, "norm": NormConfig(name=norm, settings=settings)})


def _trained(config: Config, **options: Any) -> Trainer:
    trainer = Trainer(config, PLACE, **options)
    for _ in trainer.iterate():
        pass
    return trainer


def _same(a: Trainer, b: Trainer) -> None:
    for (name, x), (_, y) in zip(a.model.state_dict().items(), b.model.state_dict().items(), strict=True):
        assert torch.equal(x, y), name
    assert (a.step, a.metrics, a.best) == (b.step, b.metrics, b.best)


def _logged(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "throughput")} for line in lines]


@pytest.mark.parametrize("options", [{}, {"ema": 0.9}, {"accumulate": 2, "clip": 0.1}, {"precision": "bf16"}])
def test_a_run_stopped_anywhere_ends_in_the_same_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = _trained(_config(tmp_path / "whole", **options))
    for stop in range(1, whole.total, 4):
        run = _config(tmp_path / f"stopped-{stop}", **options)
        first = Trainer(run, PLACE)
        steps = first.iterate()
        for _ in range(stop):
            next(steps)
        steps.close()
        torch.rand(7)
        second = _trained(run, resume=True)
        _same(whole, second)
        if whole.ema is not None and second.ema is not None:
            for x, y in zip(whole.ema.parameters(), second.ema.parameters(), strict=True):
                assert torch.equal(x, y)
        assert _logged(Path(run.out)) == _logged(tmp_path / "whole")


def test_only_the_normalisation_differs_between_runs(tmp_path: Path) -> None:
    """The same start, order and augmentation for every method."""
    seen: dict[str, list[torch.Tensor]] = {}
    for norm in ("ln", "ndpp", "bn", "none"):
        trainer = Trainer(_config(tmp_path / norm, norm=norm), PLACE)
        linear = [m.weight.detach().clone() for m in trainer.model.modules() if isinstance(m, nn.Linear)]
        seen[norm] = [*linear, *(part[0] for step in trainer.loader.epoch(0) for part in step)]
    for norm in ("ndpp", "bn", "none"):
        assert all(torch.equal(a, b) for a, b in zip(seen["ln"], seen[norm], strict=True))


def test_accumulated_parts_are_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "make_task", Toy)  # without dropout
    whole = Trainer(_config(tmp_path / "a", "none", batch_size=8), PLACE)
    parts = Trainer(_config(tmp_path / "b", "none", batch_size=8, accumulate=2), PLACE)
    steps = list(parts.loader.epoch(0))
    for step in steps:
        together = tuple(torch.cat([part[i] for part in step]) for i in (0, 1))
        losses = whole.train_step([together]), parts.train_step(step)
        assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-5)
    for a, b in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_the_average_follows_its_formula(tmp_path: Path) -> None:
    trainer = Trainer(_config(tmp_path, "none", ema=0.8), PLACE)
    name = "0.weight"
    average = trainer.model.state_dict()[name].clone()
    for number, step in enumerate(trainer.loader.epoch(0)):
        trainer.train_step(step)
        now = trainer.model.state_dict()[name]
        average = now.clone() if number == 0 else 0.8 * average + 0.2 * now
    torch.testing.assert_close(trainer.evaluated.state_dict()[name], average)


def test_gradients_are_clipped(tmp_path: Path) -> None:
    trainer = Trainer(_config(tmp_path, "none", clip=1e-3), PLACE)
    trainer = Trainer(
        Config(
            **{**trainer.config.__dict__, "optimizer": trainer.config.optimizer.__class__(lr=1.0, weight_decay=0.0)}
        ),
        PLACE,
    )
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train_step(next(trainer.loader.epoch(0)))
    moved = (
        sum(float((p.detach() - q).square().sum()) for p, q in zip(trainer.model.parameters(), before, strict=True))
        ** 0.5
    )
    assert moved == pytest.approx(1e-3, rel=1e-3)


def test_a_folder_is_not_mixed_up(tmp_path: Path) -> None:
    _trained(_config(tmp_path))
    with pytest.raises(
        ConfigError, match=r"holds a run already \(step-00000015.pt\).*--resume auto.*--overwrite.*--out"
    ):
        Trainer(_config(tmp_path), PLACE)
    with pytest.raises(ConfigError, match=r"other settings: run.epochs was 3 and is 4"):
        Trainer(_config(tmp_path, epochs=4), PLACE, resume=True)
    assert _trained(_config(tmp_path), resume=True).step == 15
    other = _trained(_config(tmp_path, epochs=1), overwrite=True)
    assert other.step == 5
    assert {line["step"] for line in _logged(tmp_path)} == set(range(1, 6))


def test_overwriting_touches_nothing_before_all_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _trained(_config(tmp_path))
    before = sorted(path.name for path in tmp_path.rglob("*"))

    def fails(config: Config) -> None:
        raise RecipeError("no data")

    monkeypatch.setattr(engine, "make_task", fails)
    with pytest.raises(RecipeError, match="no data"):
        Trainer(_config(tmp_path), PLACE, overwrite=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


class Overflows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, torch.full((x.shape[1], x.shape[1]), 6e4))


def test_the_cause_is_looked_for_in_the_precision_of_the_run(tmp_path: Path) -> None:
    trainer = Trainer(_config(tmp_path, "none", precision="fp16"), PLACE)
    model: Any = trainer.model
    model[2] = Overflows()
    with pytest.raises(NonFiniteError, match=r"layer 2 \(Overflows\) is the first"):
        trainer.train_step(next(trainer.loader.epoch(0)))


def test_what_a_run_leaves_behind(tmp_path: Path) -> None:
    trainer = _trained(_config(tmp_path, keep=2))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000014.pt", "step-00000015.pt"}
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["metric"], result["final"], result["steps"]) == ("seen", {"seen": 7.0}, 15)
    assert result["best"] == {"step": 2, "value": 7.0}
    assert {"ndpp", "torch", "device", "date", "seed"} <= set(result)
    kinds = [(line["kind"], line["step"]) for line in _logged(tmp_path)]
    assert [step for kind, step in kinds if kind == "train"] == list(range(1, 16))
    assert [step for kind, step in kinds if kind == "eval"] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert trainer.result().best["value"] == 7.0
    pytest.importorskip("tensorboard")
    assert any((tmp_path / "tensorboard").iterdir())


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.zeros(())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("layer", r"step 1: the loss is nan: layer 2 \(Broken\) is the first whose output is not finite; its input is"),
        ("parameter", r"step 1: the loss is nan: parameter 0.weight is not finite"),
        ("batch", r"step 1: the loss is nan: the batch itself: its tensor 0, of shape \(4, 2\), has NaN or Inf"),
    ],
)
def test_a_loss_of_nan_names_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    trainer = Trainer(_config(tmp_path, "none"), PLACE)
    model: Any = trainer.model
    if fault == "layer":
        model[2] = Broken()
    elif fault == "parameter":
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
    else:
        collate = trainer.task.collate
        monkeypatch.setattr(
            type(trainer.task), "collate", lambda self, items: (collate(items)[0] * float("nan"), collate(items)[1])
        )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(NonFiniteError, match=message):
        for _ in trainer.iterate():
            pass
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), f"{name} was changed by a bad step"


def test_recalibration_before_the_last_evaluation(tmp_path: Path) -> None:
    plain = _trained(_config(tmp_path / "a"))
    exact = _trained(_config(tmp_path / "b", recalibrate=5))
    for a, b in zip(plain.model.parameters(), exact.model.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.cat([part[0] for step in exact.loader.epoch(engine.LATER) for part in step])
    rows = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, correction=0)
    first: Any = exact.model[0]  # type: ignore[index]
    torch.testing.assert_close(first.running_mean.flatten(), rows.mean(0), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision(tmp_path: Path, precision: str) -> None:
    trainer = _trained(_config(tmp_path, precision=precision))
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


def test_starting_from_weights_keeps_what_they_compute(tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain = WithDropout(config()).build().eval()
    torch.save(plain.state_dict(), tmp_path / "plain.pt")
    run = _config(tmp_path / "run").changed({"model.weights": str(tmp_path / "plain.pt")})
    trainer = Trainer(run, PLACE)
    x = torch.cat([part[0] for step in trainer.loader.epoch(0) for part in step])[:16]
    torch.testing.assert_close(trainer.model.eval()(x), plain(x), atol=1e-3, rtol=1e-3)
    torch.save({"0.weight": torch.ones(1)}, tmp_path / "wrong.pt")
    with pytest.raises(RecipeError, match=r"model.weights: .*wrong.pt does not fit toy"):
        Trainer(_config(tmp_path / "x").changed({"model.weights": str(tmp_path / "wrong.pt")}), PLACE)


def test_switches(tmp_path: Path) -> None:
    benchmark, drawn = torch.backends.cudnn.benchmark, torch.get_rng_state()
    with building.prepared_torch(_config(tmp_path, deterministic=True).run):
        assert torch.are_deterministic_algorithms_enabled()
        torch.rand(3)
    assert not torch.are_deterministic_algorithms_enabled()
    engine.train(_config(tmp_path, epochs=1), quiet=True)
    assert torch.backends.cudnn.benchmark == benchmark
    assert torch.equal(torch.get_rng_state(), drawn)
    for wrong, message in (({"ema": 1.5}, "between 0 and 1"), ({"device": "meta"}, "auto, cpu, cuda")):
        with pytest.raises(ConfigError, match=message):
            engine.train(_config(tmp_path / "other", **wrong))


def test_a_run_killed_between_its_last_checkpoint_and_its_result_writes_it(tmp_path: Path) -> None:
    whole = _trained(_config(tmp_path))
    (tmp_path / "result.json").unlink()
    _trained(_config(tmp_path), resume=True)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == whole.total


def test_runs_begin_with_the_same_state_of_all_generators(tmp_path: Path) -> None:
    first, second = (Trainer(_config(tmp_path / name), PLACE) and random_state() for name in ("first", "second"))
    assert torch.equal(first["numpy"][1], second["numpy"][1])
    assert first["python"] == second["python"]


def test_overwriting_and_restarts_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match=r"--overwrite under torchrun --max-restarts.*--resume auto"):
        Trainer(_config(tmp_path), PLACE, overwrite=True)


def test_ranks_that_see_different_folders_do_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "gathered", lambda value, place: [7, None])
    with pytest.raises(RecipeError, match=r"rank 0: step 7, rank 1: none.*folder that all ranks see"):
        Trainer(_config(tmp_path), PLACE)
