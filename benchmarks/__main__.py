"""python -m benchmarks COMMAND: each command is a module with `arguments` and `main`."""

from __future__ import annotations

import argparse

from . import (
    adoption,
    collectives,
    counts,
    cpu_table,
    data,
    defaults,
    growth,
    inference,
    kernels,
    layer,
    runs,
    scaling,
    solver,
    step,
    summary,
    sweep,
    targets,
)

COMMANDS = {
    "targets": targets,
    "step": step,
    "layer": layer,
    "solver": solver,
    "growth": growth,
    "cpu-table": cpu_table,
    "inference": inference,
    "counts": counts,
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        about = str(module.__doc__)
        first = " ".join(about.split("\n\n")[0].split())
        module.arguments(commands.add_parser(name, description=about, help=first))
    options = parser.parse_args()
    COMMANDS[options.command].main(options)


if __name__ == "__main__":
    main()
