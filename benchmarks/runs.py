"""Keep what recipes' runs came to: one line for each folder of `ndpp train`, with its configuration and evaluations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndpp_recipes.comparison import NORM_TITLES, RunRecord, read_run
from ndpp_recipes.config import from_dict
from ndpp_recipes.keys import keys
from ndpp_recipes.recipes import recipe

Record = dict[str, Any]
STAMP = ("ndpp", "torch", "device", "date")
PLACES = ("run.out", "data.path", "data.workers", "run.log_every", "run.save_every", "run.keep", "run.device")


def record(run: RunRecord, data: str, note: str) -> Record:
    """A run in a line: what it changed of its recipe, and the headline metric at every evaluation."""
    config = from_dict(run.config)
    ours, usual = keys(config), keys(recipe(config.recipe, norm=config.norm.name))
    changes = {key: value for key, value in ours.items() if usual.get(key) != value and key not in PLACES}
    curve = [(point.step, round(point.value, 4)) for point in run.curve(run.metric)]
    facts = {"steps": run.steps, "planned": run.planned, "seconds": round(run.seconds, 1), "seed": run.seed}
    stamp = {name: run.result[name] for name in STAMP}
    return {"recipe": config.recipe, "data": data, "norm": run.norm, "metric": run.metric, "note": note} | {
        **{"lr": run.lr, "optimizer": config.optimizer.name, "changes": changes, "curve": curve},
        **facts,
        **stamp,
    }


def table(records: Sequence[Record]) -> str:
    """Runs by recipe and data: the metric after a quarter and half of the planned steps, and the last there is."""
    head = ("recipe, data, steps planned", "norm", "learning rate", "¼", "½", "last", "at step")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for one in records:
        reached = [[v for s, v in one["curve"] if s >= share * one["planned"]] for share in (0.25, 0.5)]
        at = [f"{values[0]:.4g}" if values else "–" for values in reached]
        last_step, last = one["curve"][-1]
        rate = f"{one['lr']:g} {one['optimizer']}"
        name = f"{one['recipe']}, {one['data']}, {one['planned']} ({one['metric']})"
        cells = (name, NORM_TITLES[one["norm"]], rate, *at, f"{last:.4g}", str(last_step))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--data", required=True, metavar="NAME", help="what the data are called")
    parser.add_argument("--note", default="", help="what else to know")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def main(options: argparse.Namespace) -> None:
    with options.out.open("a") as file:
        for folder in options.folders:
            file.write(json.dumps(record(read_run(folder), options.data, options.note)) + "\n")
