"""The path of shared statistics on one device: a group of one rank, which normally is no group, over nccl and gloo.

Several GPUs are what it takes to check nccl between ranks; one is enough to see that every collective runs there, in
the graphs of autograd and of the compiler, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ndpp
from cases import BY_LAYER
from ndpp import Settings, sync

NO_GPU = not torch.cuda.is_available()
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(NO_GPU, reason="needs a CUDA device")])
SHARED = Settings(rows=None, sync=True)
ALONE = Settings(rows=None)


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With a process group of one rank, that layers share statistics with."""
    name: str = request.param
    if name == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if name == "cuda" else "gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(sync, "group_of", lambda shares: dist.group.WORLD if shares else None)
    try:
        yield name
    finally:
        dist.destroy_process_group()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all buffers that were reduced."""
    sizes: list[int] = []
    reduce = sync._all_reduce

    def counted(buffer: Tensor, group: Any) -> Tensor:
        sizes.append(buffer.numel())
        return reduce(buffer, group)

    monkeypatch.setattr(sync, "_all_reduce", counted)
    return sizes


def steps(layer: nn.Module, model: Any, x: Tensor) -> dict[str, Tensor]:
    """What comes out of two training steps of `model`, which is the layer, or wraps it."""
    for k in range(2):
        layer.zero_grad()
        z = (x * (1 + k) + 0.3 * k).detach().requires_grad_()
        y = model(z)
        (y.float() if y.dtype == torch.bfloat16 else y).pow(3).sum().backward()
    state = {n: b.clone() for n, b in layer.named_buffers()}
    assert z.grad is not None
    return {"y": y.detach(), "dx": z.grad, **{f"d{n}": p.grad for n, p in layer.named_parameters()}, **state}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        a, b = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in (got[name], value))
        assert (a.double() - b.double()).norm() <= tolerance * (b.double().norm() + 1e-3), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", BY_LAYER)
def test_a_group_of_one_changes_nothing(name: str, dtype: torch.dtype, device: str, sent: list[int]) -> None:
    case = BY_LAYER[name]
    layers = [case.build(settings, dtype=dtype).to(device) for settings in (SHARED, ALONE)]
    shared, alone = (steps(layer, layer, case.input(dtype).to(device)) for layer in layers)
    assert_same(shared, alone, 1e-10 if dtype == torch.float64 else 1e-4)
    assert len(sent) == 4  # two steps, both ways


def network(settings: Settings, device: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    ndpp.convert_(model, settings)
    return model.to(device, dtype)


def images(device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def test_autocast(device: str, sent: list[int]) -> None:
    models = [network(settings, device, torch.float32) for settings in (SHARED, ALONE)]
    with torch.autocast(device, torch.bfloat16):
        shared, alone = (steps(model, model, images(device, torch.float32)) for model in models)
    assert_same(shared, alone, 0.05)
    assert len(sent) == 12


def test_distributed_data_parallel(device: str) -> None:
    models = [network(settings, device) for settings in (SHARED, ALONE)]
    wrapped = nn.parallel.DistributedDataParallel(models[0], device_ids=[0] if device == "cuda" else None)
    assert_same(steps(models[0], wrapped, images(device)), steps(models[1], models[1], images(device)), 1e-10)


def test_fully_sharded(device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (1,))
    models = [network(settings, device) for settings in (SHARED, ALONE)]
    for layer in models[0]:
        if isinstance(layer, (ndpp.Conv2d, ndpp.Linear)):
            fully_shard(layer, mesh=mesh)
    fully_shard(models[0], mesh=mesh)
    assert_same(steps(models[0], models[0], images(device)), steps(models[1], models[1], images(device)), 1e-10)


def test_empty_and_non_finite_input(device: str, sent: list[int]) -> None:
    layer = network(SHARED, device)
    steps(layer, layer, images(device))
    before, reduced = {n: b.clone() for n, b in layer.named_buffers()}, len(sent)
    x = images(device)
    for z in (x[:0].clone(), x * torch.nan):
        layer(z.requires_grad_()).sum().backward()
    assert len(sent) == reduced + 12
    for name, value in layer.named_buffers():
        assert torch.equal(value, before[name]), name


def test_recalibration(device: str) -> None:
    models = [network(settings, device) for settings in (SHARED, ALONE)]
    assert [ndpp.recalibrate_(model, [images(device), images(device) + 1]) for model in models] == [2, 2]
    assert_same(*(dict(model.named_buffers()) for model in models), 1e-10)


def test_compiled_whole(device: str) -> None:
    """The collective is in the graph."""
    if device == "cpu":
        pytest.skip("compiled on ranks of the CPU by sync_checks.py")
    models = [BY_LAYER["Linear"].build(settings, dtype=torch.float64).to(device) for settings in (SHARED, ALONE)]
    x = BY_LAYER["Linear"].input().to(device)
    compiled = torch.compile(models[0], fullgraph=True)
    assert_same(steps(models[0], compiled, x), steps(models[1], models[1], x), 1e-8)
