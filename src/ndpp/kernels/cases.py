"""Which cases are for kernels, and why the others are not."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import torch
import torch.autograd.forward_ad
from torch import Tensor

from ..whitening import Moments
from .plan import Plan, Running, View

MODES = ("triton", "plain", "interpret")
MODE = os.environ.get("NDPP_KERNELS", "triton")
if MODE not in MODES:
    raise ValueError(f"NDPP_KERNELS must be one of {', '.join(MODES)}; got {MODE!r}")
LEAST_CAPABILITY = (8, 0)  # products of bfloat16 and of TF32
MOST_PROGRAMS = 65535  # along all axes of a grid but the first
_OF_DEVICE = (torch.float32, torch.bfloat16, torch.float16)
failed: dict[int, str] = {}  # what is wrong with devices for which kernels could not be built


@functools.cache
def module(name: str) -> Any:
    """A file of kernels, and with it triton."""
    if MODE == "interpret":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which is here
    return importlib.import_module(f"{__package__}.{name}")


def explain(x: Tensor, weight: Tensor, view: View, plan: Plan, grad: Tensor | None = None) -> dict[str, str]:
    """For each stage of a call with this input "kernel", or why it is computed in plain PyTorch."""
    x, weight = x.detach(), weight.detach()
    reasons = {
        "moments": declines_rows(x, None, view, plan),
        "fold": declines_fold(weight, plan, weight.dtype),
        "moments_adjoint_": declines_adding(x if grad is None else grad, x, None, view, plan),
    }
    return {stage: "kernel" if reason is None else f"plain: {reason}" for stage, reason in reasons.items()}


def declines(x: Tensor) -> str | None:
    """What holds for every kernel, as the first tensor of a call shows it."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return "traced"
    kind, number = ("cuda", x.get_device()) if x.is_cuda else (x.device.type, -1)
    reason = _unfit(MODE, kind, number)
    if reason is not None or number in failed:
        return failed[number] if reason is None else reason
    return "under a function transform of torch.func" if torch._C._functorch.peek_interpreter_stack() else None


@functools.cache
def _unfit(mode: str, kind: str, number: int) -> str | None:
    """Of a device and of this machine, which stay as they are."""
    if mode == "plain":
        return "NDPP_KERNELS is plain"
    if kind != ("cuda" if mode == "triton" else "cpu"):
        return f"a tensor on {kind}"
    if not _has_triton():
        return "triton is not installed, or does not load"
    return None if kind == "cpu" else _too_old(number)


def _too_old(number: int) -> str | None:
    if torch.version.hip is not None:
        return "a device of ROCm"
    capability = torch.cuda.get_device_capability(number)
    return f"compute capability {capability[0]}.{capability[1]}" if capability < LEAST_CAPABILITY else None


def _has_triton() -> bool:
    try:
        return module("triton_launch") is not None
    except ImportError:
        return False


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors])


def declines_places(*tensors: Tensor | None) -> str | None:
    """Whether some lie elsewhere: their addresses are worth nothing to a kernel, and torch says what is wrong."""
    places = {t.get_device() for t in tensors if t is not None}
    return None if len(places) == 1 else "tensors on several devices"


def declines_fold(weight: Tensor, plan: Plan, dtype: torch.dtype) -> str | None:
    """Why D and D·W are computed in plain PyTorch."""
    reason = declines(weight)
    if reason is not None:
        return reason
    if _recorded(weight):
        return "recorded in a graph"
    if weight.dtype not in _OF_DEVICE or dtype not in _OF_DEVICE:
        return f"values of {weight.dtype}" if weight.dtype not in _OF_DEVICE else f"values of {dtype}"
    if plan.solver != "quartic":
        return f"solver {plan.solver!r}"
    return _declines_layout(plan) or _declines_weight(weight, plan)


@functools.lru_cache(4096)
def _declines_layout(plan: Plan) -> str | None:
    layout = plan.layout
    if layout.shared and len(layout.parts) > 1:
        return "a smaller last block of a shared D"
    blocks = layout.groups * sum(part.blocks for part in layout.parts)
    return f"more than {MOST_PROGRAMS} blocks" if blocks > MOST_PROGRAMS else None


def _declines_weight(weight: Tensor, plan: Plan) -> str | None:
    if weight.numel() >= 2**31:
        return "more than 2^31 weights"
    if weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last):
        return None
    if not torch.ops.aten.is_non_overlapping_and_dense(weight):
        return "a weight that is part of another tensor"
    return None if _places(weight, plan) is not None else "a weight whose taps do not lie evenly"


def _places(weight: Tensor, plan: Plan) -> tuple[int, ...] | None:
    found: tuple[int, ...] | None = module("triton_stages").weight_places(weight, plan)
    return found


def declines_observing(state: Running, batch: Moments) -> str | None:
    reason = declines(state.cov)
    if reason is not None:
        return reason
    if state.cov.dtype != torch.float32 or batch.cov.dtype != torch.float32:
        return "statistics that are not float32"
    buffers = (state.mean, state.cov, state.step_mean, state.step_cov)
    reason = declines_places(*state, batch.cov)
    if reason is not None:
        return reason
    return None if all([t.is_contiguous() for t in buffers]) else "buffers that are not contiguous"


def declines_rows(x: Tensor, gain: Tensor | None, view: View, plan: Plan) -> str | None:
    """Why moments are computed in plain PyTorch."""
    reason = declines(x)
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
    if (reason := _declines_layout(plan)) is not None:
        return reason
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


def declines_pass(x: Tensor, other: Tensor | None) -> str | None:
    """Why a pass over an input, an output or a gradient is left to the twin."""
    reason = declines(x)
    if reason is not None:
        return reason
    if _recorded(x, other):
        return "recorded in a graph"
    dtypes = {x.dtype, x.dtype if other is None else other.dtype}
    return None if dtypes <= set(_OF_DEVICE) else "values of another dtype"


def declines_scale(x: Tensor, grad: Tensor, plan: Plan) -> str | None:
    reason = declines_pass(x, grad)
    if reason is None and x.numel() == 0:
        reason = "no values"
    if reason is None:
        reason = _declines_gradient(grad.shape, grad.stride()) or _declines_gradient(x.shape, x.stride())
    return module("triton_scale").declines(x, plan) if reason is None else reason


def declines_normal(rows: Tensor, dtype: torch.dtype) -> str | None:
    """Why rows are brought to their own scale in plain PyTorch."""
    reason = declines(rows)
    if reason is not None:
        return reason
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if rows.numel() == 0:
        return "no values"
    for kind in (rows.dtype, dtype):
        if kind not in _OF_DEVICE:
            return f"values of {kind}"
    found: str | None = module("triton_normal").declines(rows)
    return found
