"""convert_: a plain model becomes an ND++ model, in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..settings import Settings, named_settings
from . import norms as normalisation
from .adopt import adopt_, convert_layers_
from .planning import LayerPlan, NormPlan, Overrides, Plan, Where, make_plan, norm_size
from .report import Report, Row
from .surgery import Snapshot, blocks, disable_fast_paths_, is_ours, place, sizes

# Wrappers by the name of their class, and what to do instead.
_WRAPPERS = {
    "DistributedDataParallel": "the module first, and wrap it afterwards",
    "DataParallel": "the module first, and wrap it afterwards",
    "FullyShardedDataParallel": "the module first, and wrap it afterwards",
    "FSDPModule": "the module first, and call fully_shard afterwards",
    "OptimizedModule": "the module first, and call torch.compile afterwards",
    "ScriptModule": "the Python module; TorchScript is fixed code",
    "GraphModule": "the model that it was traced from",
}


def convert_(
    model: nn.Module,
    settings: Settings | str | None = None,
    *,
    where: Where | None = None,
    overrides: Overrides | None = None,
    norms: Literal["remove", "keep"] = "remove",
    calibration: Iterable[Any] | None = None,
) -> Report:
    """Turn every linear and convolutional layer of a model into its ndpp layer, in place, and remove its norms.

    The modules stay the same objects with the same Parameters, names and hooks, so optimizers and checkpoints survive.

    Args:
        model: any module; a layer by itself, too.
        settings: for all layers; a :class:`Settings`, or the paper's choices for a task by name: ``"classification"``,
            ``"detection"``, ``"segmentation"``, ``"transformer"``.
        where: ``where(module, dotted_name)`` says which layers to convert; all by default.
        overrides: patterns of dotted names (as in fnmatch) → settings for these layers, the first that matches; None
            leaves them alone. Naming a layer whose weight is tied to another module is how to have it converted.
        norms: ``"remove"`` the normalisation that the layers make redundant, or ``"keep"`` it.
        calibration: batches of data. The model then keeps the function it has: for pretrained weights. A batch is a
            tensor, a mapping (``model(**batch)``), a tuple that begins with the input, or a function of the model.

    Returns:
        What was done, and what was not and why: ``print(report)``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ndpp.convert_: expected an nn.Module; got {type(model).__name__}")
    if norms not in ("remove", "keep"):
        raise ValueError(f"ndpp.convert_: norms must be 'remove' or 'keep'; got {norms!r}")
    if where is not None and not callable(where):
        raise TypeError(f"ndpp.convert_: where must be a function of (module, name); got {type(where).__name__}")
    if overrides is not None and not isinstance(overrides, Mapping):
        raise TypeError(f"ndpp.convert_: overrides must map names to settings; got {type(overrides).__name__}")
    if calibration is not None and any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        raise ValueError("ndpp.convert_: calibration needs a model with values; this one is on the meta device")
    refuse_wrapped(model, "ndpp.convert_", "convert")
    plan = make_plan(model, named_settings(settings), where, overrides or {}, norms)
    if any(t.is_inference() for t in (*model.parameters(), *model.buffers())):
        raise ValueError(
            "ndpp.convert_: the model has tensors made in inference mode, which cannot be trained; build or load it "
            "outside of torch.inference_mode"
        )
    before = sum(p.numel() for p in model.parameters())
    known = {id(p) for p in model.parameters()}
    snapshot = Snapshot(model, values=calibration is not None)
    try:
        if calibration is None:
            _refuse_trained(plan)
            convert_layers_(plan)
            disable_fast_paths_(model)
            _remove_norms_(model, plan)
            change = None
        else:
            change = adopt_(model, plan, calibration)
            disable_fast_paths_(model)
    except BaseException:
        snapshot.restore_()
        raise
    added = tuple(name for name, p in model.named_parameters() if id(p) not in known)
    after = sum(p.numel() for p in model.parameters())
    report = Report(
        tuple(map(_layer_row, plan.layers)), tuple(map(_norm_row, plan.norms)), before, after, added, change
    )
    if not report.converted and not report.removed:
        warnings.warn(f"ndpp.convert_: nothing changed: {_why_nothing(report)}", stacklevel=2)
    return report


def refuse_wrapped(model: nn.Module, caller: str, verb: str) -> None:
    """Wrapped and compiled models hold references and code that surgery would pull away from under them."""
    for path, module in model.named_modules():
        names = [kind.__name__ for kind in type(module).__mro__]
        wrapper = next((name for name in names if name in _WRAPPERS), None)
        if wrapper is None and getattr(module, "_compiled_call_impl", None) is not None:
            wrapper = "OptimizedModule"
        if wrapper is not None:
            raise TypeError(f"{caller}: {path or 'the model'} is wrapped ({wrapper}); {verb} {_WRAPPERS[wrapper]}")


def _refuse_trained(plan: Plan) -> None:
    """Trained norms are not dropped in silence."""
    found = []
    for norm in plan.norms:
        state = {**norm.module._parameters, **norm.module._buffers}
        shown = normalisation.trained(state) if norm.remove else None
        if shown is not None:
            found.append(f"{norm.path} ({type(norm.module).__name__}: {shown})")
    if found:
        raise ValueError(
            f"ndpp.convert_: {len(found)} norms that would be removed hold trained values: {', '.join(found[:3])}"
            f"{', ...' if len(found) > 3 else ''}. Pass calibration=batches to keep what the model computes, "
            'norms="keep" to keep them, or initialise them again to train from scratch'
        )


def _remove_norms_(model: nn.Module, plan: Plan) -> None:
    """Without their norms, layers gain the bias that the norms had for them, and a γ that was not 1."""
    for module in model.modules() if any(norm.remove for norm in plan.norms) else ():
        if getattr(module, "inplace", None) is True:
            module.inplace = False  # type: ignore[assignment]  # the norm gave it a tensor of its own to overwrite
    gains: list[tuple[Tensor, Tensor]] = []
    for norm in plan.norms:
        if norm.remove and norm.norm is not None:
            if norm.before is not None and is_ours(norm.before.module):
                gains += _inherit_(norm.before, norm)
            if norm.norm.kind in ("layer", "rms"):
                _give_bias_after_(norm)
    for norm in plan.norms:
        if norm.remove and norm.norm is not None:
            normalisation.remove_(norm.module, norm.norm.after, norm.read is not None)
    with torch.no_grad():
        for weight, gain in gains:  # last, as the only change of values: what fails before leaves them alone
            weight.mul_(gain)


def _inherit_(layer: LayerPlan, norm: NormPlan) -> list[tuple[Tensor, Tensor]]:
    """What a norm leaves to the layer before it: β as its bias, the same Parameter where it fits, and a γ to apply."""
    module: Any = layer.module
    gamma, beta = normalisation.affine(norm.module)
    if isinstance(module, nn.MultiheadAttention):
        return []
    fits = norm_size(norm.module) == sizes(module)[1]
    if beta is not None and module.bias is None:
        same = fits and isinstance(beta, nn.Parameter) and place(beta) == place(module.weight)
        module.bias = beta if same else _new_bias(module)
        layer.note = f"gained a bias{f', which was {norm.path}.bias' if same else ''}"
    follows_directly = norm.path.rpartition(".")[0] == layer.path.rpartition(".")[0]
    if (
        gamma is not None
        and gamma.numel()
        and fits
        and follows_directly
        and not (gamma.is_meta or bool((gamma == 1).all()))
    ):
        gain = gamma.detach().flatten()[0]  # zero starts a residual branch
        layer.note = f"{layer.note}, " * bool(layer.note) + f"weight times {gain.item():g} of {norm.path}"
        return [(module.weight, gain.to(module.weight.dtype))]
    return []


def _give_bias_after_(norm: NormPlan) -> None:
    """The layers that read a LayerNorm with β had a bias through it."""
    _, beta = normalisation.affine(norm.module)
    for layer in norm.after:
        module: Any = layer.module
        reads_it = layer.ours is not None and sizes(module)[0] == norm_size(norm.module)
        if beta is None or not reads_it or isinstance(module, nn.MultiheadAttention) or module.bias is not None:
            continue
        module.bias = _new_bias(module)
        layer.note = "gained a bias"


def _new_bias(module: Any) -> nn.Parameter:
    return nn.Parameter(module.weight.new_zeros(sizes(module)[1]), requires_grad=module.weight.requires_grad)


def _layer_row(layer: LayerPlan) -> Row:
    before = type(layer.module).__name__
    if layer.ours is None:
        return Row(layer.path, before, note=layer.note)
    stock = layer.module.__dict__.get("_stock", type(layer.module))
    shown = layer.module.settings if hasattr(layer.module, "settings") else layer.settings
    assert isinstance(shown, Settings)
    return Row(layer.path, stock.__name__, f"ndpp.{before}", blocks(layer.module), shown, layer.note)


def _norm_row(norm: NormPlan) -> Row:
    kind = norm.kind_name
    if not norm.remove:
        return Row(norm.path, kind, note=norm.note)
    kept = "removed" if norm.norm is None or not norm.norm.after else "activation only"
    return Row(norm.path, kind, kept, note=norm.note)


def _why_nothing(report: Report) -> str:
    if not report.layers:
        return "the model has no linear or convolutional layers"
    notes = sorted({row.note for row in report.layers})
    return f"{len(report.layers)} layers were left alone: {'; '.join(notes[:3])}"
