"""python -m ndpp COMMAND: what the library does without writing a program."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import io
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from .inspection import Inspection, inspect
from .settings import PRESETS
from .version import __version__


class Failure(Exception):
    """What the user has to know, in one line, and the exit status."""

    def __init__(self, text: str, status: int = 2) -> None:
        super().__init__(text)
        self.status = status


# --- inspect ---


def inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="package.module:factory, for example torchvision.models:resnet18"
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--batch", type=Path, metavar="FILE", help="data: .npy, .npz (its first array) or .pt")
    data.add_argument("--shape", metavar="N,...", help="random normal data, for example 8,3,224,224")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an argument of the factory")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="a state_dict: .safetensors, or of torch.save")
    parser.add_argument("--settings", choices=[*PRESETS], help="decorrelate as the paper does for this task")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw the numbers into this file (.png, .pdf, .svg)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers into this file")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and data (default: 0)")
    parser.add_argument("--plain", action="store_true", help="no colours")


def inspect_main(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    model = _model(options.model, dict(map(_key_and_value, options.set)))
    if options.weights is not None:
        _load(model, options.weights)
    batch = torch.randn(_shape(options.shape)) if options.batch is None else _batch(options.batch)
    try:
        found = inspect(model, _cast(batch, model), settings=options.settings)
    except Exception as error:
        raise Failure(f"the model did not take {_described(batch)}: {_one_line(error)}") from error
    shown = sys.stdout.isatty() and not options.plain and importlib.util.find_spec("rich") is not None
    if shown:
        found.print()
    else:
        print(found)
    if options.batch is None:
        print("random data: it shows little about real data, whose correlations it does not have; see --batch")
    try:
        if options.json is not None:
            options.json.write_text(json.dumps(_as_json(found), indent=2, allow_nan=False) + "\n")
        if options.figure is not None:
            found.figure(options.figure)
    except (ImportError, OSError, ValueError) as error:
        raise Failure(_one_line(error)) from error


def _model(name: str, arguments: dict[str, Any]) -> nn.Module:
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise Failure(f"MODEL must be package.module:factory, for example torchvision.models:resnet18; got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        factory: Any = importlib.import_module(module_name)
    except Exception as error:
        raise Failure(f"cannot import {module_name}: {_one_line(error)}") from error
    for part in factory_name.split("."):
        if not hasattr(factory, part):
            raise Failure(f"{module_name} has no {factory_name}")
        factory = getattr(factory, part)
    if isinstance(factory, nn.Module):
        return factory
    try:
        model = factory(**arguments)
    except Exception as error:
        raise Failure(f"{name} failed: {_one_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise Failure(f"{name} made a {type(model).__name__}; expected an nn.Module")
    return model


def _key_and_value(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise Failure(f"--set takes KEY=VALUE; got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise Failure(f"--shape takes positive sizes, for example 8,3,224,224; got {text!r}")
    return shape


def _batch(path: Path) -> Any:
    """A tensor, or what was saved: a tuple or a mapping."""
    readers: dict[str, Callable[[Path], Any]] = {
        ".npy": lambda path: torch.from_numpy(np.load(path)),
        ".npz": lambda path: torch.from_numpy(next(iter(np.load(path).values()))),
        ".pt": lambda path: torch.load(path, map_location="cpu", weights_only=True),
    }
    if path.suffix not in readers:
        raise Failure(f"--batch takes {', '.join(readers)}; got {path}")
    return _read(readers[path.suffix], path)


def _load(model: nn.Module, path: Path) -> None:
    state = _read(_read_safetensors if path.suffix == ".safetensors" else _read_state, path)
    for key in ("state_dict", "model"):  # where training programs keep it
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    try:
        model.load_state_dict(state)
    except Exception as error:
        raise Failure(f"{path} does not fit the model: {_one_line(error)}") from error


def _read_state(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: Path) -> Any:
    return importlib.import_module("safetensors.torch").load_file(path)


def _read(reader: Callable[[Path], Any], path: Path) -> Any:
    try:
        return reader(path)
    except pickle.UnpicklingError as error:  # torch's text is about its own history
        raise Failure(
            f"cannot read {path}: not tensors alone (torch.load with weights_only=True refuses it)"
        ) from error
    except Exception as error:  # of torch, numpy, pickle, zip, safetensors
        raise Failure(f"cannot read {path}: {_one_line(error)}") from error


def _cast(batch: Any, model: nn.Module) -> Any:
    """Floating-point data in the precision of the model: numpy's is double."""
    if isinstance(batch, Tensor):
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), batch.dtype)
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: _cast(value, model) for key, value in batch.items()}
    return tuple(_cast(value, model) for value in batch) if isinstance(batch, (tuple, list)) else batch


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"data of shape {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return f"arguments {', '.join(map(str, batch))}"
    return _described(batch[0]) if isinstance(batch, (tuple, list)) and batch else f"a {type(batch).__name__}"


def _as_json(found: Inspection) -> Any:
    """Plain data; numbers that are not known (NaN) are null."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if hasattr(value, "_asdict"):
            value = value._asdict()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (tuple, list)) else value

    layers = [{f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)} for layer in found.layers]
    return plain({"ndpp": __version__, "medians": found.medians, "layers": layers})


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 400 else text[:400] + ' …'}"


# --- all commands ---


class Command(NamedTuple):
    """What argparse needs to know, and what to do. A module that has these names is a command as well."""

    arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], None]
    help: str


COMMANDS = {
    "inspect": Command(inspect_arguments, inspect_main, "how correlated the inputs of a model's layers are"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for all other errors."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        sys.exit(2)


def main(
    arguments: list[str] | None = None,
    *,
    prog: str = "python -m ndpp",
    about: str | None = __doc__,
    commands: Mapping[str, Command] = COMMANDS,
) -> int:
    """Run one of the commands; a Failure is printed in a line, and is exit status 2."""
    parser = _Parser(prog=prog, description=about)
    parser.add_argument("--version", action="version", version=f"ndpp {__version__}")
    parsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in commands.items():
        command.arguments(parsers.add_parser(name, help=command.help, description=command.help))
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # arrows, where the output is not UTF-8
    if options.command is None:
        parser.print_help()
        return 0
    try:
        commands[options.command].main(options)
    except Failure as failure:
        print(f"{prog} {options.command}: {failure}", file=sys.stderr)
        return failure.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
