"""Configurations: typed keys, nearest matches, JSON, and the recipes and presets made of them."""

from __future__ import annotations

import json

import pytest

import ndpp
from ndpp_recipes.config import NORMS, Config, ImageData, ModelConfig, from_dict
from ndpp_recipes.errors import ConfigError
from ndpp_recipes.keys import keys, parsed
from ndpp_recipes.recipes import PRESETS, RECIPES, card, recipe


@pytest.fixture
def config() -> Config:
    return Config(recipe="x", task="classification", model=ModelConfig(name="m"), data=ImageData())


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("lr=1e-3", "optimizer.lr", 1e-3),
        ("epochs=3", "run.epochs", 3),
        ("run.steps=none", "run.steps", None),
        ("run.steps=7", "run.steps", 7),
        ("steps=7", "run.steps", 7),
        ("momentum=0", "optimizer.momentum", 0.0),
        ("compile=true", "run.compile", True),
        ("compile=False", "run.compile", False),
        ("precision=bf16", "run.precision", "bf16"),
        ("betas=0.8,0.9", "optimizer.betas", (0.8, 0.9)),
        ("data.mean=0.5", "data.mean", (0.5,)),
        ("data.mean=(0.1, 0.2)", "data.mean", (0.1, 0.2)),
        ("rows=256", "norm.settings.rows", 256),
        ("rows=none", "norm.settings.rows", None),
        ("sync=false", "norm.settings.sync", False),
        ("model.name=007", "model.name", "007"),
        ("data.path=a=b", "data.path", "a=b"),
    ],
)
def test_a_key_is_set_with_its_type(config: Config, text: str, key: str, value: object) -> None:
    found = keys(config.changed(parsed([text])))[key]
    assert found == value
    assert type(found) is type(value)


def test_options_of_a_model_are_free(config: Config) -> None:
    changed = config.changed(parsed(["model.options.depth=3", "model.options.kind=wide"]))
    assert changed.model.options == {"depth": 3, "kind": "wide"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr=1", r"no key 'lrr'; did you mean 'optimizer.lr'"),
        ("optimiser.lr=1", r"did you mean 'optimizer.lr'"),
        ("zzzz=1", r"lists all keys"),
        ("name=x", r"'name' could be model.name or norm.name or optimizer.name or schedule.name"),
        ("lr=fast", r"optimizer.lr: expected a number; got 'fast'"),
        ("lr=none", r"optimizer.lr: expected a number; got 'none'"),
        ("epochs=2.5", r"run.epochs: expected an integer; got '2.5'"),
        ("epochs=true", r"run.epochs: expected an integer; got 'true'"),
        ("sync=3", r"norm.settings.sync: expected true or false; got '3'"),
        ("compile=3", r"run.compile: expected true or false; got '3'"),
        ("precision=f8", r"run.precision: expected one of fp32, bf16, fp16; got 'f8'"),
        ("betas=0.9", r"optimizer.betas: expected 2 values separated by commas; got '0.9'"),
        ("rows=-1", r"norm.settings.rows: .*at least 1; got -1"),
        ("epochs=0", r"run.epochs: expected at least 1; got 0"),
        ("steps=0", r"run.steps: expected at least 1; got 0"),
        ("log_every=0", r"run.log_every: expected at least 1; got 0"),
        ("clip=0", r"run.clip: expected more than 0; got 0"),
        ("lr=-1", r"optimizer.lr: expected at least 0; got -1"),
        ("lr=nan", r"optimizer.lr: "),
        ("workers=-1", r"data.workers: expected at least 0; got -1"),
        ("warmup=-5", r"schedule.warmup: expected at least 0; got -5"),
        ("label_smoothing=1", r"run.label_smoothing: expected a number from 0 to less than 1; got 1.0"),
        ("lr", r"KEY=VALUE; got 'lr'"),
        ("=3", r"KEY=VALUE; got '=3'"),
    ],
)
def test_bad_keys_and_values(config: Config, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.changed(parsed([text]))


@pytest.mark.parametrize("name", [*RECIPES, *PRESETS])
@pytest.mark.parametrize("norm", NORMS)
def test_every_recipe_survives_json(name: str, norm: str) -> None:
    config = recipe(name, norm=norm, data="somewhere")
    assert from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.norm.name == norm
    assert config.data.path == "somewhere"
    assert card(name)


def test_ndpp_has_a_scale_in_every_recipe() -> None:
    for name in RECIPES:
        assert recipe(name, norm="ndpp").norm.settings.scale != "none"


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'cifr'; did you mean 'cifar'"):
        recipe("cifr")
    with pytest.raises(ConfigError, match=r"no normalisation 'batchnorm'.*ndpp, nd, bn"):
        recipe("cifar", norm="batchnorm")


def test_the_papers_numbers() -> None:
    """Section "Image Classification" and the supplement: batch 2048, cosine, 90 epochs, weight decays, lr 1.0."""
    ours, theirs = recipe("paper-resnet50"), recipe("paper-resnet50", norm="syncbn")
    for config in (ours, theirs):
        assert (config.run.batch_size, config.run.epochs, config.schedule.name) == (2048, 90, "cosine")
        assert config.schedule.warmup == 0
    assert (ours.optimizer.weight_decay, theirs.optimizer.weight_decay) == (1e-3, 5e-4)
    assert ours.norm.settings == ndpp.Settings.paper(scale="l1", sync=True)
    vgg, dense = recipe("paper-vgg11"), recipe("paper-densenet121")
    assert (vgg.optimizer.weight_decay, dense.optimizer.weight_decay) == (5e-4, 1e-3)
    single = recipe("paper-resnet50-lr1").optimizer
    assert (single.lr, single.momentum) == (1.0, 0.0)
    for batch, decay in ((128, 2.5e-4), (256, 5e-4), (512, 1e-3)):
        large = recipe(f"paper-mask-rcnn-{batch}")
        assert (large.run.batch_size, large.optimizer.weight_decay) == (batch, decay)
        assert (large.optimizer.lr, large.schedule.warmup) == (0.1, 0)
    scratch = recipe("paper-mask-rcnn-scratch")
    assert scratch.optimizer.lr == 0.1
    deeplab = recipe("paper-deeplab-scratch")
    assert (deeplab.schedule.power, deeplab.norm.settings.scale) == (0.9, "none")  # reported without scale invariance
    assert recipe("paper-mask-rcnn").norm.settings == ndpp.Settings.paper(scale="l1", stride=5, sync=True)
    assert recipe("paper-vit").run.steps == 10_000
