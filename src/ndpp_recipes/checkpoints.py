"""Files that are either whole or not there, and the checkpoints of a run made of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .errors import RecipeError

_NAME = re.compile(r"step-(\d+)\.pt")


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the file, flush it to the disk, and only then give it its name."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name is in the folder
        finally:
            os.close(folder)
    except (OSError, RuntimeError) as error:  # torch wraps what the disk says
        raise RecipeError(
            f"cannot write {path}: {error}. What was saved before is whole: make room and go on with --resume auto"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_json(path: Path, value: Any) -> None:
    write_whole(path, lambda file: file.write((json.dumps(value, indent=2) + "\n").encode()))


def save(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """A checkpoint of this step, after which only the last `keep` remain."""
    path = folder / f"step-{step:08d}.pt"
    write_whole(path, lambda file: torch.save(state, file))
    for old in (*found(folder)[: -max(keep, 1)], *folder.glob(".step-*.partial")):  # a kill leaves the latter behind
        old.unlink(missing_ok=True)
    return path


def found(folder: Path) -> list[Path]:
    """The checkpoints there are, oldest first."""
    names = folder.iterdir() if folder.is_dir() else ()
    return sorted((p for p in names if _NAME.fullmatch(p.name)), key=lambda p: int(_NAME.fullmatch(p.name)[1]))  # type: ignore[index]


def load(path: Path) -> Any:
    """Tensors and plain values only: a checkpoint cannot run code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise RecipeError(f"{path} does not exist") from error
    except Exception as error:
        raise RecipeError(f"{path} is no checkpoint that can be read: {' '.join(str(error).split())[:200]}") from error


def latest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read; those that cannot are put aside. None if there never was one."""
    paths = found(folder)
    for path in reversed(paths):
        try:
            state: dict[str, Any] = load(path)
            return state
        except RecipeError as error:
            warnings.warn(f"{error}; put aside, going back to the one before it", stacklevel=2)
            with contextlib.suppress(FileNotFoundError):  # another rank may have been first
                path.rename(path.with_suffix(".unreadable"))
    if paths:
        raise RecipeError(f"none of the {len(paths)} checkpoints in {folder} can be read; begin anew with --overwrite")
    return None
