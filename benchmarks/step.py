"""Time and memory of a training step under several normalisations, as a ratio to the network as it was published.

Forward, loss, backward and SGD with momentum, on one batch that lies on the device. All variants take turns within one
run. The learning rate is 0: the same work, and no variant drifts to where numbers overflow.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import timing
from .guard import begin
from .profiling import profiled
from .records import append
from .workloads import BASELINE, VARIANTS, WORKLOADS, Model, Size

READY = "ready: waiting for a line"  # what --await-turn says
EAGER, GRAPHED = "eager", "graphed"  # the latter: eager mode, recorded once by torch.cuda.make_graphed_callables
MODES: dict[str, dict[str, Any]] = {EAGER: {}, "compiled": {}, "graphs": {"mode": "reduce-overhead"}, GRAPHED: {}}
GIB = 2**30
Record = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=tuple(WORKLOADS), default="resnet50")
    parser.add_argument("--batch", type=int, help="images; by default what the model is usually timed with")
    parser.add_argument("--size", type=size, help="of images: SIDE or HEIGHTxWIDTH")
    parser.add_argument("--variants", default="bn,none,nd", help=f"comma-separated: {', '.join(VARIANTS)}")
    parser.add_argument("--modes", default="eager", help=f"comma-separated: {', '.join(MODES)}")
    parser.add_argument("--warmup", type=int, default=5, help="steps; graphs are captured in the second or third")
    parser.add_argument(
        "--await-turn", action="store_true", help="when all is warm, say so and wait for a line of input"
    )
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write a trace and a table of kernels for each")
    timing.dtype_argument(parser)
    timing.arguments(parser, steps=10, repeats=10)


def size(text: str) -> Size:
    """224 or 800x1333."""
    sides = [int(side) for side in text.split("x")]
    return sides[0], sides[-1]


def main(options: argparse.Namespace) -> None:
    complete(options)
    wanted(options)
    shape = f"{options.batch}×{options.size[0]}×{options.size[1]}"
    begin(options, f"{options.model}, {shape}, {options.dtype}, median of {options.repeats} × {options.steps} steps")
    print(table(timed(options)))


def wanted(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Variants and modes."""
    modes = timing.chosen(options.modes, tuple(MODES))
    if GRAPHED in modes and not options.device.startswith("cuda"):
        raise SystemExit(f"the mode {GRAPHED!r} records CUDA graphs: expected a CUDA device; got {options.device!r}")
    return timing.chosen(options.variants, VARIANTS), modes


def complete(options: argparse.Namespace) -> None:
    """What the model is usually timed with, where the options do not say."""
    work = WORKLOADS[options.model]
    options.batch, options.size = options.batch or work.batch, options.size or work.size


def timed(options: argparse.Namespace) -> list[Record]:
    """All variants in all modes; records are appended to --out as they come."""
    complete(options)
    variants, modes = wanted(options)
    timing.fast_arithmetic()
    records = []
    for mode in modes:
        for record in measured(mode, variants, options):
            records.append(record)
            append(options.out, record, options.device)
    return records


class Step:
    """A training step of one variant, as a call without arguments."""

    def __init__(self, variant: str, mode: str, options: argparse.Namespace) -> None:
        self.options, self.work = options, WORKLOADS[options.model]
        self.data = self.work.inputs(options.batch, options.size, options.device)
        model = self.work.model(variant, options.size, options.device)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        self.model = self._prepared(model, mode)

    def _prepared(self, model: torch.nn.Module, mode: str) -> Model:
        """As it is called in a mode."""
        if mode == EAGER:
            return model
        if mode == GRAPHED:
            # Cached casts would be shared between what is recorded and what is not.
            with timing.autocast(self.options, cache_enabled=False):
                graphed: Model = torch.cuda.make_graphed_callables(model, (self.data[0],))
            return graphed
        # Nothing may become dynamic because another variant had other sizes at the same place in the code.
        dynamic = None if self.work.varies else False
        return torch.compile(model, dynamic=dynamic, **MODES[mode])

    def __call__(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with timing.autocast(self.options):
            loss = self.work.loss(self.model, self.data)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        # After the step, not before: gradients that a graph owns must not outlive its variant's turn.
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


@dataclass
class Ready:
    """A variant that has been warmed up, and what was seen on the way."""

    step: Step
    facts: Record


def ready(variant: str, mode: str, options: argparse.Namespace) -> Ready:
    """Build and warm up; memory is what this variant adds to what was on the device before it was built.

    The peak does not include the first step, in which cuDNN tries its algorithms, and does include the capture of
    graphs, whose replays allocate nothing.
    """
    cuda = options.device.startswith("cuda")
    gc.collect()
    resident = torch.cuda.memory_allocated() if cuda else 0
    step = Step(variant, mode, options)
    seconds, loss = [], torch.zeros(())
    for number in range(options.warmup):
        start = time.perf_counter()
        loss = step()
        timing.synchronize(options.device)
        seconds.append(time.perf_counter() - start)
        if cuda and number == 0:
            torch.cuda.reset_peak_memory_stats()
    facts: Record = {"memory_gib": (torch.cuda.max_memory_allocated() - resident) / GIB if cuda else None}
    if mode == GRAPHED:  # what replays use is not allocated anew, and was not while this was counted
        facts["memory_gib"] = None
    facts["compile_s"] = None if mode in (EAGER, GRAPHED) else seconds[0] - seconds[-1]
    facts["finite"] = bool(loss.isfinite())
    return Ready(step, facts)


def measured(mode: str, variants: list[str], options: argparse.Namespace) -> list[Record]:
    """Every variant in one mode; what raises is a record with its error, and the others go on.

    Dynamo is reset once per mode, not between variants: a reset throws away what earlier variants were compiled to,
    which is needed for their turns.
    """
    import torch._dynamo.utils
    import torch._inductor.config  # slow to import

    torch._dynamo.reset()
    errors: dict[str, str] = {}
    steps: dict[str, Ready] = {}
    limits = {"recompile_limit": 1000, "accumulated_recompile_limit": 10000}  # all variants share code objects
    with torch._dynamo.config.patch(limits), torch._inductor.config.patch(force_disable_caches=True):
        for variant in variants:
            try:
                steps[variant] = ready(variant, mode, options)
            except Exception as error:
                errors[variant] = timing.told(error)
            say(variant, mode, errors.get(variant), steps[variant].facts if variant in steps else {})
        compiled = graphs()
        if options.await_turn:
            print(READY, flush=True)
            sys.stdin.readline()
        calls = {variant: one.step for variant, one in steps.items()}
        times = timing.turns(calls, options.steps, options.repeats, options.device, errors=errors)
        if graphs() != compiled:
            print(f"{mode}: {graphs() - compiled} graphs were compiled again while they were timed")
        if options.profile is not None:
            for variant in steps.keys() - errors.keys():
                steps[variant].facts |= traced(steps[variant].step, variant, mode, options)
    return finished(mode, variants, times, {name: one.facts for name, one in steps.items()}, errors, options)


def traced(step: Step, variant: str, mode: str, options: argparse.Namespace) -> dict[str, float]:
    """What a variant launches, once it has been timed: alone on the device."""
    name = f"{options.model}-{options.batch}-{variant}-{mode}"
    facts = profiled(step, options.device, options.profile, name)
    print(f"{variant} {mode}: {facts['kernels']:.0f} kernels in {facts['launches']:.0f} launches per step")
    return facts


def say(variant: str, mode: str, error: str | None, facts: Record) -> None:
    """Progress, as compiling takes minutes."""
    numbers = {name: value for name, value in facts.items() if value is not None and not isinstance(value, bool)}
    seen = ", ".join(["warm", *(f"{name} {value:.3g}" for name, value in numbers.items())])
    print(f"{variant} {mode}: {f'failed: {error}' if error else seen}", flush=True)


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def finished(
    mode: str,
    variants: list[str],
    times: dict[str, list[float]],
    facts: dict[str, Record],
    errors: dict[str, str],
    options: argparse.Namespace,
) -> list[Record]:
    found = {name: timing.spread(taken) for name, taken in times.items() if name not in errors}
    base = found[BASELINE][0] if BASELINE in found else None
    where = {"model": options.model, "baseline": WORKLOADS[options.model].baseline, "batch": options.batch}
    where |= {"size": options.size, "dtype": options.dtype, "steps": options.steps, "repeats": options.repeats}
    records = []
    for variant in variants:
        record: Record = {**where, "variant": variant, "mode": mode, "checked": not options.unchecked}
        if variant in errors:
            record["error"] = errors[variant]
        else:
            median, iqr = found[variant]
            record |= {"ms": median, "ratio": median / base if base else None, "iqr_percent": iqr, **facts[variant]}
        records.append(record)
    return records


def table(records: list[Record]) -> str:
    """One line for each variant and mode; also of records that were kept."""
    head = ["model", "variant", "mode", "ms per step", "ratio", "IQR %", "peak GiB", "compile s"]
    kernels = any("kernels" in record for record in records)
    rows = []
    for r in records:
        name = f"{r['variant']} ({r['baseline']})" if r["variant"] == BASELINE else r["variant"]
        checked = "" if r["checked"] else ", unchecked"
        model = f"{r['model']} {r['batch']}×{r['size'][0]}×{r['size'][1]} {r['dtype']}{checked}"
        cells = [(r.get(key), form) for key, form in (("ms", ".2f"), ("ratio", ".3f"), ("iqr_percent", ".1f"))]
        cells += [(r.get("memory_gib") if r["mode"] != GRAPHED else None, ".2f"), (r.get("compile_s"), ".1f")]
        cells += [(r.get("kernels"), ".0f"), (r.get("kernel_ms"), ".2f")] if kernels else []
        shown = [timing.number(value, form) for value, form in cells]
        note = r.get("error") or ("" if r["finite"] else "loss not finite")
        rows.append([model, name, r["mode"], *shown, note])
    return timing.markdown([*head, *(["kernels", "ms of kernels"] if kernels else []), "note"], rows)
