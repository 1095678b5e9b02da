"""A model, not a measurement: the training step of two networks from 1 to 1,024 GPUs, by how statistics are shared.

Every layer computes for its share of a step that was measured on one GPU, and sends what the real network's shapes say.
Statistics are waited for, layer by layer; gradients travel in buckets of 25 MiB while the backward pass goes on. Both
use one queue, as they do in one process group; another group has a queue of its own. What counts is the time that
sharing adds to a step: BatchNorm's own was measured, that of ndpp is what its arithmetic asks for, so the steps
themselves are not to be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import timing
from .network import NODE, Network
from .records import append
from .traffic import FLOAT, NETWORKS, Call, batch_norm_bytes

Record = dict[str, Any]

# Measured on one H200 before this model was made: ResNet-50, 128 images of 224², bf16 channels-last, eager. Inputs of
# the model; this command measures nothing. The step without any normalisation, and what BatchNorm adds to it:
FLOOR, BATCH_NORM = 17.3e-3, 30.1e-3 - 17.3e-3
# What the arithmetic of decorrelation asks for on top of the floor (`counts`, at 250 TFLOP/s and 4.3 TB/s): the part
# that grows with rows, and the part that does not.
ROWS, SOLVER = 0.5e-3, 0.25e-3
REFERENCE = "ResNet-50"  # what these times are of; other networks take as long for as much of the same
BACKWARD = 2 / 3  # of the time of a layer
BUCKET, FIRST_BUCKET = 25 * 2**20, 2**20  # of DistributedDataParallel
GPUS = tuple(2**k for k in range(11))


@dataclass(frozen=True)
class Scheme:
    """How statistics are shared. group: with how many, None = with all; apart: in a process group of their own, not
    that of the gradients; every: in each how many-th step; moment: bytes of a number of the second moments; rounds: 1 =
    the means of every rank have places of their own in one buffer, 2 = means are summed first; all_rows: every rank
    looks at as many rows as one does alone, not all of them together.
    """

    name: str
    batch_norm: bool = False
    group: int | None = None
    apart: bool = False
    every: int = 1
    moment: int = FLOAT
    rounds: int = 1
    all_rows: bool = False

    def ranks(self, gpus: int) -> int:
        return gpus if self.group is None else min(self.group, gpus)


OFF = 1  # a group of one
SCHEMES = (
    Scheme("BatchNorm, no sync", batch_norm=True, group=OFF),
    Scheme("SyncBatchNorm", batch_norm=True),
    Scheme("ndpp, no sync", group=OFF),
    Scheme("ndpp, sync all"),
    Scheme("… in a group of their own", apart=True),
    Scheme("… bf16 moments", moment=2),
    Scheme("… in two rounds", rounds=2),
    Scheme("… as many rows on every rank", all_rows=True),
    Scheme("… every 4th step", every=4),
    Scheme("… inside a node", group=NODE, apart=True),
)


# --- the simulation ---


@dataclass(frozen=True)
class Work:
    """One call of a layer: seconds forward and backward, and what it sends."""

    forward: float
    backward: float
    call: Call


class Queue:
    """Collectives of one rank, one after the other."""

    def __init__(self) -> None:
        self.free = 0.0

    def post(self, now: float, seconds: float) -> float:
        """When it is done."""
        self.free = max(self.free, now) + seconds
        return self.free


def step(works: Sequence[Work], scheme: Scheme, gpus: int, network: Network) -> float:
    """Seconds of one step in which statistics are shared."""
    queue, now = Queue(), 0.0
    gradients = Queue() if scheme.apart else queue
    for work in works:
        forward, _ = collectives(work.call, scheme, gpus, network)
        now += work.forward
        for seconds, _ in forward:
            now = queue.post(now, seconds)
    bucket, cap = 0, FIRST_BUCKET
    for work in reversed(works):
        _, backward = collectives(work.call, scheme, gpus, network)
        now += work.backward
        for seconds, _ in backward:
            now = queue.post(now, seconds)
        bucket += FLOAT * work.call.parameters
        if bucket >= cap:
            gradients.post(now, network.all_reduce(bucket, gpus))
            bucket, cap = 0, BUCKET
    if bucket:
        gradients.post(now, network.all_reduce(bucket, gpus))
    return max(now, gradients.free)


Sent = list[tuple[float, float]]  # seconds and bytes of collectives


def collectives(call: Call, scheme: Scheme, gpus: int, network: Network) -> tuple[Sent, Sent]:
    """What one call sends forward and backward."""
    ranks = scheme.ranks(gpus)
    if ranks == 1 or (scheme.batch_norm and not call.channels):
        return [], []
    if scheme.batch_norm:
        gathered, summed = batch_norm_bytes(call.channels)
        forward = [(network.all_gather(gathered, ranks), float(gathered))]
        return forward, [(network.all_reduce(summed, ranks), float(summed))]
    if scheme.rounds == 1:
        sizes = [call.statistics_bytes(ranks, scheme.moment)]
    else:
        sizes = [FLOAT * (call.means + 2), scheme.moment * call.triangle]
    back = [call.gradient_bytes(scheme.moment)] if call.differentiated else []
    sent, returned = ([(network.all_reduce(size, ranks), float(size)) for size in way] for way in (sizes, back))
    return sent, returned


def works(calls: Sequence[Call], reference: Sequence[Call], scheme: Scheme, gpus: int) -> list[Work]:
    """The measured times of the reference, divided among layers by what they multiply, whiten or normalise."""

    def rate(seconds: float, amount: Callable[[Call], int]) -> float:
        return seconds / sum(map(amount, reference))

    products, outputs = rate(FLOOR, lambda c: c.products), rate(BATCH_NORM, lambda c: c.outputs)
    rows = ROWS / (1 if scheme.all_rows else scheme.ranks(gpus))
    triangles = rate(rows + SOLVER, lambda c: c.triangle)
    made = []
    for call in calls:
        added = outputs * call.outputs if scheme.batch_norm else triangles * call.triangle
        seconds = products * call.products + added
        made.append(Work((1 - BACKWARD) * seconds, BACKWARD * seconds, call))
    return made


def predicted(
    calls: Sequence[Call], reference: Sequence[Call], scheme: Scheme, gpus: int, network: Network
) -> dict[str, float]:
    """Milliseconds of a step and what sharing adds to it, and the collectives and bytes of statistics, on average."""
    off = replace(scheme, group=OFF)
    alone = step(works(calls, reference, off, gpus), off, gpus, network)
    shared = step(works(calls, reference, scheme, gpus), scheme, gpus, network)
    added = (shared - alone) / scheme.every
    sent = [one for call in calls for way in collectives(call, scheme, gpus, network) for one in way]
    return {
        "ms": 1e3 * (alone + added),
        "sync_ms": 1e3 * added,
        "collectives": len(sent) / scheme.every,
        "megabytes": 1e-6 * sum(size for _, size in sent) / scheme.every,
    }


# --- the command ---


def arguments(parser: argparse.ArgumentParser) -> None:
    network = Network()
    parser.add_argument("--alpha", type=float, default=1e6 * network.inside.alpha, help="µs of a hop inside a node")
    parser.add_argument("--alpha-between", type=float, default=1e6 * network.between.alpha, help="µs between nodes")
    parser.add_argument("--bandwidth", type=float, default=1e-9 * network.inside.bandwidth, help="GB/s inside a node")
    parser.add_argument("--bandwidth-between", type=float, default=1e-9 * network.between.bandwidth, help="GB/s")
    parser.add_argument("--launch", type=float, default=1e6 * network.launch, help="µs before any collective")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument(
        "--plot", type=Path, nargs=2, metavar=("FILE", "PNG"), help="draw the records of a file instead"
    )


def main(options: argparse.Namespace) -> None:
    if options.plot:
        from .scaling_plot import draw
        from .summary import read

        draw(read(options.plot[:1]), options.plot[1])
        print(f"Figure saved to {options.plot[1]}")
        return
    network = network_of(options)
    print(__doc__)
    print("assumed:", ", ".join(f"{name} {value:g}" for name, value in assumptions(network).items()), "\n")
    found = {name: make() for name, make in NETWORKS.items()}
    records = []
    for name, calls in found.items():
        for scheme in SCHEMES:
            for gpus in GPUS:
                record: Record = {"network": name, "scheme": scheme.name, "gpus": gpus}
                record |= predicted(calls, found[REFERENCE], scheme, gpus, network)
                record |= {"settings": asdict(scheme), "assumed": assumptions(network), "modelled": True}
                records.append(record)
                append(options.out, record, "cpu")
    print(table(records))


def network_of(options: argparse.Namespace) -> Network:
    network = Network()
    inside = replace(network.inside, alpha=1e-6 * options.alpha, bandwidth=1e9 * options.bandwidth)
    between = replace(network.between, alpha=1e-6 * options.alpha_between, bandwidth=1e9 * options.bandwidth_between)
    return Network(inside, between, 1e-6 * options.launch)


def assumptions(network: Network) -> dict[str, float]:
    return {
        "floor_ms": 1e3 * FLOOR,
        "batch_norm_ms": 1e3 * BATCH_NORM,
        "decorrelation_ms": 1e3 * (ROWS + SOLVER),
        "hop_us": 1e6 * network.inside.alpha,
        "hop_between_us": 1e6 * network.between.alpha,
        "GB/s": 1e-9 * network.inside.bandwidth,
        "GB/s_between": 1e-9 * network.between.bandwidth,
        "launch_us": 1e6 * network.launch,
        "gpus_of_a_node": NODE,
    }


SHOWN = (2, 8, 64, 256, 1024)


def table(records: Sequence[Record]) -> str:
    """Milliseconds that sharing adds to a step, and what it sends; the schemes that share nothing add nothing."""
    at = {(r["network"], r["scheme"], r["gpus"]): r for r in records}
    head = ["network", "statistics", *(f"{gpus:,} GPUs" for gpus in SHOWN)]
    head += ["collectives", *(f"MB a rank gives, {gpus:,}" for gpus in (8, 1024))]
    rows = []
    for network, scheme in dict.fromkeys((r["network"], r["scheme"]) for r in records):
        if scheme.endswith("no sync"):
            continue
        added = [f"{at[network, scheme, gpus]['sync_ms']:+.1f} ms" for gpus in SHOWN]
        sent = [f"{at[network, scheme, gpus]['megabytes']:.1f}" for gpus in (8, 1024)]
        rows.append([network, scheme, *added, f"{at[network, scheme, 1024]['collectives']:g}", *sent])
    return timing.markdown(head, rows)
