"""The figure of `scaling`, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# How each is called in the figure, and its colour; what shares nothing adds nothing.
LOOKS = {
    "ndpp, sync all": ("ndpp, all GPUs", "#c44e52"),
    "… in two rounds": ("ndpp, all GPUs, in two rounds", "#dd8452"),
    "… every 4th step": ("ndpp, all GPUs, every 4th step", "#8172b3"),
    "… inside a node": ("ndpp, inside each node", "#4c72b0"),
    "SyncBatchNorm": ("SyncBatchNorm, all GPUs", "#777777"),
}


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel for every network: what sharing adds to its step, over the number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    networks = list(dict.fromkeys(record["network"] for record in records))
    figure, panels = plt.subplots(1, len(networks), figsize=(5.5 * len(networks), 5), sharey=True, squeeze=False)
    for axes, network in zip(panels[0], networks, strict=True):
        draw_panel(axes, [record for record in records if record["network"] == network])
        axes.set_title(network)
    panels[0][0].set_ylim(bottom=0)  # after all panels, which share it
    panels[0][0].set_ylabel("ms added to every training step")
    panels[0][0].legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 0.95))
    figure.suptitle("What sharing statistics between GPUs costs (a model, not a measurement)", fontsize=13)
    figure.text(0.5, 0.015, assumed(records[0]["assumed"]), ha="center", fontsize=8.5, color="#555555")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_panel(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    for scheme, (label, color) in LOOKS.items():
        points = [(record["gpus"], record["sync_ms"]) for record in records if record["scheme"] == scheme]
        axes.plot(*zip(*points, strict=True), color=color, linewidth=2, marker="o", markersize=3.5, label=label)
    axes.axvspan(0.8, 8, color="#f2f2f2", zorder=0)
    axes.text(2.6, 0.97, "one node", transform=axes.get_xaxis_transform(), ha="center", va="top", color="#777777")
    axes.set_xscale("log", base=2)
    ticks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8.5)
    axes.set(xlabel="GPUs", xlim=(0.8, 1300))
    axes.grid(axis="y", color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)


def assumed(values: dict[str, float]) -> str:
    inside = f"{values['hop_us']:g} µs a hop and {values['GB/s']:g} GB/s inside a node of {values['gpus_of_a_node']:g}"
    between = f"{values['hop_between_us']:g} µs and {values['GB/s_between']:g} GB/s between nodes"
    return f"Assumed: {inside}, {between}, {values['launch_us']:g} µs to begin; gradients share the network."
