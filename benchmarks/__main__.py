"""python -m benchmarks COMMAND: each command is a module with `arguments` and `main`."""

from __future__ import annotations

import argparse
import os
import sys

from . import (
    adoption,
    collectives,
    counts,
    cpu_table,
    data,
    defaults,
    growth,
    host,
    inference,
    kernels,
    layer,
    operations,
    runs,
    scaling,
    solver,
    step,
    summary,
    sweep,
    targets,
)
from .records import KEEPS_MEMORY

ABOUT = "Measurements of ndpp, a command each; see COMMAND --help."
COMMANDS = {
    "targets": targets,
    "step": step,
    "layer": layer,
    "solver": solver,
    "growth": growth,
    "cpu-table": cpu_table,
    "inference": inference,
    "counts": counts,
    "operations": operations,
    "host": host,
    "kernels": kernels,
    "collectives": collectives,
    "scaling": scaling,
    "defaults": defaults,
    "adoption": adoption,
    "sweep": sweep,
    "runs": runs,
    "summary": summary,
    "pack": data,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=ABOUT)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        about = str(module.__doc__)
        first = " ".join(about.split("\n\n")[0].split())
        module.arguments(commands.add_parser(name, description=about, help=first))
    parser.add_argument("--keep-memory", action="store_true", help="on a CPU: keep what is freed, as is done on a GPU")
    options = parser.parse_args()
    if options.keep_memory and any(os.environ.get(name) != value for name, value in KEEPS_MEMORY.items()):
        command = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEEPS_MEMORY})
    COMMANDS[options.command].main(options)


if __name__ == "__main__":
    main()
