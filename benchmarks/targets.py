"""What ndpp aims at in speed, measured in one go: every aim beside what was found, and whether it is met.

Training steps are timed by `step` on a CUDA device, and what is added to the paper's five layers by `cpu-table`.
Without a CUDA device the steps are left out, and listed as not measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cpu_table, step, timing
from .guard import require_green
from .records import append, header
from .workloads import BASELINE

Record = dict[str, Any]

RUNS = {
    "resnet50": "--model resnet50 --batch 128 --variants bn,none,nd,nd-l1,nd-std --modes eager,compiled",
    "small-batch": "--model resnet50 --batch 16 --variants bn,nd --modes eager,graphs",
    "vit": "--model vit_b_16 --batch 64 --variants bn,nd-standardize",
    "mask-rcnn": "--model maskrcnn --variants bn,nd,nd-l1,nd-share,nd-l1-share",
    "deeplab": "--model deeplab --variants bn,nd",
}
CPU = "cpu-table"


@dataclass(frozen=True)
class Aim:
    """A number of a run that should be at most so much: of a variant in a mode, as a ratio to the baseline's."""

    run: str
    variant: str
    mode: str
    most: float
    key: str = "ms"

    def __str__(self) -> str:
        what = {"ms": "step", "memory_gib": "peak memory", "compile_s": "compile time"}[self.key]
        return f"{self.run}, {self.variant}, {self.mode}: {what}"

    def found(self, records: Sequence[Record]) -> float | None:
        numbers = {r["variant"]: r.get(self.key) for r in records if r["mode"] == self.mode}
        ours, base = numbers.get(self.variant), numbers.get(BASELINE)
        return None if ours is None or not base else float(ours / base)


AIMS = (
    Aim("resnet50", "nd", "eager", 0.90),
    Aim("resnet50", "nd", "compiled", 0.90),
    *(Aim("resnet50", scaled, mode, 0.95) for scaled in ("nd-l1", "nd-std") for mode in ("eager", "compiled")),
    Aim("resnet50", "nd", "eager", 0.85, "memory_gib"),
    Aim("resnet50", "nd", "compiled", 1.5, "compile_s"),
    Aim("small-batch", "nd", "eager", 1.3),
    Aim("small-batch", "nd", "graphs", 1.0),
    Aim("vit", "nd-standardize", "eager", 1.05),
    *(Aim("mask-rcnn", nd, "eager", 1.15) for nd in ("nd", "nd-share")),
    *(Aim("mask-rcnn", nd, "eager", 1.25) for nd in ("nd-l1", "nd-l1-share")),
    Aim("deeplab", "nd", "eager", 1.0),
)
ADDED = 5.0  # percent of each of the five layers


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join((*RUNS, CPU)), help=f"comma-separated: {', '.join((*RUNS, CPU))}")
    parser.add_argument("--layers", default="0,1,2,3,4", help="of the CPU table")
    parser.add_argument("--batch", type=int, default=16, help="of the CPU table; the paper's is 16")
    parser.add_argument("--shrink", type=int, default=1, help="divide sides of its images, for a quick look")
    parser.add_argument("--steps-out", type=Path, help="append the records of `step` to this file")
    timing.arguments(parser, steps=10, repeats=10)


def main(options: argparse.Namespace) -> None:
    chosen = step.chosen(options.only, (*RUNS, CPU))
    cuda = options.device.startswith("cuda")
    if not options.unchecked:
        require_green(options.device)
    print(f"{header(options.device)}{'; unchecked' if options.unchecked else ''}\n", flush=True)
    records = [
        record for name in RUNS if name in chosen for record in (timed(name, options) if cuda else missing(name))
    ]
    if CPU in chosen:
        records += added(options)
    for record in records:
        append(options.out, {**record, "checked": not options.unchecked}, options.device)
    print(table(records))


def timed(name: str, options: argparse.Namespace) -> list[Record]:
    """The aims of one run of `step`."""
    parser = argparse.ArgumentParser()
    step.arguments(parser)
    common = f"--device {options.device} --steps {options.steps} --repeats {options.repeats} --unchecked"
    told = parser.parse_args([*RUNS[name].split(), *common.split()])
    told.unchecked = options.unchecked  # the tests have run once for all
    records = step.timed(told)
    for record in records:
        append(options.steps_out, record, options.device)
    return [aimed(str(aim), aim.most, aim.found(records)) for aim in AIMS if aim.run == name]


def missing(name: str) -> list[Record]:
    return [aimed(str(aim), aim.most, None) for aim in AIMS if aim.run == name]


def added(options: argparse.Namespace) -> list[Record]:
    """Percent of the plain layer that the default and a scale add, on the CPU."""
    records = []
    for index in options.layers.split(","):
        layer = cpu_table.shrunk(cpu_table.LAYERS[int(index)], options.shrink)
        _, _, found = cpu_table.measure(layer, options.batch, options.repeats, False, ["default", "l1"])
        records += [aimed(f"CPU, {layer}, {name}: percent added", ADDED, percent) for name, percent in found.items()]
    return records


def aimed(what: str, most: float, found: float | None) -> Record:
    return {"aim": what, "most": most, "found": found, "met": None if found is None else found <= most}


def table(records: Sequence[Record]) -> str:
    words = {True: "yes", False: "no", None: "not measured"}
    rows = [[r["aim"], f"{r['most']:g}", timing.number(r["found"], ".3g"), words[r["met"]]] for r in records]
    return timing.markdown(("what", "at most", "found", "met"), rows)
