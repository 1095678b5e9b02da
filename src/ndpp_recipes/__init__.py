"""Recipes: every task of the paper, on models, data formats and metrics of the ecosystem.

config = recipe("cifar", norm="ndpp", data="cifar100", changes={"optimizer.lr": 1.0})
result = train(config)
saved = open_run(result.out)
"""

from .config import NORMS, Config
from .engine import Result, Trainer, train
from .errors import RecipeError
from .recipes import PRESETS, RECIPES, recipe
from .saved import Saved, export, open_run

__all__ = [
    "NORMS",
    "PRESETS",
    "RECIPES",
    "Config",
    "RecipeError",
    "Result",
    "Saved",
    "Trainer",
    "export",
    "open_run",
    "recipe",
    "train",
]
