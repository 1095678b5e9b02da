"""Several processes under torchrun: DDP and FSDP2 train the same network, evaluate all data once, and resume."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.recipes.tiny import QUICK, TINY

from ndpp_recipes import checkpoints

pytestmark = pytest.mark.distributed
KEYS = [
    "model.options.width=8",
    "train_limit=64",
    "eval_limit=30",
    "batch_size=16",
    "eval_batch_size=4",
    "rows=64",
    "augment=none",
    "log_every=1",
]


# The command line, on ranks that never take the buffers of the first without having the same already.
COMPARING = """
import sys
import torch
from ndpp_recipes import cli, parallel

def compared(model, place, share=parallel.share_buffers_):
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    share(model, place)
    other = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])]
    assert before and not other, f"rank {place.rank} has other buffers than the first: {other}"

parallel.share_buffers_ = compared
sys.exit(cli.main(sys.argv[1:]))
"""


def _train(
    out: Path,
    ranks: int,
    *changes: str,
    norm: str = "gn",
    begin: str = "--resume=auto",
    check: bool = True,
    program: Sequence[str] = ("-m", "ndpp_recipes"),
    recipe: Sequence[str] = ("fashion",),
) -> subprocess.CompletedProcess[str]:
    """GroupNorm looks at one sample at a time, so that ranks have to make no difference at all."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "localhost:0"]
    keys = [part for text in (*(KEYS if "fashion" in recipe else ()), *changes) for part in ("--set", text)]
    command = [sys.executable, *(launcher if ranks > 1 else []), *program, "train", *recipe]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--norm", norm, begin, "--out", str(out), *keys],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr[-4000:]
    return done


def _weights(out: Path) -> dict[str, torch.Tensor]:
    state = checkpoints.latest(out / "checkpoints")
    assert state is not None
    weights: dict[str, torch.Tensor] = state["model"]
    return weights


def _result(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "result.json").read_text())
    return result


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(tmp_path: Path, parallel: str) -> None:
    """One process accumulates what two ranks do at the same time."""
    _train(tmp_path / "one", 1, "epochs=1", "accumulate=2")
    _train(tmp_path / "two", 2, "epochs=1", f"parallel={parallel}")
    one, two = _weights(tmp_path / "one"), _weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-4, msg=name)
    results = [_result(tmp_path / run)["final"] for run in ("one", "two")]
    assert results[0]["top1"] == pytest.approx(results[1]["top1"])
    assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-3)


@pytest.mark.parametrize(
    "keys", [("parallel=ddp", "ema=0.9", "recalibrate=2"), ("parallel=fsdp",)], ids=["ddp", "fsdp"]
)
def test_ranks_share_statistics(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Every position is looked at, so that two ranks have to compute as one process with the whole batch.

    What the losses of ranks are averages of is equally much: DDP's average of their gradients is the whole one's.
    """
    (tmp_path / "comparing.py").write_text(COMPARING)
    keys = ("epochs=1", "rows=none", "scale_positions=none", *keys)
    _train(tmp_path / "one", 1, *keys, norm="ndpp")
    _train(tmp_path / "two", 2, *keys, norm="ndpp", program=[str(tmp_path / "comparing.py")])
    one, two = _weights(tmp_path / "one"), _weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert (two[name] - value).double().norm() <= 1e-4 * value.double().norm(), name
    if "recalibrate=2" not in keys:  # which computes with the statistics of parts on its way
        results = [_result(tmp_path / run)["final"] for run in ("one", "two")]
        assert results[0]["eval_loss"] == pytest.approx(results[1]["eval_loss"], rel=1e-3)


def test_a_rank_without_objects(tmp_path: Path) -> None:
    """Of four images one has a box: in one of two steps a rank has no mask to learn from, in the other none has."""
    pytest.importorskip("pycocotools")
    (tmp_path / "comparing.py").write_text(COMPARING)
    folder = TINY["mask-rcnn"].make(tmp_path / "coco")
    found = json.loads((folder / "train.json").read_text())
    (folder / "train.json").write_text(json.dumps({**found, "annotations": found["annotations"][:1]}))
    keys = [*QUICK, *TINY["mask-rcnn"].changes, "run.steps=2", "eval_every=2", "timeout=60"]
    program = [str(tmp_path / "comparing.py")]
    _train(tmp_path / "two", 2, *keys, norm="ndpp", program=program, recipe=("mask-rcnn", "--data", str(folder)))
    assert _result(tmp_path / "two")["steps"] == 2


def test_ranks_keep_statistics_of_their_own_if_asked(tmp_path: Path) -> None:
    (tmp_path / "comparing.py").write_text(COMPARING)
    program = [str(tmp_path / "comparing.py")]
    done = _train(tmp_path / "two", 2, "run.steps=1", "sync=false", norm="ndpp", check=False, program=program)
    assert "rank 1 has other buffers than the first: [" in done.stderr


@pytest.mark.parametrize(("parallel", "norm"), [("ddp", "ndpp"), ("fsdp", "ndpp")])
def test_ranks_resume_exactly(tmp_path: Path, parallel: str, norm: str) -> None:
    keys = (f"parallel={parallel}", "save_every=1", "keep=9", "run.steps=6")
    _train(tmp_path / "whole", 2, *keys, norm=norm)
    shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    for path in checkpoints.found(tmp_path / "halves" / "checkpoints")[3:]:
        path.unlink()  # as if it had been killed after the third
    _train(tmp_path / "halves", 2, *keys, norm=norm)
    whole, halves = _weights(tmp_path / "whole"), _weights(tmp_path / "halves")
    for name, value in whole.items():
        assert torch.equal(value, halves[name]), name


def test_ranks_overwrite_together(tmp_path: Path) -> None:
    for _ in range(2):
        _train(tmp_path, 2, "run.steps=2", "save_every=1", begin="--overwrite")
    assert len(checkpoints.found(tmp_path / "checkpoints")) == 2


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    _train(tmp_path, 2, "run.steps=2", "save_every=1")
    done = _train(tmp_path, 1, "run.steps=2", "save_every=1", check=False)
    assert done.returncode == 2
    assert "the checkpoint is of 2 ranks; this run has 1" in done.stderr
