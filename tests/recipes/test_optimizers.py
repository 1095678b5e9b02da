"""Learning rates against their formulas, and what every optimizer does to the parameters it is given."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ndpp_recipes.config import OptimizerConfig, ScheduleConfig
from ndpp_recipes.errors import ConfigError
from ndpp_recipes.optimizers import make_optimizers, rate_factor


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        (ScheduleConfig(), 0, 1.0),
        (ScheduleConfig(), 50, 0.5),
        (ScheduleConfig(), 75, 0.5 * (1 + math.cos(0.75 * math.pi))),
        (ScheduleConfig(), 100, 0.0),
        (ScheduleConfig(), 150, 0.0),
        (ScheduleConfig(final=0.1), 100, 0.1),
        (ScheduleConfig(warmup=10), 0, 0.1),
        (ScheduleConfig(warmup=10), 9, 1.0),
        (ScheduleConfig(warmup=20), 60, 0.5),
        (ScheduleConfig(name="polynomial", power=0.9), 25, 0.75**0.9),
        (ScheduleConfig(name="inverse-sqrt", warmup=4), 3, 1.0),
        (ScheduleConfig(name="inverse-sqrt", warmup=4), 15, 0.5),
        (ScheduleConfig(name="multistep", milestones=(0.5, 0.75)), 49, 1.0),
        (ScheduleConfig(name="multistep", milestones=(0.5, 0.75)), 50, 0.1),
        (ScheduleConfig(name="multistep", milestones=(0.5, 0.75)), 80, 0.01),
        (ScheduleConfig(name="constant"), 99, 1.0),
    ],
)
def test_rates(schedule: ScheduleConfig, step: int, factor: float) -> None:
    assert rate_factor(schedule, step, 100) == pytest.approx(factor, abs=1e-12)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 2)
    )


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "lamb"])
def test_every_optimizer_trains_every_parameter(name: str) -> None:
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon")
    if name == "lamb":
        pytest.importorskip("timm")
    net, x, y = _net(), torch.randn(32, 1, 4, 4), torch.randint(2, (32,))
    optimizers = make_optimizers(net, OptimizerConfig(name=name, lr=0.02, weight_decay=0.01))
    before = [p.detach().clone() for p in net.parameters()]
    losses = []
    for _ in range(30):
        loss = nn.functional.cross_entropy(net(x), y)
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    assert all(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(before)


def test_vectors_decay_only_where_they_are_to() -> None:
    config = OptimizerConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.1)
    for decay_vectors in (True, False):
        net = _net()
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        (optimizer,) = make_optimizers(net, OptimizerConfig(**{**config.__dict__, "decay_vectors": decay_vectors}))
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for name, parameter in net.named_parameters():
            factor = 0.9 if parameter.ndim > 1 or decay_vectors else 1.0
            torch.testing.assert_close(parameter.detach(), factor * before[name])


def test_what_cannot_be_trained() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameters to train"):
        make_optimizers(frozen, OptimizerConfig())
    with pytest.raises(ConfigError, match=r"muon.*(no matrices|needs torch)"):
        make_optimizers(nn.Conv2d(1, 1, 3), OptimizerConfig(name="muon"))
