"""Time and accuracy of D = A^(-1/2): truncated iterations against the eigendecomposition.

A has a power-law spectrum from 1 down to 1/condition, in float32. Its error is ‖D·A·D - I‖_F / √n, and the distance to
the root that eigh finds in float64, relative to that root; both are computed in float64.
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ndpp.roots import inverse_sqrt

from . import timing
from .guard import begin
from .records import append

Record = dict[str, Any]
ITERATIONS = ("quartic", "newton", "minimax")
MOST = {"quartic": 5}  # steps


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="64,147,256,576", help="n of the matrices")
    parser.add_argument("--conditions", default="1e1,1e2,1e3,1e4,1e5")
    parser.add_argument(
        "--iterations",
        default="1,2,3,4,5,6,7,8",
        help="steps of newton and minimax, and those that quartic follows (5 at most)",
    )
    parser.add_argument("--matrices", type=int, default=1, help="solved together")
    parser.add_argument("--tf32", action="store_true", help="let products of float32 be TF32 where the solver does")
    timing.arguments(parser, steps=10, repeats=5)


def main(options: argparse.Namespace) -> None:
    precision = "TF32" if options.tf32 else "float32"
    begin(options, f"{options.matrices} matrices at a time, {precision}")
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    steps = [int(k) for k in options.iterations.split(",")]
    solvers = [(name, k) for name in ITERATIONS for k in steps if k <= MOST.get(name, k)] + [("eigh", 1)]
    records = []
    for n in map(int, options.sizes.split(",")):
        for condition in map(float, options.conditions.split(",")):
            for record in measured(n, condition, solvers, options):
                records.append(record)
                append(options.out, record, options.device)
    print(table(records))


def power_law(n: int, condition: float) -> Tensor:
    """(n, n) in float64, with eigenvalues i^(-p) from 1 to 1/condition and random eigenvectors."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0]
    exponent = math.log(condition) / math.log(n)
    eigenvalues = torch.arange(1, n + 1, dtype=torch.float64) ** -exponent
    matrix: Tensor = (vectors * eigenvalues) @ vectors.mT
    return matrix


def measured(n: int, condition: float, solvers: list[tuple[str, int]], options: argparse.Namespace) -> list[Record]:
    """All solvers on one matrix, in turns."""
    a = power_law(n, condition).to(options.device, torch.float32).expand(options.matrices, n, n).contiguous()
    exact = inverse_sqrt(a[:1].double(), solver="eigh", steps=1)[0]
    calls = {f"{name}-{k}": partial(inverse_sqrt, a, solver=name, steps=k) for name, k in solvers}
    times = timing.turns(calls, options.steps, options.repeats, options.device)
    records = []
    for (name, k), (key, solve) in zip(solvers, calls.items(), strict=True):
        ms, iqr = timing.spread(times[key])
        iterates = name in ITERATIONS
        record: Record = {"n": n, "condition": condition, "solver": name, "steps": k if iterates else None}
        record |= {"products": products(name, k) if iterates else None, "ms": ms, "iqr_percent": iqr}
        record |= errors(solve()[0].double(), a[0].double(), exact)
        records.append(record | {"matrices": options.matrices, "tf32": options.tf32, "checked": not options.unchecked})
    return records


def products(solver: str, steps: int) -> int:
    """Of matrices; the last two steps are one polynomial."""
    return 2 if solver == "quartic" else max(3 * steps - 4, 0)


def errors(d: Tensor, a: Tensor, exact: Tensor) -> dict[str, float]:
    identity = torch.eye(len(a), dtype=a.dtype, device=a.device)
    residual = torch.linalg.norm(d @ a @ d - identity) / math.sqrt(len(a))
    return {"residual": float(residual), "distance": float(torch.linalg.norm(d - exact) / torch.linalg.norm(exact))}


def table(records: list[Record]) -> str:
    """A line for each solver and size: its time over all conditions, and its error for each."""
    conditions = sorted({r["condition"] for r in records})
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        how = f"{r['matrices']}{' TF32' if r['tf32'] else ''}{'' if r['checked'] else ' unchecked'}"
        groups.setdefault((r["n"], r["solver"], r["steps"], r["products"], how), []).append(r)
    rows = []
    for (n, solver, steps, products, how), group in groups.items():
        residuals = {r["condition"]: f"{r['residual']:.1e}" for r in group}
        ms = timing.spread([r["ms"] for r in group])[0]
        cells = [str(n), solver, timing.number(steps, "d"), timing.number(products, "d"), how, f"{ms:.3f}"]
        rows.append([*cells, *(residuals.get(condition, "–") for condition in conditions)])
    head = ["n", "solver", "steps", "products", "matrices", "ms", *(f"error at {c:.0e}" for c in conditions)]
    return timing.markdown(head, rows)
