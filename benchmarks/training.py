"""One training run: model, data, schedule, and the record of how it went."""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configs import Config
from .data import Bytes
from .resnet import ResNet, he_

WEIGHT_DECAY = 5e-4
CROP = 4  # pixels of padding for the random crop
TEST_BATCH = 1000

Step = Callable[[Tensor, Tensor], Tensor]


class CaptureFailed(RuntimeError):
    """Raised inside a CUDA graph capture: the process is not to be trusted any more."""


class NotCapturable(RuntimeError):
    """The step synchronises with the host; found out without starting a capture."""


@dataclass(frozen=True)
class Plan:
    """What is the same for every configuration."""

    epochs: int
    batch: int
    width: int
    depth: int  # blocks of each stage
    device: str
    dtype: str  # bf16 or fp32
    graph: bool


class ImageSet:
    """One split on the device, its images padded for cropping."""

    def __init__(self, images: Bytes, labels: Bytes, device: str) -> None:
        pixels = torch.from_numpy(images).to(device)
        self.labels = torch.from_numpy(labels).to(device).long()
        self.mean = torch.tensor([0.5071, 0.4865, 0.4409], device=device)
        self.std = torch.tensor([0.2673, 0.2564, 0.2762], device=device)
        self.size = images.shape[1]
        # Padding is zero after normalisation, as near as a byte comes to it.
        gray, side = (self.mean * 255).round().to(torch.uint8), self.size + 2 * CROP
        self.padded = gray.expand(len(images), side, side, 3).contiguous()
        self.padded[:, CROP:-CROP, CROP:-CROP] = pixels

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, index: Tensor, top: Tensor, left: Tensor, flip: Tensor) -> Tensor:
        """Crops (n, 3, size, size), channels last, at (top, left) and mirrored where asked."""
        span = torch.arange(self.size, device=index.device)
        rows = top[:, None] + span
        columns = left[:, None] + torch.where(flip[:, None], self.size - 1 - span, span)
        pixels = self.padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return ((pixels / 255.0 - self.mean) / self.std).permute(0, 3, 1, 2)

    def augmented(self, batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch. Order and augmentation come from the CPU, so they depend on the seed alone."""
        draw = torch.Generator().manual_seed(seed)
        n = len(self)
        order = torch.randperm(n, generator=draw)
        place = torch.randint(0, 2 * CROP + 1, (2, n), generator=draw)
        flip = torch.rand(n, generator=draw) < 0.5
        order, place, flip = (t.to(self.labels.device) for t in (order, place, flip))
        for start in range(0, n - batch + 1, batch):
            part = slice(start, start + batch)
            yield self.images(order[part], place[0, part], place[1, part], flip[part]), self.labels[order[part]]

    def plain(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self), TEST_BATCH):
            index = torch.arange(start, min(start + TEST_BATCH, len(self)), device=self.labels.device)
            middle = torch.full_like(index, CROP)
            yield self.images(index, middle, middle, torch.zeros_like(index, dtype=torch.bool)), self.labels[index]


def learning_rate(config: Config, step: int, steps: int, per_epoch: int) -> float:
    """Linear warm-up, then cosine to zero."""
    warmup = round(config.warmup_epochs * per_epoch)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(steps - warmup, 1)))


def autocast(plan: Plan) -> contextlib.AbstractContextManager[Any]:
    # Cached casts would be shared between a captured graph and what runs outside it.
    return torch.autocast(plan.device, torch.bfloat16, enabled=plan.dtype == "bf16", cache_enabled=not plan.graph)


def captured(step: Step, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """The step (forward and backward) as a CUDA graph. Leaves the model's state as it was."""
    x, y = x.clone(), y.clone()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for attempt in range(4):
                # The last one is a rehearsal: a failed capture would leave the process unusable.
                torch.cuda.set_sync_debug_mode("error" if attempt == 3 else "default")
                step(x, y)
    except RuntimeError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise NotCapturable(f"{place.filename}:{place.lineno}: {str(error).splitlines()[0]}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.current_stream().wait_stream(side)
        model.load_state_dict(state)
        model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            loss = step(x, y)
    except RuntimeError as error:
        raise CaptureFailed(str(error).splitlines()[0]) from error

    def replay(new_x: Tensor, new_y: Tensor) -> Tensor:
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        return loss

    return replay


class Run:
    """A model in training. `record` has what is worth keeping."""

    def __init__(self, config: Config, seed: int, plan: Plan, train: ImageSet, test: ImageSet) -> None:
        self.config, self.seed, self.plan, self.train, self.test = config, seed, plan, train, test
        torch.manual_seed(seed)
        model = ResNet(int(train.labels.max()) + 1, plan.width, config.settings, plan.depth)
        if config.he:
            he_(model)
        self.model = model.to(plan.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=config.lr, momentum=config.momentum, weight_decay=WEIGHT_DECAY
        )
        self.mode, self.step = self._step()
        torch.manual_seed(seed)

    def _step(self) -> tuple[str, Step]:
        if not self.plan.graph:
            return "eager", self._eager
        x, y = next(self.train.augmented(self.plan.batch, 0))
        try:
            return "graph", captured(self._eager, self.model, x, y)
        except NotCapturable as reason:
            print(f"no CUDA graph, eager instead: {reason}", flush=True)
            return "eager", self._eager

    def _eager(self, x: Tensor, y: Tensor) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        with autocast(self.plan):
            logits = self.model(x)
        loss = F.cross_entropy(logits.float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def epochs(self) -> Iterator[dict[str, float]]:
        """Trains an epoch at a time: its mean loss, test accuracy and milliseconds per step. Stops at a loss of NaN."""
        per_epoch = len(self.train) // self.plan.batch
        done = 0
        for epoch in range(self.plan.epochs):
            self.model.train()
            total = torch.zeros((), device=self.plan.device)
            start = time.perf_counter()
            for x, y in self.train.augmented(self.plan.batch, seed=1000 * self.seed + epoch):
                lr = learning_rate(self.config, done, self.plan.epochs * per_epoch, per_epoch)
                for group in self.optimizer.param_groups:
                    group["lr"] = lr
                total += self.step(x, y)
                self.optimizer.step()
                done += 1
            loss = total.item() / per_epoch
            elapsed = time.perf_counter() - start
            yield {"loss": loss, "accuracy": self.accuracy(), "ms_per_step": 1000 * elapsed / per_epoch}
            if not math.isfinite(loss):
                return

    @torch.no_grad()
    def accuracy(self) -> float:
        """Test accuracy in percent."""
        for buffer in self.model.buffers():
            buffer.add_(0)  # a replayed graph changes buffers without telling whoever caches by their version
        self.model.eval()
        right = torch.zeros((), device=self.plan.device)
        for x, y in self.test.plain():
            with autocast(self.plan):
                right += (self.model(x).argmax(1) == y).sum()
        return 100 * right.item() / len(self.test)
