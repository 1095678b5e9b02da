"""Host time of a training step in eager mode, without a device: what a GPU that takes no time at all would wait for.

ResNet-50 with 16 channels in every layer, two images of 32×32, so that operations of torch take next to nothing.
ndpp goes the way it goes on a GPU: kernels are prepared and told as ever, and a function that does nothing is called in
place of the driver's. Values have no meaning, and the operations of torch are those of a CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import pstats
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ndpp.kernels import cases, triton_direct

from . import timing
from .records import append, header
from .workloads import BASELINE, NORMS, SETTINGS, apply_

CHANNELS, CLASSES, SHOWN, STEPS = 16, 10, 45, 3
NUMBER = -2  # of the device, so that what is prepared for it is for no other


def arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join((BASELINE, *NORMS, *SETTINGS))
    parser.add_argument("--variants", default="bn,none,nd,nd-l1", help=f"comma-separated: {names}")
    parser.add_argument("--profile", metavar="VARIANT", help="the functions in which it spends its time, with no table")
    parser.add_argument("--repeats", type=int, default=40, help="timed rounds in which the variants take turns")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    variants = timing.chosen(options.profile or options.variants, (BASELINE, *NORMS, *SETTINGS))
    if options.repeats < 1:
        raise SystemExit(f"--repeats: expected 1 or more; got {options.repeats}")
    print(f"{header('cpu')}; host time of a step, median of {options.repeats} × {STEPS}\n", flush=True)
    with pretended_device():
        steps = {variant: training_step(variant) for variant in variants}
        for step in steps.values():
            for _ in range(10):
                step()
        if options.profile:
            return profiled(steps[options.profile])
        times = timing.turns(steps, STEPS, options.repeats, "cpu")
    found = {name: timing.spread(taken) for name, taken in times.items()}
    base = found[BASELINE][0] if BASELINE in found else None
    records = []
    for name, (median, iqr) in found.items():
        record = {"variant": name, "host_ms": median, "ratio": median / base if base else None, "iqr_percent": iqr}
        records.append(record)
        append(options.out, record, "cpu")
    print(table(records))


def table(records: list[dict[str, Any]]) -> str:
    head = ("variant", "host ms per step", "ratio", "IQR %", "µs per layer above `none`")
    floor = next((r["host_ms"] for r in records if r["variant"] == "none"), None)
    rows = []
    for r in records:
        added = None if floor is None or r["variant"] == "none" else 1000 * (r["host_ms"] - floor) / LAYERS
        cells = [(r["host_ms"], ".2f"), (r["ratio"], ".2f"), (r["iqr_percent"], ".1f"), (added, ".0f")]
        rows.append([r["variant"], *(timing.number(value, form) for value, form in cells)])
    return timing.markdown(head, rows)


# --- what is timed ---

LAYERS = 53  # convolutions of ResNet-50


def network(variant: str) -> nn.Module:
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model: nn.Module = resnet50()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                own: dict[str, Any] = {key: getattr(child, key) for key in ("kernel_size", "stride", "padding")}
                setattr(parent, name, nn.Conv2d(min(child.in_channels, CHANNELS), CHANNELS, bias=False, **own))
            elif isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, nn.BatchNorm2d(CHANNELS))
            elif isinstance(child, nn.Linear):
                setattr(parent, name, nn.Linear(CHANNELS, CLASSES))
    apply_(model, variant)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return, unused-ignore]


def training_step(variant: str) -> Callable[[], None]:
    """Forward, backward and SGD in bfloat16 autocast, channels last."""
    model = network(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, foreach=True)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model(x).float().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def profiled(step: Callable[[], None], steps: int = 20) -> None:
    with cProfile.Profile() as profile:
        for _ in range(steps):
            step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(SHOWN)


# --- a device that takes no time ---


@contextlib.contextmanager
def pretended_device() -> Iterator[None]:
    """CPU tensors go the way of those on a GPU, but for the operations of torch."""
    from ndpp.kernels import triton_launch

    nothing = ctypes.CDLL(None).labs  # of the C library: it is called, reads a number and returns
    nothing.argtypes = [ctypes.c_void_p] * 4
    patches: list[tuple[Any, str, Any]] = [
        (cases, "_unfit", lambda mode, kind, number: None),
        (triton_direct, "driver", lambda: lambda *arguments: nothing(*arguments) and 0),
        (triton_launch, "INTERPRETED", False),
        (triton_launch.Launcher, "start", compiled),
        (torch._C, "_cuda_getDevice", lambda: NUMBER),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
    ]
    answers = {"readable": False, "seen": None, "works_apart": True}
    for module in [module for name, module in sys.modules.items() if name.startswith("ndpp.")]:
        patches += [(module, name, partial(_answer, value)) for name, value in answers.items() if hasattr(module, name)]
    with contextlib.ExitStack() as stack:
        for where, name, value in patches:
            stack.enter_context(mock.patch.object(where, name, value, create=where is torch._C))
        yield


def _answer(value: bool | None, t: Tensor) -> bool | None:
    return value


def compiled(launcher: Any, grid: tuple[int, ...], pointers: tuple[Any, ...], numbers: tuple[float, ...]) -> Any:
    """What Triton would have made of a kernel, as far as its launch asks."""
    plain = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    target = SimpleNamespace(backend="cuda")
    metadata = SimpleNamespace(num_ctas=1, shared=0, num_warps=4, target=target, **dict.fromkeys(plain, 0))
    kinds = ["constexpr" if t is None else "*fp32" for t in pointers]
    kinds += ["fp32" if isinstance(number, float) else "i32" for number in numbers]
    return SimpleNamespace(metadata=metadata, src=SimpleNamespace(signature=dict(enumerate(kinds))), function=1)
