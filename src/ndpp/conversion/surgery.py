"""How a stock layer becomes ours, in place: the object stays what everybody holds, only its class changes.

Parameters, hooks, device, training flag, names and every reference to the module survive, and so do optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from .. import layers
from ..attention import MultiheadAttention
from ..decorrelated import Decorrelated
from ..foreign import COUNTERPARTS, qualified_name
from ..layers import Linear
from ..settings import Settings

_NAMES = ("Linear", *(f"Conv{t}{n}d" for t in ("", "Transpose") for n in (1, 2, 3)))
STOCK: dict[type, type[nn.Module]] = {getattr(layers, name): getattr(nn, name) for name in _NAMES}
OURS: dict[type, type[Any]] = {stock: ours for ours, stock in STOCK.items()}
OURS[nn.MultiheadAttention] = MultiheadAttention
_HARMLESS = {  # what a subclass may define of its own
    *("__init__", "extra_repr", "__repr__", "__module__", "__doc__", "__qualname__", "__annotations__", "__dict__"),
    *("__constants__", "__static_attributes__", "__firstlineno__", "__weakref__", "__annotate__", "__annotate_func__"),
    *("__annotations_cache__",),
}
# What our layers hold beside the stock ones: buffers, and attributes of the object.
STATE = ("running_mean", "running_cov", "num_batches_tracked", "step_rows", "step_mean", "step_cov")
_PLANS = ("_plan", "_plan_key", "_plan_unscaled", "_plan_unscaled_key")
_CALLS = ("_present", "_seen_masked", "_cache", "_collecting", "_meeting")
OWN = ("_settings", "layout", "_label", *_PLANS, *_CALLS, "_stock")
_OF_FOLDED = ("scale", "scale_eps", "scale_per_row", "scale_positions", "scales")
_TAKEN = (*STATE, *OWN, *_OF_FOLDED, "settings", "q_proj", "k_proj", "v_proj")


class Match(NamedTuple):
    """Our class for a layer, or why there is none."""

    ours: type[Any] | None
    reason: str = ""


def is_ours(module: nn.Module) -> bool:
    return isinstance(module, (Decorrelated, MultiheadAttention))


def match(module: nn.Module) -> Match | None:
    """Our counterpart of a layer; None for a module that is no layer at all."""
    kind = type(module)
    base = next((stock for stock in OURS if isinstance(module, stock)), None)
    named = COUNTERPARTS.get(qualified_name(kind))
    if base is None and named is None:
        return None
    if parametrize.is_parametrized(module):
        parametrized = ", ".join(getattr(module, "parametrizations", {}))
        return Match(None, f"{parametrized} is parametrized: torch.nn.utils.parametrize.remove_parametrizations first")
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        raise ValueError("a lazy module without parameters; run a batch through the model before converting it")
    reason = _unfit(module, base)
    if reason:
        return Match(None, reason)
    if named is not None or kind is base:
        return Match(named or OURS[kind])
    assert base is not None
    changed = sorted(_changed_by_subclass(kind, base))
    if changed:
        return Match(None, f"a subclass of nn.{base.__name__} that defines its own {', '.join(changed)}")
    ours: Any = OURS[base]
    own: Any = kind
    return Match(combined(ours, own, ""))


def _unfit(module: nn.Module, base: type | None) -> str:
    """Why an object cannot be converted, although its class can."""
    if base is nn.MultiheadAttention:
        packed = getattr(module, "_qkv_same_embed_dim", True)
        names = ("in_proj_weight",) if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        out = getattr(module, "out_proj", None)
        found = None if out is None else Match(Linear) if is_ours(out) else match(out)
        if found is None or found.ours is None:
            return (
                f"its out_proj ({type(out).__name__}) cannot be converted: {found.reason if found else 'not a layer'}"
            )
    else:
        names = ("weight",)
    for name in names:
        weight = module._parameters.get(name)
        if not isinstance(weight, nn.Parameter):
            return f"its {name} is not a Parameter (weight_norm, spectral_norm or pruning)"
        if not weight.is_floating_point():
            return f"its {name} is of {weight.dtype}, not of a real floating-point dtype"
        if weight.numel() == 0:
            return f"its {name} is empty"
    for name in ("bias", "in_proj_bias"):
        if getattr(module, name, None) is not None and name not in module._parameters:
            return f"its {name} is not a Parameter (pruning)"
    if "forward" in module.__dict__:
        return "its forward was replaced, on this object alone"
    taken = [name for name in _TAKEN if name in module.__dict__ or name in module._buffers or name in module._modules]
    return f"it has attributes of its own that ndpp needs: {', '.join(taken)}" if taken else ""


def _changed_by_subclass(kind: type, base: type) -> set[str]:
    """What a subclass redefines beyond its construction: then it is not provably the stock layer."""
    defined = {name for parent in kind.__mro__[: kind.__mro__.index(base)] for name in vars(parent)}
    return {name for name in defined - _HARMLESS if hasattr(OURS[base], name)}


@functools.cache
def combined(ours: Any, kind: Any, name: str) -> type[Any]:
    """A class of ours that is still the given class, with the methods it adds; its objects pickle."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _rebuilt, (ours, kind, name), self.__getstate__()

    return type(name or kind.__name__, (ours, kind), {"__reduce_ex__": reduce, "__module__": kind.__module__})


def _rebuilt(ours: Any, kind: Any, name: str) -> nn.Module:
    both: Any = combined(ours, kind, name)
    new: nn.Module = object.__new__(both)
    return new


def become_(module: nn.Module, ours: type[Any], settings: Settings, path: str) -> None:
    """Turn a stock layer into ours."""
    stock = type(module)
    module.__class__ = ours
    if STOCK.get(ours) is not stock:
        module.__dict__["_stock"] = stock  # what fold_ turns it back into
    module._decorrelate(settings)  # type: ignore[operator]
    name_(module, path)


def name_(module: nn.Module, path: str) -> None:
    """Let the errors of a layer name its place in the model."""
    for below, part in module.named_modules():
        if isinstance(part, Decorrelated):
            full = ".".join(filter(None, (path, below)))
            part._label = f"{full}: {part._label}" if full else part._label


def stock_class(module: nn.Module) -> type[nn.Module]:
    return module.__dict__.get("_stock") or STOCK[type(module)]


def blocks(module: nn.Module) -> str:
    """Blocks × features of a layer, as reports show them."""
    if isinstance(module, MultiheadAttention):
        module = next(part for part in module.modules() if isinstance(part, Decorrelated))
    assert isinstance(module, Decorrelated)
    return " + ".join(f"{count}×{width}" for count, width in module.layout.widths)


def place(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def sizes(module: nn.Module) -> tuple[int, int]:
    """Features (or channels) in and out."""
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, module.embed_dim
    names = ("in_features", "out_features") if hasattr(module, "in_features") else ("in_channels", "out_channels")
    if hasattr(module, names[0]):
        return getattr(module, names[0]), getattr(module, names[1])
    weight: Any = module.weight
    return weight.shape[0], weight.shape[1]  # transformers' Conv1D


class Snapshot:
    """Everything that conversion may change, to put it back if it fails."""

    def __init__(self, model: nn.Module, values: bool) -> None:
        self._modules = [(module, type(module), dict(module.__dict__)) for module in model.modules()]
        values_of = (value for _, _, state in self._modules for value in state.values())
        self._inner = [(value, value.copy()) for value in values_of if isinstance(value, (dict, set))]
        tensors: Iterator[torch.Tensor] = (t for pair in (model.parameters(), model.buffers()) for t in pair)
        self._values = [(t, t._version, t.detach().clone()) for t in tensors] if values else []

    @torch.no_grad()
    def restore_(self) -> None:
        for module, kind, state in self._modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(state)
        for inner, contents in self._inner:  # in place: handles of hooks refer to these very dictionaries
            inner.clear()
            inner.update(contents)
        for tensor, version, value in self._values:
            if tensor._version != version:  # else a graph may still need it as it is
                tensor.copy_(value)


# --- the fast paths of nn.Transformer* read raw weights and skip the layers ---


def disable_fast_paths_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(map(is_ours, module.modules())):
            module.__dict__.setdefault("_fast_path", module.activation_relu_or_gelu)
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and any(map(is_ours, module.modules())):
            module.__dict__.setdefault("_fast_path", module.use_nested_tensor)
            module.use_nested_tensor = False


def enable_fast_paths_(model: nn.Module) -> None:
    """Only where the norms are there for the fast path to read."""
    for module in model.modules():
        if "_fast_path" not in module.__dict__:
            continue
        layers: Any = [module] if isinstance(module, nn.TransformerEncoderLayer) else module.layers
        whole = all(_reads_plain_layers(layer) for layer in layers)
        value = module.__dict__.pop("_fast_path")
        if whole and isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = value
        elif whole:
            module.use_nested_tensor = value


def _reads_plain_layers(layer: Any) -> bool:
    """Whether all that the fast path reads is there, and is all there is to it."""
    norms = all(type(norm) is nn.LayerNorm and norm.bias is not None for norm in (layer.norm1, layer.norm2))
    linear = all(type(part) is nn.Linear for part in (layer.linear1, layer.linear2))
    return norms and linear and type(layer.self_attn) is nn.MultiheadAttention
