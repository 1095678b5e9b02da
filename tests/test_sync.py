"""Statistics shared between ranks: real processes against one on the joined batch, by the checks of sync_checks.py."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import ndpp
import ranks
from ndpp import Settings, sync, whitening
from ndpp.whitening import Moments
from sync_checks import CHECKS


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """By number of ranks and name. Starting ranks takes seconds: one start runs all checks, for all pytest workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        found = folder / "results.json"
        if not found.exists():
            said = {count: ranks.run("sync_checks", count, folder / str(count)) for count in (4, 2)}
            found.write_text(json.dumps(said))
        return json.loads(found.read_text())  # type: ignore[no-any-return]


@pytest.mark.distributed
@pytest.mark.parametrize("count", [2, 4], ids=["2 ranks", "4 ranks"])
def test_the_ranks_end_cleanly(count: int, results: dict[str, dict[str, str]]) -> None:
    assert "the job" not in results[str(count)], results[str(count)]["the job"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("count", "name"), [(count, name) for count, checks in CHECKS.items() for name in checks], ids=str
)
def test_ranks_compute_as_one_process(count: int, name: str, results: dict[str, dict[str, str]]) -> None:
    said = results[str(count)]
    assert name in said, "did not run: the job ended before it"
    assert not said[name], said[name]


@pytest.mark.parametrize("initialised", [False, True])
def test_one_process_computes_alone(initialised: bool, tmp_path: Path) -> None:
    """sync=True in a script that is not distributed, or is by one rank, is sync=False."""
    if initialised:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        x, layers = torch.randn(20, 6), []
        for shares in (True, False):
            torch.manual_seed(1)
            layers.append(ndpp.Linear(6, 4, settings=Settings(sync=shares, rows=None)))
            layers[-1](x).square().sum().backward()
        for a, b in zip(layers[0].state_dict().values(), layers[1].state_dict().values(), strict=True):
            assert torch.equal(a, b)
        assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)
        assert layers[0](x[:0]).shape == (0, 4)
        assert ndpp.recalibrate_(layers[0], [x]) == 1
    finally:
        if initialised:
            torch.distributed.destroy_process_group()


def test_a_rank_that_is_not_of_the_group_is_told() -> None:
    with pytest.raises(ValueError, match=r"sync must be .* that this rank is a member of; got -100"):
        Settings(sync=torch.distributed.GroupMember.NON_GROUP_MEMBER)


class Pretended:
    """A group of many ranks in one process: sums what each sent when it is asked a second time."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.current, self.sent = ranks, 0, []

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.current

    def all_reduce(self, buffer: torch.Tensor, group: object) -> torch.Tensor:
        if len(self.sent) < self.ranks:
            self.sent.append(buffer.clone())
        return torch.stack(self.sent).sum(0)

    def join(self, parts: list[Moments]) -> list[Moments]:
        for turn in range(2):
            merged = []
            for self.current, part in enumerate(parts):
                merged.append(sync.join_forward(part, self)[0])
            assert turn or len(self.sent) == self.ranks
        return merged


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e5])
def test_many_ranks_in_single_precision(mean: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 ranks, a mean that is large against the spread, and a column without any: no cancellation, no variance."""
    group = Pretended(64)
    monkeypatch.setattr(sync, "_all_reduce", group.all_reduce)
    data = [torch.randn(1 + rank % 7, 5) + mean for rank in range(64)]
    for rows in data:
        rows[:, 4] = mean + 0.123
    unit = torch.tensor(max(2.0 ** math.floor(math.log2(mean + 1)), 1.0))
    parts = []
    for rows in data:
        center, cov = whitening.moments(rows[None] / unit)
        parts.append(Moments(torch.tensor(float(len(rows))), center, cov, unit))
    merged = group.join(parts)
    assert all(torch.equal(a, b) for other in merged[1:] for a, b in zip(merged[0], other, strict=True))
    rows = torch.cat(data).double()
    want = (rows - rows.mean(0)).T @ (rows - rows.mean(0)) / len(rows)
    got = merged[0].cov[0].double() * unit**2
    rounding = torch.finfo(torch.float32).eps * (mean + 1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 + 4 * rounding)
    assert got[4, 4] <= (rounding / 8) ** 2
    assert merged[0].rows == len(rows)
