"""A run opened again: evaluated, or exported as a plain network."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ndpp
from ndpp.feeding import tensors

from . import checkpoints
from .building import autocast, build_model, evaluate, on_device
from .config import Config, from_dict
from .errors import ConfigError, MissingExtra, RecipeError
from .loading import Loader
from .parallel import Place, device_named
from .tasks import Task, make_task


@dataclass(frozen=True, repr=False)
class Saved:
    """A trained model, its task and its data."""

    config: Config
    task: Task
    loader: Loader
    model: nn.Module
    step: int

    def __repr__(self) -> str:
        return f"Saved({self.config.recipe}, {self.config.model.name}, {self.config.norm.name}, step {self.step})"

    def evaluate(self) -> dict[str, float]:
        """The metrics over the evaluation data."""
        device = self.loader.place.device
        return evaluate(
            self.model,
            self.loader,
            lambda: autocast(device, self.config.run.precision),
            lambda batch: on_device(batch, device, self.config.run.channels_last),
        )


def open_run(
    folder: str | Path, checkpoint: str = "best", *, data: str | None = None, changes: Mapping[str, Any] | None = None
) -> Saved:
    """The model of a run: at its `best` evaluation, its `last` checkpoint, or a checkpoint file."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise RecipeError(f"{folder} is no run: it has no config.json; expected a folder that `ndpp train` wrote")
    try:
        config = from_dict(json.loads((folder / "config.json").read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise RecipeError(f"{folder / 'config.json'} is no configuration of this version: {error}") from error
    config = config.changed({**({"data.path": data} if data is not None else {}), **(changes or {})})
    state = _state(folder, checkpoint)
    device = device_named(config.run.device)
    task = make_task(config)
    _refuse_other_files(task, folder)
    loader = Loader(task, Place(0, 1, device))
    model, _ = build_model(loader, device, fresh=False)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise RecipeError(f"{folder}: the checkpoint does not fit the model of config.json: {error}") from error
    return Saved(config, task, loader, model.eval(), int(state["step"]))


def _refuse_other_files(task: Task, folder: Path) -> None:
    """A model is only as good as its vocabulary and its classes: other data may have others."""
    for name, text in task.files().items():
        if (folder / name).is_file() and (folder / name).read_text() != text:
            raise RecipeError(
                f"{task.config.data.path} makes another {name} than {folder / name}: outputs would mean other things; "
                "use data with the same training text or classes"
            )


def _state(folder: Path, checkpoint: str) -> dict[str, Any]:
    if checkpoint == "last":
        state = checkpoints.latest(folder / "checkpoints")
        if state is None:
            raise RecipeError(f"{folder} has no checkpoint yet")
    else:
        path = folder / "best.pt" if checkpoint == "best" else Path(checkpoint)
        if checkpoint == "best" and not path.exists():
            raise RecipeError(f"{folder} has no best.pt: no evaluation has been made yet; use --checkpoint last")
        state = checkpoints.load(path)
    if not isinstance(state, dict) or not {"model", "step"} <= set(state):
        raise RecipeError(f"--checkpoint {checkpoint}: expected a checkpoint of `ndpp train`, with model and step")
    if state.get("ema") is not None:  # what was evaluated is the average
        inner = {key.removeprefix("module."): value for key, value in state["ema"].items() if key != "n_averaged"}
        state = {**state, "model": inner}
    return state


# --- export ---


def export(saved: Saved, kind: str, path: Path) -> float:
    """Write the network as plain layers, and return how far its output is from the trained model's at most."""
    if kind not in FORMATS:
        raise ConfigError(f"no format {kind!r}; there are {', '.join(FORMATS)}")
    model = copy.deepcopy(saved.model).cpu().float().eval()
    inputs = tuple(torch.cat([value.cpu(), value.cpu()]) for value in saved.task.example())  # a batch of 1 is special
    with torch.no_grad():
        expected = tensors(saved.task.exportable(model)(*inputs))
        if any(isinstance(module, ndpp.decorrelated.Decorrelated) for module in model.modules()):
            ndpp.fold_(model)
        plain = saved.task.exportable(model).eval()
        found = tensors(plain(*inputs))
    difference = max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True) if a.numel())
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "safetensors":
        _write_safetensors(saved, model, path)
    else:
        free = dict.fromkeys(saved.task.free_dims, torch.export.Dim.AUTO)
        program = torch.export.export(plain, inputs, dynamic_shapes=tuple(free for _ in inputs))
        _write_onnx(program, path) if kind == "onnx" else torch.export.save(program, str(path))
    return difference


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    try:
        made = torch.onnx.export(program, dynamo=True, verbose=False)
    except ImportError as error:
        raise MissingExtra("onnx and onnxscript", "--format onnx") from error
    if made is None:
        raise RecipeError("torch.onnx gave no program")
    made.save(str(path))


def _write_safetensors(saved: Saved, model: nn.Module, path: Path) -> None:
    try:
        from safetensors.torch import save_model
    except ImportError as error:
        raise MissingExtra("safetensors", "--format safetensors") from error
    config = saved.config
    about = {"recipe": config.recipe, "model": config.model.name, "norm": config.norm.name, "step": str(saved.step)}
    about["scale"] = config.norm.settings.scale if config.norm.name == "ndpp" else "none"
    save_model(model, str(path), metadata={**about, "options": json.dumps(config.model.options)})
    path.chmod(0o644)  # it is written for its owner alone


# What a file of each kind is called.
FORMATS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
