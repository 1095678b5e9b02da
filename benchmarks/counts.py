"""By count, not by clock: the arithmetic and the bytes that ndpp adds to a training step, beside those of its layers.

Gram matrices count by half forward (they are symmetric); rows are read twice forward, once backward, and added to the
gradient. Times are what an ideal device of the given speeds would take for all of it, one after the other.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ndpp
from ndpp.decorrelated import Decorrelated

from .records import append
from .timing import chosen, markdown
from .workloads import SETTINGS, WORKLOADS

Record = dict[str, Any]
MODELS = ("resnet50", "resnet18", "vit_b_16")
STAGES = ("moments", "root", "fold")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--variants", default="nd,nd-paper", help=f"comma-separated: {', '.join(SETTINGS)}")
    parser.add_argument("--bytes", type=int, default=2, help="of an activation")
    parser.add_argument("--tflops", type=float, default=250.0, help="of the device: sustained TFLOP/s of products")
    parser.add_argument("--tbytes", type=float, default=4.3, help="of the device: TB/s of its memory")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")


def main(options: argparse.Namespace) -> None:
    records = [counted(name, SETTINGS[name], options) for name in chosen(options.variants, tuple(SETTINGS))]
    for record in records:
        append(options.out, record, "cpu")
    print(table(records))


def counted(name: str, settings: ndpp.Settings, options: argparse.Namespace) -> Record:
    """TFLOP of every stage and of the layers' own products, forward and backward; GB of rows."""
    total = dict.fromkeys((*STAGES, "layers", "gb"), 0.0)
    for layer, positions in layers(options.model, settings):
        for what, amount in of_layer(layer, options.batch * positions, options.bytes).items():
            total[what] += amount
    added = sum(total[stage] for stage in STAGES)
    ms = added / options.tflops * 1000 + total["gb"] / options.tbytes
    told = {"model": options.model, "batch": options.batch, "variant": name}
    return {"counted": told, **total, "ms": ms, "tflops": options.tflops, "tbytes": options.tbytes}


def layers(model: str, settings: ndpp.Settings) -> list[tuple[Decorrelated, int]]:
    """Converted layers, each with the output positions of one sample."""
    work = WORKLOADS[model]
    network = work.build(work.size)
    ndpp.convert_(network, settings)
    found: list[tuple[Decorrelated, int]] = []

    def note(module: nn.Module, inputs: Any, y: Tensor) -> None:
        assert isinstance(module, Decorrelated)
        sizes = y.shape[1:-1] if isinstance(module, nn.Linear) else y.shape[2:]
        found.append((module, math.prod(sizes)))

    for module in network.modules():
        if isinstance(module, Decorrelated):
            module.register_forward_hook(note)
    with torch.no_grad():
        network.eval()(work.inputs(1, work.size, "cpu")[0])
    return found


def of_layer(layer: Decorrelated, positions: int, size: int) -> dict[str, float]:
    plan, settings = layer._plan, layer.settings
    looked = positions if plan.rows is None else min(plan.rows, positions)
    if plan.stride is not None:
        looked = positions // plan.stride ** len(layer.weight.shape[2:])
    outputs = plan.outputs(layer.weight) // plan.layout.groups
    k = settings.steps
    products = 2 + 3 if settings.solver == "quartic" else (3 * k - 4) + (8 * k - 12)
    found = dict.fromkeys((*STAGES, "layers", "gb"), 0.0)
    for part, (own, f) in zip(plan.layout.parts, plan.layout.widths, strict=True):
        blocks = plan.layout.groups * part.blocks
        found["moments"] += 1.5 * 2 * looked * blocks * f * f / 1e12
        found["root"] += products * 2 * own * f**3 / 1e12
        found["fold"] += 3 * 2 * blocks * f * f * outputs / 1e12
        found["layers"] += 3 * 2 * positions * blocks * f * outputs / 1e12
        found["gb"] += 5 * size * looked * blocks * f / 1e9
    return found


def table(records: list[Record]) -> str:
    head = (
        "model, batch",
        "variant",
        "layers TFLOP",
        "moments",
        "root",
        "fold",
        "added to layers",
        "rows GB",
        "ideal ms",
    )
    rows = []
    for r in records:
        told, added = r["counted"], sum(r[stage] for stage in STAGES)
        numbers = [f"{r[what]:.3f}" for what in STAGES]
        share = f"{100 * added / r['layers']:.1f}%"
        name = f"{told['model']}, {told['batch']}"
        rows.append([name, told["variant"], f"{r['layers']:.2f}", *numbers, share, f"{r['gb']:.2f}", f"{r['ms']:.2f}"])
    return markdown(head, rows)
