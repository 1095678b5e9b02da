"""The speed commands on tiny sizes: they run, and what they record is complete and finite. Never a time."""

import argparse
import json
import math
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from benchmarks import __main__ as commands
from benchmarks import counts, guard, host, layer, solver, step, summary, targets, timing, workloads
from torch import nn

import ndpp
from ndpp.kernels import cases, triton_direct

Record = dict[str, Any]


def run(name: str, arguments: str, folder: Path) -> list[Record]:
    """Records of a command, which `summary` must be able to show, too."""
    module = commands.COMMANDS[name]
    out = folder / f"{name}.jsonl"
    parser = argparse.ArgumentParser()
    module.arguments(parser)
    common = f"--device cpu --unchecked --steps 1 --repeats 2 --out {out}"
    module.main(parser.parse_args([*arguments.split(), *common.split()]))
    summary.main(argparse.Namespace(files=[out], markdown=True))
    records: list[Record] = summary.read([out])
    assert all(record["checked"] is False for record in records)
    for record in records:
        json.dumps(record, allow_nan=False)
    return records


TINY = "--model resnet18 --size 32 --batch 2 --dtype fp32 --warmup 1"


def test_step(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(workloads.SETTINGS, "nd", ndpp.Settings(block=8, rows=32, steps=1))  # quick
    records = run("step", f"{TINY} --variants bn,none,nd --profile {tmp_path}", tmp_path)
    assert "unchecked" in capsys.readouterr().out.splitlines()[0]
    assert [record["variant"] for record in records] == ["bn", "none", "nd"]
    assert records[0]["ratio"] == 1
    for record in records:
        assert record["finite"]
        assert record["ms"] > 0
        assert record["ratio"] > 0
        assert record["kernels"] > 0
        for ending in ("json", "txt"):
            assert (tmp_path / f"resnet18-2-{record['variant']}-eager.{ending}").stat().st_size > 0


def test_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one convolution by hand, and of a network in all."""
    conv = ndpp.Conv2d(96, 10, 3, settings=ndpp.Settings(features=9 * 64, rows=100, solver="newton", steps=3))
    found = counts.of_layer(conv, 1000, 2)  # a block of 64 channels, and one of 32
    widths = [576, 288]
    assert math.isclose(found["root"], sum((5 + 12) * 2 * f**3 for f in widths) / 1e12)
    assert math.isclose(found["moments"], sum(1.5 * 2 * 100 * f**2 for f in widths) / 1e12)
    assert math.isclose(found["fold"], sum(3 * 2 * f**2 * 10 for f in widths) / 1e12)
    assert math.isclose(found["layers"], 3 * 2 * 1000 * 864 * 10 / 1e12)
    parser = argparse.ArgumentParser()
    counts.arguments(parser)
    out = tmp_path / "counts.jsonl"
    counts.main(parser.parse_args(["--model", "resnet18", "--batch", "2", "--variants", "nd", "--out", str(out)]))
    printed = capsys.readouterr().out
    summary.main(argparse.Namespace(files=[out], markdown=True))
    assert capsys.readouterr().out == printed


def told(name: str, arguments: str, out: Path) -> list[Record]:
    """Records of a command that runs no tests first; `summary` shows them as it does."""
    parser = argparse.ArgumentParser()
    commands.COMMANDS[name].arguments(parser)
    commands.COMMANDS[name].main(parser.parse_args([*arguments.split(), "--out", str(out)]))
    summary.main(argparse.Namespace(files=[out], markdown=True))
    return summary.read([out])


def test_operations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels take the place of most operations, and are counted."""
    pytest.importorskip("triton")
    none, plain = told("operations", "--model resnet18 --variants none,nd", tmp_path / "plain.jsonl")
    _, kernels = told("operations", "--model resnet18 --variants none,nd --kernels", tmp_path / "kernels.jsonl")
    assert none["launches"] == plain["launches"] == 0 < kernels["launches"]
    assert none["operations"] < kernels["operations"] < plain["operations"] / 3
    assert kernels["converted"] == 21
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| resnet18 | nd")]
    assert lines[0] == lines[1]
    assert lines[2] == lines[3]


def test_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every layer goes by its kernels, whose launches reach what stands for the driver; all is as before afterwards."""
    pytest.importorskip("triton")
    from ndpp.kernels import triton_launch

    reached, before = Counter[str](), triton_direct.Direct.__call__

    def counted(self: Any, pointers: Any, device: int) -> bool:
        reached["launches"] += 1
        return before(self, pointers, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_direct.Direct, "__call__", counted)
        records = told("host", "--variants bn,none,nd --repeats 2", tmp_path / "host.jsonl")
    assert [(r["variant"], r["host_ms"] > 0) for r in records] == [("bn", True), ("none", True), ("nd", True)]
    assert records[0]["ratio"] == 1
    steps = 10 + 3 * (1 + 2)  # to warm up, then in rounds
    assert reached["launches"] > 53 * 8 * (steps - 2)
    assert triton_launch.Launcher.start is not host.compiled
    x = torch.randn(2, 4)
    assert cases.declines(x) == "a tensor on cpu"
    assert torch.isfinite(ndpp.Linear(4, 3)(x)).all()


def test_runs_of_several_batch_sizes_are_shown_by_batch() -> None:
    same = {"settings": None, "mode": "eager", "tf32": False, "jobs": 1, "images": 9, "evaluated_on": "holdout"}
    same |= {"source": "", "device": ""}
    runs = [("a", 16, 60.0, 0), ("b", 16, 50.0, 0), ("a", 32, 61.0, 0), ("a", 32, 63.0, 1)]
    records = [
        {"config": config, "plan": {"batch": batch}, "final_accuracy": final, "seed": seed, **same}
        for config, batch, final, seed in runs
    ]
    lines = summary.by_batch([*records, {**records[0], "images": 10, "final_accuracy": 70.0}]).splitlines()
    assert lines[0] == "| config | batch 16 | batch 32 |"
    assert lines[2:] == ["| a | 70.00, 60.00 | 62.00 ± 1.41 (2) |", "| b | 50.00 | – |"]


def test_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device the steps are listed and not measured; what can be measured is compared with its aim."""
    records = run("targets", "--only resnet50,cpu-table --layers 1 --batch 1 --shrink 20", tmp_path)
    shown = capsys.readouterr().out
    steps = [r for r in records if r["aim"].startswith("resnet50")]
    assert [r["found"] for r in steps] == [None] * 8
    assert shown.count("not measured") == 16  # by the command and by the summary
    rest = [r for r in records if r not in steps]
    assert [r["met"] for r in rest] == [r["found"] <= 5.0 for r in rest]
    assert len(rest) == 2
    aim = targets.Aim("resnet50", "nd", "eager", 0.9, "memory_gib")
    found = [{"variant": name, "mode": "eager", "memory_gib": size} for name, size in (("bn", 4.0), ("nd", 3.0))]
    assert aim.found(found) == 0.75
    assert aim.found(found[1:]) is None


def test_targets_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They warm up side by side, and are timed in turns; what one could not run is not measured."""
    monkeypatch.setitem(targets.RUNS, "deeplab", (f"{TINY} --variants bn,none", f"{TINY} --variants bn,nowhere"))
    monkeypatch.setitem(targets.RUNS, "vit", (f"{TINY} --variants bn,none",))
    aims = targets.Aim("vit", "none", "eager", 1e9), targets.Aim("deeplab", "nd", "eager", 1.0)
    monkeypatch.setattr(targets, "AIMS", aims)
    out = tmp_path / "steps.jsonl"
    told = {"device": "cpu", "steps": 1, "repeats": 1, "steps_out": out, "profile": None, "patience": 600}
    found = targets.timed(["vit", "deeplab"], argparse.Namespace(**told), None)
    assert [(r["most"], r["met"]) for r in found] == [(1e9, True), (1.0, None)]
    assert [r["variant"] for r in summary.read([out])] == ["bn", "none"] * 2


class Waiting:
    """In the place of a process that warms up."""

    def __init__(self, name: str, ready: bool) -> None:
        self.name, self.ready, self.got = name, threading.Event(), []
        if ready:
            self.ready.set()

    def send(self, number: signal.Signals) -> None:
        self.got.append(number)
        if number == signal.SIGCONT:
            self.ready.set()


def test_who_is_late_stands_still_and_comes_after_the_others() -> None:
    processes = [Waiting("late", False), Waiting("first", True), Waiting("second", True)]
    seen = []
    for process in targets.in_turn(processes, 0.0, None):
        seen.append((process.name, list(processes[0].got)))
    assert seen[:2] == [("first", [signal.SIGSTOP]), ("second", [signal.SIGSTOP])]
    assert seen[2:] == [("late", [signal.SIGSTOP, signal.SIGCONT])]


def test_all_who_are_ready_in_time_are_timed_in_their_order() -> None:
    processes = [Waiting("first", False), Waiting("second", True)]
    threading.Timer(0.5, processes[0].ready.set).start()
    assert [process.name for process in targets.in_turn(processes, 600.0, None)] == ["first", "second"]
    assert not processes[0].got


def test_a_variant_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: nn.Module, variant: str) -> None:
        if variant == "none":
            raise RuntimeError("first line\nlast line")

    monkeypatch.setattr(workloads, "apply_", refuse)
    records = run("step", f"{TINY} --variants bn,none", tmp_path)
    assert records[0]["ratio"] == 1
    assert records[1]["error"] == "RuntimeError: last line"


def test_a_call_that_fails_in_its_turn_drops_out() -> None:
    def refuse() -> None:
        raise RuntimeError("no")

    errors: dict[str, str] = {}
    times = timing.turns({"bad": refuse, "good": lambda: None}, 1, 3, "cpu", errors=errors)
    assert errors == {"bad": "RuntimeError: no"}
    assert len(times["good"]) == 3
    with pytest.raises(RuntimeError):
        timing.turns({"bad": refuse}, 1, 3, "cpu")


@pytest.mark.parametrize("variant", workloads.VARIANTS)
def test_every_variant_is_what_it_is_called(variant: str) -> None:
    model = workloads.WORKLOADS["resnet18"].model(variant, (32, 32), "cpu")
    kinds = Counter(type(module).__name__ for module in model.modules())
    expected = {"bn": "BatchNorm2d", "none": "Identity", "gn": "GroupNorm", "ln": "GroupNorm", "iternorm": "IterNorm"}
    assert variant not in expected or kinds[expected[variant]] == 20
    assert kinds["BatchNorm2d"] == (20 if variant == "bn" else 0)
    convolution: Any = model.conv1
    settings = workloads.SETTINGS.get(variant.removesuffix(workloads.SHARED))
    assert isinstance(convolution, ndpp.Conv2d) == (settings is not None)
    assert getattr(convolution, "settings", None) == settings
    assert model.training
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_mask_rcnn_is_frozen_and_trains_all_layers() -> None:
    model = workloads.WORKLOADS["maskrcnn"].build((96, 128))
    kinds = Counter(type(module).__name__ for module in model.modules())
    assert kinds["FrozenBatchNorm2d"] == 53
    assert kinds["BatchNorm2d"] == 0
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_layers_share_where_a_variant_says_so() -> None:
    for variant, together in (("nd", False), ("nd-share", True)):
        first = workloads.WORKLOADS["resnet50"].model(variant, (32, 32), "cpu").layer1[0]
        assert (first.conv1._meeting is not None) == together
        assert first.conv1._meeting is first.downsample[0]._meeting


def test_unknown_names() -> None:
    with pytest.raises(SystemExit, match="bn, none"):
        timing.chosen("bn,batchnorm", workloads.VARIANTS)
    assert step.size("800x1333") == (800, 1333)
    assert step.size("224") == (224, 224)


def test_layer(tmp_path: Path) -> None:
    names = "1×1/1 64→64*,linear 768→768*".replace(" ", "?")
    records = run("layer", f"--layers {names} --batch 2 --shrink 14 --dtype fp32 --variants nd,nd-l1", tmp_path)
    assert [record["shape"] for record in records] == ["1×1/1 64→64 4²", "linear 768→768 ×14"]
    for record in records:
        for what in layer.PASSES:
            assert record[what]["plain"]["ratio"] == 1
            assert record[what]["nd-l1"]["ms"] > 0


def test_layers_are_those_of_the_networks() -> None:
    seen: Counter[tuple[int, ...]] = Counter()

    def look(module: Any, args: Any, output: Any) -> None:
        kernel, stride = module.kernel_size[0], module.stride[0]
        seen[module.in_channels, module.out_channels, kernel, stride, args[0].shape[-1], module.padding[0]] += 1

    with torch.device("meta"):
        model = torchvision.models.resnet50()
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(look)
        model(torch.empty(1, 3, 224, 224))
        vit = torchvision.models.vit_b_16()
    table = {(s.inputs, s.outputs, s.kernel, s.stride, s.side, s.padding): s.times for s in layer.RESNET50}
    assert seen == table
    matrices = Counter(tuple(p.shape) for name, p in vit.named_parameters() if p.dim() == 2)
    assert matrices == {(s.outputs, s.inputs): s.times for s in layer.VIT_B_16 if s.kernel == 0}


def test_graphs_need_a_gpu(tmp_path: Path) -> None:
    for name in ("layer", "growth"):
        with pytest.raises(SystemExit, match="CUDA"):
            run(name, "--graph", tmp_path)


def test_solver(tmp_path: Path) -> None:
    records = run("solver", "--sizes 16 --conditions 1e1,1e3 --iterations 1,8", tmp_path)
    assert len(records) == 2 * 6
    best = {(r["condition"], r["solver"], r["steps"]): r for r in records}
    assert best[10.0, "eigh", None]["residual"] < 1e-5
    assert best[10.0, "eigh", None]["distance"] < 1e-5
    assert best[1000.0, "newton", 1]["residual"] > best[1000.0, "newton", 8]["residual"]
    assert best[1000.0, "newton", 8]["products"] == 20
    assert best[10.0, "quartic", 1]["products"] == 2


def test_the_spectrum_is_what_was_asked_for() -> None:
    eigenvalues = torch.linalg.eigvalsh(solver.power_law(20, 1e4))
    assert float(eigenvalues[-1]) == pytest.approx(1)
    assert float(eigenvalues[0]) == pytest.approx(1e-4)


def test_growth(tmp_path: Path) -> None:
    sizes = "--sizes 4,8 --batch 2 --batches 2,3,4 --side 4 --channels 8 --dtype fp32"
    records = run("growth", sizes, tmp_path)
    assert [(r["grows"], r["batch"], r["side"]) for r in records] == [
        *(("size", 2, side) for side in (4, 8)),
        *(("batch", batch, 4) for batch in (2, 3, 4)),
    ]
    for record in records:
        assert record["added_ms"] == pytest.approx(record["ms"] - record["plain_ms"])
        assert math.isfinite(record["to_first"])


@pytest.mark.parametrize(("body", "green"), [("pass", True), ("assert False, 'red'", False), ("skip()", False)])
def test_no_times_while_tests_are_red(body: str, green: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(f"from pytest import skip\ndef test_it():\n    {body}\n")
    monkeypatch.setattr(guard, "TESTS", str(file))
    if green:
        guard.Tests("cpu").require_green()
    else:
        with pytest.raises(SystemExit, match="no times"):
            guard.Tests("cpu").require_green()


def test_aims_of_records_that_were_kept() -> None:
    """The newest of the same work count; another size, a CPU, or tests that did not run are no answer."""

    def process(ours: float, **other: Any) -> list[dict[str, Any]]:
        where = {"model": "resnet50", "batch": 128, "size": [224, 224], "dtype": "bf16", "mode": "eager"}
        where |= {"checked": True, "device": "NVIDIA H200", **other}
        return [where | {"variant": "bn", "ms": 10.0}, where | {"variant": "nd", "ms": ours}]

    wrong = [{"size": [32, 32]}, {"device": "x86_64, 2 threads"}, {"checked": False}, {"batch": 64}, {"dtype": "fp32"}]
    records = process(20.0) + process(8.0) + [record for other in wrong for record in process(1.0, **other)]
    found = {record["aim"]: (record["found"], record["met"]) for record in targets.of_steps(records)}
    assert found.pop("resnet50, nd, eager: step") == (0.8, True)
    assert set(found.values()) == {(None, None)}
    with pytest.raises(SystemExit, match="expected records of `step`"):
        targets.of_steps(records[1:2])


def test_modes_that_need_a_gpu_say_so() -> None:
    """Before anything runs."""
    parser = argparse.ArgumentParser()
    step.arguments(parser)
    with pytest.raises(SystemExit, match=r"'graphed' records CUDA graphs: expected a CUDA device; got 'cpu'"):
        step.main(parser.parse_args(["--modes", "eager,graphed", "--device", "cpu"]))
