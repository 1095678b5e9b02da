"""By count, not by clock: operations that a training step hands to the device, forward and backward.

Each is a launch or more on a GPU, and takes the host some microseconds: small batches wait for them. Counted on a CPU,
under a mode in which no value of a tensor may be read, as on a device. Views, allocations and the optimizer's do not
count, nor tables that are made once and kept. All is plain PyTorch, or with --kernels what a GPU would run, whose
launches are recorded in place of being done.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from ndpp import keeping
from ndpp.decorrelated import Decorrelated
from ndpp.kernels import cases

from .records import append
from .timing import chosen, markdown
from .workloads import VARIANTS, WORKLOADS

Record = dict[str, Any]
MODELS = ("resnet50", "resnet18", "vit_b_16")
FREE = {
    *("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::_unsafe_view", "aten::scalar_tensor"),  # a view; a number that an operation takes as it is
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--variants", default="bn,none,nd,nd-l1", help=f"comma-separated: {', '.join(VARIANTS)}")
    parser.add_argument("--kernels", action="store_true", help="with the kernels that a GPU would run (needs triton)")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")


def main(options: argparse.Namespace) -> None:
    variants = chosen(options.variants, VARIANTS)
    records = [counted(options.model, variant, options.kernels) for variant in variants]
    for record in records:
        append(options.out, record, "cpu")
    print(table(records))


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operations that compute something, and how often each ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func._schema.name not in FREE and not _makes_a_table():
            self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def _makes_a_table() -> bool:
    """Whether this is within a function whose tensors are kept: under a mode they are made anew each time."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        if caller.f_code.co_filename == keeping.__file__:
            return True
        frame = caller
    return False


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """Launches of kernels, none of which is done: what is computed has no meaning."""
    from ndpp.kernels import triton_launch

    launches: list[Any] = []
    declines = mock.patch.object(cases, "declines", return_value=None)
    with declines, mock.patch.object(triton_launch, "recorded", launches):
        yield launches


def counted(model: str, variant: str, kernels: bool = False) -> Record:
    work = WORKLOADS[model]
    network = work.model(variant, work.size, "cpu")
    batch = work.inputs(2, work.size, "cpu")
    with contextlib.ExitStack() as stack:
        launches: list[Any] = stack.enter_context(recorded()) if kernels else []
        work.loss(network, batch).backward()  # type: ignore[no-untyped-call]  # makes tables that are kept
        network.zero_grad()
        launches.clear()
        with Count() as count:
            work.loss(network, batch).backward()  # type: ignore[no-untyped-call]
    layers = sum(isinstance(module, Decorrelated) for module in network.modules())
    names = count.names + Counter([f"kernel {launch.kernel.__name__.strip('_')}" for launch in launches])
    where = {"model": model, "variant": variant, "kernels": kernels, "launches": len(launches)}
    return {**where, "operations": names.total(), "converted": layers, "often": dict(names.most_common(8))}


def table(records: list[Record]) -> str:
    head = ("model", "variant", "operations", "kernels", "converted layers", "added to `none`, per layer", "most often")
    floors = {r["model"]: r["operations"] for r in records if r["variant"] == "none"}
    rows = []
    for r in records:
        floor = floors.get(r["model"])
        added = "–" if floor is None or not r["converted"] else f"{(r['operations'] - floor) / r['converted']:.0f}"
        often = ", ".join(f"{name.removeprefix('aten::')} {count}" for name, count in list(r["often"].items())[:4])
        numbers = [str(r["operations"]), str(r["launches"]) if r["kernels"] else "–", str(r["converted"])]
        rows.append([r["model"], r["variant"], *numbers, added, often])
    return markdown(head, rows)
