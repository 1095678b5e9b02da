"""What a run tells while it goes on: lines of JSON, TensorBoard, and a progress bar."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, Protocol

import torch

from .checkpoints import write_whole


class Display(Protocol):
    """Who shows a run's progress."""

    def update(self, step: int, total: int, shown: dict[str, str]) -> None: ...
    def message(self, text: str) -> None: ...
    def close(self) -> None: ...


class Bar:
    """One line that stays at the bottom of a terminal."""

    def __init__(self, title: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
        )
        self.task = self.progress.add_task(title, total=None, shown="")
        self.progress.start()

    def update(self, step: int, total: int, shown: dict[str, str]) -> None:
        text = "  ".join(f"[dim]{key}[/dim] {value}" for key, value in shown.items())
        self.progress.update(self.task, completed=step, total=total, shown=text)

    def message(self, text: str) -> None:
        self.progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self.progress.stop()


class Lines:
    """A line now and then, where there is no terminal."""

    def __init__(self, title: str) -> None:
        self.title, self.tenth = title, -1

    def update(self, step: int, total: int, shown: dict[str, str]) -> None:
        tenth = 10 * step // max(total, 1)
        if tenth != self.tenth:
            self.tenth = tenth
            values = "  ".join(f"{key} {value}" for key, value in shown.items())
            self.message(f"{self.title}  step {step}/{total}  {values}")

    def message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class Silent:
    """Says nothing: for other ranks, and for use as a library."""

    def update(self, step: int, total: int, shown: dict[str, str]) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def display(title: str) -> Display:
    terminal = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    return Bar(title) if terminal else Lines(title)


class Log:
    """metrics.jsonl and TensorBoard's files of a run. After a restart, what came later than its step is dropped."""

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / "metrics.jsonl"
        _cut(self.path, step)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a")
        self.board: Any = None
        if importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, kind: str, step: int, values: dict[str, float | int]) -> None:
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _cut(path: Path, step: int) -> None:
    """Keep the lines up to a step; a torn last line goes."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    write_whole(path, lambda file: file.write("".join(kept).encode()))


def memory(device: torch.device) -> str:
    """The most that was in use, on the device or in this process."""
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / 2**30:.1f} GiB"
    import resource

    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB"
