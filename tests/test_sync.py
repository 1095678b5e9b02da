"""Statistics shared between ranks: real processes against one on the joined batch, by the checks of sync_checks.py."""

from __future__ import annotations

import json
import os

import pytest
from filelock import FileLock

import ranks
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
