"""THE DISPATCH POINT: the stages of a training call, by kernels where they take the case, else in plain PyTorch.

Every stage has the signature of its plain twin. Kernels decline with a reason, which `explain` shows. NDPP_KERNELS
chooses: "triton" (the default: on NVIDIA devices of compute capability 8.0 or more, where triton works), "plain", or
"interpret" for tests, which runs the kernels in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

import functools
import subprocess
import warnings
from typing import Any

import torch
from torch import Tensor

from ..whitening import Moments
from . import cases, plain
from .cases import declines_normal, explain
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
    "declines_normal",
    "explain",
    "fold",
    "fold_adjoint",
    "folded",
    "forward",
    "gain_adjoint",
    "moments",
    "moments_adjoint_",
    "newest_weight",
    "normalised",
    "normalised_adjoint",
    "observe_",
    "root",
    "scale",
    "scale_adjoint_",
    "scaled_gradient",
    "scaled_output_",
    "scaled_part",
    "usable",
]

_STAGES = {
    "forward": "triton_stages",
    "fold": "triton_stages",
    "fold_adjoint": "triton_stages",
    "moments": "triton_gathered",
    "moments_adjoint_": "triton_moments_adjoint",
    "observe_": "triton_observe",
    "scale": "triton_scale",
    "scale_adjoint_": "triton_scale",
    "normalised": "triton_normal",
    "normalised_adjoint": "triton_normal",
    "gain_adjoint": "triton_passes",
    "scaled_output_": "triton_passes",
    "scaled_gradient": "triton_passes",
}
_IN_PARTS = ("moments_adjoint_", "observe_")  # several launches that write in place: not to be begun anew half done


# --- the stages ---


def moments(x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> Moments:
    """As `plain.moments`."""
    result: Moments = _run("moments", cases.declines_rows(x, gain, view, plan), x, x, gain, draws, view, plan)
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
    reason = cases.declines_adding(grad, x, gain, view, plan)
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
    reason = cases.declines_rows(x, gain, view, plan) or cases.declines_fold(weight, plan, dtype)
    reason = reason or cases.declines_places(x, weight, bias, *running)
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
    reason = cases.declines_fold(weight, plan, dtype) or cases.declines_places(weight, bias, batch.cov, *running)
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
    reason = cases.declines_fold(weight, plan, grad_folded.dtype)
    arguments = (batch, used, weight, grad_folded, grad_constant, grad_used, plan)
    result: tuple[Tensor, Tensor, Tensor] = _run("fold_adjoint", reason, weight, *arguments)
    return result


def observe_(state: Running, batch: Moments, momentum: float | None, more_may_come: bool, begins: bool = False) -> None:
    """As `plain.observe_`."""
    reason = cases.declines_observing(state, batch)
    _run("observe_", reason, state.cov, state, batch, momentum, more_may_come, begins)


def scale(x: Tensor, plan: Plan) -> Tensor:
    """As `plain.scale`."""
    result: Tensor = _run("scale", cases.declines_scale(x, x, plan), x, x, plan)
    return result


def scale_adjoint_(grad: Tensor, x: Tensor, gain: Tensor, grad_gain: Tensor, plan: Plan) -> None:
    """As `plain.scale_adjoint_`."""
    _run("scale_adjoint_", cases.declines_scale(x, grad, plan), x, grad, x, gain, grad_gain, plan)


def normalised(rows: Tensor, mode: str, eps: float, dtype: torch.dtype) -> Tensor:
    """As `plain.normalised`."""
    result: Tensor = _run("normalised", cases.declines_normal(rows, dtype), rows, rows, mode, eps, dtype)
    return result


def normalised_adjoint(grad: Tensor, rows: Tensor, mode: str, eps: float) -> Tensor:
    """As `plain.normalised_adjoint`."""
    reason = cases.declines_normal(rows, grad.dtype)
    result: Tensor = _run("normalised_adjoint", reason, rows, grad, rows, mode, eps)
    return result


def gain_adjoint(grad: Tensor, x: Tensor, gain: Tensor, plan: Plan) -> Tensor:
    """As `plain.gain_adjoint`."""
    reason = cases.declines_pass(x, grad)
    reason = cases.module("triton_passes").declines_inner(grad, x, plan) if reason is None else reason
    result: Tensor = _run("gain_adjoint", reason, x, grad, x, gain, plan)
    return result


def scaled_output_(y: Tensor, gain: Tensor | None, bias: Tensor) -> Tensor:
    """As `plain.scaled_output_`."""
    reason = cases.declines_pass(y, bias)
    reason = cases.module("triton_passes").declines_output(y, bias.dim()) if reason is None else reason
    result: Tensor = _run("scaled_output_", reason, y, y, gain, bias)
    return result


def scaled_gradient(
    grad: Tensor, gain: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `plain.scaled_gradient`."""
    reason = cases.declines_pass(grad, gain)
    reason = cases.module("triton_passes").declines_output(grad, len(shape), True) if reason is None else reason
    result: tuple[Tensor, Tensor] = _run("scaled_gradient", reason, grad, grad, gain, shape, dtype)
    return result


def _run(name: str, reason: str | None, on: Tensor, *arguments: Any) -> Any:
    """A stage, on the device of a tensor."""
    if reason is not None:
        return getattr(plain, name)(*arguments)
    try:
        if on.is_cuda and on.get_device() != torch.cuda.current_device():
            with torch.cuda.device(on.device):
                return _kernel(name)(*arguments)
        return _kernel(name)(*arguments)
    except Exception as error:
        half_done = name in _IN_PARTS and cases.module("triton_launch").works
        if not on.is_cuda or half_done or not _cannot_compile(error):
            raise
        cases.failed[on.get_device()] = f"its kernels could not be built: {type(error).__name__}"
        warnings.warn(
            f"ndpp: Triton cannot build kernels for {on.device} ({type(error).__name__}: {error}); training goes on in "
            "plain PyTorch, which is slower. Look at triton and the C compiler it needs, or set NDPP_KERNELS=plain",
            stacklevel=2,
        )
    return getattr(plain, name)(*arguments)


def _cannot_compile(error: Exception) -> bool:
    """Whether a kernel was not started for want of what compiles it: a C compiler, ptxas, a triton that works."""
    of_triton = type(error).__module__.partition(".")[0] == "triton"
    tools = isinstance(error, (ImportError, FileNotFoundError, subprocess.CalledProcessError))
    return of_triton or tools or (type(error) is RuntimeError and "compiler" in str(error))


@functools.cache
def _kernel(stage: str) -> Any:
    return getattr(cases.module(_STAGES[stage]), stage)
