"""What ndpp aims at in speed, measured in one go: every aim beside what was found, and whether it is met.

Training steps are timed by `step` on a CUDA device, and what is added to the paper's five layers by `cpu-table`.
Without a CUDA device the steps are left out, and listed as not measured. Processes of `step` build, compile and warm up
side by side, beside the tests; once all are ready and the tests are green, they are timed one after the other. Those
that take longer than --patience to be ready stand still meanwhile, and are timed when they are.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cpu_table, step, timing
from .guard import Tests
from .records import ROOT, append, header
from .workloads import BASELINE, WORKLOADS

Record = dict[str, Any]

# Of each aim what `step` is told, process by process; a variant is compared with the baseline of its own process.
RUNS = {
    "resnet50": (
        "--model resnet50 --batch 128 --variants bn,none,nd,nd-l1,nd-std,gn,iternorm",
        "--model resnet50 --batch 128 --variants bn,nd --modes compiled",
        "--model resnet50 --batch 128 --variants bn,nd-l1 --modes compiled",
        "--model resnet50 --batch 128 --variants bn,nd-std --modes compiled",
        "--model resnet50 --batch 128 --variants bn,none --modes compiled",
        "--model resnet50 --batch 128 --variants bn,nd --modes graphs",
        "--model resnet50 --batch 128 --variants bn,nd --modes graphed",
    ),
    "small-batch": (
        "--model resnet50 --batch 16 --variants bn,nd,none",
        "--model resnet50 --batch 16 --variants bn,nd --modes graphs",
    ),
    "vit": (
        "--model vit_b_16 --batch 64 --variants bn,nd-standardize,none",
        "--model vit_b_16 --batch 64 --variants bn,nd-standardize --modes graphed",
    ),
    "deeplab": ("--model deeplab --variants bn,nd",),
    "mask-rcnn": ("--model maskrcnn --variants bn,nd,nd-l1,nd-share,nd-l1-share",),
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
    parser.add_argument("--of", type=Path, metavar="FILE", help="of records that `step` has written; nothing is timed")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="as of `step`")
    parser.add_argument("--patience", type=float, default=600, help="seconds until those that are ready are timed")
    timing.arguments(parser, steps=10, repeats=10)


def main(options: argparse.Namespace) -> None:
    if options.of is not None:
        from .summary import read  # which has this table, too

        print(table(of_steps(read([options.of]))))
        return
    chosen = timing.chosen(options.only, (*RUNS, CPU))
    cuda = options.device.startswith("cuda")
    tests = None if options.unchecked else Tests(options.device)
    print(f"{header(options.device)}{'; unchecked' if options.unchecked else ''}\n", flush=True)
    wanted = [name for name in RUNS if name in chosen]
    records = timed(wanted, options, tests) if cuda else [missing(aim) for aim in AIMS if aim.run in wanted]
    if tests is not None and not cuda:
        tests.require_green()
    if CPU in chosen:
        records += added(options)
    for record in records:
        append(options.out, {**record, "checked": not options.unchecked}, options.device)
    print(table(records))


class Timed:
    """A process of `step`, which waits for its turn once it is ready."""

    def __init__(self, run: str, told: str, folder: Path, options: argparse.Namespace) -> None:
        self.run, self.told, self.file = run, told, folder / f"{run}-{abs(hash(told))}.jsonl"
        self.ready, self.stood_still = threading.Event(), False
        command = [sys.executable, "-m", "benchmarks", "step", *told.split(), "--await-turn", "--unchecked"]
        command += ["--device", options.device, "--steps", str(options.steps), "--repeats", str(options.repeats)]
        command += ["--out", str(self.file)]
        if options.profile is not None:
            command += ["--profile", str(options.profile.resolve())]
        folders = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
        # With a session of its own: it stands still together with the compilers that it has started.
        self.process = subprocess.Popen(command, start_new_session=True, **pipes)  # type: ignore[call-overload]
        threading.Thread(target=self._warm_up, daemon=True).start()

    def _warm_up(self) -> None:
        """Pass on what it says until it is ready, or has ended."""
        for line in self.process.stdout:
            if line.strip() == step.READY:
                break
            print(f"[{self.run}] {line}", end="", flush=True)
        self.ready.set()

    def send(self, number: signal.Signals) -> None:
        """To the process and all it has started."""
        if self.process.poll() is None:
            self.stood_still |= number == signal.SIGSTOP
            os.killpg(self.process.pid, number)

    def records(self) -> list[Record]:
        """Its turn: it is timed, and ends."""
        output, _ = self.process.communicate("\n" if self.process.poll() is None else None)
        print("".join(f"[{self.run}] {line}\n" for line in output.splitlines() if line), end="", flush=True)
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        records: list[Record] = [json.loads(line) for line in lines]
        return [record | {"compile_s": None} for record in records] if self.stood_still else records


def timed(names: Sequence[str], options: argparse.Namespace, tests: Tests | None) -> list[Record]:
    """The aims of these runs."""
    found: dict[Aim, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = [Timed(name, told, Path(folder), options) for name in names for told in RUNS[name]]
        try:
            for process in in_turn(processes, options.patience, tests):
                records = process.records()
                for record in records:
                    append(options.steps_out, record | {"checked": tests is not None}, options.device)
                found |= {aim: ratio for aim in AIMS if aim.run == process.run and (ratio := aim.found(records))}
        finally:
            for process in processes:
                process.send(signal.SIGKILL)
    return [aimed(str(aim), aim.most, found.get(aim)) for aim in AIMS if aim.run in names]


def in_turn(processes: Sequence[Timed], patience: float, tests: Tests | None) -> Iterator[Timed]:
    """Those that are ready, one after the other, with the device to themselves."""
    waiting, start = list(processes), time.monotonic()
    while waiting:
        ready = [process for process in waiting if process.ready.is_set()]
        late = [process for process in waiting if process not in ready]
        if not ready or (late and time.monotonic() - start < patience):
            time.sleep(0.2)
            continue
        if tests is not None:
            tests.require_green()
        print(f"{len(ready)} ready, timed now; {len(late)} more stand still", flush=True)
        for process in late:
            process.send(signal.SIGSTOP)
        yield from ready
        print(f"{len(late)} go on", flush=True)
        for process in late:
            process.send(signal.SIGCONT)
        waiting = late


def of_steps(records: Sequence[Record]) -> list[Record]:
    """The aims, by the newest records of each process of `step`, which begin with its baseline, in their setting."""
    found: dict[Aim, float] = {}
    starts = [number for number, record in enumerate(records) if "mode" in record and record["variant"] == BASELINE]
    if not starts:
        raise SystemExit(
            f"expected records of `step` with the variant {BASELINE!r}; got {len(records)} records without it"
        )
    for start, end in zip(starts, [*starts[1:], len(records)], strict=True):
        own = records[start:end]
        for aim in AIMS:
            ratio = aim.found(own) if of_run(own[0]) == timed_with(aim.run) and own[0]["checked"] else None
            if ratio is not None:
                found[aim] = ratio
    return [aimed(str(aim), aim.most, found.get(aim)) for aim in AIMS]


def of_run(record: Record) -> tuple[Any, ...]:
    """What an aim holds for: model, batch, size of images, precision, and a GPU."""
    of_gpu = "threads" not in record["device"]
    return record["model"], record["batch"], tuple(record["size"]), record["dtype"], of_gpu


def timed_with(run: str) -> tuple[Any, ...]:
    words = RUNS[run][0].split()
    told = dict(zip(words[::2], words[1::2], strict=True))
    work = WORKLOADS[told["--model"]]
    return told["--model"], int(told.get("--batch", work.batch)), work.size, "bf16", True


def missing(aim: Aim) -> Record:
    return aimed(str(aim), aim.most, None)


def added(options: argparse.Namespace) -> list[Record]:
    """Percent of the plain layer that the default and a scale add, on the CPU."""
    records = []
    for layer in [cpu_table.shrunk(layer, options.shrink) for layer in cpu_table.layers(options.layers)]:
        _, _, found = cpu_table.measure(layer, options.batch, options.repeats, False, ["default", "l1"])
        records += [aimed(f"CPU, {layer}, {name}: percent added", ADDED, percent) for name, percent in found.items()]
    return records


def aimed(what: str, most: float, found: float | None) -> Record:
    return {"aim": what, "most": most, "found": found, "met": None if found is None else found <= most}


def table(records: Sequence[Record]) -> str:
    words = {True: "yes", False: "no", None: "not measured"}
    rows = [[r["aim"], f"{r['most']:g}", timing.number(r["found"], ".3g"), words[r["met"]]] for r in records]
    return timing.markdown(("what", "at most", "found", "met"), rows)
