"""Where this process stands among those of torchrun, and what they do together."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from .config import RunConfig
from .errors import ConfigError, RecipeError

SHARDED = 1_000_000  # parameters above which FSDP gives a block its own all-gather
# Seconds in which gloo's threads let go of what they exchanged. DDP keeps them beyond the group, and one that asks for
# Python's lock while Python ends takes the process down, after all is done.
LEAVE = 0.1


@dataclass(frozen=True)
class Place:
    """A process: one of `world`, on its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextlib.contextmanager
def joined(run: RunConfig) -> Iterator[Place]:
    """Join the processes that torchrun started, if it did, for the time of a run.

    An error leaves the group as it is, and the end of the process ends it: to take leave, nccl would wait for ranks
    that may be gone or do something else, and the error would not be shown before.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_named(run.device, local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world == 1 or dist.is_initialized():
        rank = dist.get_rank() if dist.is_initialized() else 0
        yield Place(rank, dist.get_world_size() if dist.is_initialized() else 1, device)
        return
    store, rank, world = _met(run.timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=run.timeout),
    )
    yield Place(rank, world, device)
    dist.destroy_process_group()
    time.sleep(LEAVE)


def _met(timeout: float) -> tuple[Any, int, int]:
    """A part of torchrun's store that is new to the ranks that live now, this one's number, and how many there are.

    That store outlives restarts (pytorch issue 135712): the addresses that dead ranks left in it would be called. The
    count of restarts cannot tell them apart, for nodes count only their own. So every rank shows a mark that no one
    had before; the first calls each mark it sees by the name of a new part, and goes on once all have answered to it.
    """
    from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

    deadline = time.monotonic() + timeout
    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
    store.set_timeout(timedelta(seconds=timeout))
    mark = uuid.uuid4().hex
    store.set(f"ndpp/here/{rank}", mark)
    if rank > 0:
        name = store.get(f"ndpp/called/{mark}").decode()
        store.set(f"ndpp/{name}/{rank}", "answered")
        return PrefixStore(name, store), rank, world
    missing = list(range(1, world))
    while missing:
        for other in missing:
            seen = store.get(f"ndpp/here/{other}").decode()  # it may be a dead one's, and will be replaced
            store.set(f"ndpp/called/{seen}", mark)
        missing = [other for other in missing if not store.check([f"ndpp/{mark}/{other}"])]
        if time.monotonic() > deadline:
            raise RecipeError(f"ranks {missing} did not join within run.timeout={timeout} s; look at what they printed")
        time.sleep(0.01)
    return PrefixStore(mark, store), rank, world


def device_named(name: str, local: int = 0) -> torch.device:
    """The device a configuration asks for; `auto` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"run.device: expected auto, cpu, cuda or cuda:N; got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"run.device: expected auto, cpu, cuda or cuda:N; got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"run.device={name}: no CUDA device is available here; use cpu or auto")
    return torch.device("cuda", local) if device.type == "cuda" and device.index is None else device


def wrapped(model: nn.Module, place: Place, run: RunConfig) -> nn.Module:
    """The model as DDP or FSDP2 trains it; FSDP2 works in place."""
    if place.world == 1:
        return model
    if run.parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for module in model.modules():
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                for block in module:
                    if sum(p.numel() for p in block.parameters()) >= SHARDED:
                        fully_shard(block)
        fully_shard(model)
        return model
    ids = [place.device.index] if place.device.type == "cuda" else None
    # Buffers are statistics: each rank keeps its own while it trains, and takes those of the first to evaluate and
    # wherever a checkpoint is made.
    return nn.parallel.DistributedDataParallel(model, device_ids=ids, broadcast_buffers=False)


@contextlib.contextmanager
def gradients_later(model: nn.Module, later: bool) -> Iterator[None]:
    """Leave out the exchange of gradients, for all but the last part of an accumulated step."""
    if later and isinstance(model, nn.parallel.DistributedDataParallel):
        with model.no_sync():
            yield
    elif later and is_sharded(model):
        sharded: Any = model
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)
    else:
        yield


def share_buffers_(model: nn.Module, place: Place) -> None:
    """Every rank takes the buffers of the first."""
    if place.world > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


def gathered(value: Any, place: Place) -> list[Any]:
    """One picklable value of every rank, on every rank."""
    if place.world == 1:
        return [value]
    values: list[Any] = [None] * place.world
    dist.all_gather_object(values, value)
    return values


def agree(step: int | None, place: Place) -> None:
    """All ranks go on from the same checkpoint, or none does."""
    steps = gathered(step, place)
    if len(set(steps)) > 1:
        found = ", ".join(f"rank {rank}: {'none' if s is None else f'step {s}'}" for rank, s in enumerate(steps))
        raise RecipeError(
            f"the ranks found different checkpoints ({found}); --out has to be a folder that all ranks see"
        )


def barrier(place: Place) -> None:
    if place.world > 1:
        dist.barrier()


# --- state, put together from shards where there are any ---


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")  # what fully_shard gives a module


def _whole() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)


def model_state(model: nn.Module) -> dict[str, Any]:
    if not is_sharded(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model, options=_whole())


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    if not is_sharded(model):
        model.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, state, options=_whole())


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if not is_sharded(model):
        return optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(model, optimizer, options=_whole())


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    if not is_sharded(model):
        optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    set_optimizer_state_dict(model, optimizer, state, options=_whole())
