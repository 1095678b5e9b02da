"""Adopting trained weights: the converted model computes what the plain one did, and training goes on from there.

Norms that provably belong to a layer are folded into it; then D and μ are measured on the calibration data, and
W ← D⁻¹·W, b ← b + μ·W take the weights to the decorrelated space (the way back of y = X·D·w).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import whitening
from ..attention import MultiheadAttention, Projection
from ..decorrelated import Decorrelated
from ..feeding import evaluating, feed, tensors
from ..recalibrate import collect_
from . import norms as normalisation
from .planning import LayerPlan, NormPlan, Plan, norm_size
from .surgery import become_, place
from .tracing import Flow, trace

SCALE_OF = {"layer": "standardize", "rms": "rms"}  # norms before linear layers that are a scale of theirs
NORM_ERROR = 1e-4  # how exactly a norm must be what it is taken for, on the data
CHANGE = {torch.float64: 1e-3, torch.float32: 1e-3}  # what a model may change by; half precision: its own rounding
HALF_CHANGE = 3e-2


def adopt_(model: nn.Module, plan: Plan, calibration: Iterable[Any]) -> float:
    """Convert a trained model without changing what it computes; the largest relative change of an output."""
    batches = list(calibration)
    if not batches:
        raise ValueError("ndpp.convert_: calibration holds no batches; expected some that the model can run on")
    with evaluating(model):
        reference = [[t.detach().clone() for t in tensors(feed(model, batch))] for batch in batches]
        _check_reference(reference)
        evidence = _Evidence(plan)
        flow, again = trace(model, batches[0], evidence.watched, evidence.look)
        if _change([reference[0]], [tensors(again)]) > 1e-5:
            raise ValueError(
                "ndpp.convert_: the model gives different outputs for the same batch in evaluation mode, so "
                "that nothing can be verified; make it deterministic for conversion"
            )
        _fold_norms_(plan, flow, evidence)
        _convert_layers_(plan)
        layers = {
            f"{layer.path}.{name}".strip("."): part
            for layer in plan.layers
            if layer.ours is not None
            for name, part in layer.module.named_modules()
            if isinstance(part, Decorrelated)
        }
        _, rows = collect_(layers, model, batches, "running")
        _transform_weights_(plan)
        change = _change(reference, [tensors(feed(model, batch)) for batch in batches])
    _note_unseen(plan, rows)
    _check_change(model, change)
    return change


def _check_reference(reference: list[list[Tensor]]) -> None:
    if not all(any(t.is_floating_point() for t in outputs) for outputs in reference):
        raise ValueError("ndpp.convert_: the model returns no floating-point tensors for a calibration batch to verify")
    if not all(bool(torch.isfinite(t).all()) for outputs in reference for t in outputs if t.is_floating_point()):
        raise ValueError("ndpp.convert_: the plain model gives NaN or Inf on the calibration data; look at the data")


def _check_change(model: nn.Module, change: float) -> None:
    allowed = max((CHANGE.get(p.dtype, HALF_CHANGE) for p in model.parameters()), default=1e-3)
    if not change <= allowed:
        raise RuntimeError(
            f"ndpp.convert_: the converted model differs by {change:.1e} on the calibration data (at most {allowed:g} "
            "is accepted), and the plain one was put back. If its outputs have no fixed shape (detections), convert "
            'the parts that have, such as model.backbone; else try norms="keep", or overrides={name: None} for a part'
        )


def _change(before: list[list[Tensor]], after: list[list[Tensor]]) -> float:
    """The largest ‖after - before‖ / ‖before‖ of an output; infinite where they cannot be compared."""
    worst = 0.0
    for old, new in zip(before, after, strict=True):
        if [t.shape for t in old] != [t.shape for t in new]:
            return math.inf
        for a, b in zip(old, new, strict=True):
            if a.is_floating_point():
                size = float(a.double().norm())
                difference = float((b.double() - a.double()).norm())
                worst = max(worst, difference / size if size else (0.0 if difference == 0 else math.inf))
            elif not torch.equal(a, b):
                return math.inf
            if math.isnan(worst):
                return math.inf
    return worst


# --- norms ---


class _Evidence:
    """Which norms are, on the data, the formulas by which they would be folded."""

    def __init__(self, plan: Plan) -> None:
        self.norms = {norm.module: norm for norm in plan.norms if norm.norm is not None and norm.remove_asked}
        self.watched = [*(layer.module for layer in plan.layers), *self.norms]
        self.error: dict[nn.Module, float] = {}

    def look(self, module: nn.Module, x: Tensor, y: Tensor) -> None:
        plan = self.norms.get(module)
        if plan is None or plan.norm is None:
            return
        expected = _formula(plan, x)
        if expected is None:
            return
        for part in plan.norm.after:
            expected = part(expected)
        error = _change([[y.detach()]], [[expected]])
        self.error[module] = max(self.error.get(module, 0.0), error)


def _formula(plan: NormPlan, x: Tensor) -> Tensor | None:
    """What folding would make of the norm, or None where there is no way to fold it."""
    module: Any = plan.module
    assert plan.norm is not None
    if plan.norm.kind == "batch":
        found = normalisation.evaluation_affine(module)
        if found is None or x.dim() < 2:
            return None
        a, c = (t.to(x.dtype).reshape(-1, *(1,) * (x.dim() - 2)) for t in found)
        return x * a + c
    if plan.norm.kind in SCALE_OF and norm_size(module) in (None, x.shape[-1]):
        gamma, beta = normalisation.affine(module)
        settings = _scale_settings(plan)
        center, gain = whitening.sample_scale(x, settings["scale"], (x.dim() - 1,), eps=settings["scale_eps"])
        y = (x.to(gain.dtype) - center) * gain
        y = y if gamma is None else y * gamma
        return (y if beta is None else y + beta).to(x.dtype)
    return None


def _scale_settings(plan: NormPlan) -> dict[str, Any]:
    """The scale that a norm before a linear layer is, with its ε (which libraries call by several names)."""
    assert plan.norm is not None
    eps = next((e for n in ("eps", "variance_epsilon") if (e := getattr(plan.module, n, None)) is not None), None)
    if eps is None:  # nn.RMSNorm
        eps = torch.finfo(next(plan.module.parameters()).dtype).eps
    return {"scale": SCALE_OF[plan.norm.kind], "scale_eps": float(eps)}


def _fold_norms_(plan: Plan, flow: Flow, evidence: _Evidence) -> None:
    by_module = {layer.module: layer for layer in plan.layers}
    for layer in plan.layers:
        layer.settings = layer.settings.replace(scale="none", scale_eps=0.0)
    for norm in plan.norms:
        if not norm.remove_asked or norm.norm is None:
            norm.remove = False
            continue
        norm.note = _fold_norm_(norm, flow, evidence, by_module)
        norm.remove = norm.note.startswith("folded")
        if norm.remove:
            normalisation.remove_(norm.module, norm.norm.after, norm.read is not None)


def _fold_norm_(norm: NormPlan, flow: Flow, evidence: _Evidence, layers: dict[nn.Module, LayerPlan]) -> str:
    """Fold one norm; what was done, or why it is kept."""
    assert norm.norm is not None
    module = norm.module
    if norm.read is not None and norm.read.values:
        return f"kept: {norm.read.parent} reads its weight"
    if module not in flow.outputs:
        return "kept: not used by the calibration data"
    if module not in evidence.error:
        if norm.norm.kind in SCALE_OF:
            return "kept: it does not normalise the last axis, as the scale of a linear layer does"
        return f"kept: a {norm.norm.kind} norm after a layer depends on each sample, which no weights can express"
    if evidence.error[module] > NORM_ERROR:
        return (
            f"kept: it differs from the formula of a {norm.norm.kind} norm by {evidence.error[module]:.0e} on the data"
        )
    if norm.norm.kind == "batch":
        producers = flow.producers(module)
        producer = next(iter(producers)) if len(producers) == 1 else None
        layer = layers.get(producer) if producer is not None else None
        if layer is None or isinstance(layer.module, nn.MultiheadAttention):
            return "kept: its input does not come straight from one layer"
        others = flow.users_of(layer.module) - {module}
        if others:
            return f"kept: {_users(others, layers)} also uses what {layer.path} computes"
        if _held_elsewhere(layer, layers):
            return f"kept: the parameters of {layer.path} are shared"
        _fold_after_(layer.module, module)
        return f"folded into {layer.path}"
    users = flow.users_of(module)
    readers = [layers[user] for user in users if isinstance(user, nn.Module) and user in layers]
    if len(readers) != len(users) or not readers:
        return f"kept: {_users(users - {r.module for r in readers}, layers)} uses it besides decorrelated layers"
    for reader in readers:
        reason = _cannot_read(reader, module, flow)
        if reason:
            return f"kept: {reason}"
    for reader in readers:
        _fold_before_(reader.module, module)
        reader.settings = reader.settings.replace(**_scale_settings(norm))
    return f"folded into {', '.join(sorted(r.path for r in readers))}, as scale {SCALE_OF[norm.norm.kind]!r}"


def _users(users: set[nn.Module | str], layers: dict[nn.Module, LayerPlan]) -> str:
    names = {user if isinstance(user, str) else layers[user].path if user in layers else "a norm" for user in users}
    return ", ".join(sorted(names)) or "nothing"


def _cannot_read(reader: LayerPlan, norm: nn.Module, flow: Flow) -> str:
    if reader.ours is None:
        return f"{reader.path} is not decorrelated"
    if flow.producers(reader.module) != {norm}:
        return f"{reader.path} also reads something else"
    if isinstance(reader.module, (nn.modules.conv._ConvNd,)):
        return f"{reader.path} is a convolution, whose scale is of whole samples"
    return ""


def _held_elsewhere(layer: LayerPlan, layers: dict[nn.Module, LayerPlan]) -> bool:
    own = {id(p) for p in layer.module.parameters()}
    return any(id(p) in own for other in layers if other is not layer.module for p in other.parameters())


@torch.no_grad()
def _fold_after_(layer: Any, norm: nn.Module) -> None:
    """A norm after a layer, a·(x·W + b) + c, as its weight and bias."""
    found = normalisation.evaluation_affine(norm)
    assert found is not None
    a, c = found
    out = _output_axis(layer)
    shape = [1] * layer.weight.dim()
    shape[out] = -1
    groups = getattr(layer, "groups", 1) if out == 1 else 1  # transposed: (in, out / groups, ...), groups along `in`
    grouped = layer.weight.double().reshape(groups, -1, *layer.weight.shape[1:])
    layer.weight.copy_((grouped * a.reshape(groups, *shape)).reshape(layer.weight.shape))
    bias = c if layer.bias is None else layer.bias.double() * a + c
    beta = norm._parameters.get("bias")
    if layer.bias is None and beta is not None and place(beta) == place(layer.weight):
        layer.bias = beta  # optimizers know it
    _set_bias_(layer, "bias", bias)


def _output_axis(layer: Any) -> int:
    is_transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    return 1 if is_transposed or not isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)) else 0


@torch.no_grad()
def _fold_before_(layer: Any, norm: nn.Module) -> None:
    """An affine before a layer, (x·γ + β)·W + b, as its weight and bias."""
    gamma, beta = normalisation.affine(norm)
    for weight, name, part in _matrices(layer):
        plain = weight.double()  # (out, in)
        if beta is not None:
            old = getattr(layer, name)
            held = torch.zeros(plain.shape[0]) if old is None else old.double()[part]
            _set_bias_(layer, name, held.to(plain) + plain @ beta.double(), part)
        if gamma is not None:
            weight.copy_(plain * gamma.double())


def _matrices(layer: Any) -> list[tuple[Tensor, str, slice]]:
    """The weights (out, in) of a layer as views, the name of their bias, and where in it theirs is."""
    whole = slice(None)
    if isinstance(layer, nn.MultiheadAttention):
        e = layer.embed_dim
        if layer._qkv_same_embed_dim:
            assert layer.in_proj_weight is not None
            return [(layer.in_proj_weight.data, "in_proj_bias", whole)]
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        return [(w.data, "in_proj_bias", slice(i * e, (i + 1) * e)) for i, w in enumerate(weights) if w is not None]
    is_linear = isinstance(layer, nn.Linear)
    return [(layer.weight.data if is_linear else layer.weight.data.mT, "bias", whole)]


@torch.no_grad()
def _set_bias_(layer: Any, name: str, value: Tensor, part: slice = slice(None)) -> None:
    """Into the Parameter that is there, or into a new one."""
    old = getattr(layer, name)
    like = next(layer.parameters())
    if old is None:
        length = value.numel() if part == slice(None) else 3 * layer.embed_dim
        setattr(layer, name, nn.Parameter(torch.zeros(length, dtype=like.dtype, device=like.device)))
    getattr(layer, name)[part].copy_(value)


# --- weights ---


def _convert_layers_(plan: Plan) -> None:
    for layer in plan.layers:
        if layer.ours is not None:
            become_(layer.module, layer.ours, layer.settings, layer.path)
        if isinstance(layer.module, MultiheadAttention):  # a norm before it is none of its output projection
            projection: Any = layer.module.out_proj
            projection.settings = projection.settings.replace(scale="none", scale_eps=0.0)


@torch.no_grad()
def _transform_weights_(plan: Plan) -> None:
    """W ← D⁻¹·W and b ← b + μ·W, in the Parameters that are there."""
    for layer in plan.layers:
        if layer.ours is None:
            continue
        module: Any = layer.module
        if isinstance(module, MultiheadAttention):
            _transform_attention_(module)
            module = module.out_proj
        weight, bias = module._unfolded(*module._evaluation_root(), module.weight, module.bias)
        module.weight.copy_(weight)
        _set_bias_(module, "bias", bias)


def _transform_attention_(module: Any) -> None:
    e = module.embed_dim
    packed = module._qkv_same_embed_dim
    for i, name in enumerate("qkv"):
        projection: Projection = getattr(module, f"{name}_proj")
        part = slice(i * e, (i + 1) * e)
        weight = module.in_proj_weight[part] if packed else getattr(module, f"{name}_proj_weight")
        old = None if module.in_proj_bias is None else module.in_proj_bias[part]
        new, bias = projection._unfolded(*projection._evaluation_root(), weight, old)
        weight.copy_(new)
        _set_bias_(module, "in_proj_bias", bias, part)


def _note_unseen(plan: Plan, rows: dict[str, float]) -> None:
    for layer in plan.layers:
        if layer.ours is not None and any(rows.get(key) == 0 for key in rows if key.startswith(layer.path)):
            layer.note = "not used by the calibration data: its weights are as they were"
