"""The paper's toy problem: what gradient descent, Newton's method and an ndpp layer do with correlated features.

Linear regression on two correlated features of unequal scale and non-zero mean, loss ½·mean(y - t)², from w = 0.
Prints how many steps each method needs and draws the loss in the coordinates of each, as in the paper's figure.
Every number and every path comes from the run itself; no method is told how many steps to take.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import ndpp

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOLERANCE = 1e-6  # done when the loss is within this of the optimum, relative to it
MOST_STEPS = 10_000
GREEN, RED = "#1a8f3c", "#d62728"

Iterates = Iterator[tuple[Tensor, Tensor]]  # (weights, predictions), before the first step and after each


@dataclass(frozen=True)
class Run:
    """One method's way to the optimum."""

    name: str
    rate: float
    steps: str  # a number, or that the limit was reached
    path: Tensor  # (steps + 1, 2), the weights in the method's own coordinates
    excess: list[float]  # loss above the optimum, before the first step and after each


def make_data() -> tuple[Tensor, Tensor]:
    """Features (n, 2), deviations near 1 and 0.4, means near 0.5 and 0.3, correlation near 0.85; noisy targets (n,)."""
    normal = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = normal[:, :2] @ normal.new_tensor([[1.0, 0.34], [0.0, 0.21]]) + normal.new_tensor([0.5, 0.3])
    t = x @ normal.new_tensor([2.0, -3.0]) + 0.5 + 0.3 * normal[:, 2]
    return x, t


def with_bias(features: Tensor) -> Tensor:
    return torch.cat([features, torch.ones_like(features[:, :1])], 1)


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.std(0, correction=0)


def decorrelated(x: Tensor) -> Tensor:
    """(x - μ)·Cov^(-1/2), worked out apart from the library, so that the drawing is a check of the layer."""
    eigenvalues, vectors = torch.linalg.eigh(x.mT.cov(correction=0))
    d: Tensor = (vectors * eigenvalues.rsqrt()) @ vectors.mT
    return (x - x.mean(0)) @ d


def half_mean_square(error: Tensor) -> float:
    return error.square().mean().item() / 2


def best_fixed_rate(features: Tensor) -> float:
    """2 / (λmin + λmax) of the Hessian: the fixed learning rate with the fastest guaranteed convergence."""
    design = with_bias(features)
    eigenvalues = torch.linalg.eigvalsh(design.mT @ design / len(design))
    return 2 / float(eigenvalues[0] + eigenvalues[-1])


def gradient_descent(features: Tensor, t: Tensor, rate: float, newton: bool = False) -> Iterates:
    """On two weights and a bias; Newton's method corrects the gradient by the inverse Hessian."""
    design = with_bias(features)
    hessian = design.mT @ design / len(t)
    theta = design.new_zeros(3)
    while True:
        y = design @ theta
        yield theta[:2], y
        gradient = design.mT @ (y - t) / len(t)
        theta = theta - rate * (torch.linalg.solve(hessian, gradient) if newton else gradient)


def ndpp_layer(x: Tensor, t: Tensor, rate: float, settings: ndpp.Settings) -> Iterates:
    """Plain SGD on an ndpp layer, which is given the raw features."""
    layer = ndpp.Linear(2, 1, dtype=torch.float64, settings=settings)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    while True:
        y = layer(x).squeeze(1)
        yield layer.weight.detach().flatten().clone(), y.detach()
        optimizer.zero_grad()
        ((y - t).square().mean() / 2).backward()
        optimizer.step()


def follow(name: str, rate: float, iterates: Iterates, best: Tensor, optimum: float) -> Run:
    """Step until the loss is within tolerance of the optimum; `best` are the predictions there."""
    path, excess, steps = [], [], f"over {MOST_STEPS}"
    for step, (weights, y) in enumerate(islice(iterates, MOST_STEPS + 1)):
        path.append(weights)
        # Equal to loss - optimum, as least-squares residuals are orthogonal to y - best; but free of cancellation.
        excess.append(half_mean_square(y - best))
        if excess[-1] <= TOLERANCE * optimum:
            steps = str(step)
            break
    return Run(name, rate, steps, torch.stack(path), excess)


def print_table(runs: list[Run], at_start: float, optimum: float) -> None:
    print("Linear regression on 2 correlated features, with a bias; loss = 1/2 mean (y - t)^2; all start at 0.")
    print(f"Loss at the start {at_start:.4f}, at the optimum {optimum:.4f}.\n")
    head = f"{'method':<34}{'learning rate':>13}{'steps':>12}{'excess after 1 step':>22}{'excess at the end':>20}"
    print(head + "\n" + "-" * len(head))
    for run in runs:
        print(f"{run.name:<34}{run.rate:>13.4f}{run.steps:>12}{run.excess[1]:>22.1e}{run.excess[-1]:>20.1e}")
    print(f"\nsteps: until the loss is within {TOLERANCE:g} (relative) of the optimum. excess: loss above the optimum.")
    print("Gradient descent has the fixed learning rate of fastest guaranteed convergence,")
    print("2 / (smallest + largest eigenvalue of its Hessian). ndpp layers are trained by torch.optim.SGD;")
    print("the default stops its solver early on purpose, which generalises better in deep networks.\n")


def draw_panel(axes: Axes, features: Tensor, t: Tensor, run: Run, title: str) -> None:
    """The loss over the two weights with the bias at its optimum, and two ways to its lowest point."""
    (start, _), (corrected, _) = islice(gradient_descent(features, t, 1.0, newton=True), 2)
    reach = 1.2 * (run.path - corrected).abs().max().item()
    side = torch.linspace(-reach, reach, 401, dtype=torch.float64)
    offset = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1)
    covariance = features.mT.cov(correction=0)  # the Hessian of the weights once the bias is solved for
    height = ((offset @ covariance) * offset).sum(-1).sqrt()  # root of twice the excess loss: evenly spaced contours
    spacing = (corrected @ covariance @ corrected).sqrt().item() / 3  # the start lies on the third contour
    levels = [spacing * k for k in range(int(height.max().item() / spacing) + 2)]
    area = ((side + corrected[0]).numpy(), (side + corrected[1]).numpy(), height.numpy())
    axes.contourf(*area, levels, cmap="Blues", alpha=0.4)
    axes.contour(*area, levels[1:], colors="#8db3d9", linewidths=0.9)
    width = 6.0 if len(run.path) == 2 else 1.3  # a single step would be hidden under Newton's
    axes.plot(*run.path.mT.numpy(), color=GREEN, linewidth=width, marker="o", markersize=3.5, label="gradient descent")
    axes.plot(*torch.stack([start, corrected]).mT.numpy(), color=RED, linewidth=2, label="Newton's step")
    axes.plot(*start.tolist(), "o", color="black", markersize=7, label="start")
    axes.plot(*corrected.tolist(), "*", color="gold", markeredgecolor="black", markersize=15, label="optimum")
    axes.set_title(f"{title}\nlearning rate {run.rate:.2f}, steps: {run.steps}")
    axes.set(xlabel="weight 1", ylabel="weight 2", aspect="equal")


def draw(x: Tensor, t: Tensor, raw: Run, scaled: Run, layer: Run, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13.5, 5.6), layout="constrained")
    draw_panel(panels[0], x, t, raw, "(a) Raw features")
    draw_panel(panels[1], standardised(x), t, scaled, "(b) Standardised features")
    draw_panel(panels[2], decorrelated(x), t, layer, "(c) Decorrelated by ndpp.Linear, exact")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    note = "Contours: loss over the two weights, with the bias at its optimum. The bias is trained too, not drawn."
    figure.supxlabel(note, fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description="Gradient descent, Newton's method and ndpp on a toy problem.")
    parser.add_argument("--out", type=Path, default=Path("correction.png"), help="where to save the figure")
    out: Path = parser.parse_args().out
    x, t = make_data()
    z, best = standardised(x), with_bias(x) @ torch.linalg.lstsq(with_bias(x), t).solution
    optimum, rate_x, rate_z = half_mean_square(best - t), best_fixed_rate(x), best_fixed_rate(z)
    raw = follow("gradient descent, raw", rate_x, gradient_descent(x, t, rate_x), best, optimum)
    scaled = follow("gradient descent, standardised", rate_z, gradient_descent(z, t, rate_z), best, optimum)
    newton = follow("Newton's method", 1.0, gradient_descent(x, t, 1.0, newton=True), best, optimum)
    exact, default = ndpp.Settings.exact(), ndpp.Settings()
    layer = follow("ndpp.Linear, Settings.exact()", 1.0, ndpp_layer(x, t, 1.0, exact), best, optimum)
    usual = follow("ndpp.Linear, default settings", 1.0, ndpp_layer(x, t, 1.0, default), best, optimum)
    print_table([raw, scaled, newton, layer, usual], half_mean_square(t), optimum)
    try:
        draw(x, t, raw, scaled, layer, out)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        print('No figure: matplotlib is missing. Install it with: pip install "ndpp[inspect]"')
        return
    print(f"Figure saved to {out}")
    counts = f"{raw.steps} on raw features, {scaled.steps} on standardised and {layer.steps} on decorrelated ones"
    print(f"It shows the steps of gradient descent to the optimum: {counts} (Newton's method: {newton.steps}).")


if __name__ == "__main__":
    main()
