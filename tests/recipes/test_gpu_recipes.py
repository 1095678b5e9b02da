"""The engine on a CUDA device: precision, memory format, compilation, exact resumption, loss of NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes.tiny import QUICK, TINY

from ndpp_recipes import Config, Trainer, checkpoints, export, open_run, recipe, train
from ndpp_recipes.bench import bench
from ndpp_recipes.errors import NonFiniteError
from ndpp_recipes.keys import parsed
from ndpp_recipes.parallel import Place, device_named

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SMALL = ["train_limit=128", "eval_limit=64", "batch_size=16", "epochs=1", "rows=64", "log_every=1"]


def _config(out: Path, *changes: str, norm: str = "ndpp") -> Config:
    return recipe("fashion", norm=norm, changes={**parsed([*SMALL, *changes]), "run.out": str(out)})


@pytest.mark.parametrize(
    "changes",
    [
        ["precision=bf16"],
        ["precision=fp16"],
        ["precision=bf16", "channels_last=true"],
        ["precision=bf16", "compile=true"],
        ["ema=0.9", "accumulate=2", "clip=1.0"],
        ["data.workers=2"],
    ],
    ids=" ".join,
)
def test_it_learns(tmp_path: Path, changes: list[str]) -> None:
    result = train(_config(tmp_path, "train_limit=512", "epochs=3", *changes), quiet=True)
    losses = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [line["loss"] for line in losses if line["kind"] == "train"]
    assert sum(found[-5:]) < 0.7 * sum(found[:5])
    assert result.metrics["top1"] > 30


@pytest.mark.parametrize("norm", ["ndpp", "bn"])
def test_a_deterministic_run_resumes_exactly(tmp_path: Path, norm: str) -> None:
    keys = ("deterministic=true", "save_every=1", "keep=9", "precision=bf16")
    whole = train(_config(tmp_path / "whole", *keys, norm=norm), quiet=True)
    run = _config(tmp_path / "halves", *keys, norm=norm)
    steps = Trainer(run, Place(0, 1, device_named("cuda"))).iterate()
    for _ in range(3):
        next(steps)
    steps.close()
    torch.rand(3, device="cuda")
    halves = train(run, resume=True, quiet=True)
    assert halves.metrics == whole.metrics
    states = [checkpoints.latest(result.out / "checkpoints") for result in (whole, halves)]
    for name, value in states[0]["model"].items():  # type: ignore[index]
        assert torch.equal(value, states[1]["model"][name]), name  # type: ignore[index]
    torch.use_deterministic_algorithms(False)


def test_nan_stops_before_the_step(tmp_path: Path) -> None:
    trainer = Trainer(_config(tmp_path), Place(0, 1, device_named("cuda")))
    trainer.model[3].register_forward_hook(lambda module, inputs, output: output * float("nan"))  # type: ignore[index]
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NonFiniteError, match=r"layer 3 \(Conv2d\) is the first"):
        trainer.train_step(next(trainer.loader.epoch(0)))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_bench_measures_memory() -> None:
    timings = bench("fashion", ["bn", "ndpp"], None, parsed(SMALL), 3)
    assert all(timing.milliseconds > 0 and timing.memory is not None and timing.memory > 0 for timing in timings)


@pytest.mark.parametrize("name", [name for name in TINY if name != "fashion"])
def test_every_recipe(tmp_path: Path, name: str) -> None:
    tiny = TINY[name]
    changes: dict[str, Any] = parsed([*QUICK, *tiny.changes, "run.precision=bf16"])
    data = str(tiny.make(tmp_path / "data"))
    config = recipe(name, data=data, changes={**changes, "run.steps": 4, "run.out": str(tmp_path / "run")})
    result = train(config, quiet=True)
    saved = open_run(result.out)
    # In bf16 the order of reductions, which differs between batches, shows in a metric.
    assert saved.evaluate()[saved.task.metric] == pytest.approx(result.best["value"], rel=0.05, abs=1.0)
    assert export(saved, "safetensors", tmp_path / "model.safetensors") < 1e-2
