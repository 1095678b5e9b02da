"""Batches whose content depends on seed, epoch and position alone: any of them can be had again, in any process."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from .errors import DataError
from .parallel import Place
from .tasks import Task

TRIES = 32  # records looked at, in order, to replace one that cannot be used
Key = tuple[int, int]  # epoch, record


class Loader:
    """The training and evaluation batches of one rank. Bad records are counted, listed, and end the run at a limit."""

    def __init__(self, task: Task, place: Place) -> None:
        run, data = task.config.run, task.config.data
        self.task, self.place, self.limit = task, place, data.skip_bad
        self.part = micro_batch(run.batch_size, run.accumulate, place.world)
        self.eval_size = run.eval_batch_size or self.part
        self.accumulate, self.seed = run.accumulate, run.seed
        self.workers = min(data.workers, os.cpu_count() or 1)
        self.bad: set[str] = set()
        self.listed: Path | None = None

    def steps_per_epoch(self) -> int:
        return len(self._parts(0)) // self.accumulate

    def epoch(self, number: int, start: int = 0) -> Iterator[list[Any]]:
        """The steps of an epoch from the given one on; each is a list of the parts to accumulate."""
        parts = self._parts(number)[start * self.accumulate :]
        keys = [[(number, record) for record in part] for part in parts]
        step: list[Any] = []
        for batch in self._loaded(self.task.train_set, keys, replace=True):
            step.append(batch)
            if len(step) == self.accumulate:
                yield step
                step = []

    def evaluation(self, everything: bool = False) -> Iterator[Any]:
        """The share of this rank in the evaluation data, or all of it."""
        batches = self.task.eval_batches(self.eval_size)
        if not everything:
            batches = batches[self.place.rank :: self.place.world]
        keys = [[(0, record) for record in batch] for batch in batches]
        yield from self._loaded(self.task.eval_set, keys, replace=False)

    def _parts(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(_mixed(self.seed, epoch))
        parts = self.task.batches(self.part, generator)
        together = self.place.world * self.accumulate
        whole = len(parts) // together * together
        if whole == 0:
            count = len(self.task.train_set)  # type: ignore[arg-type]
            raise DataError(
                self.task.config.data.path,
                f"{count} records make {len(parts)} batches of {self.part}, fewer than one step takes "
                f"({self.place.world} ranks × accumulate {self.accumulate}); use a smaller run.batch_size",
            )
        return parts[self.place.rank : whole : self.place.world]

    def _loaded(self, data: Dataset[Any], keys: list[list[Key]], replace: bool) -> Iterator[Any]:
        loader = DataLoader(
            _Seeded(data, self.seed, replace),
            batch_sampler=_Listed(keys),
            num_workers=min(self.workers, len(keys)),
            collate_fn=_Collated(self.task),
            pin_memory=self.place.device.type == "cuda",
            worker_init_fn=_leave_signals_alone,
            generator=torch.Generator(),  # its own: a loader that is started again must not draw from torch's
        )
        for batch, bad in loader:
            self._note(bad)
            if batch is not None:
                yield batch
            elif replace:
                raise DataError(self.task.config.data.path, f"{TRIES} records in a row cannot be used; see bad.jsonl")

    def list_bad_in(self, path: Path) -> None:
        """Write bad records to this file, from now on and those found already; what it lists counts on."""
        found, self.bad = self.bad, set()
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(json.JSONDecodeError):  # torn by a kill
                self.bad.add(json.loads(line)["text"])
        self.listed = path
        for text in sorted(found - self.bad):
            self._list(text)

    def _list(self, text: str) -> None:
        self.bad.add(text)
        if self.listed is not None:
            with self.listed.open("a") as file:
                file.write(json.dumps({"text": text}) + "\n")

    def _note(self, bad: Sequence[DataError]) -> None:
        for error in bad:
            if str(error) in self.bad:
                continue
            self._list(str(error))
            if len(self.bad) > self.limit:
                if self.limit == 0:
                    raise DataError(error.path, f"{error.reason}. --skip-bad N leaves up to N out", error.record)
                listed = "\n  ".join(sorted(self.bad))
                raise DataError(
                    self.task.config.data.path,
                    f"{len(self.bad)} bad records, and --skip-bad is {self.limit}:\n  {listed}",
                )


def micro_batch(batch_size: int, accumulate: int, world: int) -> int:
    """How many records one rank sees at a time."""
    size, rest = divmod(batch_size, accumulate * world)
    if rest or size < 1:
        raise DataError(
            "run.batch_size", f"{batch_size} does not divide into {world} ranks × accumulate {accumulate} equal parts"
        )
    return size


def _leave_signals_alone(worker: int) -> None:
    """What asks a run to stop reaches all its processes; the main one decides. Workers end when it does."""
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_IGN)


class _Listed:
    """A batch sampler that was written down."""

    def __init__(self, keys: list[list[Key]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


class _Seeded(Dataset[tuple[Any, list[DataError]]]):
    """Items drawn under a seed of their own; in place of a bad one comes the next, or nothing."""

    def __init__(self, data: Dataset[Any], seed: int, replace: bool) -> None:
        self.data, self.seed, self.replace = data, seed, replace

    def __getitems__(self, keys: list[Key]) -> list[tuple[Any, list[DataError]]]:
        """A batch. In the main process the generators go on afterwards as if nothing had been drawn."""
        saved = None if torch.utils.data.get_worker_info() else random_state()
        try:
            return [self[key] for key in keys]
        finally:
            if saved is not None:
                restore_random_(saved)

    def __getitem__(self, key: Key) -> tuple[Any, list[DataError]]:
        epoch, record = key
        bad: list[DataError] = []
        seed_(_mixed(self.seed, epoch, record))
        for number in range(TRIES if self.replace else 1):
            try:
                return self.data[(record + number) % len(self.data)], bad  # type: ignore[arg-type]
            except DataError as error:
                bad.append(error)
            except OSError as error:
                bad.append(DataError(error.filename or "data", f"{type(error).__name__}: {error}", record + number))
        return None, bad


class _Collated:
    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, found: list[tuple[Any, list[DataError]]]) -> tuple[Any, list[DataError]]:
        items = [item for item, _ in found if item is not None]
        return (self.task.collate(items) if items else None), [error for _, errors in found for error in errors]


def _mixed(*numbers: int) -> int:
    """32 bits that depend on all numbers, by the finaliser of SplitMix64: quicker than numpy's SeedSequence."""
    mixed = 0
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        mixed ^= mixed >> 31
    return mixed >> 32


def seed_(seed: int) -> None:
    """All three global generators of the CPU at a seed; torch.manual_seed would seed the GPUs as well."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def random_state(cuda: bool = False) -> dict[str, Any]:
    """The state of the global generators, in types that torch.load takes with weights_only."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "python": random.getstate(),
    }
    return {**state, "cuda": torch.cuda.get_rng_state()} if cuda else state


def restore_random_(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
