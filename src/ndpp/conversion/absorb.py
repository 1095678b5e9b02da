"""Folding norms into the layers beside them, where the calibration data show that this is what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .. import whitening
from . import norms as normalisation
from .planning import LayerPlan, NormPlan, Plan, norm_size
from .surgery import place
from .tracing import Flow

SCALE_OF = {"layer": "standardize", "rms": "rms"}  # norms before linear layers that are a scale of theirs
NORM_ERROR = 1e-4  # how exactly a norm must be what it is taken for
HALF_NORM_ERROR = 2e-2
EPSILONS = ("eps", "variance_epsilon", "epsilon")


def relative_change(old: Tensor, new: Tensor) -> float:
    """‖new - old‖ / ‖old‖; infinite where they cannot be compared, or where one is not finite."""
    if old.shape != new.shape or old.dtype.is_complex != new.dtype.is_complex:
        return float("inf")
    if not (old.is_floating_point() or old.is_complex()):
        return 0.0 if torch.equal(old, new) else float("inf")
    wide = torch.complex128 if old.is_complex() else torch.float64
    size, difference = float(old.to(wide).norm()), float((new.to(wide) - old.to(wide)).norm())
    if size == 0:
        return 0.0 if difference <= 1e-6 * max(old.numel(), 1) ** 0.5 else float("inf")
    change = difference / size
    return change if change == change else float("inf")


class Evidence:
    """Which norms are, on the data, the formulas by which they would be folded."""

    def __init__(self, plan: Plan) -> None:
        asked = (norm for norm in plan.norms if norm.norm is not None and norm.remove_asked)
        self.norms = {norm.module: norm for norm in asked}
        self.hooked = {
            module for module in self._candidates(plan) if module._forward_hooks or module._forward_pre_hooks
        }
        self.error: dict[nn.Module, float] = {}
        self.dims: dict[nn.Module, set[int]] = {}

    def own_bias(self, norm: nn.Module) -> nn.Parameter | None:
        """β, unless another norm has the same."""
        beta = norm._parameters.get("bias")
        holders = sum(other._parameters.get("bias") is beta for other in self.norms)
        return beta if holders == 1 else None

    def _candidates(self, plan: Plan) -> Sequence[nn.Module]:
        return [*self.norms, *(layer.module for layer in plan.layers)]

    def look(self, module: nn.Module, given: list[Tensor], output: Any) -> None:
        plan = self.norms.get(module)
        if plan is None or len(given) != 1 or not isinstance(output, Tensor):
            return
        x = given[0]
        try:
            errors = [_error(plan, x, output)]
            if plan.norm is not None and plan.norm.kind in SCALE_OF:  # small data show whether ε is the one it has
                small = x * 1e-3
                errors.append(_error(plan, small, plan.module.forward(small)))
        except RuntimeError:  # tensors without values, as under vmap: no evidence
            errors = [float("inf")]
        if None not in errors:
            limit = HALF_NORM_ERROR / NORM_ERROR if x.dtype in (torch.bfloat16, torch.float16) else 1.0
            worst = max(e / limit for e in errors if e is not None)
            self.error[module] = max(self.error.get(module, 0.0), worst)
            self.dims.setdefault(module, set()).add(x.dim())


def _error(plan: NormPlan, x: Tensor, y: Tensor) -> float | None:
    expected = _formula(plan, x)
    if expected is None or plan.norm is None:
        return None
    for part in plan.norm.after:
        expected = part(expected)
    return relative_change(y.detach(), expected)


def _formula(plan: NormPlan, x: Tensor) -> Tensor | None:
    """What folding would make of the norm, or None where there is no way to fold it."""
    module: Any = plan.module
    assert plan.norm is not None
    if plan.norm.kind == "batch":
        found = normalisation.evaluation_affine(module)
        if found is None or x.dim() < 2 or x.shape[1] != len(found[0]):
            return None
        a, c = (t.to(x.dtype).reshape(-1, *(1,) * (x.dim() - 2)) for t in found)
        return x * a + c
    settings = _scale_settings(plan)
    if settings is None or norm_size(module) not in (None, x.shape[-1]):
        return None
    gamma, beta = normalisation.affine(module)
    center, gain = whitening.sample_scale(x, settings["scale"], (x.dim() - 1,), eps=settings["scale_eps"])
    y = (x.to(gain.dtype) - center) * gain
    y = y if gamma is None else y * gamma
    return (y if beta is None else y + beta).to(x.dtype)


def _scale_settings(plan: NormPlan) -> dict[str, Any] | None:
    """The scale that a norm before a linear layer is, with its ε; None if that cannot be told."""
    if plan.norm is None or plan.norm.kind not in SCALE_OF:
        return None
    eps = next((e for name in EPSILONS if (e := getattr(plan.module, name, None)) is not None), None)
    if eps is None:
        if not isinstance(plan.module, nn.RMSNorm):
            return None
        weight = next(plan.module.parameters(), torch.ones(()))
        eps = torch.finfo(weight.dtype).eps  # as nn.RMSNorm does
    return {"scale": SCALE_OF[plan.norm.kind], "scale_eps": float(eps)}


# --- what is folded into what ---


def absorb_norms_(plan: Plan, flow: Flow, evidence: Evidence) -> set[nn.Module]:
    """Fold what can be folded; the modules whose own output is another now."""
    layers = {layer.module: layer for layer in plan.layers}
    changed: set[nn.Module] = set()
    for layer in plan.layers:
        layer.settings = layer.settings.replace(scale="none", scale_eps=0.0)
    for norm in plan.norms:
        norm.remove = False
        if not norm.remove_asked or norm.norm is None:
            continue
        reason = _reason_to_keep(norm, flow, evidence)
        if not reason:
            batch = norm.norm.kind == "batch"
            reason = (_fold_into_layer_before_ if batch else _fold_into_layers_after_)(
                norm, flow, evidence, layers, changed
            )
        norm.note = reason
        norm.remove = reason.startswith("folded")
        if norm.remove:
            normalisation.remove_(norm.module, norm.norm.after, norm.read is not None)
    return changed


def _reason_to_keep(norm: NormPlan, flow: Flow, evidence: Evidence) -> str:
    assert norm.norm is not None
    module, kind = norm.module, norm.norm.kind
    if norm.read is not None and norm.read.values:
        return f"kept: {norm.read.parent} reads its weight"
    if module not in flow.users:
        return "kept: not used by the calibration data"
    if module in evidence.hooked:
        return "kept: it has hooks"
    if module not in evidence.error:
        if kind in SCALE_OF:
            return (
                "kept: it does not normalise the last axis by an ε that it names, as the scale of a linear layer does"
            )
        return f"kept: a {kind} norm after a layer depends on each sample, which no weights can express"
    if evidence.error[module] > NORM_ERROR:
        return f"kept: it differs from the formula of a {kind} norm by {evidence.error[module]:.0e} on the data"
    return ""


def _fold_into_layer_before_(
    norm: NormPlan, flow: Flow, evidence: Evidence, layers: dict[nn.Module, LayerPlan], changed: set[nn.Module]
) -> str:
    producers = flow.producers.get(norm.module, set())
    producer = next(iter(producers)) if len(producers) == 1 else None
    layer = layers.get(producer) if producer is not None else None
    if layer is None or isinstance(layer.module, nn.MultiheadAttention):
        return "kept: its input does not come straight from one layer"
    if layer.ours is None:
        return f"kept: {layer.path} was left alone"
    if layer.module in evidence.hooked:
        return f"kept: {layer.path} has hooks"
    others = flow.users[layer.module] - {norm.module}
    if others:
        return f"kept: {_named(others, layers)} also uses what {layer.path} computes"
    if not isinstance(layer.module, _ConvNd) and evidence.dims[norm.module] != {2}:
        return f"kept: its channels are not the features of {layer.path}"
    fold_after_(layer.module, norm.module, evidence.own_bias(norm.module))
    changed.add(layer.module)
    return f"folded into {layer.path}"


def _fold_into_layers_after_(
    norm: NormPlan, flow: Flow, evidence: Evidence, layers: dict[nn.Module, LayerPlan], changed: set[nn.Module]
) -> str:
    users = flow.users[norm.module]
    readers = [layers[user] for user in users if isinstance(user, nn.Module) and user in layers]
    if len(readers) != len(users) or not readers:
        return f"kept: {_named(users - {r.module for r in readers}, layers)} uses it, besides decorrelated layers"
    for reader in readers:
        if reader.ours is None:
            return f"kept: {reader.path}, which reads it, was left alone"
        if flow.producers[reader.module] != {norm.module}:
            return f"kept: {reader.path} also reads something else"
        if isinstance(reader.module, _ConvNd):
            return f"kept: {reader.path} is a convolution, whose scale is of whole samples"
    settings = _scale_settings(norm)
    assert settings is not None
    for reader in readers:
        fold_before_(reader.module, norm.module)
        reader.settings = reader.settings.replace(**settings)
    changed.add(norm.module)
    return f"folded into {', '.join(sorted(r.path for r in readers))}, as scale {settings['scale']!r}"


def _named(users: set[nn.Module | str], layers: dict[nn.Module, LayerPlan]) -> str:
    names = {user if isinstance(user, str) else layers[user].path if user in layers else "a norm" for user in users}
    return ", ".join(sorted(names)) or "nothing"


# --- the arithmetic ---


@torch.no_grad()
def fold_after_(layer: Any, norm: nn.Module, beta: nn.Parameter | None) -> None:
    """A norm after a layer, a·(x·W + b) + c, as its weight and bias; β is the new bias, for optimizers know it."""
    found = normalisation.evaluation_affine(norm)
    assert found is not None
    a, c = found
    is_transposed = isinstance(layer, _ConvTransposeNd)
    out = 1 if is_transposed or not isinstance(layer, (nn.Linear, _ConvNd)) else 0
    shape = [1] * layer.weight.dim()
    shape[out] = -1
    groups = layer.groups if is_transposed else 1  # transposed: (in, out / groups, ...), groups along `in`
    grouped = layer.weight.double().reshape(groups, -1, *layer.weight.shape[1:])
    layer.weight.copy_((grouped * a.reshape(groups, *shape)).reshape(layer.weight.shape))
    bias = c if layer.bias is None else layer.bias.double() * a + c
    if layer.bias is None and beta is not None and place(beta) == place(layer.weight):
        layer.bias = beta
    set_bias_(layer, "bias", bias)


@torch.no_grad()
def fold_before_(layer: Any, norm: nn.Module) -> None:
    """An affine before a layer, (x·γ + β)·W + b, as its weight and bias."""
    gamma, beta = normalisation.affine(norm)
    for weight, name, part in _matrices(layer):
        plain = weight.double()  # (out, in)
        if beta is not None:
            old = getattr(layer, name)
            held = torch.zeros(plain.shape[0]) if old is None else old.double()[part]
            set_bias_(layer, name, held.to(plain) + plain @ beta.double(), part)
        if gamma is not None:
            weight.copy_(plain * gamma.double())


def _matrices(layer: Any) -> list[tuple[Tensor, str, slice]]:
    """The weights (out, in) of a layer as views, the name of their bias, and where in it theirs is.

    Detached, not `.data`: what is written to them then counts in the version of the Parameter.
    """
    whole = slice(None)
    if isinstance(layer, nn.MultiheadAttention):
        e = layer.embed_dim
        if layer._qkv_same_embed_dim:
            assert layer.in_proj_weight is not None
            return [(layer.in_proj_weight.detach(), "in_proj_bias", whole)]
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        return [(w.detach(), "in_proj_bias", slice(i * e, (i + 1) * e)) for i, w in enumerate(weights) if w is not None]
    is_linear = isinstance(layer, nn.Linear)
    return [(layer.weight.detach() if is_linear else layer.weight.detach().mT, "bias", whole)]


@torch.no_grad()
def set_bias_(layer: Any, name: str, value: Tensor, part: slice = slice(None)) -> None:
    """Into the Parameter that is there, or into a new one."""
    if getattr(layer, name) is None:
        like = next(layer.parameters())
        length = value.numel() if part == slice(None) else 3 * layer.embed_dim
        new = torch.zeros(length, dtype=like.dtype, device=like.device)
        setattr(layer, name, nn.Parameter(new, requires_grad=like.requires_grad))
    getattr(layer, name)[part].copy_(value)
