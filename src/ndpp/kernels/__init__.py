"""THE DISPATCH POINT: the stages of a training call, by kernels where they take the case, else in plain PyTorch.

Every stage has the signature of its plain twin. Kernels decline with a reason, which `explain` shows. NDPP_KERNELS
chooses: "triton" (the default: on CUDA devices, where triton is installed), "plain", or "interpret" for tests, which
runs the kernels in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from ..whitening import Moments
from . import plain
from .plain import (
    Folded,
    Plan,
    Running,
    View,
    absolute,
    folded,
    newest_weight,
    root,
    scaled_part,
    usable,
)

__all__ = [
    "Folded",
    "Plan",
    "Running",
    "View",
    "absolute",
    "explain",
    "fold",
    "fold_adjoint",
    "folded",
    "forward",
    "gain_adjoint",
    "moments",
    "moments_adjoint_",
    "newest_weight",
    "observe_",
    "root",
    "scale",
    "scale_adjoint_",
    "scaled_gradient",
    "scaled_output_",
    "scaled_part",
    "usable",
]

MODES = ("triton", "plain", "interpret")
MODE = os.environ.get("NDPP_KERNELS", "triton")
if MODE not in MODES:
    raise ValueError(f"NDPP_KERNELS must be one of {', '.join(MODES)}; got {MODE!r}")
_STAGES = {
    "forward": "triton_stages",
    "fold": "triton_stages",
    "fold_adjoint": "triton_stages",
    "moments": "triton_moments",
    "moments_adjoint_": "triton_moments_adjoint",
    "observe_": "triton_observe",
    "scale": "triton_scale",
    "scale_adjoint_": "triton_scale",
    "gain_adjoint": "triton_passes",
    "scaled_output_": "triton_passes",
    "scaled_gradient": "triton_passes",
}
_OF_DEVICE = (torch.float32, torch.bfloat16, torch.float16)


# --- the stages ---


def moments(x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> Moments:
    """As `plain.moments`."""
    result: Moments = _run("moments", declines_rows(x, gain, view, plan), x, x, gain, draws, view, plan)
    return result


def moments_adjoint_(
    grad: Tensor,
    grad_mean: Tensor,
    grad_cov: Tensor,
    stats: Moments,
    x: Tensor,
    gain: Tensor | None,
    draws: Tensor,
    view: View,
    plan: Plan,
) -> Tensor | None:
    """As `plain.moments_adjoint_`."""
    reason = declines_adding(grad, x, gain, view, plan)
    arguments = (grad, grad_mean, grad_cov, stats, x, gain, draws, view, plan)
    result: Tensor | None = _run("moments_adjoint_", reason, x, *arguments)
    return result


def forward(
    x: Tensor,
    gain: Tensor | None,
    draws: Tensor,
    running: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    view: View,
    plan: Plan,
    dtype: torch.dtype,
) -> tuple[Moments, Folded]:
    """As `plain.forward`."""
    reason = declines_rows(x, gain, view, plan) or declines_fold(weight, plan, dtype)
    if reason is not None:  # one of the two may still be for a kernel
        batch = moments(x, gain, draws, view, plan)
        return batch, fold(batch, running, weight, bias, plan, dtype)
    result: tuple[Moments, Folded]
    result = _run("forward", None, x, x, gain, draws, running, weight, bias, view, plan, dtype)
    return result


def fold(
    batch: Moments,
    running: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    dtype: torch.dtype,
) -> Folded:
    """As `plain.fold`."""
    reason = declines_fold(weight, plan, dtype)
    result: Folded = _run("fold", reason, weight, batch, running, weight, bias, plan, dtype)
    return result


def fold_adjoint(
    batch: Moments,
    used: tuple[Tensor, Tensor, Tensor],
    weight: Tensor,
    grad_folded: Tensor,
    grad_constant: Tensor,
    grad_used: tuple[Tensor, ...],
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `plain.fold_adjoint`."""
    reason = declines_fold(weight, plan, grad_folded.dtype)
    arguments = (batch, used, weight, grad_folded, grad_constant, grad_used, plan)
    result: tuple[Tensor, Tensor, Tensor] = _run("fold_adjoint", reason, weight, *arguments)
    return result


def observe_(state: Running, batch: Moments, momentum: float | None, more_may_come: bool) -> None:
    """As `plain.observe_`."""
    _run("observe_", _declines_observing(state, batch), state.cov, state, batch, momentum, more_may_come)


def scale(x: Tensor, plan: Plan) -> Tensor:
    """As `plain.scale`."""
    result: Tensor = _run("scale", _declines_scale(x, x, plan), x, x, plan)
    return result


def scale_adjoint_(grad: Tensor, x: Tensor, gain: Tensor, grad_gain: Tensor, plan: Plan) -> None:
    """As `plain.scale_adjoint_`."""
    _run("scale_adjoint_", _declines_scale(x, grad, plan), x, grad, x, gain, grad_gain, plan)


def gain_adjoint(grad: Tensor, x: Tensor, gain: Tensor, plan: Plan) -> Tensor:
    """As `plain.gain_adjoint`."""
    reason = _declines_pass(x, grad)
    reason = _of("triton_passes").declines_inner(grad, x, plan) if reason is None else reason
    result: Tensor = _run("gain_adjoint", reason, x, grad, x, gain, plan)
    return result


def scaled_output_(y: Tensor, gain: Tensor | None, bias: Tensor) -> Tensor:
    """As `plain.scaled_output_`."""
    reason = _declines_pass(y, bias)
    reason = _of("triton_passes").declines_output(y, bias.dim()) if reason is None else reason
    result: Tensor = _run("scaled_output_", reason, y, y, gain, bias)
    return result


def scaled_gradient(
    grad: Tensor, gain: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `plain.scaled_gradient`."""
    reason = _declines_pass(grad, gain)
    reason = _of("triton_passes").declines_output(grad, len(shape), True) if reason is None else reason
    result: tuple[Tensor, Tensor] = _run("scaled_gradient", reason, grad, grad, gain, shape, dtype)
    return result


def _run(name: str, reason: str | None, on: Tensor, *arguments: Any) -> Any:
    """A stage, on the device of a tensor."""
    if reason is not None:
        return getattr(plain, name)(*arguments)
    if on.is_cuda and on.get_device() != torch.cuda.current_device():
        with torch.cuda.device(on.device):
            return _kernel(name)(*arguments)
    return _kernel(name)(*arguments)


@functools.cache
def _kernel(stage: str) -> Any:
    return getattr(_of(_STAGES[stage]), stage)


@functools.cache
def _of(module: str) -> Any:
    if MODE == "interpret":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which is here
    return importlib.import_module(f"{__name__}.{module}")


# --- who takes a case ---


def explain(x: Tensor, weight: Tensor, view: View, plan: Plan, grad: Tensor | None = None) -> dict[str, str]:
    """For each stage of a call with this input "kernel", or why it is computed in plain PyTorch."""
    x, weight = x.detach(), weight.detach()
    reasons = {
        "moments": declines_rows(x, None, view, plan),
        "fold": declines_fold(weight, plan, weight.dtype),
        "moments_adjoint_": declines_adding(x if grad is None else grad, x, None, view, plan),
    }
    return {stage: "kernel" if reason is None else f"plain: {reason}" for stage, reason in reasons.items()}


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _declines(x: Tensor) -> str | None:
    """What holds for every kernel, as the first tensor of a call shows it."""
    if MODE == "plain":
        return "NDPP_KERNELS is plain"
    if not (x.is_cuda if MODE == "triton" else x.device.type == "cpu"):
        return f"a tensor on {x.device.type}"
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return "traced"
    if not _has_triton():
        return "triton is not installed"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "under a function transform of torch.func"
    return None


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def declines_fold(weight: Tensor, plan: Plan, dtype: torch.dtype) -> str | None:
    """Why D and D·W are computed in plain PyTorch."""
    reason = _declines(weight)
    if reason is not None:
        return reason
    if _recorded(weight):
        return "recorded in a graph"
    if weight.dtype not in _OF_DEVICE or dtype not in _OF_DEVICE:
        return f"values of {weight.dtype}" if weight.dtype not in _OF_DEVICE else f"values of {dtype}"
    if plan.solver != "quartic":
        return f"solver {plan.solver!r}"
    if plan.layout.shared and len(plan.layout.parts) > 1:
        return "a smaller last block of a shared D"
    return _declines_weight(weight, plan)


def _declines_weight(weight: Tensor, plan: Plan) -> str | None:
    if weight.numel() >= 2**31:
        return "more than 2^31 weights"
    if weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last):
        return None
    if not torch.ops.aten.is_non_overlapping_and_dense(weight):
        return "a weight that is part of another tensor"
    return None if _places(weight, plan) is not None else "a weight whose taps do not lie evenly"


def _places(weight: Tensor, plan: Plan) -> tuple[int, ...] | None:
    found: tuple[int, ...] | None = _of("triton_stages").weight_places(weight, plan)
    return found


def _declines_observing(state: Running, batch: Moments) -> str | None:
    reason = _declines(state.cov)
    if reason is not None:
        return reason
    if state.cov.dtype != torch.float32 or batch.cov.dtype != torch.float32:
        return "statistics that are not float32"
    buffers = (state.mean, state.cov, state.step_mean, state.step_cov)
    return None if all([t.is_contiguous() for t in buffers]) else "buffers that are not contiguous"


def declines_rows(x: Tensor, gain: Tensor | None, view: View, plan: Plan) -> str | None:
    """Why moments are computed in plain PyTorch."""
    reason = _declines(x)
    if reason is not None:
        return reason
    if _recorded(x, gain):
        return "recorded in a graph"
    return _declines_view(x.shape, x.stride(), x.dtype, view, plan)


@functools.lru_cache(4096)
def _declines_view(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, view: View, plan: Plan
) -> str | None:
    """Of what stays the same from call to call."""
    if dtype not in _OF_DEVICE:
        return f"values of {dtype}"
    if len(view.phase) > 3:
        return "more than three axes"
    if plan.padding_mode != "zeros" and any(axis.overhangs for axis in view.phase):
        return f"padding with {plan.padding_mode!r}"
    if plan.layout.shared and len(plan.layout.parts) > 1:
        return "a smaller last block of a shared D"
    reach = sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    cells = [
        count * picks for count, picks in zip((shape[0], *(a.count for a in view.phase)), view.budget, strict=True)
    ]
    widest = max(reach, *strides, *cells, _rows(view, plan))
    return "sizes beyond 32 bits" if widest >= 2**31 else None


def _rows(view: View, plan: Plan) -> int:
    rows = plan.layout.groups * plan.layout.parts[0].blocks if plan.layout.shared else 1
    for count in view.budget:
        rows *= count
    return rows


def declines_adding(grad: Tensor, x: Tensor, gain: Tensor | None, view: View, plan: Plan) -> str | None:
    """Why the gradient of moments is computed in plain PyTorch."""
    reason = declines_rows(x, gain, view, plan)
    if reason is not None:
        return reason
    if _recorded(grad):
        return "recorded in a graph"
    if grad.dtype not in _OF_DEVICE:
        return f"a gradient of {grad.dtype}"
    return _declines_gradient(grad.shape, grad.stride())


@functools.lru_cache(4096)
def _declines_gradient(shape: tuple[int, ...], strides: tuple[int, ...]) -> str | None:
    if any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True)):
        return "a gradient whose entries share memory"
    reach = sum((size - 1) * stride for size, stride in zip(shape[1:], strides[1:], strict=True))
    return "sizes beyond 32 bits" if max(reach, *strides) >= 2**31 else None


def _declines_pass(x: Tensor, other: Tensor | None) -> str | None:
    """Why a pass over an input, an output or a gradient is left to the twin."""
    reason = _declines(x)
    if reason is not None:
        return reason
    if _recorded(x, other):
        return "recorded in a graph"
    dtypes = {x.dtype, x.dtype if other is None else other.dtype}
    return None if dtypes <= set(_OF_DEVICE) else "values of another dtype"


def _declines_scale(x: Tensor, grad: Tensor, plan: Plan) -> str | None:
    reason = _declines_pass(x, grad)
    if reason is None and x.numel() == 0:
        reason = "no values"
    if reason is None:
        reason = _declines_gradient(grad.shape, grad.stride()) or _declines_gradient(x.shape, x.stride())
    return _of("triton_scale").declines(x, plan) if reason is None else reason
