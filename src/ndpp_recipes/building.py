"""What a run is made of: the model with its normalisation, torch's switches, the state to go on from, an evaluation."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ndpp
from ndpp.feeding import evaluating

from . import checkpoints, parallel
from .config import Config, RunConfig, from_dict, keys
from .errors import ConfigError, RecipeError
from .loading import Loader, random_state, restore_random_
from .norms import apply_norm_
from .tasks import Task

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CALIBRATION = 4  # batches that show ndpp layers the data, so that they keep what pretrained weights compute

# Keys that a run may be continued with other values of.
FREE = {
    *("run.out", "run.keep", "run.log_every", "run.save_every", "run.device", "run.timeout"),
    *("data.path", "data.workers", "data.skip_bad"),
}


def build_model(loader: Loader, device: torch.device, fresh: bool = True) -> tuple[nn.Module, str]:
    """The task's network with its normalisation, on the device, and what was done to it in a line.

    `fresh`: with the weights to start from, which a model that is about to be loaded from a run does not need.
    """
    task = loader.task
    config = task.config
    model = task.build().to(device)
    batches = None
    if config.model.weights is not None:
        if fresh:
            _load_weights(task, model, Path(config.model.weights))
        batches = [_fed(task, on_device(part, device)) for part in _first_parts(loader)]
    summary = apply_norm_(model, config.norm, calibration=batches)
    if config.run.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model, summary


def _load_weights(task: Task, model: nn.Module, path: Path) -> None:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        state: Any = load_file(path)
    else:
        state = checkpoints.load(path)
    for key in ("state_dict", "model"):  # where training programs keep it
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    try:
        task.load_weights(model, state)
    except RuntimeError as error:
        raise RecipeError(f"model.weights: {path} does not fit {task.config.model.name}: {error}") from error


def _first_parts(loader: Loader) -> list[Any]:
    return [part for step in itertools.islice(loader.epoch(0), CALIBRATION) for part in step][:CALIBRATION]


def _fed(task: Task, part: Any) -> Callable[[nn.Module], Any]:
    return lambda model: task.forward(model, part)


def averaged(model: nn.Module, run: RunConfig) -> AveragedModel | None:
    """The exponential moving average of the weights, where it is asked for."""
    if run.ema is None:
        return None
    if not 0 < run.ema < 1:
        raise ConfigError(f"run.ema: expected a number between 0 and 1, as 0.999; got {run.ema}")
    if run.parallel == "fsdp":
        raise ConfigError("run.ema does not work with run.parallel=fsdp; use ddp, or no average")
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(run.ema))  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def prepared_torch(run: RunConfig) -> Iterator[None]:
    """The switches of torch that a configuration decides, and its random numbers, for the time of a run."""
    matmul, cudnn, workspace = torch.backends.cuda.matmul, torch.backends.cudnn, "CUBLAS_WORKSPACE_CONFIG"
    switches = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    before, setting = random_state(cuda=torch.cuda.is_available()), os.environ.get(workspace)
    try:
        matmul.allow_tf32 = cudnn.allow_tf32 = run.tf32
        cudnn.benchmark = not run.deterministic
        torch.use_deterministic_algorithms(run.deterministic)
        if run.deterministic:
            os.environ.setdefault(workspace, ":4096:8")
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark, deterministic = switches
        torch.use_deterministic_algorithms(deterministic)
        if setting is None:
            os.environ.pop(workspace, None)
        restore_random_(before)


def saved_state(config: Config, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """The checkpoint to go on from; an error where a run would be lost or mixed with another."""
    out = Path(config.out)
    if overwrite and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0:
        raise ConfigError(
            "--overwrite under torchrun --max-restarts would begin anew after every restart; use --resume auto and "
            "another folder, or no restarts"
        )
    if overwrite:
        return None
    there = checkpoints.found(out / "checkpoints")
    if there and not resume:
        raise ConfigError(
            f"{out} holds a run already ({there[-1].name}); go on with --resume auto (always, under torchrun "
            "--max-restarts), begin anew with --overwrite, or choose another folder with --out"
        )
    state = checkpoints.latest(out / "checkpoints") if resume else None
    if state is not None:
        _refuse_other(from_dict(state["config"]), config)
    return state


def clear_(out: Path) -> None:
    """Remove the run that was in a folder, and nothing else."""
    for name in ("checkpoints", "tensorboard"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("best.pt", "metrics.jsonl", "result.json", "bad.jsonl", "conditioning.json"):
        (out / name).unlink(missing_ok=True)


def _refuse_other(saved: Config, config: Config) -> None:
    old, new = keys(saved), keys(config)
    other = [key for key in sorted({*old, *new} - FREE) if old.get(key) != new.get(key)]
    if other:
        listed = ", ".join(f"{key} was {old.get(key)!r} and is {new.get(key)!r}" for key in other)
        raise ConfigError(f"{config.out} is a run with other settings: {listed}; use these, or another folder")


def evaluate(
    model: nn.Module,
    loader: Loader,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
    to_device: Callable[[Any], Any],
) -> dict[str, float]:
    """The metrics of a model over all evaluation data, the same on every rank."""
    sharded = parallel.is_sharded(model)  # its ranks have to call it equally often
    meter = loader.task.meter()
    with evaluating(model):
        for batch in loader.evaluation(everything=sharded):
            with autocast():
                meter.update(model, to_device(batch))
    states = [meter.state()] if sharded else parallel.gathered(meter.state(), loader.place)
    return meter.result(states)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def on_device(batch: Any, device: torch.device, channels_last: bool = False) -> Any:
    """A batch with its tensors on the device, without waiting for the copies."""
    if isinstance(batch, Tensor):
        layout = torch.channels_last if channels_last and batch.ndim == 4 else torch.preserve_format
        return batch.to(device, non_blocking=True, memory_format=layout)
    if isinstance(batch, dict):
        return {key: on_device(value, device, channels_last) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(on_device(value, device, channels_last) for value in batch)
    return batch


def versions(device: torch.device) -> dict[str, str]:
    """What numbers depend on, to be written beside them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"ndpp": ndpp.__version__, "torch": torch.__version__, "device": name + threads, "date": date}
