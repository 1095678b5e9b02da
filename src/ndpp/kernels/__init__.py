"""THE DISPATCH POINT: the stages of a training call, by a kernel where one takes the case, else in plain PyTorch.

Every stage has the signature of its plain twin. A kernel declines with a reason, which `explain` shows. NDPP_KERNELS
chooses: "plain" (the default: the kernels have not run on a device yet), "triton", or "interpret" for tests, which runs
the kernels in Triton's interpreter on CPU tensors.
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
    Plan,
    Running,
    View,
    absolute,
    folded,
    folded_adjoint,
    gain_adjoint,
    newest_weight,
    scale,
    scale_adjoint_,
    scaled_gradient,
    scaled_output_,
    scaled_part,
    usable,
)

__all__ = [
    "Plan",
    "Running",
    "View",
    "absolute",
    "explain",
    "folded",
    "folded_adjoint",
    "gain_adjoint",
    "moments",
    "moments_adjoint_",
    "newest_weight",
    "observe_",
    "root",
    "root_adjoint",
    "scale",
    "scale_adjoint_",
    "scaled_gradient",
    "scaled_output_",
    "scaled_part",
    "usable",
]

MODE = os.environ.get("NDPP_KERNELS", "plain")
if MODE not in ("plain", "triton", "interpret"):
    raise ValueError(f"NDPP_KERNELS must be plain, triton or interpret; got {MODE!r}")
WIDEST_ROOT = 128  # features of a block whose D one program computes; beyond, products of the library are faster
MOST_STEPS = 10  # steps are unrolled
_STAGES = {
    "root": "triton_root",
    "root_adjoint": "triton_root",
    "moments": "triton_moments",
    "moments_adjoint_": "triton_moments_adjoint",
    "observe_": "triton_observe",
}


# --- the stages ---


def moments(x: Tensor, gain: Tensor | None, draws: Tensor, view: View, plan: Plan) -> Moments:
    """As `plain.moments`."""
    taken = _declines_rows((x, gain), x, view, plan) is None
    result: Moments = (_kernel("moments") if taken else plain.moments)(x, gain, draws, view, plan)
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
    reason = _declines_adding((grad, grad_mean, grad_cov, x, gain), grad, x, view, plan)
    stage = _kernel("moments_adjoint_") if reason is None else plain.moments_adjoint_
    result: Tensor | None = stage(grad, grad_mean, grad_cov, stats, x, gain, draws, view, plan)
    return result


def root(stats: Moments, plan: Plan) -> Tensor:
    """As `plain.root`."""
    taken = _declines_root(stats, plan) is None
    result: Tensor = (_kernel("root") if taken else plain.root)(stats, plan)
    return result


def root_adjoint(stats: Moments, d: Tensor, grad: Tensor, plan: Plan) -> Tensor:
    """As `plain.root_adjoint`."""
    taken = _declines_root(stats, plan) is None
    result: Tensor = (_kernel("root_adjoint") if taken else plain.root_adjoint)(stats, d, grad, plan)
    return result


def observe_(state: Running, batch: Moments, momentum: float | None, more_may_come: bool) -> None:
    """As `plain.observe_`."""
    taken = _declines_observing(state, batch) is None
    (_kernel("observe_") if taken else plain.observe_)(state, batch, momentum, more_may_come)


def _kernel(stage: str) -> Any:
    if MODE == "interpret":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, which is here
    return getattr(importlib.import_module(f"{__name__}.{_STAGES[stage]}"), stage)


# --- who takes a case ---


def explain(x: Tensor, view: View, plan: Plan, grad: Tensor | None = None) -> dict[str, str]:
    """For each stage of a call with this input "kernel", or why it is computed in plain PyTorch."""
    blocks, f = sum(g for g, _ in plan.layout.widths), plan.layout.widths[0][1]
    cov = torch.empty(blocks, f, f, dtype=torch.float32 if x.dtype != torch.float64 else x.dtype, device=x.device)
    stats = Moments(cov[0, 0, 0], cov[:, 0], cov, cov[0, 0, 0])
    x = x.detach()
    reasons = {
        "moments": _declines_rows((x,), x, view, plan),
        "moments_adjoint_": _declines_adding((x,), x if grad is None else grad, x, view, plan),
        "root": _declines_root(stats, plan),
        "root_adjoint": _declines_root(stats, plan),
    }
    return {stage: "kernel" if reason is None else f"plain: {reason}" for stage, reason in reasons.items()}


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _declines(*tensors: Tensor | None) -> str | None:
    """What holds for every kernel."""
    if MODE == "plain":
        return "NDPP_KERNELS is plain"
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return "traced"
    if not _has_triton():
        return "triton is not installed"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "under a function transform of torch.func"
    present = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in present):
        return "recorded in a graph"
    place = "cuda" if MODE == "triton" else "cpu"
    if any(t.device.type != place for t in present):
        return f"a tensor on {next(t.device.type for t in present if t.device.type != place)}"
    wide = [t.dtype for t in present if t.dtype not in (torch.float32, torch.bfloat16, torch.float16)]
    return f"values of {wide[0]}" if wide else None


def _declines_root(stats: Moments, plan: Plan) -> str | None:
    reason = _declines(stats.cov, stats.unit, stats.rows)
    if reason is not None:
        return reason
    if plan.solver == "eigh":
        return "an eigendecomposition"
    if plan.steps > MOST_STEPS:
        return f"more than {MOST_STEPS} steps"
    f = stats.cov.shape[-1]
    return f"blocks of {f} features, more than {WIDEST_ROOT}" if f > WIDEST_ROOT else None


def _declines_observing(state: Running, batch: Moments) -> str | None:
    buffers = (state.mean, state.cov, state.step_rows, state.step_mean, state.step_cov)
    reason = _declines(*buffers, *batch)
    if reason is not None:
        return reason
    if any(t.dtype != torch.float32 for t in (*buffers, *batch)):
        return "statistics that are not float32"
    return None if all(t.is_contiguous() for t in buffers) else "buffers that are not contiguous"


def _declines_rows(tensors: tuple[Tensor | None, ...], x: Tensor, view: View, plan: Plan) -> str | None:
    reason = _declines(*tensors)
    if reason is not None:
        return reason
    if len(view.phase) > 3:
        return "more than three axes"
    if plan.padding_mode != "zeros" and any(axis.overhangs for axis in view.phase):
        return f"padding with {plan.padding_mode!r}"
    if plan.layout.shared and len(plan.layout.parts) > 1:
        return "a smaller last block of a shared D"
    return "more than 2^31 rows" if _rows(view, plan) >= 2**31 else None


def _rows(view: View, plan: Plan) -> int:
    rows = plan.layout.groups * plan.layout.parts[0].blocks if plan.layout.shared else 1
    for count in view.budget:
        rows *= count
    return rows


def _declines_adding(tensors: tuple[Tensor | None, ...], grad: Tensor, x: Tensor, view: View, plan: Plan) -> str | None:
    reason = _declines_rows(tensors, x, view, plan)
    if reason is not None:
        return reason
    if any(stride == 0 and size > 1 for stride, size in zip(grad.stride(), grad.shape, strict=True)):
        return "a gradient whose entries share memory"
    if plan.layout.taps == 1:
        return None  # no two rows share an entry
    if torch.are_deterministic_algorithms_enabled():
        return "atomic additions are not deterministic"
    if MODE == "interpret" and grad.dtype != torch.float32:
        return "the interpreter adds atomically in float32 only"
    return None
