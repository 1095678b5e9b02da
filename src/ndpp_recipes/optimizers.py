"""Optimizers by name, and learning rates as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from .config import OptimizerConfig, ScheduleConfig
from .errors import ConfigError, MissingExtra

Groups = list[dict[str, object]]


def make_optimizers(model: nn.Module, config: OptimizerConfig) -> list[Optimizer]:
    """One optimizer, or two where one cannot train all parameters (Muon takes matrices only)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigError("the model has no parameters to train")
    if config.name == "muon":
        embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        return _muon(parameters, embeddings, config)
    return _OPTIMIZERS[config.name](parameters, config)


def _groups(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> Groups:
    """All parameters, vectors apart where they are not to decay."""
    if config.decay_vectors:
        return [{"params": list(parameters), "weight_decay": config.weight_decay}]
    parts = (
        (config.weight_decay, [p for p in parameters if p.ndim > 1]),
        (0.0, [p for p in parameters if p.ndim <= 1]),
    )
    return [{"params": found, "weight_decay": decay} for decay, found in parts if found]


def _sgd(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> list[Optimizer]:
    nesterov = config.nesterov and config.momentum > 0
    return [torch.optim.SGD(_groups(parameters, config), lr=config.lr, momentum=config.momentum, nesterov=nesterov)]


def _adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> list[Optimizer]:
    return [torch.optim.AdamW(_groups(parameters, config), lr=config.lr, betas=config.betas)]


def _muon(
    parameters: Sequence[nn.Parameter], embeddings: set[nn.Parameter], config: OptimizerConfig
) -> list[Optimizer]:
    """torch's Muon for matrices, with updates as large as AdamW's; AdamW for embeddings, convolutions and vectors."""
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"optimizer.name=muon needs torch >= 2.9; this is {torch.__version__}")
    matrices = [p for p in parameters if p.ndim == 2 and p not in embeddings]
    others = [p for p in parameters if p.ndim != 2 or p in embeddings]
    if not matrices:
        raise ConfigError("optimizer.name=muon: the model has no matrices (parameters of two dimensions); use adamw")
    muon = torch.optim.Muon(
        matrices,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, *(_adamw(others, config) if others else [])]


def _lamb(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> list[Optimizer]:
    try:
        from timm.optim.lamb import Lamb
    except ImportError as error:
        raise MissingExtra("timm", "optimizer.name=lamb") from error
    return [Lamb(_groups(parameters, config), lr=config.lr, betas=config.betas)]


_OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter], OptimizerConfig], list[Optimizer]]] = {
    "sgd": _sgd,
    "adamw": _adamw,
    "lamb": _lamb,
}


def rate_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """What the learning rate is multiplied by at a step (from 0) of a run of `total` steps."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    done = min((step - config.warmup) / max(total - config.warmup, 1), 1.0)
    return config.final + (1 - config.final) * _SHAPES[config.name](config, done, step)


def _multistep(config: ScheduleConfig, done: float, step: int) -> float:
    return config.gamma ** sum(done >= milestone for milestone in config.milestones)


_SHAPES: dict[str, Callable[[ScheduleConfig, float, int], float]] = {
    "cosine": lambda config, done, step: 0.5 * (1 + math.cos(math.pi * done)),
    "polynomial": lambda config, done, step: (1 - done) ** config.power,
    "inverse-sqrt": lambda config, done, step: math.sqrt(max(config.warmup, 1) / max(step + 1, 1)),
    "multistep": _multistep,
    "constant": lambda config, done, step: 1.0,
}
