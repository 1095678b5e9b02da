"""The training loop of every task."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ndpp

from . import checkpoints, parallel
from .building import (
    autocast,
    averaged,
    build_model,
    clear_,
    evaluate,
    on_device,
    prepared_torch,
    saved_state,
    versions,
)
from .config import Config
from .diagnosis import nonfinite_cause
from .errors import ConfigError, NonFiniteError, Stopped
from .loading import Loader, random_state, restore_random_, seed_
from .monitor import Display, Log, Silent, display, memory
from .optimizers import make_optimizers, rate_factor
from .parallel import Place
from .tasks import make_task

LATER = 1 << 20  # the number of an epoch that no run reaches: batches for recalibration


@dataclass(frozen=True)
class Result:
    """A finished run: its folder, the last metrics, and the best value of the headline metric with its step."""

    out: Path
    metrics: dict[str, float]
    best: dict[str, float]
    steps: int
    seconds: float


def train(config: Config, *, resume: bool = False, overwrite: bool = False, quiet: bool = False) -> Result:
    """Train as the configuration says; `resume` goes on from the last checkpoint in the run's folder, if any."""
    with parallel.joined(config.run) as place:
        shown = display(f"{config.recipe} · {config.norm.name}") if place.first and not quiet else Silent()
        try:
            with prepared_torch(config.run):
                trainer = Trainer(config, place, resume=resume, overwrite=overwrite, shown=shown)
                with _politely_stopped(trainer):
                    for _ in trainer.iterate():
                        pass
            return trainer.result()
        finally:
            shown.close()


class Trainer:
    """A run: everything that a checkpoint keeps, and the loop that changes it."""

    def __init__(
        self,
        config: Config,
        place: Place,
        *,
        resume: bool = False,
        overwrite: bool = False,
        shown: Display | None = None,
    ) -> None:
        self.config, self.place, self.shown, self.overwrite = config, place, shown or Silent(), overwrite
        self.out = Path(config.out)
        saved = saved_state(config, resume, overwrite)
        parallel.agree(None if saved is None else saved["step"], place)
        self.task = make_task(config)
        self.loader = Loader(self.task, place)
        _seed(config.run.seed)
        self.model, self.summary = build_model(self.loader, place.device, fresh=saved is None)
        self.ema = averaged(self.model, config.run)
        self.wrapped = parallel.wrapped(self.model, place, config.run)
        if config.run.compile:
            self.wrapped = torch.compile(self.wrapped)  # type: ignore[assignment]
        self.optimizers = make_optimizers(self.model, config.optimizer)
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=config.run.precision == "fp16")
        self.per_epoch = self.loader.steps_per_epoch()
        self.total = config.run.steps or config.run.epochs * self.per_epoch
        self.step, self.seconds, self.paused = 0, 0.0, 0.0
        self.metrics: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.stopping = False
        _seed(config.run.seed + place.rank)  # the same for every normalisation, however it was built
        if saved is not None:
            self.load_state(saved)
        self.log: Log | None = None

    # --- the loop ---

    def iterate(self) -> Iterator[None]:
        """Train to the end, pausing after every step; evaluations and checkpoints come when they are due."""
        self._open()
        try:
            while self.step < self.total:
                epoch, done = divmod(self.step, self.per_epoch)
                for parts in self.loader.epoch(epoch, done):
                    self._timed_step(parts)
                    last = self.step == self.total
                    if last or self._due(self.config.run.eval_every):
                        self._evaluate(last)
                    if last or self.stopping or self._due(self.config.run.save_every or self.config.run.eval_every):
                        self.save()
                    yield
                    if self.stopping and not last:
                        raise Stopped(f"stopped at step {self.step} of {self.total}; go on with --resume auto")
                    if last:
                        break
        finally:
            if self.log is not None:
                self.log.close()

    def train_step(self, parts: list[Any]) -> dict[str, float]:
        """One step of the optimizer on the parts of a batch. Raises at a loss that is not finite, before the step."""
        rate = self.config.optimizer.lr * rate_factor(self.config.schedule, self.step, self.total)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.model.train()
        shown: dict[str, float] = {}
        for number, part in enumerate(parts):
            batch = self.to_device(part)
            with parallel.gradients_later(self.wrapped, number < len(parts) - 1):
                with self.autocast():
                    losses = self.task.loss(self.wrapped, batch)
                arriving = _Arriving(losses)
                self.scaler.scale(losses["loss"] / len(parts)).backward()  # type: ignore[no-untyped-call]
            for name, value in arriving.values().items():  # the forward pass is over; the backward pass may go on
                shown[name] = shown.get(name, 0.0) + value / len(parts)
            if not math.isfinite(shown["loss"]):
                self._explain(batch, shown["loss"])
        self._update()
        return {**shown, "lr": rate}

    def _update(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if self.config.run.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.run.clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def _timed_step(self, parts: list[Any]) -> None:
        start = time.perf_counter()
        values = self.train_step(parts)
        self.step += 1
        self.seconds += time.perf_counter() - start
        units = sum(map(self.task.count, parts)) * self.place.world
        speed = units / max(time.perf_counter() - self.paused, 1e-9)  # since the last step: with the wait for data
        self.paused = time.perf_counter()
        if self.step % self.config.run.log_every == 0 or self.step == self.total:
            epoch = self.step / self.per_epoch
            self._write("train", {**values, "epoch": epoch, "seconds": self.seconds, "throughput": speed})
        self.shown.update(self.step, self.total, self._shown(values["loss"], speed))

    def _shown(self, loss: float, speed: float) -> dict[str, str]:
        shown = {"loss": f"{loss:.3f}"}
        if self.task.metric in self.metrics:
            shown[self.task.metric] = f"{self.metrics[self.task.metric]:.2f}"
        return {**shown, f"{self.task.unit}/s": f"{speed:,.0f}", "memory": memory(self.place.device)}

    def _due(self, every: int) -> bool:
        return self.step % (every or self.per_epoch) == 0

    def _explain(self, batch: Any, loss: float) -> None:
        with self.autocast():  # an overflow of half precision is none in single
            cause = nonfinite_cause(self.model, batch, self.task.loss)
        saved = checkpoints.found(self.out / "checkpoints")
        last = f"the last checkpoint is {saved[-1].name}" if saved else "there is no checkpoint yet"
        if self.log is not None:
            self.log.write("train", self.step + 1, {"loss": loss, "seconds": self.seconds})
        raise NonFiniteError(f"step {self.step + 1}: the loss is {loss}: {cause}. {last}")

    # --- evaluation ---

    def _evaluate(self, last: bool) -> None:
        if last and self.config.run.recalibrate:
            self.recalibrate_(self.config.run.recalibrate)
        parallel.share_buffers_(self.evaluated, self.place)
        self.metrics = evaluate(self.evaluated, self.loader, self.autocast, self.to_device)
        value = self.metrics[self.task.metric]
        sign = 1 if self.task.maximise else -1
        if math.isfinite(value) and (not self.best or sign * value > sign * self.best["value"]):
            self.best = {"step": self.step, "value": value}
            state = {"model": parallel.model_state(self.evaluated), "step": self.step, "config": self.config.to_dict()}
            if self.place.first:
                checkpoints.write_whole(self.out / "best.pt", lambda file: torch.save(state, file))
        epoch = self.step / self.per_epoch
        self._write("eval", {**self.metrics, "epoch": epoch, "seconds": self.seconds})
        values = "  ".join(f"{name} {number:.4g}" for name, number in self.metrics.items())
        self.shown.message(f"step {self.step}  epoch {epoch:.2f}  {values}")
        self.paused = time.perf_counter()

    @property
    def evaluated(self) -> nn.Module:
        """The model that is evaluated, saved as best and exported: the averaged one where there is one."""
        return self.model if self.ema is None else self.ema.module

    def recalibrate_(self, batches: int) -> None:
        """Exact statistics of the ndpp layers over the first batches of an epoch of its own."""
        steps = zip(range(batches), self.loader.epoch(LATER), strict=False)
        parts = (part for _, step in steps for part in step)
        if any(isinstance(m, ndpp.decorrelated.Decorrelated) for m in self.evaluated.modules()):
            ndpp.recalibrate_(self.evaluated, (self._fed(part) for part in parts), progress=False)

    def _fed(self, part: Any) -> Callable[[nn.Module], Any]:
        def forward(model: nn.Module) -> Any:
            with self.autocast():
                return self.task.forward(model, self.to_device(part))

        return forward

    # --- state ---

    def save(self) -> None:
        """A checkpoint of now, by the first rank, whose statistics are those of all who go on from it."""
        parallel.share_buffers_(self.model, self.place)
        mine = random_state(cuda=self.place.device.type == "cuda")
        state = {**self.state(), "random": parallel.gathered(mine, self.place)}
        if self.place.first:
            checkpoints.save(self.out / "checkpoints", self.step, state, self.config.run.keep)
            self.write_result()
        parallel.barrier(self.place)

    def state(self) -> dict[str, Any]:
        """All that the rest of the run depends on; sharded parts are put together, so every rank has to call it."""
        return {
            "config": self.config.to_dict(),
            "world": self.place.world,
            "step": self.step,
            "seconds": self.seconds,
            "metrics": self.metrics,
            "best": self.best,
            "model": parallel.model_state(self.model),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizers": [parallel.optimizer_state(self.model, optimizer) for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        if state["world"] != self.place.world:
            raise ConfigError(
                f"the checkpoint is of {state['world']} ranks; this run has {self.place.world}, which would see other "
                f"batches; start {state['world']} (torchrun --nproc-per-node), or begin anew in another folder"
            )
        self.step, self.seconds = state["step"], state["seconds"]
        self.metrics, self.best = state["metrics"], state["best"]
        parallel.load_model_state(self.model, state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            parallel.load_optimizer_state(self.model, optimizer, saved)
        self.scaler.load_state_dict(state["scaler"])
        restore_random_(state["random"][self.place.rank])

    def result(self) -> Result:
        return Result(self.out, self.metrics, self.best, self.step, self.seconds)

    # --- what it writes, and where it computes ---

    def _open(self) -> None:
        if self.place.first:
            if self.overwrite:  # only now that everything could be built
                clear_(self.out)
            self.log = Log(self.out, self.step)
            self.loader.list_bad_in(self.out / "bad.jsonl")
            checkpoints.write_json(self.out / "config.json", self.config.to_dict())
            for name, text in self.task.files().items():
                checkpoints.write_whole(self.out / name, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
            if self.step == self.total:  # it may have ended between its last checkpoint and this
                self.write_result()
        begun = f"from step {self.step} " if self.step else ""
        self.shown.message(f"{self.summary}; {self.total} steps {begun}on {self.place.device} → {self.out}")
        self.paused = time.perf_counter()

    def _write(self, kind: str, values: dict[str, float]) -> None:
        if self.log is not None:
            self.log.write(kind, self.step, {name: float(f"{value:.6g}") for name, value in values.items()})

    def write_result(self) -> None:
        result = {"metric": self.task.metric, "maximise": self.task.maximise, "final": self.metrics, "best": self.best}
        facts = {"steps": self.step, "total": self.total, "seconds": self.seconds, "seed": self.config.run.seed}
        checkpoints.write_json(self.out / "result.json", {**result, **facts, **versions(self.place.device)})

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return autocast(self.place.device, self.config.run.precision)

    def to_device(self, batch: Any) -> Any:
        return on_device(batch, self.place.device, self.config.run.channels_last)


def _seed(seed: int) -> None:
    """All generators, of GPUs too: a run that was killed before its first checkpoint begins as it did."""
    torch.manual_seed(seed)
    seed_(seed % 2**32)


class _Arriving:
    """Losses on their way to the host, copied while the device goes on."""

    def __init__(self, losses: dict[str, Tensor]) -> None:
        self.names = list(losses)
        values = torch.stack([value.detach().float() for value in losses.values()])
        self.event = None
        if values.is_cuda:
            self.host = torch.empty(values.shape, pin_memory=True)
            self.host.copy_(values, non_blocking=True)
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record()
        else:
            self.host = values

    def values(self) -> dict[str, float]:
        if self.event is not None:
            self.event.synchronize()
        return dict(zip(self.names, self.host.tolist(), strict=True))


@contextlib.contextmanager
def _politely_stopped(trainer: Trainer) -> Iterator[None]:
    """SIGINT and SIGTERM end the run after the step at hand, with a checkpoint; a second one ends it at once."""
    if trainer.place.world > 1 or threading.current_thread() is not threading.main_thread():
        # Several ranks would stop at different steps. And torchrun ends what is left of a broken run by SIGTERM: a rank
        # that waits for a dead one could not answer, and would hold up the restart until it is killed.
        yield
        return

    def stop(number: int, frame: object) -> None:
        trainer.stopping = True
        for kind, handler in before.items():
            signal.signal(kind, handler)

    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    for kind in before:
        signal.signal(kind, stop)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
