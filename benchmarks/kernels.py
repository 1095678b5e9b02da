"""What the kernels take of a multiprocessor, built for a device that need not be here: registers, memory, spills."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any

import torch

from ndpp.geometry import Layout, conv_grid
from ndpp.kernels import Plan, View, plain
from ndpp.sampling import draw, row_budget
from ndpp.whitening import Moments

from .timing import markdown

SHAPES = {"3x3": (64, 3, "none"), "1x1": (256, 1, "l1")}  # channels, taps along an axis, scale
WIDTHS = (16, 64, 128)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capability", type=int, default=90, help="of the device, as in sm_90")


def plan_of(channels: int, kernel: int, scale: str, block: int = 64) -> Plan:
    layout = Layout(1, channels, kernel * kernel, block, False)
    return Plan(layout, False, False, "zeros", scale, 0.0, None, "newton", 3, 1e-5, 0.0, 512, None)


def of_moments(channels: int, kernel: int, scale: str, dtype: torch.dtype) -> list[Any]:
    """The launches of moments and of their adjoint, bfloat16 in channels-last and float32 in channels-first."""
    from ndpp.kernels import triton_launch, triton_moments, triton_moments_adjoint

    plan, half = plan_of(channels, kernel, scale), kernel // 2
    x = torch.randn(8, channels, 14, 14).to(dtype)
    if dtype != torch.float32:
        x = x.contiguous(memory_format=torch.channels_last)
    phase = conv_grid((14, 14), (kernel,) * 2, (1, 1), ((half, half),) * 2, (1, 1)).phases[0]
    view, draws = View(phase, row_budget(8, phase, plan.rows, None)), draw(x.device)
    gain = plain.scale(x, plan) if scale != "none" else None
    triton_launch.recorded = []
    stats = triton_moments.moments(x, gain, draws, view, plan)
    triton_moments_adjoint.moments_adjoint_(x, stats.mean, stats.cov, stats, x, gain, draws, view, plan)
    taken, triton_launch.recorded = triton_launch.recorded, None
    return taken


def of_roots(width: int) -> list[Any]:
    """The launches of D and of its adjoint, as a quartic and by Newton steps."""
    from ndpp.kernels import triton_launch, triton_root

    cov, one = torch.eye(width)[None], torch.ones(())
    stats, plan = Moments(one, cov[:, 0], cov, one), plan_of(width, 1, "none", width)
    triton_launch.recorded = []
    for each in (replace(plan, solver="quartic"), replace(plan, solver="newton")):
        triton_root.root(stats, each)
        triton_root.root_adjoint(stats, cov, cov, each)
    taken, triton_launch.recorded = triton_launch.recorded, None
    return taken


def of_observing(width: int) -> list[Any]:
    """The launches of running statistics."""
    from ndpp.kernels import Running, triton_launch, triton_observe

    cov, one = torch.eye(width)[None], torch.ones(())
    state = Running(cov[:, 0], cov, torch.ones((), dtype=torch.long), one, cov[:, 0], cov)
    triton_launch.recorded = []
    triton_observe.observe_(state, Moments(one, cov[:, 0], cov, one), 0.1, True)
    taken, triton_launch.recorded = triton_launch.recorded, None
    return taken


def main(options: argparse.Namespace) -> None:
    from ndpp.kernels import triton_launch

    cases: list[tuple[str, Any]] = []
    for name, shape in SHAPES.items():
        for dtype in (torch.bfloat16, torch.float32):
            cases += [(f"{name}, {str(dtype).split('.')[1]}", started) for started in of_moments(*shape, dtype)]
    for width in WIDTHS:
        words = {True: "quartic", False: "newton"}
        cases += [(f"{width} features, {words[one.arguments['QUARTIC']]}", one) for one in of_roots(width)]
    cases += [("64 features", started) for started in of_observing(64)]
    rows = []
    for name, started in cases:
        built = triton_launch.build(started, options.capability)
        programs = str(math.prod(started.grid))
        numbers = [started.warps, built.registers, built.shared, built.stack]
        rows.append([started.kernel.__name__.strip("_"), name, programs, *map(str, numbers)])
    print(markdown(["kernel", "of", "programs", "warps", "registers", "shared (bytes)", "stack (bytes)"], rows))
