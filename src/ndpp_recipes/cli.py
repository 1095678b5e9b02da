"""ndpp COMMAND: train, compare, evaluate and export, from the command line."""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import math
import os
import shlex
import sys
import textwrap
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ndpp
from ndpp.__main__ import COMMANDS as CORE
from ndpp.__main__ import Command, Failure
from ndpp.__main__ import main as run_command

from .config import NORMS, Config, keys, parsed
from .errors import ConfigError, RecipeError, Stopped
from .recipes import PRESETS, RECIPES, card, recipe

# --- what several commands share ---


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="PATH|NAME", help="the data: a folder or file, or `fashion`, which comes along"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; may be repeated")
    parser.add_argument("--seed", type=int, metavar="N", help="of weights, data order and augmentation (default: 0)")
    parser.add_argument(
        "--deterministic", action="store_true", help="the same numbers in every run, at some cost in speed"
    )
    parser.add_argument("--skip-bad", type=int, metavar="N", help="leave up to N unusable records out, and list them")


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = dict(parsed(options.set))
    given = {"run.seed": options.seed, "data.skip_bad": options.skip_bad}
    changes |= {key: value for key, value in given.items() if value is not None}
    if options.deterministic:
        changes["run.deterministic"] = True
    return changes


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their heads; the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, ["─" * width for width in widths], *rows):
        first, *others = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join((first.strip().ljust(widths[0]), *others)).rstrip())
    return "\n".join(lines)


# --- train ---


def train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="one of `ndpp recipes`")
    parser.add_argument("--preset", metavar="NAME", choices=[*PRESETS], help="the paper's numbers, as paper-resnet50")
    parser.add_argument("--norm", metavar="NAME", default="ndpp", help=f"one of {', '.join(NORMS)} (default: ndpp)")
    _recipe_arguments(parser)
    parser.add_argument("--out", metavar="FOLDER", help="where the run is written (default: runs/RECIPE-NORM)")
    parser.add_argument(
        "--resume", choices=["auto"], help="go on from the last checkpoint in the folder, if there is one"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew where a run was before")
    parser.add_argument("--dry-run", action="store_true", help="build everything, show it, and train nothing")


def train_main(options: argparse.Namespace) -> None:
    from .engine import train

    config = _config(options)
    if options.dry_run:
        _dry_run(config)
        return
    result = train(config, resume=options.resume == "auto", overwrite=options.overwrite)
    if int(os.environ.get("RANK", "0")) == 0:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
        print(f"{result.steps} steps in {result.seconds:.1f} s  {metrics}\n{result.out}")


def _config(options: argparse.Namespace) -> Config:
    name = options.preset or options.recipe
    if name is None:
        raise ConfigError("expected a RECIPE or --preset NAME; `ndpp recipes` lists them")
    if options.preset and options.recipe not in (None, PRESETS[options.preset].recipe):
        raise ConfigError(
            f"--preset {options.preset} is of the recipe {PRESETS[options.preset].recipe}, not {options.recipe}"
        )
    changes = _changes(options)
    if options.out is not None:
        changes["run.out"] = options.out
    return recipe(name, norm=options.norm, data=options.data, changes=changes)


def _dry_run(config: Config) -> None:
    """All that a run is made of, from one batch."""
    from .building import prepared_torch
    from .engine import Trainer
    from .monitor import memory
    from .parallel import Place, device_named

    _print_keys(config)
    with prepared_torch(config.run):
        trainer = Trainer(config, Place(0, 1, device_named(config.run.device)), overwrite=True)
        losses = trainer.train_step(next(trainer.loader.epoch(0)))
    values = "  ".join(f"{name} {value:.4g}" for name, value in losses.items())
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    records = len(trainer.task.train_set), len(trainer.task.eval_set)  # type: ignore[arg-type]
    print(f"data: {records[0]:,} records for training, {records[1]:,} for evaluation")
    print(f"model: {config.model.name}, {count:,} parameters; {trainer.summary}")
    print(
        f"run: {trainer.total:,} steps on {trainer.place.device}, {memory(trainer.place.device)}; first step: {values}"
    )


def _print_keys(config: Config) -> None:
    """All keys, under what their section says of them."""
    section = ""
    for key, value in keys(config).items():
        name = key.rpartition(".")[0]
        if name != section:
            section, of = name, functools.reduce(getattr, name.split("."), config)
            about = "see docs/layers.md" if isinstance(of, ndpp.Settings) else inspect.getdoc(of) or ""
            print("\n" + textwrap.indent(f"{name}: {about}", "# "))
        print(f"{key} = {','.join(map(str, value)) if isinstance(value, tuple) else value}")


# --- race, report, bench ---


def race_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="fashion", help="(default: fashion)")
    parser.add_argument("--norms", default="bn,ndpp", metavar="A,B", help="whom to compare (default: bn,ndpp)")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs of each, with seeds 0 to N-1 (default: 1)"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew where a race was before")
    parser.add_argument("--tuned-only", action="store_true", help="leave out the runs at learning rate 1.0")
    _recipe_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("race"), metavar="FOLDER", help="(default: race)")
    parser.add_argument("--open", action="store_true", help="open the report in a browser")


def race_main(options: argparse.Namespace) -> None:
    from .race import Race
    from .report import headline, write_report

    first = options.seed or 0
    if options.seeds < 1:
        raise ConfigError(f"--seeds: expected at least 1; got {options.seeds}")
    options.seed = None
    race = Race(
        recipe=options.recipe,
        norms=_names(options.norms),
        seeds=range(first, first + options.seeds),
        out=options.out,
        data=options.data,
        changes=_changes(options),
        lr1=not options.tuned_only,
        overwrite=options.overwrite,
    )
    runs = race.run()
    path = options.out / "report.html"
    command = shlex.join(["ndpp", *sys.argv[1:]])
    write_report(path, runs, title=f"ndpp race · {options.recipe}", command=command, notes=[])
    print(f"\n{comparison(runs)}\n\n{headline(runs)}\n{path}")
    if options.open:
        webbrowser.open(path.resolve().as_uri())


def comparison(runs: Sequence[Any]) -> str:
    """The table of a race, for the terminal."""
    from .comparison import compare_table

    def form(value: Any, digits: int) -> str:
        return "–" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"

    rows = compare_table(runs)
    metric = rows[0]["metric"]
    head = (
        "run",
        f"steps to {form(rows[0]['target'], 2)}",
        "seconds to it",
        f"final {metric}",
        f"best {metric}",
        "ms/step",
    )
    cells = [
        (
            str(row["label"]),
            form(row["steps_to"], 0),
            form(row["seconds_to"], 1),
            form(row["final"], 2) + ("" if row["final_std"] is None else f" ± {form(row['final_std'], 2)}"),
            form(row["best"], 2),
            form(row["ms_per_step"], 1),
        )
        for row in rows
    ]
    return _table(head, cells)


def report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="folders of runs; the first with BatchNorm is the baseline"
    )
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="(default: report.html)")
    parser.add_argument("--title", default="ndpp report")
    parser.add_argument("--open", action="store_true", help="open the report in a browser")


def report_main(options: argparse.Namespace) -> None:
    from .comparison import read_run
    from .report import headline, write_report

    runs = [read_run(folder) for folder in options.runs]
    write_report(options.out, runs, title=options.title, command=shlex.join(["ndpp", *sys.argv[1:]]), notes=[])
    print(f"{comparison(runs)}\n\n{headline(runs)}\n{options.out}")
    if options.open:
        webbrowser.open(options.out.resolve().as_uri())


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", default="fashion", help="(default: fashion)")
    parser.add_argument("--norms", default="bn,ndpp,nd,none", metavar="A,B", help="the first is the reference")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="timed steps of each (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the numbers to this file, a line each")
    _recipe_arguments(parser)


def bench_main(options: argparse.Namespace) -> None:
    from .bench import bench, record

    changes = _changes(options)
    timings = bench(options.recipe, _names(options.norms), options.data, changes, options.rounds)
    head = ("norm", "ms per step", "quartiles", f"/ {timings[0].norm}", "memory MiB")
    rows = [
        (
            t.norm,
            f"{t.milliseconds:.2f}",
            f"{t.quartiles[0]:.2f}–{t.quartiles[1]:.2f}",
            f"{t.ratio:.2f}",
            "–" if t.memory is None else f"{t.memory:,.0f}",
        )
        for t in timings
    ]
    print(_table(head, rows))
    if options.json is not None:
        device = str(changes.get("run.device", changes.get("device", "auto")))
        with options.json.open("a") as file:
            file.writelines(json.dumps(record(t, options.recipe, changes, device)) + "\n" for t in timings)


# --- eval, export ---


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    parser.add_argument("--checkpoint", default="best", metavar="best|last|FILE", help="(default: best)")
    parser.add_argument("--data", metavar="PATH", help="other data than that of the run")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key, as run.device=cpu"
    )


def eval_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the metrics into this file")


def eval_main(options: argparse.Namespace) -> None:
    from .checkpoints import write_json
    from .saved import open_run

    saved = open_run(options.run, options.checkpoint, data=options.data, changes=parsed(options.set))
    metrics = saved.evaluate()
    print(f"step {saved.step}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    if options.json is not None:
        write_json(options.json, {"run": options.run, "step": saved.step, **metrics})


def export_arguments(parser: argparse.ArgumentParser) -> None:
    _run_arguments(parser)
    parser.add_argument("--format", default="onnx", metavar="onnx|torch|safetensors", help="(default: onnx)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="(default: model.onnx, .pt2 or .safetensors in the run)"
    )


def export_main(options: argparse.Namespace) -> None:
    from .saved import FORMATS, export, open_run

    if options.format not in FORMATS:
        raise ConfigError(f"--format: expected one of {', '.join(FORMATS)}; got {options.format!r}")
    saved = open_run(options.run, options.checkpoint, data=options.data, changes=parsed(options.set))
    path = options.out or Path(options.run) / f"model{FORMATS[options.format]}"
    difference = export(saved, options.format, path)
    print(f"{path}  (plain layers; outputs differ from the trained model's by at most {difference:.1e})")


# --- recipes ---


def recipes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list", "show"], default="list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe or preset, to show")
    parser.add_argument("--norm", metavar="NAME", default="ndpp", help="the normalisation to show it with")


def recipes_main(options: argparse.Namespace) -> None:
    if options.action == "show":
        if options.name is None:
            raise ConfigError("expected a NAME to show; `ndpp recipes` lists them")
        config = recipe(options.name, norm=options.norm)
        print(f"{options.name}: {card(options.name)}\n")
        _print_keys(config)
        return
    for name in RECIPES:
        print(f"{name:14} {card(name).splitlines()[0]}")
    print("\npresets: the paper's numbers")
    for name, preset in PRESETS.items():
        print(f"{name:24} {preset.recipe}: {preset.about}")
    print(f"\nnormalisations: {', '.join(NORMS)}")


COMMANDS: dict[str, Command] = {
    "race": Command(race_arguments, race_main, "train a network with several normalisations side by side"),
    "train": Command(train_arguments, train_main, "train a recipe"),
    "eval": Command(eval_arguments, eval_main, "the metrics of a trained model"),
    "export": Command(
        export_arguments, export_main, "a trained model as plain layers: ONNX, torch.export, safetensors"
    ),
    "report": Command(report_arguments, report_main, "compare runs in a page of HTML"),
    "bench": Command(bench_arguments, bench_main, "time and memory of a training step with several normalisations"),
    "recipes": Command(recipes_arguments, recipes_main, "list the recipes, or show one"),
    **CORE,
}


def _of_rank(text: str) -> str:
    """Whose error it is, where several processes speak at once."""
    return f"rank {os.environ['RANK']}: {text}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else text


def _checked(command: Command) -> Command:
    def run(options: argparse.Namespace) -> None:
        try:
            command.main(options)
        except Stopped as error:
            raise Failure(str(error), status=3) from error
        except RecipeError as error:
            raise Failure(_of_rank(str(error))) from error
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise Failure(_of_rank(f"{error.filename or 'a file'}: {error.strerror or error}")) from error

    return command._replace(main=run)


def main(arguments: list[str] | None = None) -> int:
    commands = {name: _checked(command) for name, command in COMMANDS.items()}
    return run_command(arguments, prog="ndpp", about=__doc__, commands=commands)
