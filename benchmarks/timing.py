"""What the speed commands share: options, clocks, turns, and tables.

Variants take turns within one run and medians are compared, so that a noisy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch

Call = Callable[[], object]
HINTS = ("Set TORCH", "For even more", "You can suppress")  # how messages of torch.compile end


def arguments(parser: argparse.ArgumentParser, *, steps: int, repeats: int) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=steps, help="calls between two readings of the clock")
    parser.add_argument("--repeats", type=int, default=repeats, help="timed rounds in which the variants take turns")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--unchecked", action="store_true", help="do not run the matching tests first; recorded")


def dtype_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="bf16 is autocast; fp32 is TF32")


def chosen(text: str, known: tuple[str, ...]) -> list[str]:
    """Names in a list with commas; SystemExit for one that is not known."""
    names = [name for name in text.split(",") if name]
    if not names or set(names) - set(known):
        raise SystemExit(f"expected some of {', '.join(known)}; got {text!r}")
    return names


def autocast(options: argparse.Namespace, **how: bool) -> torch.autocast:
    device_type = torch.device(options.device).type
    return torch.autocast(device_type, torch.bfloat16, enabled=options.dtype == "bf16", **how)


def fast_arithmetic() -> None:
    """What people train with: cuDNN's best algorithms and TF32 where float32 is left."""
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def milliseconds(call: Call, steps: int, device: str) -> float:
    """Of one call, from `steps` in a row: by CUDA events on a GPU, by the clock elsewhere."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        for _ in range(steps):
            call()
        return 1000 * (time.perf_counter() - start) / steps
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    before.record()
    for _ in range(steps):
        call()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / steps


def turns(
    calls: Mapping[str, Call],
    steps: int,
    repeats: int,
    device: str,
    *,
    warmup: int = 1,
    errors: dict[str, str] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of every call in every round. What raises drops out with its message in `errors`, where given."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-warmup, repeats):
        for name, call in calls.items():
            if errors is not None and name in errors:
                continue
            try:
                taken = milliseconds(call, steps, device)
            except Exception as error:
                if errors is None:
                    raise
                errors[name] = told(error)
                continue
            if number >= 0:
                times[name].append(taken)
    return times


def spread(times: Sequence[float]) -> tuple[float, float]:
    """Median, and the interquartile range in percent of it."""
    median = statistics.median(times)
    if len(times) < 2:
        return median, 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return median, 100 * (high - low) / median


def told(error: Exception) -> str:
    """The last line of an error that says something; all of it goes to stderr."""
    traceback.print_exception(error, file=sys.stderr)
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(HINTS)]
    return f"{type(error).__name__}: {said[-1] if said else ''}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def number(value: float | None, form: str) -> str:
    """A cell of a table; a dash for what was not measured."""
    return "–" if value is None else format(value, form)
