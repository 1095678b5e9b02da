"""One layer plain and with ndpp: forward, and forward with backward, in turns; on a GPU also within a CUDA graph.

The layers are the distinct convolutions of ResNet-50 at 224² and the linear layers of ViT-B/16.
"""

from __future__ import annotations

import argparse
import fnmatch
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import ndpp

from . import timing
from .guard import begin
from .records import append
from .workloads import SETTINGS

Record = dict[str, Any]
PLAIN = "plain"
PASSES = ("forward", "both")  # both: forward and backward


@dataclass(frozen=True)
class Shape:
    """A layer and its input: images of `side`² for a convolution, `side` tokens for a linear layer (kernel 0)."""

    inputs: int
    outputs: int
    kernel: int
    stride: int
    side: int
    times: int = 1  # it occurs in its network

    def __str__(self) -> str:
        if self.kernel == 0:
            return f"linear {self.inputs}→{self.outputs} ×{self.side}"
        return f"{self.kernel}×{self.kernel}/{self.stride} {self.inputs}→{self.outputs} {self.side}²"

    def build(self, settings: ndpp.Settings | None) -> nn.Module:
        torch.manual_seed(0)
        if self.kernel == 0:
            plain: nn.Module = nn.Linear(self.inputs, self.outputs)
        else:
            plain = nn.Conv2d(self.inputs, self.outputs, self.kernel, self.stride, padding=self.padding, bias=False)
        if settings is not None:
            ndpp.convert_(plain, settings)
        return plain

    @property
    def padding(self) -> int:
        return 0 if self.kernel == self.stride else self.kernel // 2

    def input(self, batch: int) -> Tensor:
        torch.manual_seed(1)
        if self.kernel == 0:
            return torch.randn(batch, self.side, self.inputs)
        return torch.randn(batch, self.inputs, self.side, self.side).to(memory_format=torch.channels_last)


RESNET50 = (
    Shape(3, 64, 7, 2, 224),
    Shape(64, 64, 1, 1, 56),
    Shape(64, 64, 3, 1, 56, 3),
    Shape(64, 256, 1, 1, 56, 4),
    Shape(256, 64, 1, 1, 56, 2),
    Shape(256, 128, 1, 1, 56),
    Shape(128, 128, 3, 2, 56),
    Shape(256, 512, 1, 2, 56),
    Shape(128, 512, 1, 1, 28, 4),
    Shape(512, 128, 1, 1, 28, 3),
    Shape(128, 128, 3, 1, 28, 3),
    Shape(512, 256, 1, 1, 28),
    Shape(256, 256, 3, 2, 28),
    Shape(512, 1024, 1, 2, 28),
    Shape(256, 1024, 1, 1, 14, 6),
    Shape(1024, 256, 1, 1, 14, 5),
    Shape(256, 256, 3, 1, 14, 5),
    Shape(1024, 512, 1, 1, 14),
    Shape(512, 512, 3, 2, 14),
    Shape(1024, 2048, 1, 2, 14),
    Shape(512, 2048, 1, 1, 7, 3),
    Shape(2048, 512, 1, 1, 7, 2),
    Shape(512, 512, 3, 1, 7, 2),
)
VIT_B_16 = (
    Shape(3, 768, 16, 16, 224),
    Shape(768, 2304, 0, 1, 197, 12),
    Shape(768, 768, 0, 1, 197, 12),
    Shape(768, 3072, 0, 1, 197, 12),
    Shape(3072, 768, 0, 1, 197, 12),
    Shape(768, 1000, 0, 1, 1),
)
SHAPES = {str(shape): shape for shape in (*RESNET50, *VIT_B_16)}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", default="*", help="patterns of names as the table shows them, comma-separated")
    parser.add_argument("--variants", default="nd", help=f"comma-separated: {', '.join(SETTINGS)}")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--shrink", type=int, default=1, help="divide sides of inputs by this, for a quick look")
    parser.add_argument("--graph", action="store_true", help="time replays of a CUDA graph: no launches by the host")
    timing.dtype_argument(parser)
    timing.arguments(parser, steps=20, repeats=10)


def main(options: argparse.Namespace) -> None:
    if options.graph and not options.device.startswith("cuda"):
        raise SystemExit("--graph needs a CUDA device")
    patterns = options.layers.split(",")
    shapes = [shape for name, shape in SHAPES.items() if any(fnmatch.fnmatch(name, p) for p in patterns)]
    if not shapes or set(options.variants.split(",")) - set(SETTINGS):
        raise SystemExit(f"layers: {', '.join(SHAPES)}\nvariants: {', '.join(SETTINGS)}")
    begin(options, f"batch {options.batch}, {options.dtype}, {'graph' if options.graph else 'eager'}")
    timing.fast_arithmetic()
    records = []
    for shape in shapes:
        side = max(shape.side // options.shrink, shape.kernel, 1)
        records.append(measured(replace(shape, side=side), options))
        append(options.out, records[-1], options.device)
        print(f"{records[-1]['shape']}: {records[-1].get('error', 'done')}", flush=True)
    print(table(records))


def measured(shape: Shape, options: argparse.Namespace) -> Record:
    """Plain and variants in turns; milliseconds, spread and ratios by pass and variant."""
    record: Record = {"shape": str(shape), "times": shape.times, "batch": options.batch, "dtype": options.dtype}
    record |= {"graph": options.graph, "checked": not options.unchecked}
    names = [PLAIN, *options.variants.split(",")]
    try:
        for what in PASSES:
            backward = what == "both"
            calls = {name: call(shape, options.batch, SETTINGS.get(name), backward, options) for name in names}
            times = timing.turns(calls, options.steps, options.repeats, options.device)
            found = {name: timing.spread(taken) for name, taken in times.items()}
            record[what] = {name: {"ms": ms, "iqr_percent": iqr} for name, (ms, iqr) in found.items()}
            for name in names:
                record[what][name]["ratio"] = found[name][0] / found[PLAIN][0]
    except Exception as error:
        record["error"] = timing.told(error)
    return record


def call(
    shape: Shape, batch: int, settings: ndpp.Settings | None, backward: bool, options: argparse.Namespace
) -> timing.Call:
    """One pass of a layer in training mode; the input needs a gradient unless it is an image."""
    layout = torch.channels_last if shape.kernel else torch.preserve_format
    module = shape.build(settings).to(options.device, memory_format=layout)  # type: ignore[call-overload]
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    x = shape.input(batch).to(options.device, dtype).requires_grad_(backward and shape.inputs > 3)

    def forward() -> Tensor:
        with timing.autocast(options):
            y: Tensor = module(x)
        return y

    with torch.no_grad():
        gradient = torch.randn_like(forward())

    def run() -> None:
        if not backward:
            with torch.no_grad():
                forward()
            return
        forward().backward(gradient)  # type: ignore[no-untyped-call]
        x.grad = None
        module.zero_grad(set_to_none=True)

    return captured(run) if options.graph else run


def captured(run: timing.Call) -> timing.Call:
    """The same as a CUDA graph, after a few calls on a stream of its own."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def table(records: list[Record]) -> str:
    """Milliseconds of the plain layer and ratios to it, for each pass."""
    names = [name for name in next((r["both"] for r in records if "both" in r), {}) if name != PLAIN]
    columns = [f"{what} {cell}" for what in PASSES for cell in ("plain ms", "IQR %", *names)]
    rows = []
    for r in records:
        how = f"{r['batch']} {r['dtype']}{' graph' if r['graph'] else ''}{'' if r['checked'] else ' unchecked'}"
        cells = [r["error"], *["–"] * (len(columns) - 1)] if "error" in r else []
        for what in PASSES if "error" not in r else ():
            plain = r[what][PLAIN]
            cells += [f"{plain['ms']:.3f}", f"{plain['iqr_percent']:.0f}"]
            cells += [f"{r[what][name]['ratio']:.2f}" for name in names]
        rows.append([r["shape"], f"×{r['times']}", how, *cells])
    return timing.markdown(["layer", "occurs", "batch", *columns], rows)
