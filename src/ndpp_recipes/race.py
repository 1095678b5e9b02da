"""The same network trained with several normalisations side by side, each with its share of the time."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ndpp

from . import checkpoints
from .building import prepared_torch
from .comparison import NORM_TITLES, RunRecord, read_run
from .config import Config
from .engine import Trainer
from .errors import ConfigError, NonFiniteError
from .loading import random_state, restore_random_
from .monitor import Silent
from .parallel import Place, device_named
from .recipes import LR1, recipe


class Runner:
    """One run of the race, with random numbers of its own."""

    def __init__(self, config: Config) -> None:
        self.config, self.failure = config, ""
        momentum = "" if config.optimizer.momentum else ", no momentum"
        seed = f", seed {config.run.seed}" if config.run.seed else ""
        self.title = f"{NORM_TITLES[config.norm.name]}, lr {config.optimizer.lr:g}{momentum}{seed}"
        self.trainer = Trainer(config, Place(0, 1, device_named(config.run.device)), overwrite=True, shown=Silent())
        self.cuda = self.trainer.place.device.type == "cuda"
        self.random = random_state(self.cuda)
        self.steps = self.trainer.iterate()
        self.done = False

    def advance(self) -> None:
        """One step, as if nothing else ran in this process."""
        restore_random_(self.random)
        try:
            next(self.steps)
        except StopIteration:
            self.done = True
        except NonFiniteError as error:
            self.done, self.failure = True, str(error)
            self.trainer.write_result()
        self.random = random_state(self.cuda)

    @property
    def value(self) -> float | None:
        return self.trainer.metrics.get(self.trainer.task.metric)

    def write_conditioning(self) -> None:
        """How well conditioned the inputs of its layers are, and what the weights get to see of that."""
        trainer = self.trainer
        batch = next(trainer.loader.evaluation())
        converted = any(isinstance(m, ndpp.decorrelated.Decorrelated) for m in trainer.model.modules())
        found = ndpp.inspect(trainer.model, lambda model: trainer.task.forward(model, trainer.to_device(batch)))
        before, after = [], []
        for layer in found.measured:
            name = f"{layer.path} {layer.kind.removeprefix('ndpp.')}"
            seen = layer.condition.after if converted else layer.condition.before  # plain weights see their input
            before.append({"layer": name, "condition": layer.condition.before})
            after.append({"layer": name, "condition": seen})
        checkpoints.write_json(trainer.out / "conditioning.json", {"before": before, "after": after})


@dataclass(frozen=True)
class Race:
    """Who runs: normalisations, each at the recipe's learning rate and at 1.0 without momentum, for every seed."""

    recipe: str
    norms: Sequence[str]
    seeds: Sequence[int]
    out: Path
    data: str | None = None
    changes: Mapping[str, Any] | None = None
    lr1: bool = True
    overwrite: bool = False

    def configs(self) -> list[Config]:
        if len(set(self.norms)) != len(self.norms) or not self.norms:
            raise ConfigError(f"--norms: expected different names separated by commas; got {','.join(self.norms)!r}")
        found = []
        for seed in self.seeds:
            for norm in self.norms:
                config = recipe(self.recipe, norm=norm, data=self.data, changes=self.changes)
                variants = {"tuned": config}
                if self.lr1 and config.optimizer.name == "sgd":  # of others 1.0 is no sensible rate
                    variants["lr1"] = config.changed(LR1)
                for name, variant in variants.items():
                    out = str(self.out / f"{norm}-{name}-seed{seed}")
                    found.append(variant.changed({"run.seed": seed, "run.out": out}))
        return found

    def run(self) -> list[RunRecord]:
        """All runs, a seed at a time; the one that has had the least time takes the next step."""
        configs = self.configs()
        there = [config.out for config in configs if checkpoints.found(Path(config.out) / "checkpoints")]
        if there and not self.overwrite:
            raise ConfigError(f"{there[0]} holds a run already; begin anew with --overwrite, or choose another --out")
        with prepared_torch(configs[0].run):
            self._run(configs)
        return [read_run(config.out) for config in configs]

    def _run(self, configs: Sequence[Config]) -> None:
        for seed in self.seeds:
            runners = [Runner(config) for config in configs if config.run.seed == seed]
            with _shown(runners) as show:
                while waiting := [runner for runner in runners if not runner.done]:
                    runner = min(waiting, key=lambda r: r.trainer.seconds)
                    runner.advance()
                    show(runner)
            for runner in runners:
                if not runner.failure:
                    runner.write_conditioning()


@contextlib.contextmanager
def _shown(runners: Sequence[Runner]) -> Iterator[Any]:
    terminal = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    with (_bars if terminal else _lines)(runners) as show:
        yield show


@contextlib.contextmanager
def _bars(runners: Sequence[Runner]) -> Iterator[Any]:
    """A bar for every run, with its accuracy."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
        console=Console(stderr=True),
        refresh_per_second=5,
    )
    bars = {id(r): progress.add_task(r.title, total=r.trainer.total, shown="") for r in runners}

    def show(runner: Runner) -> None:
        value = "  …  " if runner.value is None else f"{runner.value:5.2f}"
        text = f"[bold]{value}[/bold] {runner.trainer.task.metric}  [dim]{runner.trainer.seconds:5.1f} s[/dim]"
        if runner.failure:
            text = f"[red]diverged after {runner.trainer.step} steps[/red]"
        progress.update(bars[id(runner)], completed=runner.trainer.step, shown=text)

    with progress:
        yield show


@contextlib.contextmanager
def _lines(runners: Sequence[Runner]) -> Iterator[Any]:
    """A line for every tenth of every run, where there is no terminal."""
    total = runners[0].trainer.total
    print(f"{len(runners)} runs of {total} steps side by side, of {runners[0].config.model.name}", file=sys.stderr)
    shown = {id(runner): 0 for runner in runners}

    def show(runner: Runner) -> None:
        tenth = 10 * runner.trainer.step // total
        if tenth == shown[id(runner)] and not runner.failure:
            return
        shown[id(runner)] = tenth
        value = "" if runner.value is None else f"  {runner.trainer.task.metric} {runner.value:.2f}"
        step = f"step {runner.trainer.step}/{runner.trainer.total}"
        ended = f"  diverged: {runner.failure}" if runner.failure else ""
        print(
            f"{runner.title:32} {step:>14}  {runner.trainer.seconds:6.1f} s{value}{ended}", file=sys.stderr, flush=True
        )

    yield show
