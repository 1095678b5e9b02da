"""Every recipe on tiny data in its standard format: train, resume, evaluate, export, all normalisations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes.tiny import QUICK, TINY

import ndpp
from ndpp_recipes import NORMS, RECIPES, Config, RecipeError, Trainer, export, open_run, recipe, train
from ndpp_recipes.keys import parsed
from ndpp_recipes.parallel import Place
from ndpp_recipes.race import Race

PLACE = Place(0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("data")
    return {name: str(tiny.make(root / name)) for name, tiny in TINY.items()}


def _config(name: str, norm: str, data: dict[str, str], out: Path, **more: Any) -> Config:
    changes = {**parsed([*QUICK, *TINY[name].changes]), "run.steps": 4, "eval_every": 2, "save_every": 2, **more}
    return recipe(name, norm=norm, data=data[name], changes={**changes, "run.out": str(out)})


def test_every_recipe_has_tiny_data() -> None:
    assert set(TINY) == set(RECIPES)


@pytest.mark.parametrize("name", list(TINY))
def test_train_resume_evaluate_export(name: str, data: dict[str, str], tmp_path: Path) -> None:
    whole = train(_config(name, "ndpp", data, tmp_path / "whole"), quiet=True)
    run = _config(name, "ndpp", data, tmp_path / "halves")
    first = Trainer(run, PLACE)
    steps = first.iterate()
    for _ in range(3):  # one step after the checkpoint of step 2
        next(steps)
    steps.close()
    halves = train(run, resume=True, quiet=True)
    assert halves.metrics == whole.metrics
    last = [open_run(result.out, "last") for result in (whole, halves)]
    for (key, a), b in zip(last[0].model.state_dict().items(), last[1].model.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    assert last[0].evaluate() == pytest.approx(whole.metrics)
    saved = open_run(whole.out)
    assert saved.evaluate()[saved.task.metric] == pytest.approx(whole.best["value"])
    path = tmp_path / "model.safetensors"
    assert export(saved, "safetensors", path) < 1e-3
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("name", ["cifar", "vit-small", "deeplab", "translation", "language", "mask-rcnn"])
@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "ndpp"])
def test_every_normalisation_in_every_recipe(name: str, norm: str, data: dict[str, str], tmp_path: Path) -> None:
    config = _config(name, norm, data, tmp_path, **{"run.steps": 2, "optimizer.lr": 1e-3})
    transformer = name in ("vit-small", "translation", "language")
    if norm == "frozenbn" and transformer:
        with pytest.raises(RecipeError, match="BatchNorm"):
            Trainer(config, PLACE)
        return
    trainer = Trainer(config, PLACE)
    losses = [trainer.train_step(parts)["loss"] for _, parts in zip(range(2), trainer.loader.epoch(0), strict=False)]
    assert len(losses) >= 1
    assert all(loss > 0 for loss in losses)


@pytest.mark.parametrize("name", ["fashion", "deeplab", "translation", "language", "faster-rcnn"])
def test_exported_programs_compute_what_the_model_does(name: str, data: dict[str, str], tmp_path: Path) -> None:
    result = train(_config(name, "ndpp", data, tmp_path / "run", **{"run.steps": 2}), quiet=True)
    saved = open_run(result.out)
    assert export(saved, "torch", tmp_path / "model.pt2") < 1e-3
    program = torch.export.load(tmp_path / "model.pt2").module()
    inputs = tuple(torch.cat([value] * 3) for value in saved.task.example())  # a batch that was not traced
    if name == "language":
        inputs = (inputs[0][:, :9],)
    with torch.no_grad():
        expected = saved.task.exportable(saved.model)(*inputs)
        found = program(*inputs)
    for a, b in zip(_flat(expected), _flat(found), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["fashion", "language"])
def test_onnx_computes_what_the_model_does(name: str, data: dict[str, str], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    result = train(_config(name, "ndpp", data, tmp_path / "run", **{"run.steps": 2}), quiet=True)
    saved = open_run(result.out)
    export(saved, "onnx", tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    inputs = [torch.cat([x] * 3) for x in saved.task.example()]
    inputs = [torch.randn(x.shape) if x.is_floating_point() else x for x in inputs]
    named = {node.name: x.numpy() for node, x in zip(session.get_inputs(), inputs, strict=True)}
    with torch.no_grad():
        expected = saved.task.exportable(saved.model)(*inputs)
    torch.testing.assert_close(torch.from_numpy(session.run(None, named)[0]), _flat(expected)[0], atol=1e-3, rtol=1e-3)


def test_a_safetensors_file_loads_into_a_network_built_again(data: dict[str, str], tmp_path: Path) -> None:
    """As docs/recipes.md says."""
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_model

    result = train(_config("cifar", "ndpp", data, tmp_path / "run", **{"run.steps": 2}), quiet=True)
    saved = open_run(result.out)
    path = tmp_path / "model.safetensors"
    export(saved, "safetensors", path)
    with safetensors.safe_open(path, "pt") as file:
        about = file.metadata()
    assert (about["model"], about["scale"]) == ("resnet18-cifar", "l1")
    model = saved.task.build().eval()
    ndpp.convert_(model, ndpp.Settings(scale=about["scale"]))
    ndpp.fold_(model)
    load_model(model, path)
    x = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model(x), saved.model(x), atol=1e-4, rtol=1e-4)


def _flat(output: Any) -> list[torch.Tensor]:
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("name", ["cifar", "language"])
def test_data_that_would_give_outputs_another_meaning(name: str, data: dict[str, str], tmp_path: Path) -> None:
    """Other classes, or a vocabulary of other text: the numbers would be wrong without a word."""
    result = train(_config(name, "bn", data, tmp_path / "run", **{"run.steps": 1}), quiet=True)
    other = TINY[name].make(tmp_path / "other")
    if name == "cifar":
        for split in ("train", "test"):
            (other / split / "red").rename(other / split / "zebra")
    else:
        (other / "train.txt").write_text("quite another text, of other words\n" * 300)
    with pytest.raises(RecipeError, match=r"makes another (classes|tokenizer).json than .*run"):
        open_run(result.out, data=str(other))


def test_only_sgd_races_at_rate_1(tmp_path: Path) -> None:
    race = Race("vit-small", ["ln", "ndpp"], [0], tmp_path, data="x")
    assert [Path(config.out).name for config in race.configs()] == [
        "ln-tuned-seed0",
        "ndpp-tuned-seed0",
        "ndpp-lr1-seed0",
    ]


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"is no run: it has no config.json"):
        open_run(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"no configuration of this version"):
        open_run(tmp_path)
