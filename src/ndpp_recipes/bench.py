"""The time and memory of a training step with several normalisations, measured in one run."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .building import prepared_torch, versions
from .engine import Trainer
from .errors import ConfigError
from .parallel import Place, device_named
from .recipes import recipe

WARMUP, BATCHES = 4, 4


@dataclass(frozen=True)
class Timing:
    """A normalisation: median milliseconds per step with quartiles, against the first, and its own peak memory."""

    norm: str
    milliseconds: float
    quartiles: tuple[float, float]
    ratio: float
    memory: float | None  # MiB above what was allocated before, on a GPU


def bench(name: str, norms: Sequence[str], data: str | None, changes: Mapping[str, Any], rounds: int) -> list[Timing]:
    """Steps of all normalisations in turn, so that a noisy machine disturbs all of them alike."""
    if rounds < 1:
        raise ConfigError(f"--rounds: expected at least 1; got {rounds}")
    if not norms:
        raise ConfigError("--norms: expected names separated by commas")
    run = recipe(name, norm=norms[0], data=data, changes=changes).run
    with tempfile.TemporaryDirectory() as folder, prepared_torch(run):
        trainers = [_trainer(name, norm, data, changes, folder) for norm in norms]
        parts = [_batches(trainer) for trainer in trainers]
        memory = [_warm(trainer, part) for trainer, part in zip(trainers, parts, strict=True)]
        times: list[list[float]] = [[] for _ in norms]
        for number in range(rounds):
            for trainer, part, found in zip(trainers, parts, times, strict=True):
                found.append(_timed(trainer, part[number % len(part)]))
    medians = [statistics.median(found) for found in times]
    return [
        Timing(norm, median, _quartiles(found), median / medians[0], peak)
        for norm, median, found, peak in zip(norms, medians, times, memory, strict=True)
    ]


def _trainer(name: str, norm: str, data: str | None, changes: Mapping[str, Any], folder: str) -> Trainer:
    config = recipe(name, norm=norm, data=data, changes={**changes, "run.out": folder})
    return Trainer(config, Place(0, 1, device_named(config.run.device)))


def _batches(trainer: Trainer) -> list[Any]:
    """A few steps' data, on the device already: loading is not what is measured."""
    return [[trainer.to_device(part) for part in step] for step in itertools.islice(trainer.loader.epoch(0), BATCHES)]


def _warm(trainer: Trainer, parts: list[Any]) -> float | None:
    cuda = trainer.place.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    for number in range(WARMUP):
        trainer.train_step(parts[number % len(parts)])
    return (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None


def _timed(trainer: Trainer, parts: list[Any]) -> float:
    if trainer.place.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    trainer.train_step(parts)
    if trainer.place.device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def _quartiles(times: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return low, high


def record(timing: Timing, name: str, changes: Mapping[str, Any], device: str) -> dict[str, Any]:
    """A line of JSON, with what the number depends on."""
    return {"recipe": name, **timing.__dict__, "changes": dict(changes), **versions(device_named(device))}
