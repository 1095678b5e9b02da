"""Which settings should be the default: CIFAR-100, ResNet-18, a few epochs, by configuration and seed.

Every run is a process of its own, and appends one JSON line to --out when it ends. See configs.py for the names.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import ndpp

from . import configs, data, summary
from .records import ROOT, commit
from .training import CaptureFailed, ImageSet, Plan, Run

CAPTURE_FAILED = 3  # exit status of a run that must be started again without a graph


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", default="bn-lr0.1,default", help="names or fnmatch patterns, comma-separated")
    parser.add_argument("--list", action="store_true", help="print the names that --configs selects, and stop")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--data", type=Path, help="folder with train/<class>/*.png and test/<class>/*.png")
    parser.add_argument("--cache", type=Path, help=".npz of the data: read if it exists, else written from --data")
    parser.add_argument("--out", type=Path, default=Path("results/defaults.jsonl"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="bf16 is autocast")
    parser.add_argument("--tf32", action="store_true", help="allow TF32 in float32 matrix products")
    parser.add_argument("--graph", action="store_true", help="capture the step in a CUDA graph where that works")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2, help="blocks of each stage: 2 is ResNet-18, 1 is ResNet-10")
    parser.add_argument("--images", type=int, help="use only N images of either split, evenly spaced")
    parser.add_argument("--holdout", type=int, help="choose by N training images left out, not by the test split")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, all on the one device")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after this long")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> None:
    chosen = configs.select(options.configs)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.list:
        print("\n".join(chosen))
    elif options.worker:
        [(name, config)], [seed] = chosen.items(), seeds
        _work(name, config, seed, options)
    else:
        _schedule(list(itertools.product(seeds, chosen)), options)


# --- all runs --------------------------------------------------------------------------------------------------------


def _schedule(tasks: list[tuple[int, str]], options: argparse.Namespace) -> None:
    """Seed by seed, so that what a time limit cuts off is the last seeds and not the last configurations."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.cache is not None and not options.cache.exists():
        data.load(options.data, options.cache)
    start = time.monotonic()

    def run(task: tuple[int, str]) -> bool:
        seed, name = task
        if time.monotonic() - start > 60 * options.minutes:
            print(f"{name} seed {seed}: not started, out of time", flush=True)
            return False
        status = _spawn(name, seed, options, options.graph)
        if status == CAPTURE_FAILED:
            status = _spawn(name, seed, options, False)
        if status != 0:
            print(f"{name} seed {seed}: FAILED with exit status {status}", flush=True)
        return status == 0

    with ThreadPoolExecutor(options.jobs) as pool:
        finished = sum(pool.map(run, tasks))
    print(f"{finished} of {len(tasks)} runs in {(time.monotonic() - start) / 60:.1f} minutes -> {options.out}\n")
    if options.out.exists():
        print(summary.render(summary.read([options.out])))


def _spawn(name: str, seed: int, options: argparse.Namespace, graph: bool) -> int:
    command = [sys.executable, "-m", "benchmarks", "defaults", "--worker", "--configs", name, "--seeds", str(seed)]
    for option in ("data", "cache", "out"):
        path = getattr(options, option)
        command += [f"--{option}", str(path.resolve())] if path is not None else []
    for option in ("device", "dtype", "epochs", "batch", "width", "depth", "images", "holdout", "jobs"):
        value = getattr(options, option)
        command += [f"--{option}", str(value)] if value is not None else []
    command += ["--tf32"] * options.tf32 + ["--graph"] * graph
    threads = "1" if options.device != "cpu" or options.jobs > 1 else str(os.cpu_count())
    search = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": search}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


# --- one run ---------------------------------------------------------------------------------------------------------


def _work(name: str, config: configs.Config, seed: int, options: argparse.Namespace) -> None:
    start = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    graph = options.graph and options.device != "cpu"
    sizes = options.epochs, options.batch, options.width, options.depth
    plan = Plan(*sizes, options.device, options.dtype, graph)
    source = _digest()
    arrays = data.load(options.data, options.cache)
    if options.holdout:
        arrays = data.hold_out(arrays, options.holdout)
    train, test = (ImageSet(*data.part(arrays, split, options.images), plan.device) for split in data.SPLITS)
    try:
        run = Run(config, seed, plan, train, test)
    except CaptureFailed as reason:
        print(f"{name} seed {seed}: capture failed, starting again without a graph: {reason}", flush=True)
        sys.exit(CAPTURE_FAILED)
    history = []
    for epoch in run.epochs():
        history.append(epoch)
        numbers = f"loss {epoch['loss']:.3f}  accuracy {epoch['accuracy']:.2f}%  {epoch['ms_per_step']:.1f} ms/step"
        print(f"{name} seed {seed} epoch {len(history)}: {numbers} ({run.mode})", flush=True)
    record = _record(name, config, seed, history, plan)
    record |= {"mode": run.mode, "tf32": options.tf32, "jobs": options.jobs, "images": len(train)}
    record |= {"source": source, "evaluated_on": "holdout" if options.holdout else "test", "test_images": len(test)}
    record["seconds"] = round(time.perf_counter() - start, 1)
    with options.out.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _record(
    name: str, config: configs.Config, seed: int, history: list[dict[str, float]], plan: Plan
) -> dict[str, Any]:
    times = [epoch["ms_per_step"] for epoch in history[1:] or history]  # the first epoch warms up
    accuracies = [round(epoch["accuracy"], 3) for epoch in history]
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "config": name,
        "seed": seed,
        "final_accuracy": accuracies[-1],
        "last_train_loss": history[-1]["loss"],
        "accuracies": accuracies,
        "losses": [epoch["loss"] for epoch in history],
        "ms_per_step": round(statistics.median(times), 3),
        "finished": len(history) == plan.epochs,
        **dataclasses.asdict(config),
        "plan": dataclasses.asdict(plan),
        "device": cpu if plan.device == "cpu" else torch.cuda.get_device_name(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "ndpp": ndpp.__version__},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _digest() -> str:
    """Of ndpp's source: which code it was, committed or not."""
    files = sorted(Path(ndpp.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
