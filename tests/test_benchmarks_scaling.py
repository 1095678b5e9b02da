"""The model of communication by hand, what it says at its ends, and the counting of collectives."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from benchmarks import collectives, scaling, summary
from benchmarks.network import Link, Network, ring, tree
from benchmarks.scaling import OFF, SCHEMES, Queue, Scheme, Work, predicted, step
from benchmarks.traffic import Call, batch_norm_bytes, calls
from torch import nn

LINK = Link(alpha=1e-3, bandwidth=1000.0)
NETWORK = Network(inside=LINK, between=Link(2e-3, 100.0), launch=0.5)


def test_ring_and_tree_by_hand() -> None:
    """Four ranks, 400 bytes: six hops of 100 bytes around the ring; two levels up and down, and all bytes twice."""
    assert ring(400, 4, LINK) == pytest.approx(6 * (1e-3 + 0.1))
    assert tree(400, 4, LINK) == pytest.approx(4 * 1e-3 + 2 * 0.4)
    assert ring(400, 1, LINK) == tree(400, 1, LINK) == 0


def test_all_reduce_by_hand() -> None:
    """Sixteen ranks in two nodes: a ring of eight inside, then the eighth of every GPU between the two."""
    inside = 14 * (1e-3 + 800 / 8 / 1000)
    between = 2 * (2e-3 + 100 / 2 / 100)
    assert NETWORK.all_reduce(800, 16) == pytest.approx(0.5 + inside + between)
    small = NETWORK.all_reduce(1e-6, 1024)  # few hops count: trees
    assert small == pytest.approx(0.5 + 6 * 1e-3 + 14 * 2e-3, rel=1e-3)


def test_all_gather_by_hand() -> None:
    """Sixteen ranks: the 7 others of the node twice (their own, and those of the other node) and one from outside."""
    assert NETWORK.all_gather(10, 16) == pytest.approx(0.5 + 3e-3 + 14 * 10 / 1000 + 2e-3 + 10 / 100)


@pytest.mark.parametrize("collective", [Network().all_reduce, Network().all_gather])
def test_costs_grow_with_bytes_and_ranks_and_one_pays_nothing(collective: object) -> None:
    assert callable(collective)
    assert collective(1e6, 1) == 0
    for ranks in (2, 8, 64, 1024):
        costs = [collective(size, ranks) for size in (0, 1, 1e3, 1e6, 1e9)]
        assert costs == sorted(costs)
        assert costs[0] > 0
    costs = [collective(1e6, ranks) for ranks in (1, 2, 4, 8, 16, 64, 256, 1024)]
    assert costs == sorted(costs)
    with pytest.raises(ValueError, match="multiple of it; got 12"):
        collective(1.0, 12)


CALL = Call("a", 10, 100, triangle=6, means=3, channels=5, outputs=20, differentiated=True)


def test_what_is_sent() -> None:
    assert CALL.statistics_bytes(ranks=4) == 4 * 6 + 4 * 4 * (3 + 2)
    assert CALL.statistics_bytes(ranks=4, moment=2) == 2 * 6 + 4 * 4 * (3 + 2)
    assert batch_norm_bytes(5) == (44, 40)


def test_collectives_wait_for_each_other() -> None:
    queue = Queue()
    assert queue.post(1.0, 2.0) == 3.0
    assert queue.post(2.0, 1.0) == 4.0
    assert queue.post(9.0, 1.0) == 10.0


def test_a_step_by_hand() -> None:
    """Two ranks, two layers: statistics are waited for both ways, gradients (one bucket) follow at the end."""
    works = [Work(1.0, 2.0, CALL), Work(1.0, 2.0, CALL)]
    statistics = NETWORK.all_reduce(CALL.statistics_bytes(2), 2)
    gradients = NETWORK.all_reduce(800, 2)
    assert step(works, Scheme("off", group=OFF), 1, NETWORK) == pytest.approx(6)
    assert step(works, Scheme("off", group=OFF), 2, NETWORK) == pytest.approx(6 + gradients)
    assert step(works, Scheme("all"), 2, NETWORK) == pytest.approx(6 + 4 * statistics + gradients)


def test_gradients_travel_while_the_backward_pass_goes_on() -> None:
    heavy = Call("a", 10, 2**20, triangle=6, means=3, channels=5, outputs=20, differentiated=True)
    works = [Work(0.0, 1.0, heavy), Work(0.0, 1.0, heavy)]  # each more than the first bucket, less than the next
    network = Network(Link(0.0, 2**22 / 0.5), launch=0.0)
    one = network.all_reduce(2**22, 2)
    assert step(works, Scheme("off", group=OFF), 2, network) == pytest.approx(2 + one)  # the first is hidden


def test_schemes_compare_as_they_must() -> None:
    layers = [CALL, Call("b", 30, 50, triangle=10, means=4, channels=0, outputs=0, differentiated=True)]
    at = {s.name: predicted(layers, layers, s, 64, Network()) for s in SCHEMES}
    assert at["ndpp, no sync"]["sync_ms"] == at["BatchNorm, no sync"]["sync_ms"] == 0
    assert at["… inside a node"]["sync_ms"] < at["ndpp, sync all"]["sync_ms"]
    assert at["… every 4th step"]["sync_ms"] == pytest.approx(at["ndpp, sync all"]["sync_ms"] / 4)
    assert at["… bf16 moments"]["megabytes"] < at["ndpp, sync all"]["megabytes"]
    assert at["SyncBatchNorm"]["collectives"] == 2  # the second layer has no norm
    assert at["ndpp, sync all"]["collectives"] == 4
    for scheme in SCHEMES:  # one GPU has no one to share with
        assert predicted(layers, layers, scheme, 1, Network())["sync_ms"] == 0


class Small(nn.Module):
    """A layer of two blocks, the second called twice, and one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 70, 3, padding=1), nn.BatchNorm2d(70)
        self.second = nn.Conv2d(70, 70, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.norm(self.first(x)))
        return self.second(x).mean()


def test_calls_of_a_network() -> None:
    data = torch.randn(2, 3, 8, 8)
    first, second, third = calls(Small, lambda model: model(data), larger=4)
    assert (first.name, second.name, third.name) == ("first", "second", "second")
    assert first.products == 4 * 2 * 64 * 70 * 27
    assert (first.triangle, first.means) == (27 * 28 // 2, 27)
    assert second.means == 70  # blocks of 64 and 6, each as wide as it is
    assert second.triangle == 64 * 65 // 2 + 6 * 7 // 2
    assert (first.channels, second.channels, first.outputs) == (70, 0, 4 * 2 * 70 * 64)
    assert (second.parameters, third.parameters) == (70 * 70 + 70, 0)
    assert [first.differentiated, second.differentiated] == [False, True]


def test_the_command_and_its_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(2, 3, 8, 8)
    small = {"ResNet-50": lambda: calls(Small, lambda model: model(data))}
    monkeypatch.setattr(scaling, "NETWORKS", small)
    out, png = tmp_path / "scaling.jsonl", tmp_path / "scaling.png"
    for words in (["--out", str(out)], ["--plot", str(out), str(png)]):
        parser = argparse.ArgumentParser()
        scaling.arguments(parser)
        scaling.main(parser.parse_args(words))
    records = summary.read([out])
    assert len(records) == len(SCHEMES) * len(scaling.GPUS)
    assert all({"assumed", "date", "torch", "modelled"} <= set(record) for record in records)
    json.dumps(records, allow_nan=False)
    summary.main(argparse.Namespace(files=[out], markdown=True))
    assert png.stat().st_size > 10_000


def _reduce(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    counting = collectives.Counting()
    with counting:
        dist.all_reduce(torch.ones(10))
        dist.all_gather([torch.ones(3) for _ in range(ranks)], torch.ones(3))
        torch.ones(3) + 1  # no collective
    assert counting.sent == [("allreduce", 40), ("allgather", 12)], counting.sent
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_collectives_are_counted(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_reduce, (2, str(tmp_path)), 2)


@pytest.mark.distributed
@pytest.mark.skipif(importlib.util.find_spec("ndpp.sync") is None, reason="nothing is synchronised yet")
def test_a_real_step_sends_what_the_model_says() -> None:
    counted, expected, _ = collectives.compared("resnet18", 2)
    assert (counted["sent"], counted["bytes"]) == (expected["sent"], expected["bytes"])
