"""The tasks by name. Each module is imported when it is asked for, as some need libraries that others do not."""

from __future__ import annotations

import importlib
from pathlib import Path

from ..config import Config
from ..errors import ConfigError, MissingExtra
from .base import Meter, Task

__all__ = ["TASKS", "Meter", "Task", "make_task"]

TASKS = {
    "classification": "Classification",
    "detection": "Detection",
    "segmentation": "Segmentation",
    "translation": "Translation",
    "language": "Language",
}


def make_task(config: Config) -> Task:
    path = config.data.path
    if not path:
        raise ConfigError(f"{config.recipe} needs --data: a folder or file; docs/recipes.md shows how data lie there")
    if path != "fashion" and not Path(path).exists():
        raise ConfigError(f"--data {path}: there is no such folder or file")
    try:
        module = importlib.import_module(f".{config.task}", __package__)
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name).partition(".")[0], config.task) from error
    task: Task = getattr(module, TASKS[config.task])(config)
    return task
