"""A trainer killed at any moment, and started again, ends as if nothing had happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ndpp_recipes import checkpoints

TRAIN = [sys.executable, "-m", "ndpp_recipes", "train", "fashion", "--resume", "auto"]
SMALL = [
    "model.options.width=8",
    "train_limit=480",
    "eval_limit=32",
    "batch_size=16",
    "epochs=1",
    "rows=64",
    "save_every=1",
    "eval_every=10",
]
KEYS = [part for text in [*SMALL, "log_every=1", "ema=0.9"] for part in ("--set", text)]
ALONE = {**os.environ, "OMP_NUM_THREADS": "1"}


def _start(out: Path, *more: str) -> subprocess.Popen[str]:
    """In a group of its own, as a shell starts it."""
    command = [*TRAIN, "--out", str(out), *KEYS, *more]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=ALONE, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def _steps(out: Path) -> int:
    names = [path.stem for path in checkpoints.found(out / "checkpoints")]
    return int(names[-1].removeprefix("step-")) if names else 0


def _finished(out: Path, *more: str) -> dict[str, torch.Tensor]:
    process = _start(out, *more)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "30 steps" in output
    state = checkpoints.latest(out / "checkpoints")
    assert state is not None
    return {**state["model"], **{f"ema.{key}": value for key, value in state["ema"].items()}}


def _killed(out: Path, wait: float, kind: signal.Signals = signal.SIGKILL, *more: str) -> int:
    """Start, let it make some steps, and kill it and its workers `wait` seconds later, wherever they then are."""
    process = _start(out, *more)
    before, deadline = _steps(out), time.time() + 120
    while _steps(out) <= before and process.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    time.sleep(wait)
    os.killpg(process.pid, kind)
    _, errors = process.communicate(timeout=60)
    if kind is not signal.SIGKILL:
        assert "stopped at step" in errors
        assert "--resume auto" in errors
    return process.returncode


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    out = tmp_path_factory.mktemp("whole")
    return out, _finished(out)


def test_killed_at_random_moments(tmp_path: Path, uninterrupted: tuple[Path, dict[str, torch.Tensor]]) -> None:
    out, whole = uninterrupted
    draw = random.Random(time.time())  # another moment in every run of the test
    kills = 0
    while _steps(tmp_path / "killed") < 25 and kills < 6:
        code = _killed(tmp_path / "killed", draw.uniform(0, 0.25))
        kills += code == -signal.SIGKILL
    resumed = _finished(tmp_path / "killed")
    assert kills >= 1
    assert whole.keys() == resumed.keys()
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
    metrics = [(run / "metrics.jsonl").read_text().splitlines() for run in (out, tmp_path / "killed")]
    assert len(metrics[0]) == len(metrics[1])


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_leaves_a_checkpoint_and_goes_on(tmp_path: Path, kind: signal.Signals) -> None:
    """The signal reaches the workers of its loader as well, as it does from a terminal."""
    assert _killed(tmp_path / "run", 0.1, kind, "--set", "data.workers=2") == 3
    assert 0 < _steps(tmp_path / "run") < 30
    _finished(tmp_path / "run")


@pytest.mark.parametrize("leftover", [".step-00000099.pt.123.partial", "step-00000099.pt"])
def test_leftovers_of_a_crash(
    tmp_path: Path, leftover: str, uninterrupted: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    """A partial file is ignored; a torn checkpoint with a proper name is passed over."""
    _, whole = uninterrupted
    _killed(tmp_path / "run", 0.0)
    (tmp_path / "run" / "checkpoints" / leftover).write_bytes(b"PK\x03\x04 torn")
    resumed = _finished(tmp_path / "run", *(["--set", "keep=50"] if not leftover.startswith(".") else []))
    for name, value in whole.items():
        assert torch.equal(value, resumed[name]), name
