"""Collectives and bytes of one training step: ours counted on gloo ranks, SyncBatchNorm's by formula.

Every rank really trains a step, on its own small images, while all that torch.distributed is asked for is counted:
neither the number of collectives nor their bytes depend on the size of images. nn.SyncBatchNorm refuses to run
without a GPU: what it sends is written down from its source (an all_gather of 2C + 1 numbers forward and an all_reduce
of 2C backward for each layer), for the same network with its own norms. Gradients are left out: they are the same for
all.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ndpp

from . import timing
from .records import append, header
from .traffic import Call, batch_norm_bytes, calls
from .workloads import WORKLOADS, Size, Workload

Record = dict[str, Any]
SIZES: dict[str, Size] = {"resnet18": (64, 64), "resnet50": (64, 64), "maskrcnn": (200, 320)}
WAITS = ("wait_tensor",)  # functional collectives end in it; it sends nothing
TIMEOUT = timedelta(minutes=5)


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Name and bytes of every collective, however it was called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in WAITS:
            # The first argument of a reduction is what is sent; gathers take their output first.
            given = args[1] if "gather" in name and func.namespace == "c10d" else args[0]
            size = sum(leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
            self.sent.append((name.strip("_"), size))
        return func(*args, **(kwargs or {}))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="resnet50,maskrcnn", help=f"comma-separated: {', '.join(SIZES)}")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")


def main(options: argparse.Namespace) -> None:
    print(f"{header('cpu')}; {options.ranks} gloo ranks, one step\n", flush=True)
    records = []
    for name in options.models.split(","):
        for how in compared(name, options.ranks):
            record = {"network": name, "ranks": options.ranks, **how}
            records.append(record)
            append(options.out, record, "cpu")
    print(table(records))


def compared(name: str, ranks: int) -> list[Record]:
    work, size = WORKLOADS[name], SIZES[name]
    data = inputs(work, size, 0)
    layers = calls(lambda: work.build(size), lambda model: work.loss(model, data))
    sent = counted(name, ranks)
    ways = [
        ("ndpp, sync", "counted", [size for _, size in sent]),
        ("ndpp, sync", "formula", formula(layers, ranks)),
        ("SyncBatchNorm", "formula", [s for c in layers if c.channels for s in batch_norm_bytes(c.channels)]),
    ]
    return [{"statistics": who, "from": how, "sent": len(sizes), "bytes": sum(sizes)} for who, how, sizes in ways]


def formula(layers: Sequence[Call], ranks: int) -> list[int]:
    """One buffer forward for every call of a layer, and one backward where its input has a gradient."""
    return [call.statistics_bytes(ranks) for call in layers for _ in range(1 + call.differentiated)]


def inputs(work: Workload, size: Size, rank: int) -> Any:
    """Two images of one rank."""
    torch.manual_seed(rank)
    return work.data(2, size)


# --- ranks ---


def counted(name: str, ranks: int) -> list[tuple[str, int]]:
    """What a rank sent in a step; an error if the ranks did not send the same, or one of them failed."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (ranks, name, folder), ranks)  # type: ignore[no-untyped-call]
        sent = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    if any(one != sent[0] for one in sent):
        raise SystemExit(f"{name}: the ranks sent different things: {[len(one) for one in sent]} collectives")
    return [(kind, size) for kind, size in sent[0]]


def _rank(rank: int, ranks: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=TIMEOUT, rank=rank, world_size=ranks)
    work, size = WORKLOADS[name], SIZES[name]
    torch.manual_seed(0)
    model = work.build(size)
    ndpp.convert_(model, ndpp.Settings(sync=True, rows=16, steps=1))  # neither rows nor steps change what is sent
    torch.save(sent_in_a_step(model.train(), work, inputs(work, size, rank)), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def sent_in_a_step(model: nn.Module, work: Workload, data: Any) -> list[tuple[str, int]]:
    counting = Counting()
    with counting:
        work.loss(model, data).backward()  # type: ignore[no-untyped-call]
    return counting.sent


def table(records: Sequence[Record]) -> str:
    head = ("network", "statistics", "from", "ranks", "collectives", "MB a rank gives")
    rows = []
    for r in records:
        cells = [r["network"], r["statistics"], r["from"], str(r["ranks"]), str(r["sent"]), f"{1e-6 * r['bytes']:.2f}"]
        rows.append(cells)
    return timing.markdown(head, rows)
