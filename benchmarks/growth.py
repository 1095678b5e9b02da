"""What ndpp adds to one convolution as images and batches grow: 64→64, 3×3, forward and backward.

With a row budget the statistics cost the same whatever the input; what grows is what touches all of it.
"""

from __future__ import annotations

import argparse
import gc
from typing import Any

import torch

from . import timing
from .guard import begin
from .layer import PLAIN, Shape, call
from .records import append
from .workloads import SETTINGS

Record = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="56,112,224,448", help="sides of images at --batch")
    parser.add_argument("--batch", type=int, default=32, help="for --sizes")
    parser.add_argument("--batches", default="2,4,8,16,32,64,128,256,512,1024", help="at --side")
    parser.add_argument("--side", type=int, default=56, help="for --batches")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--variant", choices=tuple(SETTINGS), default="nd")
    parser.add_argument("--graph", action="store_true", help="time replays of a CUDA graph: no launches by the host")
    timing.dtype_argument(parser)
    timing.arguments(parser, steps=20, repeats=10)


def main(options: argparse.Namespace) -> None:
    if options.graph and not options.device.startswith("cuda"):
        raise SystemExit("--graph needs a CUDA device")
    how = "graph" if options.graph else "eager"
    begin(options, f"{options.channels}→{options.channels} 3×3, {options.variant}, {options.dtype}, {how}")
    timing.fast_arithmetic()
    sweeps = {
        "size": [(options.batch, int(side)) for side in options.sizes.split(",") if side],
        "batch": [(int(batch), options.side) for batch in options.batches.split(",") if batch],
    }
    records = []
    for name, points in sweeps.items():
        first = None
        for batch, side in points:
            record = {"grows": name, **measured(batch, side, options)}
            first = first or record["added_ms"]
            record["to_first"] = record["added_ms"] / first
            records.append(record)
            append(options.out, record, options.device)
            print(f"{batch}×{side}²: {record['added_ms']:+.3f} ms", flush=True)
    print(table(records))


def measured(batch: int, side: int, options: argparse.Namespace) -> Record:
    shape = Shape(options.channels, options.channels, 3, 1, side)
    settings = {PLAIN: None, options.variant: SETTINGS[options.variant]}
    calls = {name: call(shape, batch, one, True, options) for name, one in settings.items()}
    times = timing.turns(calls, options.steps, options.repeats, options.device)
    (plain, iqr), (ours, our_iqr) = (timing.spread(times[name]) for name in settings)
    del calls
    gc.collect()
    if options.device.startswith("cuda"):
        torch.cuda.empty_cache()
    record: Record = {"batch": batch, "side": side, "channels": options.channels, "variant": options.variant}
    record |= {"plain_ms": plain, "plain_iqr_percent": iqr, "ms": ours, "iqr_percent": our_iqr}
    record |= {"added_ms": ours - plain, "ratio_to_plain": ours / plain, "dtype": options.dtype}
    return record | {"graph": options.graph, "checked": not options.unchecked}


def table(records: list[Record]) -> str:
    head = ("grows", "input", "plain ms", "IQR %", "variant", "ms", "IQR %", "ms added", "to the first", "to plain")
    rows = []
    for r in records:
        how = f"{r['variant']} {r['dtype']}{' graph' if r['graph'] else ''}{'' if r['checked'] else ' unchecked'}"
        plain = [f"{r['plain_ms']:.3f}", f"{r['plain_iqr_percent']:.0f}"]
        ours = [f"{r['ms']:.3f}", f"{r['iqr_percent']:.0f}", f"{r['added_ms']:.3f}"]
        ratios = [f"{r['to_first']:.2f}", f"{r['ratio_to_plain']:.2f}"]
        rows.append([r["grows"], f"{r['batch']}×{r['side']}²", *plain, how, *ours, *ratios])
    return timing.markdown(head, rows)
