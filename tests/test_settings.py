"""Settings: validated, frozen, short."""

import copy
import dataclasses
import inspect
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import ndpp
from ndpp import Settings


def test_presets() -> None:
    paper = Settings.paper()
    assert (paper.solver, paper.steps, paper.eps, paper.shared, paper.stride, paper.rows) == (
        "newton", 5, 1e-5, True, 3, None,
    )  # fmt: skip
    assert (paper.shrinkage, paper.block) == (0.0, None)
    exact = Settings.exact()
    assert (paper.scale_positions, exact.scale_positions) == (None, None)
    assert (exact.solver, exact.rows, exact.stride, exact.eps, exact.shrinkage) == ("eigh", None, None, 0.0, 0.0)
    assert exact.block is not None
    assert exact.block > 1e6
    assert Settings.paper(scale="l1").scale == "l1"
    assert Settings.paper(rows=100).stride is None
    assert Settings(stride=4).replace(stride=None) == Settings()
    assert ndpp.Conv2d(2, 2, 3, settings=Settings(stride=4))._plan.rows is None  # in place of the default
    assert Settings(block=np.int64(4), eps=np.float32(0.5)).block == 4


def test_frozen_keyword_only_hashable_and_copyable() -> None:
    settings = Settings(scale="l1", steps=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.steps = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        Settings("l1")  # type: ignore[misc]
    assert hash(settings) == hash(Settings(steps=4, scale="l1"))
    assert pickle.loads(pickle.dumps(settings)) == copy.deepcopy(settings) == settings
    assert settings.replace(steps=2).steps == 2


def test_repr_shows_what_differs() -> None:
    assert repr(Settings()) == "Settings()"
    assert (
        repr(Settings.paper())
        == "Settings(scale_positions=None, features=None, shared=True, solver='newton', steps=5, rows=None, stride=3)"
    )
    assert repr(Settings(scale="std", freeze=True)) == "Settings(scale='std', freeze=True)"
    assert eval(repr(Settings.paper())) == Settings.paper()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": "l2"}, "scale must be one of 'none', 'l1', 'rms', 'std', 'standardize'; got 'l2'"),
        ({"scale": ["l1"]}, "scale must be one of"),
        ({"solver": "cholesky"}, "solver must be one of 'quartic', 'newton', 'minimax', 'eigh'"),
        ({"nonfinite": "ignore"}, "nonfinite must be one of"),
        ({"block": 0}, "block must be None or an integer of at least 1; got 0"),
        ({"block": 6.5}, "block must be"),
        ({"rows": -1}, "rows must be"),
        ({"rows": True}, "rows must be"),
        ({"stride": 0, "rows": None}, "stride must be"),
        ({"stride": 3, "rows": 64}, "two ways to sample"),
        ({"steps": 0}, "steps must be an integer from 1 to 5 for solver='quartic'"),
        ({"steps": 51, "solver": "newton"}, "steps must be an integer from 1 to 50"),
        ({"steps": 2.0}, "steps must be"),
        ({"eps": -1e-5}, "eps must be a finite number of at least 0"),
        ({"eps": float("nan")}, "eps must be"),
        ({"shrinkage": float("inf")}, "shrinkage must be"),
        ({"momentum": 0.0}, r"momentum must be None .* in \(0, 1\]; got 0.0"),
        ({"momentum": 1.5}, "momentum must be"),
        ({"shared": 1}, "shared must be True or False"),
        ({"freeze": "yes"}, "freeze must be"),
        ({"sync": "all"}, "sync must be True, False or a torch.distributed process group"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**change)


def test_every_field_is_documented() -> None:
    text = inspect.getdoc(Settings) or ""
    for field in dataclasses.fields(Settings):
        assert f"{field.name}: " in text


def test_numbers_of_numpy_are_numbers() -> None:
    settings = Settings(rows=np.int64(16), eps=np.float64(1e-3), shrinkage=Fraction(1, 10))
    assert settings == Settings(rows=16, eps=1e-3, shrinkage=0.1)
    layer = ndpp.Conv2d(np.int64(4), 3, (np.int64(3), 1), groups=np.int64(2) - 1, settings=settings)
    layer(torch.randn(2, 4, 6, 6)).sum().backward()
    assert layer.weight.grad is not None
