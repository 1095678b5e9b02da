"""Normalisation layers of torch.nn and of other libraries: which they are, whether they hold anything, what they do."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

Kind = Literal["batch", "layer", "group", "instance", "rms"]

_STOCK: tuple[tuple[type[nn.Module], Kind], ...] = (
    (_InstanceNorm, "instance"),
    (_BatchNorm, "batch"),
    (nn.LayerNorm, "layer"),
    (nn.GroupNorm, "group"),
    (nn.RMSNorm, "rms"),
)
# By name, for those that other libraries wrote themselves: LlamaRMSNorm, T5LayerNorm (which is RMS), FrozenBatchNorm2d.
_BY_NAME: tuple[tuple[str, Kind], ...] = (
    (r"RMS_?Norm|T5LayerNorm|Simple_?Norm", "rms"),
    (r"Batch_?Norm", "batch"),
    (r"Layer_?Norm", "layer"),
    (r"Group_?Norm", "group"),
    (r"Instance_?Norm", "instance"),
)
_AROUND_ONE = ("Gemma", "Qwen3Next")  # RMSNorms that multiply by 1 + weight
_KEPT = ("drop", "act")  # what timm's norms with an activation do after normalising, in this order


class Norm(NamedTuple):
    """A normalisation: its kind, and the modules within it that stay when it goes."""

    kind: Kind
    after: tuple[nn.Module, ...]


def is_named_norm(module: nn.Module) -> bool:
    """Whether it calls itself a norm, and is not a container of other things as well."""
    named = "norm" in type(module).__name__.lower() or isinstance(module, tuple(stock for stock, _ in _STOCK))
    named = named and not isinstance(module, (RemovedNorm, RemovedNormAct))
    return named and (not module._modules or bool(module._parameters) or bool(module._buffers))


def recognise(module: nn.Module) -> Norm | None:
    """The normalisation that this module is, if it takes one tensor and is nothing more than that."""
    name = type(module).__name__
    kind = next((kind for stock, kind in _STOCK if isinstance(module, stock)), None)
    if kind is None:
        kind = next((kind for pattern, kind in _BY_NAME if re.search(pattern, name, re.IGNORECASE)), None)
    children = dict(module.named_children())
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if kind is None or not own <= {"weight", "bias"} or not set(children) <= set(_KEPT) or not _takes_one(module):
        return None
    if "forward" in module.__dict__:
        return None
    if not children and not type(module).forward.__module__.startswith("torch.nn.") and not _is_odd(module):
        return None
    return Norm(kind, tuple(children[key] for key in _KEPT if key in children))


def _is_odd(module: nn.Module) -> bool:
    """Whether f(-x) = -f(x) without β and μ: all norms do that, and a norm with an activation inside does not."""
    gamma, _ = affine(module)
    if gamma is not None and gamma.is_meta:
        return True  # it cannot be tried
    probe = _probe(module)
    size = 8 if gamma is None else gamma.numel()
    options: dict[str, Any] = {} if gamma is None else {"dtype": gamma.dtype, "device": gamma.device}
    with torch.no_grad():
        for shape in ((2, size), (2, 3, size), (2, size, 3), (2, size, 3, 3), (2, 3, 3, size), (2, size, 3, 3, 3)):
            x = torch.linspace(-1, 1, math.prod(shape), device="cpu").sin().reshape(shape).to(**options)
            try:
                y, opposite = probe.forward(x), probe.forward(-x)
            except Exception:  # not a shape that it takes
                continue
            if isinstance(y, Tensor) and y.shape == x.shape:
                return torch.allclose(y, -opposite, atol=1e-2)
    return False


def _probe(module: nn.Module) -> nn.Module:
    """An object of the same class in evaluation mode without β and μ; it shares nothing that a call changes."""
    probe: nn.Module = object.__new__(type(module))
    for name, value in module.__dict__.items():
        probe.__dict__[name] = dict(value) if type(value) is dict else value
    probe.training = False
    for tensors in (probe._parameters, probe._buffers):
        for name in ("bias", "running_mean"):
            if (old := tensors.get(name)) is not None:
                tensors[name] = nn.Parameter(torch.zeros_like(old), requires_grad=False)
    return probe


def _takes_one(module: nn.Module) -> bool:
    """Whether forward takes one tensor. A norm with a condition or a gate is not one that can be left out."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) == 1 and parameters[0].kind is not inspect.Parameter.VAR_KEYWORD


def affine(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """γ and β, whether they are parameters or buffers."""
    gamma, beta = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(gamma, Tensor) and type(module).__name__.startswith(_AROUND_ONE):
        gamma = gamma + 1
    return (gamma if isinstance(gamma, Tensor) else None), (beta if isinstance(beta, Tensor) else None)


def statistics(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    mean, var = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    return (mean if isinstance(mean, Tensor) else None), (var if isinstance(var, Tensor) else None)


def trained(values: dict[str, Any]) -> str | None:
    """What shows that a norm with these tensors was trained: the name of one that is not as constructors leave it."""
    gamma, beta = values.get("weight"), values.get("bias")
    mean, var, count = values.get("running_mean"), values.get("running_var"), values.get("num_batches_tracked")
    if any(value is not None and value.is_meta for value in (gamma, beta, mean, var, count)):
        return None  # without values
    checks = {  # a γ of one value is an initial one: 1, or 0 at the end of a residual branch
        "weight": gamma is None or bool((gamma == gamma.flatten()[0]).all() if gamma.numel() > 1 else gamma in (0, 1)),
        "bias": beta is None or not bool(beta.any()),
        "running_mean": mean is None or not bool(mean.any()),
        "running_var": var is None or bool((var == 1).all()),
        "num_batches_tracked": count is None or int(count) == 0,
    }
    return next((name for name, fresh in checks.items() if not fresh), None)


def evaluation_affine(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Per channel (a, c) with which a norm that evaluates by running statistics is a·x + c, in float64."""
    mean, var = statistics(module)
    if mean is None or var is None:
        return None
    gamma, beta = affine(module)
    a = (var.double() + float(getattr(module, "eps", 1e-5))).rsqrt()
    a = a if gamma is None else a * gamma.double()
    c = -mean.double() * a
    return a, c if beta is None else c + beta.double()


class RemovedNorm(nn.Identity):
    """What a removed norm becomes: the identity, which knows what was here when a checkpoint brings it back."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        if args:
            return args[0]
        self.__dict__["called_by_name"] = True  # norms have many names for their input, nn.Identity has one
        return next(iter(kwargs.values()))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        values = {name: state_dict.pop(prefix + name) for name in names if prefix + name in state_dict}
        shown = trained(values)
        if shown is not None:
            args[-1].append(
                f"{prefix[:-1]}: the checkpoint holds a trained normalisation here ({shown} is not initial), which "
                "ndpp.convert_ removed. If the checkpoint is that of a plain model, load it before conversion, with "
                "ndpp.convert_(model, calibration=batches); if it is that of a model converted with calibration, "
                "convert this one with calibration, too (any batch will do), and then load it"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


class RemovedNormAct(nn.Sequential):
    """What a norm with an activation becomes: the activation alone, after dropout if it had one."""

    _load_from_state_dict = RemovedNorm._load_from_state_dict  # type: ignore[assignment]


@torch.no_grad()
def remove_(module: nn.Module, after: tuple[nn.Module, ...], asked_for: bool = False) -> None:
    """Leave a norm out, in place: whoever holds the module holds what remains of it.

    `asked_for`: code elsewhere asks for the dtype or device of its weight, and finds an empty one.
    """
    weight, _ = affine(module)
    for tensors in (module._parameters, module._buffers):
        tensors.clear()
    if asked_for and weight is not None:
        module.register_buffer("weight", weight.new_empty(0), persistent=False)
    module.__class__ = RemovedNormAct if after else RemovedNorm
    for name in list(module._modules):
        if module._modules[name] not in after:
            del module._modules[name]


def forget_removed_(module: nn.Module) -> None:
    """A removed norm as a stock module."""
    if isinstance(module, RemovedNorm) and not module.__dict__.get("called_by_name"):
        module.__class__ = nn.Identity  # type: ignore[assignment]
    elif isinstance(module, RemovedNormAct):
        module.__class__ = nn.Sequential  # type: ignore[assignment]
