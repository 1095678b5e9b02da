"""What ndpp adds to the five convolutions of the paper's CPU runtime table, in percent of the plain layer.

Plain and ndpp layers take turns within one run. What is added is the median of the differences within a pair, in
percent of the median of the plain layer: read these, not the milliseconds. The paper's percentages are
(Get X + Cov + D + D·W) / Conv of its own table, plus its x/σ₁ row where the layer has a scale (it does not say which
statistic σ₁ is): forward alone, batch 16, on a machine it does not name.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ndpp

from .guard import Tests
from .records import append
from .timing import markdown


@dataclass(frozen=True)
class Layer:
    """A column of the paper's table; its times are seconds at batch 16."""

    kernel: int
    stride: int
    inputs: int
    outputs: int
    size: tuple[int, int]
    scale: float  # x/σ₁
    get_x: float
    cov: float
    d: float
    dw: float
    conv: float

    def __str__(self) -> str:
        return f"{self.kernel}×{self.kernel}/{self.stride} {self.inputs}→{self.outputs} {self.size[0]}×{self.size[1]}"

    def paper_percent(self, with_scale: bool) -> float:
        extra = self.get_x + self.cov + self.d + self.dw + (self.scale if with_scale else 0.0)
        return 100 * extra / self.conv


LAYERS = (
    Layer(7, 2, 3, 64, (800, 1333), 0.75, 0.72, 1.43, 0.0, 0.0, 30.16),
    Layer(3, 1, 64, 64, (200, 333), 0.99, 0.93, 0.70, 0.14, 0.0, 3.40),
    Layer(3, 1, 256, 256, (200, 333), 3.84, 6.22, 2.75, 0.13, 0.02, 30.56),
    Layer(1, 1, 512, 128, (100, 166), 1.94, 2.81, 1.36, 0.13, 0.02, 7.31),
    Layer(1, 2, 2048, 1024, (50, 83), 1.95, 2.93, 1.40, 0.13, 0.84, 46.60),
)

VARIANTS = {
    "default": ndpp.Settings(),
    "l1": ndpp.Settings(scale="l1"),
    "std": ndpp.Settings(scale="std"),
    "paper(5)": ndpp.Settings.paper(stride=5),
}


SCALED = ("l1", "std")
WARMUP = 2  # rounds: memory is first handed out, then handed out again


def layers(numbers: str) -> list[Layer]:
    """Columns of the table by their numbers, comma-separated."""
    known = [str(number) for number in range(len(LAYERS))]
    wanted = numbers.split(",")
    if set(wanted) - set(known):
        raise SystemExit(f"--layers: expected some of {','.join(known)}; got {numbers!r}")
    return [LAYERS[int(number)] for number in wanted]


def shrunk(layer: Layer, by: int) -> Layer:
    height, width = layer.size
    return replace(layer, size=(height // by, width // by))


def seconds(module: nn.Module, x: torch.Tensor, backward: bool) -> float:
    start = time.perf_counter()
    if backward:
        y = module(x)
        y.backward(torch.ones((), device=y.device).expand_as(y))
        x.grad = None
        module.zero_grad(set_to_none=True)
    else:
        with torch.no_grad():
            module(x)
    return time.perf_counter() - start


def measure(
    layer: Layer, batch: int, repeats: int, backward: bool, names: list[str]
) -> tuple[float, float, dict[str, float]]:
    """Plain layer: median milliseconds. In percent of it: interquartile range, and what each variant adds."""
    torch.manual_seed(0)
    x = torch.randn(batch, layer.inputs, *layer.size, requires_grad=backward)
    arguments = (layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.kernel // 2)
    plain = nn.Conv2d(*arguments)
    times: dict[str, list[float]] = {name: [] for name in names}
    plain_times: list[float] = []
    modules = {name: ndpp.Conv2d(*arguments, settings=VARIANTS[name]) for name in names}
    for repeat in range(-WARMUP, repeats):
        for name, module in modules.items():
            pair = seconds(plain, x, backward), seconds(module, x, backward)
            if repeat >= 0:
                plain_times.append(pair[0])
                times[name].append(pair[1] - pair[0])
    base = statistics.median(plain_times)
    low, _, high = statistics.quantiles(plain_times, n=4)
    return (
        1000 * base,
        100 * (high - low) / base,
        {name: 100 * statistics.median(t) / base for name, t in times.items()},
    )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=1, help="the paper used 16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backward", action="store_true", help="time forward and backward")
    parser.add_argument("--layers", default="0,1,2,3,4", help="which columns of the table, from 0")
    parser.add_argument("--out", type=Path, help="append one JSON line per layer to this file")
    parser.add_argument("--shrink", type=int, default=1, help="divide image sides by this, for a quick look")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument("--unchecked", action="store_true", help="do not run the matching tests first; recorded")


def main(options: argparse.Namespace) -> None:
    names = options.variants.split(",")
    if set(names) - set(VARIANTS):
        raise SystemExit(f"expected some of {', '.join(VARIANTS)}; got {options.variants!r}")
    chosen = layers(options.layers)
    if not options.unchecked:
        Tests("cpu").require_green()
    what = "forward and backward" if options.backward else "forward"
    versions = f"torch {torch.__version__}, ndpp {ndpp.__version__}"
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, {versions};")
    print(f"{what}, training mode, batch {options.batch}, median of {options.repeats};")
    print("in brackets the paper's percent: forward, batch 16\n")
    print(f"{'layer':<28}{'plain ms':>10}{'IQR':>7}" + "".join(f"{name:>20}" for name in names))
    for layer in [shrunk(layer, options.shrink) for layer in chosen]:
        plain, spread, added = measure(layer, options.batch, options.repeats, options.backward, names)
        if options.out:
            record = {"layer": str(layer), "plain_ms": plain, "iqr_percent": spread, "added_percent": added}
            record |= {"batch": options.batch, "backward": options.backward, "threads": torch.get_num_threads()}
            append(options.out, {**record, "checked": not options.unchecked}, "cpu")
        cells = (f"{percent:>+10.1f}% ({layer.paper_percent(name in SCALED):5.1f}%)" for name, percent in added.items())
        print(f"{layer!s:<28}{plain:>10.1f}{spread:>6.0f}%" + "".join(cells), flush=True)


def table(records: list[dict[str, Any]]) -> str:
    """What is added in percent, beside the paper's numbers for the same layer (forward, batch 16)."""
    paper = {str(layer): layer for layer in LAYERS}
    names = list(records[0]["added_percent"])
    head = ["layer", "batch", "plain ms", "IQR %"]
    head += [part for name in names for part in (name, "paper" + " with scale" * (name in SCALED))]
    rows = []
    for r in records:
        cells = [r["layer"], str(r["batch"]), f"{r['plain_ms']:.0f}", f"{r['iqr_percent']:.0f}"]
        for name in names:
            cells += [f"{r['added_percent'][name]:+.1f}%", f"+{paper[r['layer']].paper_percent(name in SCALED):.0f}%"]
        rows.append(cells)
    return markdown(head, rows)
