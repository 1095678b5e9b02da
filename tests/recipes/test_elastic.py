"""Ranks under torchrun that are killed, stopped or raise: the job restarts and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ndpp_recipes import checkpoints

pytestmark = pytest.mark.distributed
STEPS = 12
KEYS = [
    *("model.options.width=8", "train_limit=96", "eval_limit=16", "batch_size=16", "eval_batch_size=4", "rows=64"),
    *("data.workers=0", "log_every=1", "save_every=1", "eval_every=5", "keep=3", f"run.steps={STEPS}", "timeout=60"),
]
PARALLEL = {"ddp": ["parallel=ddp", "ema=0.9"], "fsdp": ["parallel=fsdp"]}
BOUND = 150  # seconds in which a job of a few steps ends, whatever is done to it


class Job:
    """torchrun with two ranks, in a session of its own; its output goes to a file, which cannot fill up."""

    def __init__(self, out: Path, *changes: str, restarts: int = 0, program: str = "-m ndpp_recipes") -> None:
        self.out, self.output = out, out.with_suffix(".txt")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launcher += ["--max-restarts", str(restarts)]
        keys = [part for text in (*KEYS, *changes) for part in ("--set", text)]
        train = [*program.split(), "train", "fashion", "--resume", "auto", "--out", str(out), *keys]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *train],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def rank(self, number: int) -> int | None:
        """The process of a rank: the child of torchrun whose environment says so."""
        pid = self.process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except FileNotFoundError:
            return None
        for child in map(int, children):
            try:
                environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if f"RANK={number}".encode() in environment:
                return child
        return None

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + BOUND
        while not holds():
            assert self.process.poll() is None, f"ended before its time:\n{self.text()}"
            assert time.monotonic() < deadline, f"did not come so far:\n{self.text()}"
            time.sleep(0.01)

    def send(self, number: int, kind: signal.Signals) -> int:
        self.until(lambda: self.rank(number) is not None)
        pid = self.rank(number)
        assert pid is not None
        os.kill(pid, kind)
        return pid

    def end(self) -> int:
        """Its exit status, within the bound."""
        try:
            return self.process.wait(BOUND)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {BOUND} s:\n{self.text()}")

    def text(self) -> str:
        return self.output.read_text()[-6000:]

    def clear(self) -> None:
        """Nothing of it outlives a test."""
        for number in range(2):
            if (pid := self.rank(number)) is not None:
                os.kill(pid, signal.SIGKILL)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def started(*changes: str, **options: Any) -> Job:
        jobs.append(Job(tmp_path / "run", *changes, **options))
        return jobs[-1]

    yield started
    for job in jobs:
        job.clear()


def _step(out: Path) -> int:
    names = [path.stem for path in checkpoints.found(out / "checkpoints")]
    return int(names[-1].removeprefix("step-")) if names else 0


def _ended(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All that a finished run depends on and wrote, but for the times it took."""
    state = checkpoints.latest(out / "checkpoints")
    assert state is not None
    for key in ("config", "seconds"):
        del state[key]
    log = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for line in log:
        line.pop("seconds"), line.pop("throughput", None)
    return state, log


def _assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Bit for bit."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            _assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_same(one, other, f"{where}[{number}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    else:
        assert found == expected, where


Whole = Callable[[str], tuple[dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Uninterrupted runs, made once."""
    made: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}

    def of(parallel: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        if parallel not in made:
            job = Job(tmp_path_factory.mktemp("whole") / "run", *PARALLEL[parallel])
            try:
                assert job.end() == 0, job.text()
            finally:
                job.clear()
            made[parallel] = _ended(job.out)
        return made[parallel]

    return of


def _kill_after_steps(job: Job, number: int, wait: float) -> int:
    """Wherever the rank is `wait` seconds after the next checkpoint of these processes; the first writes those."""
    before = _step(job.out)
    job.until(lambda: _step(job.out) > before)
    time.sleep(wait)
    return job.send(number, signal.SIGKILL)


@pytest.mark.parametrize(("parallel", "number"), [("ddp", 0), ("fsdp", 1)])
def test_killed_ranks_are_started_again_and_end_the_same(
    parallel: str, number: int, whole: Whole, start: Callable[..., Job]
) -> None:
    expected = whole(parallel)
    draw = random.Random(time.time())  # other moments in every run of the test
    job = start(*PARALLEL[parallel], restarts=3)
    if parallel == "ddp":  # the other one while it is starting
        job.until(lambda: job.rank(1) is not None)
        time.sleep(draw.uniform(0, 3))
        job.send(1, signal.SIGKILL)
    _kill_after_steps(job, number, draw.uniform(0, 0.15))
    assert _step(job.out) < STEPS, "it was over before it could be killed: more STEPS"
    for path in checkpoints.found(job.out / "checkpoints"):
        checkpoints.load(path)  # what has its name is whole
    assert job.end() == 0, job.text()
    found = _ended(job.out)
    _assert_same(found[0], expected[0])
    _assert_same(found[1], expected[1], "log")
    result = json.loads((job.out / "result.json").read_text())
    assert (result["steps"], result["final"]) == (STEPS, expected[0]["metrics"])
    assert not list(job.out.rglob("*.partial"))
    assert not list(job.out.rglob("*.unreadable"))


def test_a_stopped_rank_only_delays(whole: Whole, start: Callable[..., Job]) -> None:
    expected = whole("ddp")
    job = start(*PARALLEL["ddp"])
    job.until(lambda: _step(job.out) >= 2)
    stopped = job.send(1, signal.SIGSTOP)
    time.sleep(0.5)  # what was under way may end
    reached = _step(job.out)
    time.sleep(1)
    assert _step(job.out) == reached
    os.kill(stopped, signal.SIGCONT)
    assert job.end() == 0, job.text()
    _assert_same(_ended(job.out)[0], expected[0])


BROKEN = """
import os, sys, time
from ndpp_recipes import cli, engine, errors

step = engine.Trainer.train_step

def broken(self, parts):
    if self.place.rank == 1 and self.step == 3:
        {what}
    return step(self, parts)

engine.Trainer.train_step = broken
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("what", "message"),
    [("raise errors.RecipeError('no more')", "ndpp train: rank 1: no more"), ("time.sleep(1000)", "Timed out waiting")],
    ids=["raises", "hangs"],
)
def test_a_broken_rank_ends_the_job(what: str, message: str, tmp_path: Path, start: Callable[..., Job]) -> None:
    """The timeout counts while ranks start as well: no shorter than a busy machine takes for one of them."""
    (tmp_path / "broken.py").write_text(BROKEN.format(what=what))
    begun = time.monotonic()
    job = start(*PARALLEL["ddp"], "timeout=8", program=str(tmp_path / "broken.py"))
    assert job.end() == 1, job.text()
    assert time.monotonic() - begun < 60
    assert message in job.output.read_text()
    assert _step(job.out) == 3
    for path in checkpoints.found(job.out / "checkpoints"):
        checkpoints.load(path)
