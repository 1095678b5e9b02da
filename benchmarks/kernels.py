"""What the kernels take of a multiprocessor, built for a device that need not be here: registers, memory, spills."""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ndpp.geometry import Layout, conv_grid
from ndpp.kernels import Plan, Running, View, plain
from ndpp.sampling import draw, row_budget

from .timing import markdown


class Shape(NamedTuple):
    """Of a convolution."""

    channels: int
    kernel: int
    block: int
    scale: str


SHAPES = {
    "3x3 by 64": Shape(64, 3, 64, "none"),
    "1x1 by 64": Shape(256, 1, 64, "l1"),
    "3x3 by 16": Shape(20, 3, 16, "std"),
    "1x1 by 256": Shape(256, 1, 256, "none"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capability", type=int, default=90, help="of the device, as in sm_90")


def launches_of(shape: Shape, dtype: torch.dtype) -> list[Any]:
    """Those of a training step of a layer: bfloat16 in channels-last, float32 in channels-first."""
    from ndpp.kernels import triton_launch

    channels, kernel, block, scale = shape
    layout = Layout(1, channels, kernel * kernel, block, False)
    plan = Plan(layout, False, False, "zeros", scale, 0.0, None, "quartic", 3, 1e-5, 0.0, 512, None)
    memory = torch.contiguous_format if dtype == torch.float32 else torch.channels_last
    x = torch.randn(8, channels, 14, 14).to(dtype, memory_format=memory)
    weight = torch.randn(channels, channels, kernel, kernel).to(memory_format=memory)
    half = kernel // 2
    phase = conv_grid((14, 14), (kernel,) * 2, (1, 1), ((half, half),) * 2, (1, 1)).phases[0]
    triton_launch.recorded = []
    try:
        step(plan, View(phase, row_budget(8, phase, plan.rows, None)), x, weight)
        return triton_launch.recorded
    finally:
        triton_launch.recorded = None


def step(plan: Plan, view: View, x: Tensor, weight: Tensor) -> None:
    """Whatever a training step starts. Where launches are recorded in place of being done, values have no meaning."""
    from ndpp.kernels import (
        triton_moments_adjoint,
        triton_normal,
        triton_observe,
        triton_passes,
        triton_scale,
        triton_stages,
    )

    of_samples = plan.scale != "none" and not plan.per_row
    gain = triton_scale.scale(x, plan) if of_samples else plain.scale(x, plan) if plan.scale != "none" else None
    draws, bias, running = draw(x.device), weight.new_empty(plan.outputs(weight)), Running(*_buffers(plan))
    batch, folded = triton_stages.forward(x, gain, draws, running[:3], weight, bias, view, plan, x.dtype)
    triton_observe.observe_(running, batch, 0.1, True)
    triton_stages.fold_adjoint(batch, folded[2:], weight, folded.weight, folded.constant, (), plan)
    y = torch.empty_like(x)
    triton_moments_adjoint.moments_adjoint_(y, batch.mean, batch.cov, batch, x, gain, draws, view, plan)
    if plan.per_row:
        return
    rows = x.movedim(1, -1).contiguous()
    triton_normal.normalised_adjoint(triton_normal.normalised(rows, "standardize", 1e-5, x.dtype), rows, "rms", 0.0)
    of_channels = (x.shape[1], *[1] * (x.dim() - 2))
    triton_passes.scaled_output_(y, gain, weight.new_empty(of_channels))
    if triton_passes.declines_output(y, len(of_channels), True) is None:
        triton_passes.scaled_gradient(y, gain, of_channels, torch.float32)
    if gain is not None:
        triton_passes.gain_adjoint(y, x, gain, plan)
        triton_scale.scale_adjoint_(y, x, gain, gain, plan)


def _buffers(plan: Plan) -> list[Tensor]:
    blocks, f = sum(count for count, _ in plan.layout.widths), plan.layout.widths[0][1]
    cov = torch.eye(f).repeat(blocks, 1, 1)
    mean = cov[:, 0].contiguous()
    return [mean, cov, torch.ones((), dtype=torch.long), torch.ones(()), mean.clone(), cov.clone()]


def main(options: argparse.Namespace) -> None:
    from ndpp.kernels import triton_launch

    rows = []
    for name, shape in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            for started in launches_of(shape, dtype):
                built = triton_launch.build(started, options.capability)
                numbers = [math.prod(started.grid), started.warps, built.registers, built.shared, built.stack]
                of = f"{name}, {str(dtype).split('.')[1]}"
                rows.append([started.kernel.__name__.strip("_"), of, *map(str, numbers)])
    print(markdown(["kernel", "of", "programs", "warps", "registers", "shared (bytes)", "stack (bytes)"], rows))
