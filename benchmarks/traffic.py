"""What the layers of a network compute and send in a step, from the network itself: one run with hooks on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import ndpp
from ndpp.decorrelated import Decorrelated

from .workloads import WORKLOADS

FLOAT = 4  # bytes
LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Call:
    """One call of a layer: what it multiplies, and what synchronising it sends. Elements, not bytes.

    triangle: of the second moments of all blocks, symmetric part only; means: of all blocks; channels: those of the
    BatchNorm that the published network has behind this layer, 0 where it has none; outputs: what that one normalises;
    differentiated: its input has a gradient, so that sharing has a backward pass (the images have none).
    """

    name: str
    products: int
    parameters: int
    triangle: int
    means: int
    channels: int
    outputs: int
    differentiated: bool

    def statistics_bytes(self, ranks: int, moment: int = FLOAT) -> int:
        """One flat buffer: the triangles, and for every rank a place for its count, its flag and its means."""
        return moment * self.triangle + FLOAT * ranks * (self.means + 2)


def batch_norm_bytes(channels: int) -> tuple[int, int]:
    """nn.SyncBatchNorm: gathered forward from every rank (mean, inverse σ, count), and summed backward."""
    return FLOAT * (2 * channels + 1), FLOAT * 2 * channels


def calls(build: Callable[[], nn.Module], run: Callable[[nn.Module], object], larger: float = 1.0) -> list[Call]:
    """All calls in their order. `larger`: pixels of real images by those of `run`; heads of regions see no more."""
    norms = norms_behind(build(), run)
    model = build()
    ndpp.convert_(model, ndpp.Settings(rows=16, steps=1))  # neither changes what is sent
    found: list[Call] = []

    def note(name: str, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        assert isinstance(layer, Decorrelated)
        again = any(call.name == name for call in found)
        found.append(called(name, layer, x, y, norms.get(name, 0), 1.0 if "roi_heads" in name else larger, again))

    watched(model, run, (Decorrelated,), note)
    return found


def called(name: str, layer: Decorrelated, x: Tensor, y: Tensor, channels: int, larger: float, again: bool) -> Call:
    positions = x if isinstance(layer, TRANSPOSED) else y
    widths = layer.layout.widths
    return Call(
        name,
        products=round(larger * positions.numel() * layer.weight[0].numel()),
        parameters=0 if again else sum(parameter.numel() for parameter in layer.parameters(recurse=False)),
        triangle=sum(g * f * (f + 1) // 2 for g, f in widths),
        means=sum(g * f for g, f in widths),
        channels=channels,
        outputs=round(larger * y.numel()) if channels else 0,
        differentiated=x.requires_grad,
    )


def norms_behind(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, int]:
    """Channels of the BatchNorm that is called right after a layer, by the name of the layer."""
    from torchvision.ops import FrozenBatchNorm2d

    behind: dict[str, int] = {}
    last = [""]

    def note(name: str, module: nn.Module, x: Tensor, y: Tensor) -> None:
        if isinstance(module, LAYERS):
            last[0] = name
        else:
            behind[last[0]] = x.shape[1]

    watched(model, run, (*LAYERS, nn.BatchNorm2d, FrozenBatchNorm2d), note)
    return behind


def watched(
    model: nn.Module,
    run: Callable[[nn.Module], object],
    kinds: tuple[type[nn.Module], ...],
    note: Callable[[str, nn.Module, Tensor, Tensor], None],
) -> None:
    """Run a model for training, and note every call of modules of these kinds with its input and output."""

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: note(name, module, inputs[0], output)

    for name, module in model.named_modules():
        if isinstance(module, kinds):
            module.register_forward_hook(hook(name))
    run(model.train())


# --- the networks ---


def resnet50() -> list[Call]:
    """128 images of 224² on every GPU."""
    work = WORKLOADS["resnet50"]
    images = torch.randn(1, 3, 224, 224)
    return calls(lambda: work.build((224, 224)), lambda model: model(images), 128)


def mask_rcnn() -> list[Call]:
    """Two images of 800×1333 on every GPU."""
    work = WORKLOADS["maskrcnn"]
    torch.manual_seed(0)
    data = work.data(2, (200, 320))
    return calls(lambda: work.build((200, 320)), lambda model: model(*data), 800 * 1333 / (200 * 320))


NETWORKS: dict[str, Callable[[], list[Call]]] = {"ResNet-50": resnet50, "Mask R-CNN R50-FPN": mask_rcnn}
