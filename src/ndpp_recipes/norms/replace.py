"""Every normalisation of a plain network becomes the one named."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from ndpp.conversion.convert import refuse_wrapped
from ndpp.conversion.norms import Norm, affine, is_named_norm, recognise, statistics
from ndpp.conversion.planning import norm_size

from ..errors import RecipeError
from .frn import FRN
from .iternorm import IterNorm, largest_divisor
from .switchable import SwitchableWhitening

GROUPS = 32  # of GroupNorm


class Replaced(NamedTuple):
    """How many norms of each class were replaced, were of the wanted kind already, or are not known."""

    replaced: Counter[str]
    kept: Counter[str]
    unknown: Counter[str]


class BatchNorm(_BatchNorm):
    """For any number of spatial dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm: expected input of shape (N, {self.num_features}, ...); got {input.dim()}D")


class FrozenBatchNorm(nn.Module):
    """BatchNorm with fixed statistics, γ and β, for any number of spatial dimensions."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((num_features,), value))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


class Tokens(nn.Module):
    """A norm of channels in dimension 1 for input that has them last: every token is a sample of one position."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.reshape(-1, x.shape[-1]))
        return y.reshape(x.shape)


class Old(NamedTuple):
    """What was known of a norm before it was replaced."""

    module: nn.Module
    norm: Norm
    channels: int
    last: bool  # channels are the last dimension, not the second

    @property
    def affine(self) -> bool:
        return any(value is not None for value in affine(self.module))

    @property
    def single(self) -> bool:
        """Whether a channel of a sample may have a single value."""
        return self.last or isinstance(self.module, nn.BatchNorm1d)


def _batch_norm(old: Old) -> nn.Module:
    if old.norm.kind != "batch":
        return BatchNorm(old.channels, affine=old.affine)
    module: Any = old.module
    tracked = statistics(module)[0] is not None
    momentum = getattr(module, "momentum", 0.1)
    return BatchNorm(old.channels, module.eps, momentum, affine=old.affine, track_running_stats=tracked)


def _sync_batch_norm(old: Old) -> nn.Module:
    new: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(_batch_norm(old))  # type: ignore[no-untyped-call]
    return new


def _frozen_batch_norm(old: Old) -> nn.Module:
    return FrozenBatchNorm(old.channels, eps=float(getattr(old.module, "eps", 1e-5)))


def _group_norm(old: Old) -> nn.Module:
    # A group of one value or two at a single position would have nothing left but a sign.
    most = min(GROUPS, old.channels // 8) if old.single else GROUPS
    return nn.GroupNorm(largest_divisor(old.channels, most), old.channels, affine=old.affine)


def _layer_norm(old: Old) -> nn.Module:
    if old.last:
        return nn.LayerNorm(old.channels, elementwise_affine=old.affine)
    return nn.GroupNorm(1, old.channels, affine=old.affine)


def _frn(old: Old) -> nn.Module:
    """Without a TLU: it would have to take the place of the activation behind it, which a norm does not know."""
    return FRN(old.channels, learnable_eps=old.single, affine=old.affine)


_MAKE: dict[str, Callable[[Old], nn.Module]] = {
    "bn": _batch_norm,
    "syncbn": _sync_batch_norm,
    "frozenbn": _frozen_batch_norm,
    "gn": _group_norm,
    "ln": _layer_norm,
    "frn": _frn,
    "iternorm": lambda old: IterNorm(old.channels, affine=old.affine),
    "sw": lambda old: SwitchableWhitening(old.channels, affine=old.affine),
    "none": lambda old: nn.Identity(),
}


def _groups(old: Old) -> int:
    return int(getattr(old.module, "num_groups", 0))


# Which norms are what was asked for, and stay. Frozen ones have "batch" in their name and are no nn.BatchNorm.
_IS: dict[str, Callable[[Old], bool]] = {
    "bn": lambda old: isinstance(old.module, _BatchNorm) and not isinstance(old.module, nn.SyncBatchNorm),
    "syncbn": lambda old: isinstance(old.module, nn.SyncBatchNorm),
    "frozenbn": lambda old: old.norm.kind != "batch" or not isinstance(old.module, _BatchNorm),
    "gn": lambda old: _groups(old) > 1,
    "ln": lambda old: old.norm.kind == "layer" or _groups(old) == 1,
}


def replace_norms_(model: nn.Module, name: str) -> Replaced:
    """Turn the norms of a model into those called `name`, in place: whoever holds a norm holds what it became.

    γ and β, where the new norm has them, start from the values they had; running statistics only carry over from one
    BatchNorm to another.
    """
    if name not in _MAKE:
        raise RecipeError(f"norm: expected one of {', '.join(_MAKE)}; got {name!r}")
    refuse_wrapped(model, "replace_norms_", "change")
    found = {
        module: _described(module)
        for path, module in model.named_modules()
        if is_named_norm(module) and "parametrizations" not in path.split(".")
    }
    known = [old for old in found.values() if old is not None]
    if name == "frozenbn":
        _require_batch_norms(known)
    result = Replaced(Counter(), Counter(), Counter(_kind(m) for m, old in found.items() if old is None))
    for old in known:
        keep = name in _IS and _IS[name](old)
        (result.kept if keep else result.replaced)[_kind(old.module)] += 1
        if not keep:
            _become_(old.module, _replacement(old, name, model))
    if result.replaced:
        _disable_fast_paths_(model)
        if name == "none":
            _never_in_place_(model)
    return result


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _require_batch_norms(known: list[Old]) -> None:
    batch = [old for old in known if old.norm.kind == "batch"]
    if known and not batch:
        names = ", ".join(sorted({_kind(old.module) for old in known}))
        raise RecipeError(f"norm frozenbn applies to networks with BatchNorm only; this one has {names}")
    if any(None in statistics(old.module) for old in batch):
        raise RecipeError("norm frozenbn needs running statistics; this network's BatchNorm does not track any")


def _described(module: nn.Module) -> Old | None:
    norm, channels = recognise(module), norm_size(module)
    if norm is None or channels is None:
        return None
    return Old(module, norm, channels, norm.kind in ("layer", "rms") and not _takes_channels_first(module, channels))


@torch.no_grad()
def _takes_channels_first(module: nn.Module, channels: int) -> bool:
    """Of a LayerNorm or RMSNorm: whether it moves the channels itself, as LayerNorm2d of timm and torchvision do."""
    if type(module).forward.__module__.startswith("torch.nn."):
        return False
    weight, _ = affine(module)
    like = torch.empty(0) if weight is None else weight
    try:
        module.forward(like.new_ones(1, channels, 1, 2 if channels != 2 else 3))
    except Exception:  # whatever it says of a shape that it does not take
        return False
    return True


def _replacement(old: Old, name: str, model: nn.Module) -> nn.Module:
    new = _MAKE[name](old)
    place = next((t for t in (*old.module.parameters(), *old.module.buffers(), *model.parameters())), torch.empty(0))
    new.to(place.device, place.dtype if place.is_floating_point() else None)
    _carry_(old, new[0] if isinstance(new, nn.Sequential) else new)
    if old.last and not isinstance(new, (nn.LayerNorm, nn.Identity)):
        new = Tokens(new)
    if old.norm.after:
        kept = {key: part for key, part in old.module.named_children() if part in old.norm.after}
        new = nn.Sequential(OrderedDict(norm=new, **kept))
    return new.train(old.module.training)


@torch.no_grad()
def _carry_(old: Old, new: nn.Module) -> None:
    pairs = list(zip(affine(old.module), affine(new), strict=True))
    if old.norm.kind == "batch" and isinstance(new, (_BatchNorm, FrozenBatchNorm)):
        pairs += zip(statistics(old.module), statistics(new), strict=True)
    for source, target in pairs:
        if source is not None and target is not None:
            target.copy_(source)
            if isinstance(source, nn.Parameter) and isinstance(target, nn.Parameter):
                target.requires_grad_(source.requires_grad)


def _become_(module: nn.Module, new: nn.Module) -> None:
    """The object stays, so that all who share it go on sharing; hooks stay with it."""
    hooks = {name: value for name, value in module.__dict__.items() if "hook" in name}
    module.__class__ = type(new)
    module.__dict__.clear()
    module.__dict__.update({**new.__dict__, **hooks})


def _disable_fast_paths_(model: nn.Module) -> None:
    """In evaluation nn.TransformerEncoderLayer computes LayerNorm from the weights of its norms, whatever they are."""
    changed = {
        layer
        for layer in model.modules()
        if isinstance(layer, nn.TransformerEncoderLayer)
        and not all(type(norm) is nn.LayerNorm for norm in (layer.norm1, layer.norm2))
    }
    for module in model.modules():
        if module in changed:
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and changed.intersection(module.layers):
            module.use_nested_tensor = False


def _never_in_place_(model: nn.Module) -> None:
    """A norm gave the activation after it a tensor of its own to overwrite; the identity does not."""
    for module in model.modules():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]
