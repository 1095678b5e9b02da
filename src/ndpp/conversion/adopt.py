"""Adopting trained weights: the converted model computes what the plain one did, and training goes on from there.

Norms that belong to a layer are folded into it; then D and μ are measured on the calibration data, and W ← D⁻¹·W,
b ← b + μ·W take the weights to the decorrelated space (the way back of y = X·D·w). Then everything is compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import MultiheadAttention, Projection
from ..decorrelated import Decorrelated
from ..feeding import as_batches, evaluating, feed, numbered, tensors
from ..recalibrate import collect_
from .absorb import Evidence, absorb_norms_, relative_change, set_bias_
from .planning import LayerPlan, Plan
from .surgery import become_
from .tracing import Flow

CHANGE, HALF_CHANGE = 1e-3, 3e-2  # what a model may change by, in float32 and above, and in half precision
SAMPLE = 4096  # values of each layer's output that are compared
_HALF = (torch.bfloat16, torch.float16)


def adopt_(model: nn.Module, plan: Plan, calibration: Iterable[Any]) -> float:
    """Convert a trained model without changing what it computes; the largest relative change of an output."""
    batches = list(as_batches(calibration, "ndpp.convert_: calibration"))
    if not batches:
        raise ValueError("ndpp.convert_: calibration holds no batches; expected some that the model can run on")
    with evaluating(model), _no_fast_path():
        evidence, samples = Evidence(plan), Samples()
        flow = Flow([*(layer.module for layer in plan.layers), *(norm.module for norm in plan.norms)])

        def look(module: nn.Module, given: list[Tensor], output: Any) -> None:
            evidence.look(module, given, output)
            samples.look(module, given, output)

        named = list(numbered(batches, "ndpp.convert_"))
        reference = [[t.detach().clone() for t in tensors(flow.run(model, batch, look))] for batch in named]
        _check_reference(reference, model, named[0])
        changed = absorb_norms_(plan, flow, evidence)
        convert_layers_(plan)
        _unscale_outputs_of_attention_(plan)
        rows = _collect_(model, plan, named)
        for layer in plan.layers:
            if layer.ours is not None:
                _transform_weights_(layer)
        again = samples.of_the_same(model, changed)
        change = _largest(reference, [tensors(feed(model, batch)) for batch in again.watching(named)])
        _check_change(plan, reference, change, samples.difference(again))
    _note_rows(plan, rows)
    return change


@contextlib.contextmanager
def _no_fast_path() -> Iterator[None]:
    """The fast paths of attention skip layers, and give other values where there is padding."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# --- verification ---


class Samples:
    """Some values of what every module computed, call by call: a head of zeros hides nothing from them."""

    def __init__(self) -> None:
        self.values: dict[nn.Module, list[Tensor]] = {}

    def look(self, module: nn.Module, given: list[Tensor], output: Any) -> None:
        found = tensors(output)[:1]
        for flat in (t.detach().flatten() for t in found if not torch._C._functorch.is_functorch_wrapped_tensor(t)):
            part = flat[:: max(flat.numel() // SAMPLE, 1)].clone()
            self.values.setdefault(module, []).append(part)

    def of_the_same(self, model: nn.Module, besides: set[nn.Module]) -> Samples:
        """Room for the samples of the same modules, but those whose output is meant to be another."""
        again = Samples()
        self.values = {module: v for module, v in self.values.items() if module not in besides}
        again.values = {module: [] for module in self.values}
        return again

    def watching(self, batches: Iterable[Any]) -> Iterator[Any]:
        hooks = [m.register_forward_hook(lambda m, given, y: self.look(m, [], y)) for m in self.values]
        try:
            yield from batches
        finally:
            for hook in hooks:
                hook.remove()

    def difference(self, other: Samples) -> tuple[float, nn.Module | None]:
        worst: tuple[float, nn.Module | None] = (0.0, None)
        for module, before in self.values.items():
            after = other.values[module]
            lost = len(before) != len(after)
            change = float("inf") if lost else max(map(_sample_change, before, after), default=0.0)
            worst = max(worst, (change, module), key=lambda pair: pair[0])
        return worst


def _sample_change(old: Tensor, new: Tensor) -> float:
    """Inside a model, what is not finite may be meant so (attention to nothing), as long as it stays the same."""
    if old.shape != new.shape or not torch.equal(torch.isfinite(old), torch.isfinite(new)):
        return float("inf")
    return relative_change(*(torch.where(torch.isfinite(t), t, 0) for t in (old, new)))


def _largest(before: list[list[Tensor]], after: list[list[Tensor]]) -> float:
    """The largest relative change of an output."""
    changes = [0.0]
    for old, new in zip(before, after, strict=True):
        if len(old) != len(new):
            return float("inf")
        changes += map(relative_change, old, new)
    return max(changes)


def _check_reference(reference: list[list[Tensor]], model: nn.Module, first: Any) -> None:
    outputs = [t for one in reference for t in one if t.is_floating_point() or t.is_complex()]
    if not outputs:
        raise ValueError("ndpp.convert_: the model returns no floating-point tensors for a calibration batch to verify")
    if not all(bool(torch.isfinite(t).all()) for t in outputs):
        raise ValueError("ndpp.convert_: the plain model gives NaN or Inf on the calibration data; look at the data")
    if _largest(reference[:1], [tensors(feed(model, first))]) > 1e-3:
        raise ValueError(
            "ndpp.convert_: the model gives different outputs for the same batch in evaluation mode, so "
            "that nothing can be verified; make it deterministic for conversion"
        )


def _check_change(
    plan: Plan, reference: list[list[Tensor]], change: float, inside: tuple[float, nn.Module | None]
) -> None:
    parameters = (p.dtype for layer in plan.layers for p in layer.module.parameters())
    outputs = (t.dtype for one in reference for t in one)
    allowed = HALF_CHANGE if any(dtype in _HALF for dtype in (*parameters, *outputs)) else CHANGE
    if change <= allowed and inside[0] <= 10 * allowed:
        return
    paths: dict[nn.Module | None, str] = {layer.module: layer.path for layer in plan.layers}
    paths |= {norm.module: norm.path for norm in plan.norms}
    what = f"the output of {paths[inside[1]]} differs by {inside[0]:.1e}" if inside[1] else "its outputs differ"
    raise RuntimeError(
        f"ndpp.convert_: the converted model differs by {change:.1e} on the calibration data (at most {allowed:g} is "
        f"accepted; {what}), and the plain one was put back. Try overrides={{name: None}} for the layers around that, "
        'or norms="keep"; where outputs have no fixed shape (detections), convert the parts that have, such as '
        "model.backbone"
    )


# --- weights ---


def convert_layers_(plan: Plan) -> None:
    for layer in plan.layers:
        if layer.ours is not None:
            become_(layer.module, layer.ours, layer.settings, layer.path)


def _unscale_outputs_of_attention_(plan: Plan) -> None:
    """A norm before attention is the scale of its inputs, and none of its output projection."""
    for layer in plan.layers:
        if layer.ours is not None and isinstance(layer.module, MultiheadAttention):
            projection: Any = layer.module.out_proj
            projection.settings = projection.settings.replace(scale="none", scale_eps=0.0)


def _parts(layer: LayerPlan) -> dict[str, Decorrelated]:
    found = layer.module.named_modules() if layer.ours is not None else ()
    return {f"{layer.path}.{name}".strip("."): part for name, part in found if isinstance(part, Decorrelated)}


def _collect_(model: nn.Module, plan: Plan, batches: list[Any]) -> dict[str, float]:
    layers = {path: part for layer in plan.layers for path, part in _parts(layer).items()}
    return collect_(layers, model, batches, "running")[1]


@torch.no_grad()
def _transform_weights_(layer: LayerPlan) -> None:
    """W ← D⁻¹·W and b ← b + μ·W, in the Parameters that are there."""
    module: Any = layer.module
    if isinstance(module, MultiheadAttention):
        _transform_attention_(module)
        module = module.out_proj
    weight, bias = _transformed(module, module.weight, module.bias)
    module.weight.copy_(weight)
    set_bias_(module, "bias", bias)


def _transform_attention_(module: Any) -> None:
    e = module.embed_dim
    packed = module._qkv_same_embed_dim
    for i, name in enumerate("qkv"):
        projection: Projection = getattr(module, f"{name}_proj")
        part = slice(i * e, (i + 1) * e)
        weight = module.in_proj_weight[part] if packed else getattr(module, f"{name}_proj_weight")
        old = None if module.in_proj_bias is None else module.in_proj_bias[part]
        new, bias = _transformed(projection, weight, old)
        weight.copy_(new)
        set_bias_(module, "in_proj_bias", bias, part)


def _transformed(layer: Decorrelated, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The parameters in the decorrelated space; an error where the way there loses something for other data."""
    root = layer._evaluation_root()
    new, constant = layer._unfolded(*root, weight, bias)
    back, _ = layer._folded(*root, new, constant)
    lost = relative_change(weight, back)
    if lost > (HALF_CHANGE if weight.dtype in _HALF else CHANGE):
        raise RuntimeError(
            f"{layer._label}: D loses {lost:.0%} of the weight, which is then zero where the calibration data has no "
            "variance; use settings with eps > 0 (and a solver that converges), or more calibration data"
        )
    return new, constant


def _note_rows(plan: Plan, rows: dict[str, float]) -> None:
    for layer in plan.layers:
        parts = _parts(layer)
        if any(rows[path] == 0 for path in parts):
            layer.note = "not used by the calibration data: its weights are as they were"
        elif parts:
            features = max(width for part in parts.values() for _, width in part.layout.widths)
            fewest = min(rows[path] for path in parts)
            if fewest <= features:
                layer.note = f"only {fewest:.0f} rows of calibration data for blocks of {features}"
