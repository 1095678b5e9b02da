"""Convert, train two steps, evaluate, fold and compare: every model of the zoo, one line each."""

from __future__ import annotations

import argparse
import copy
import fnmatch
import math
import re
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ndpp
from ndpp.conversion.surgery import OURS, is_ours
from ndpp.decorrelated import Decorrelated

from .records import append, header
from .zoo import ZOO, Entry, awake_

QUICK = ndpp.Settings(block=16, rows=512)  # the same code as the default, in a tenth of the time


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="*", help="names or fnmatch patterns, comma-separated")
    parser.add_argument(
        "--settings", help="a preset; otherwise the default settings with small blocks, which are quick on a CPU"
    )
    parser.add_argument("--adopt", action="store_true", help="train the plain model first, and keep what it computes")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th model from the K-th on, to run several at once")
    parser.add_argument("--trace", action="store_true", help="print where a failure came from")
    parser.add_argument("--out", type=Path, help="append one JSON line per model to this file")


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(header("cpu"))
    failed = []
    part, parts = map(int, options.part.split("/"))
    for number, entry in enumerate(ZOO):
        if not any(fnmatch.fnmatch(entry.name, pattern) for pattern in options.models.split(",")):
            continue
        if number % parts != part:
            continue
        try:
            record = adopt(entry) if options.adopt else sweep(entry, options.settings)
        except Exception as error:
            failed.append(entry.name)
            print(f"{entry.name:<48} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
            if options.trace:
                traceback.print_exc()
            continue
        print(line(record), flush=True)
        append(options.out, record, "cpu")
    if failed:
        raise SystemExit(f"{len(failed)} failed: {', '.join(failed)}")


def line(record: dict[str, Any]) -> str:
    reasons = "; ".join(f"{count} {reason}" for reason, count in {**record["skipped"], **record["kept"]}.items())
    numbers = f"{record['converted']:>4} layers {record['removed']:>4} norms  "
    if "change" in record:
        return f"{record['name']:<48} {numbers}change {record['change']:.0e}  {reasons}"
    numbers += f"fold {record['fold_error']:.0e}"
    return f"{record['name']:<48} {numbers}  loss {record['losses'][0]:.2f} → {record['losses'][1]:.2f}  {reasons}"


def sweep(entry: Entry, settings: str | None = None) -> dict[str, Any]:
    """What became of one model; AssertionError where something that must hold does not."""
    start = time.perf_counter()
    torch.manual_seed(0)
    model, batch = entry.build().train(), entry.batch()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine and bool((module.weight != module.weight[0]).any()):
            module.reset_parameters()  # RepVGG's start at random, which is not to be told from trained
    report = ndpp.convert_(model, settings or QUICK)
    _check_complete(model, report)
    awake_(model)
    called = _count_calls(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = entry.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses)), losses
    for name, module in model.named_modules():
        if isinstance(module, Decorrelated):
            seen = int(module.num_batches_tracked)
            assert (seen > 0) == (called[module] > 0), f"{name} was called {called[module]} times, tracked {seen}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that only training uses
        ndpp.recalibrate_(model, [lambda model: entry.output(model, batch)])  # two steps make no statistics
    unused = sum(isinstance(m, Decorrelated) and not called[m] for m in model.modules())
    error = _fold_error(model, entry, batch)
    if error > 1e-5:  # rounding that deep networks amplify, if it vanishes with more digits
        exact = _fold_error(model.double(), entry, batch, torch.float64)
        assert exact <= 1e-9, f"folded and converted differ by {error:.1e}, and by {exact:.1e} in float64"
    return {
        **_outcome(entry, report),
        "unused": unused,
        "losses": losses,
        "fold_error": error,
        "seconds": time.perf_counter() - start,
    }


def _outcome(entry: Entry, report: ndpp.Report) -> dict[str, Any]:
    return {
        "name": entry.name,
        "family": entry.family,
        "converted": len(report.converted),
        "skipped": _reasons(report.skipped),
        "removed": len(report.removed),
        "kept": _reasons(report.kept),
    }


def adopt(entry: Entry) -> dict[str, Any]:
    """The same for a model that was trained before: converted with calibration, which keeps what it computes."""
    start = time.perf_counter()
    torch.manual_seed(0)
    model, batch = entry.build().train(), entry.batch()
    awake_(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        entry.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    report = ndpp.convert_(model, QUICK, calibration=[lambda model: entry.output(model, batch)])
    assert report.change is not None
    return {
        **_outcome(entry, report),
        "change": report.change,
        "seconds": time.perf_counter() - start,
    }


def _check_complete(model: nn.Module, report: ndpp.Report) -> None:
    """Every layer is converted, or listed with a reason."""
    listed = {row.path for row in report.layers}
    inside = [f"{path}." for path, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)]
    for path, module in model.named_modules():
        if isinstance(module, tuple(OURS)) and not any(path.startswith(prefix) for prefix in inside):
            assert path in listed, f"{path} is not in the report"
    assert all(row.note for row in (*report.skipped, *report.kept))
    assert all(is_ours(model.get_submodule(row.path)) for row in report.converted)


def _count_calls(model: nn.Module) -> Counter[nn.Module]:
    called: Counter[nn.Module] = Counter()
    for module in model.modules():
        if isinstance(module, Decorrelated):
            module.register_forward_hook(lambda module, *_: called.update([module]))
    return called


@torch.no_grad()
def _fold_error(model: nn.Module, entry: Entry, batch: Any, dtype: torch.dtype = torch.float32) -> float:
    model.eval()
    batch = _cast(batch, dtype)
    want = [t.double() for t in entry.output(model, batch)]
    folded = ndpp.fold_(copy.deepcopy(model))
    assert not any(map(is_ours, folded.modules()))
    got: list[Tensor] = [t.double() for t in entry.output(folded, batch)]
    assert all(bool(torch.isfinite(t).all()) for t in want)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(got, want, strict=True))


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: _cast(value, dtype) for key, value in batch.items()}
    return type(batch)(_cast(value, dtype) for value in batch) if isinstance(batch, (list, tuple)) else batch


def _reasons(rows: Any) -> dict[str, int]:
    """Counts of reasons, without the names in them."""
    counts: Counter[str] = Counter()
    for row in rows:
        note = re.sub(r"^\S+, the layer after it,", "the layer after it", row.note)
        note = re.sub(r"tied to .*", "tied", re.sub(r"its \d+ features", "its features", note))
        note = re.sub(r" by \S+ on the data| what \S+ computes|of \S+ are shared", "", note)
        note = re.sub(r"kept: (\S*\.)+\S* |kept: (.*, )?(\S*\.)+\S+ also", "kept: another layer ", note)
        counts[note] += 1
    return dict(counts)


def table(records: list[dict[str, Any]]) -> str:
    """For the documentation: a line per model."""
    lines = ["| model | converted | left alone | norms removed | kept | fold error |", "|---|---|---|---|---|---|"]
    for r in sorted(records, key=lambda r: (r["name"].split("/")[0], r["family"].lower(), r["name"])):
        skipped, kept = (
            "<br>".join(f"{count} × {reason}" for reason, count in r[key].items()) or "0" for key in ("skipped", "kept")
        )
        lines.append(
            f"| {r['name']} | {r['converted']} | {skipped} | {r['removed']} | {kept} | {r['fold_error']:.0e} |"
        )
    return "\n".join(lines)
