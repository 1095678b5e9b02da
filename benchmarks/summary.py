"""Table of the records in one or more .jsonl files of another command; those of `defaults` best first."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import (
    adoption,
    collectives,
    counts,
    cpu_table,
    growth,
    host,
    inference,
    layer,
    operations,
    runs,
    scaling,
    solver,
    step,
    sweep,
    targets,
)

# By a key of their records.
TABLES = {
    "aim": targets.table,
    "counted": counts.table,
    "operations": operations.table,
    "host_ms": host.table,
    "baseline": step.table,
    "added_ms": growth.table,
    "added_percent": cpu_table.table,
    "shape": layer.table,
    "residual": solver.table,
    "fold_error": sweep.table,
    "modelled": scaling.table,
    "sent": collectives.table,
    "ratio": inference.table,
    "method": adoption.table,
    "curve": runs.table,
}
Record = dict[str, Any]
HEADER = ("config", "seeds", "final %", "± std", "epoch 1", "epoch 3", "train loss", "ms/step", "how", "note")
WORDS = ("config", "how", "note")  # columns that are not numbers
SAME = ("config", "settings", "plan", "mode", "tf32", "jobs", "images", "evaluated_on", "source", "device")


def read(files: Sequence[Path]) -> list[Record]:
    """Of all files, in their order."""
    expected = "expected .jsonl files that a command has written by --out"
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise SystemExit(f"no such file: {', '.join(missing)}; {expected}")
    try:
        return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]
    except ValueError as error:
        raise SystemExit(f"{', '.join(map(str, files))}: not records ({error}); {expected}") from None


def grouped(records: Sequence[Record]) -> list[list[Record]]:
    """Best first. Runs that differ in anything but the seed are never averaged together."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        same = {name: record[name] for name in SAME}
        groups[json.dumps(same, sort_keys=True)].append(record)
    return sorted(groups.values(), key=lambda group: -_mean([r["final_accuracy"] for r in group]))


def render(records: Sequence[Record]) -> str:
    return _columns([HEADER, *(_row(group) for group in grouped(records))])


def _row(group: list[Record]) -> tuple[str, ...]:
    first = group[0]
    final = [record["final_accuracy"] for record in group]
    spread = f"{statistics.stdev(final):.2f}" if len(final) > 1 else "-"
    stopped = sum(not record["finished"] for record in group)
    precision = first["plan"]["dtype"] + (" tf32" if first["tf32"] else "")
    how = f"{first['mode']} ×{first['jobs']} {precision} {first['evaluated_on']} {first['source'][:6]}"
    return (
        first["config"],
        str(len({record["seed"] for record in group})),
        f"{_mean(final):.2f}",
        spread,
        _at_epoch(group, 1),
        _at_epoch(group, 3),
        f"{_mean([record['last_train_loss'] for record in group]):.3f}",
        f"{_mean([record['ms_per_step'] for record in group]):.1f}",
        how,
        f"{stopped} diverged" if stopped else "",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _at_epoch(group: list[Record], epoch: int) -> str:
    known = [record["accuracies"][epoch - 1] for record in group if len(record["accuracies"]) >= epoch]
    return f"{_mean(known):.2f}" if known else "-"


def _columns(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = zip(HEADER, row, widths, strict=True)
        cells = [cell.ljust(width) if name in WORDS else cell.rjust(width) for name, cell, width in padded]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(records: Sequence[Record]) -> str:
    """The same for a page of documentation, without times: those of runs that share a device mean little."""
    kept = [HEADER.index(name) for name in ("config", "seeds", "final %", "± std", "epoch 1", "epoch 3", "train loss")]
    rows = [HEADER, *(_row(group) for group in grouped(records))]
    lines = ["| " + " | ".join(row[i] for i in kept) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(kept) + "|", *lines[1:]])


def by_batch(records: Sequence[Record]) -> str:
    """Final accuracy of every configuration at every batch size: mean, spread and number of seeds."""
    batches = sorted({record["plan"]["batch"] for record in records})
    rows = [["config", *(f"batch {batch}" for batch in batches)]]
    for config in dict.fromkeys(record["config"] for record in records):
        own = [record for record in records if record["config"] == config]
        rows.append([config, *(_finals([r for r in own if r["plan"]["batch"] == batch]) for batch in batches)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _finals(records: list[Record]) -> str:
    """Of every group of runs that differ in the seed alone."""
    found = []
    for group in grouped(records):
        final = [record["final_accuracy"] for record in group]
        spread = f" ± {statistics.stdev(final):.2f} ({len(final)})" if len(final) > 1 else ""
        found.append(f"{_mean(final):.2f}{spread}")
    return ", ".join(found) or "–"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--markdown", action="store_true", help="as a table for the documentation")


def main(options: argparse.Namespace) -> None:
    records = read(options.files)
    kind = next((table for key, table in TABLES.items() if records and key in records[0]), None)
    if kind is not None:
        print(kind(records))
    elif len({record["plan"]["batch"] for record in records}) > 1:
        print(by_batch(records))
    else:
        print(markdown(records) if options.markdown else render(records))
