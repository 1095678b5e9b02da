"""The command line as a user has it: output, exit status, and errors in one line."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.recipes.tiny import folders

from ndpp_recipes.cli import main

KEYS = ["model.options.width=8", "train_limit=96", "eval_limit=32", "batch_size=16", "rows=64", "eval_every=3"]
SMALL = [part for text in KEYS for part in ("--set", text)]


def _says(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    assert main(list(arguments)) == status
    return capsys.readouterr()


def test_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = _says(capsys, "recipes")
    for word in ("fashion", "mask-rcnn", "paper-resnet50-lr1", "iternorm"):
        assert word in out
    out, _ = _says(capsys, "recipes", "show", "paper-resnet50", "--norm", "bn")
    assert "77.95" in out
    assert "run.batch_size = 2048" in out
    assert "optimizer.weight_decay = 0.0005" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "expected a RECIPE or --preset"),
        (["train", "fashon"], "no recipe 'fashon'; did you mean 'fashion'"),
        (["train", "fashion", "--norm", "batch"], "no normalisation 'batch'"),
        (["train", "fashion", "--set", "lrr=1"], "no key 'lrr'; did you mean 'optimizer.lr'"),
        (["train", "cifar", "--preset", "paper-resnet50"], "is of the recipe imagenet, not cifar"),
        (["train", "cifar", "--data", "/nowhere"], "/nowhere"),
        (["train", "cifar"], "data"),
        (["train", "fashion", "--set", "model.name=resnet19"], "resnet1"),
        (["train", "fashion", "--set", "batch_size=0"], "batch_size"),
        (["train", "fashion", "--set", "accumulate=3", "--set", "batch_size=16"], "does not divide"),
        (["race", "--norms", "bn,bn"], "different names"),
        (["race", "--seeds", "0"], "--seeds"),
        (["eval", "/nowhere"], "/nowhere is no run"),
        (["export", "/nowhere", "--format", "tflite"], "expected one of onnx, torch, safetensors; got 'tflite'"),
        (["report", "/nowhere"], "/nowhere"),
        (["recipes", "show"], "expected a NAME"),
        (["train", "fashion", "--set", "norm.name=bn"], "norm.name cannot be set"),
        (["train", "fashion", "--set", "task=language"], "task cannot be set"),
        (["train", "fashion", "--out", "a{b}"], "run.out: only {recipe}, {norm}, {seed}"),
        (["train", "fashion", "--out", "/dev/null/x"], "/dev/null"),
        (["train", "fashion", "--set", "batch_size=1000000"], "records make 0 batches"),
        (["bench", "fashion", "--norms", ","], "--norms"),
        (["bench", "fashion", "--rounds", "0"], "--rounds"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    _, err = _says(capsys, *arguments, status=2)
    assert message in err
    assert err.startswith(f"ndpp {arguments[0]}: ")
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("*.pt"))


def test_a_run_from_beginning_to_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """train, refuse, resume, eval, export, report, in one folder."""
    monkeypatch.chdir(tmp_path)
    for norm in ("bn", "ndpp"):
        out, err = _says(capsys, "train", "fashion", "--norm", norm, *SMALL, "--set", "epochs=1", "--seed", "3")
        assert re.search(r"6 steps in .* top1", out)
        assert f"runs/fashion-{norm}" in out
        assert "step 6/6" in err
    _, err = _says(capsys, "train", "fashion", *SMALL, "--set", "epochs=1", "--seed", "3", status=2)
    assert "holds a run already" in err
    out, _ = _says(capsys, "train", "fashion", *SMALL, "--set", "epochs=1", "--seed", "3", "--resume", "auto")
    assert "6 steps" in out
    out, _ = _says(capsys, "eval", "runs/fashion-ndpp", "--json", "metrics.json")
    metrics = json.loads(Path("metrics.json").read_text())
    best = json.loads(Path("runs/fashion-ndpp/result.json").read_text())["best"]
    assert metrics["top1"] == pytest.approx(best["value"])
    out, _ = _says(capsys, "export", "runs/fashion-ndpp", "--format", "torch")
    assert Path("runs/fashion-ndpp/model.pt2").exists()
    assert "at most" in out
    out, _ = _says(capsys, "report", "runs/fashion-bn", "runs/fashion-ndpp", "--title", "<b>&")
    page = Path("report.html").read_text()
    assert "BatchNorm" in out
    assert "&lt;b&gt;&amp;" in page
    assert "<b>&" not in page


def test_dry_run_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, _ = _says(capsys, "train", "fashion", "--dry-run", *SMALL)
    assert "data: 96 records for training, 32 for evaluation" in out
    assert re.search(r"model: cnn, [\d,]+ parameters; ndpp: 5 layers converted", out)
    assert "first step: loss" in out
    assert not list(tmp_path.iterdir())


def test_bad_images_are_skipped_and_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = folders(tmp_path / "data")
    (data / "train" / "red" / "0.png").write_bytes(b"\x89PNG torn")
    keys = ["model.options.width=4", "batch_size=8", "epochs=1", "rows=64", "block=8", "data.workers=0"]
    command = ["train", "cifar", "--data", str(data), *[part for text in keys for part in ("--set", text)]]
    _, err = _says(capsys, *command, status=2)
    assert "red/0.png" in err
    assert "--skip-bad" in err
    _says(capsys, *command, "--skip-bad", "1")
    (line,) = Path("runs/cifar-ndpp/bad.jsonl").read_text().splitlines()
    assert "red/0.png" in json.loads(line)["text"]


def test_race_prints_a_table_and_writes_a_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out, _ = _says(capsys, "race", *SMALL, "--set", "epochs=1", "--norms", "bn,ndpp,none")
    lines = [line for line in out.splitlines() if "lr" in line]
    for label in ("BatchNorm lr 0.1", "BatchNorm lr 1", "ND++ lr 0.2", "ND++ lr 1", "No norm lr 1"):
        assert any(line.startswith(label) for line in lines), label
    _, err = _says(capsys, "race", *SMALL, status=2)
    assert "holds a run already" in err
    page = Path("race/report.html").read_text()
    assert "<svg" in page
    assert "ND++" in page
    for run in Path("race").glob("*-seed0"):
        names = json.loads((run / "conditioning.json").read_text())
        assert len(names["before"]) == len(names["after"]) == 5
        same = [a["condition"] == b["condition"] for a, b in zip(names["before"], names["after"], strict=True)]
        assert all(same) == ("ndpp" not in run.name)


def test_runs_in_a_race_are_those_run_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [*SMALL, "--set", "epochs=1"]
    _says(capsys, "race", *keys, "--tuned-only")
    _says(capsys, "train", "fashion", *keys)
    results = [
        json.loads((Path(p) / "result.json").read_text()) for p in ("race/ndpp-tuned-seed0", "runs/fashion-ndpp")
    ]
    assert results[0]["final"] == results[1]["final"]


def test_bench_prints_ratios(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    out, _ = _says(capsys, "bench", *SMALL, "--norms", "bn,none", "--rounds", "2", "--json", str(path))
    assert re.search(r"^bn +[\d.]+ +[\d.]+–[\d.]+ +1.00", out, re.MULTILINE)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["norm"] for record in records] == ["bn", "none"]
    assert {"milliseconds", "ratio", "torch", "ndpp", "device", "date"} <= set(records[0])


def test_in_a_terminal(tmp_path: Path) -> None:
    """Bars that move, in a terminal of 100 columns."""
    primary, secondary = pty.openpty()
    command = [sys.executable, "-m", "ndpp_recipes", "race", *SMALL, "--set", "epochs=1", "--out", str(tmp_path)]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=secondary, env=environment)
    os.close(secondary)
    screen, deadline = b"", time.time() + 200
    while time.time() < deadline:
        if select.select([primary], [], [], 0.5)[0]:
            try:
                screen += os.read(primary, 65536)
            except OSError:  # the other side is closed
                break
        elif process.poll() is not None:
            break
    assert process.wait(timeout=60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.decode())
    assert "━" in text
    assert "6/6" in text
    assert re.search(r"ND\+\+, lr 1, no momentum .*\d+\.\d+ top1", text)
    assert "report.html" in text
