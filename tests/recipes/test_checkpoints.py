"""Files are whole or not there; torn checkpoints are passed over; loading runs no code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ndpp_recipes import checkpoints
from ndpp_recipes.errors import RecipeError


def test_only_the_last_remain(tmp_path: Path) -> None:
    for step in (5, 10, 100):
        checkpoints.save(tmp_path, step, {"step": step}, keep=2)
    assert [path.name for path in checkpoints.found(tmp_path)] == ["step-00000010.pt", "step-00000100.pt"]
    assert checkpoints.latest(tmp_path) == {"step": 100}
    assert checkpoints.latest(tmp_path / "nowhere") is None


def test_what_a_kill_left_behind_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".step-00000005.pt.123.partial").write_bytes(b"torn")
    checkpoints.save(tmp_path, 5, {"step": 5}, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005.pt"]


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, 1, {"step": 1, "w": torch.ones(100)}, keep=5)
    newest = checkpoints.save(tmp_path, 2, {"step": 2, "w": torch.ones(100)}, keep=5)
    newest.write_bytes(newest.read_bytes()[:200])
    with pytest.warns(UserWarning, match=r"step-00000002.pt is no checkpoint that can be read.*before it"):
        state = checkpoints.latest(tmp_path)
    assert state is not None
    assert state["step"] == 1
    checkpoints.save(tmp_path, 2, {"step": 2}, keep=1)  # the torn one is out of the way of the next
    assert checkpoints.latest(tmp_path) == {"step": 2}


def test_nothing_but_torn_checkpoints_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "step-00000001.pt").write_bytes(b"torn")
    with pytest.warns(UserWarning, match="put aside"), pytest.raises(RecipeError, match="none of the 1 checkpoints"):
        checkpoints.latest(tmp_path)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    checkpoints.write_whole(path, lambda file: file.write(b"old"))

    def fails(file: object) -> None:
        file.write(b"ne")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with pytest.raises(RecipeError, match=r"cannot write .*best.pt: .*No space left.*--resume auto"):
        checkpoints.write_whole(path, fails)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["best.pt"]


def test_a_full_disk(tmp_path: Path) -> None:
    """A real one: /dev/full answers every write with ENOSPC."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(RecipeError, match="No space left"):
        checkpoints.write_whole(tmp_path / "x.pt", lambda _: (torch.save({"w": torch.ones(10)}, full), full.flush()))
    full.close()


class _Evil:
    def __reduce__(self) -> object:
        return os.system, ("true",)


def test_a_checkpoint_cannot_run_code(tmp_path: Path) -> None:
    torch.save({"model": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(RecipeError, match="no checkpoint that can be read"):
        checkpoints.load(tmp_path / "evil.pt")
    with pytest.raises(RecipeError, match="does not exist"):
        checkpoints.load(tmp_path / "none.pt")
