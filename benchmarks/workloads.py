"""The networks whose training steps are timed, with their data and losses, and the normalisations they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ndpp

Size = tuple[int, int]
Model = Callable[..., Any]  # a module, or what torch.compile made of it

CLASSES, MAP_CLASSES, BOX_CLASSES, BOXES = 1000, 19, 91, 8

SETTINGS = {
    "nd": ndpp.Settings(),
    "nd-l1": ndpp.Settings(scale="l1"),
    "nd-std": ndpp.Settings(scale="std"),
    "nd-standardize": ndpp.Settings(scale="standardize"),
    "nd-paper": ndpp.Settings.paper(),
}
BASELINE = "bn"
NORMS = ("none", "gn", "ln", "iternorm")  # as ndpp_recipes calls them
SHARED = "-share"  # with one D for layers that read the same tensor
VARIANTS = (BASELINE, *NORMS, *SETTINGS, *(name + SHARED for name in SETTINGS))


@dataclass(frozen=True)
class Workload:
    """A network with the norms it was published with (`baseline`), a batch for it, and its loss."""

    baseline: str
    build: Callable[[Size], nn.Module]
    data: Callable[[int, Size], Any]
    loss: Callable[[Model, Any], Tensor]
    batch: int
    size: Size
    channels_last: bool = True
    varies: bool = False  # shapes differ from step to step

    def model(self, variant: str, size: Size, device: str) -> nn.Module:
        """In training mode, on the device; every variant starts from the same weights."""
        torch.manual_seed(0)
        model = self.build(size)
        apply_(model, variant.removesuffix(SHARED))
        layout = torch.channels_last if self.channels_last else torch.preserve_format
        model.train().to(device, memory_format=layout)  # type: ignore[call-overload]
        if variant.endswith(SHARED):
            ndpp.share_(model, self.inputs(1, size, device))
        return model

    def inputs(self, batch: int, size: Size, device: str) -> Any:
        torch.manual_seed(1)
        return placed(self.data(batch, size), device, self.channels_last)


def apply_(model: nn.Module, variant: str) -> None:
    """Give a network the normalisation of a variant, in place; the baseline is what it has."""
    from ndpp_recipes.norms import replace_norms_

    if variant in SETTINGS:
        ndpp.convert_(model, SETTINGS[variant])
    elif variant != BASELINE:
        done = replace_norms_(model, variant)
        if done.unknown or not (done.replaced or done.kept):
            raise ValueError(f"{variant}: norms not known: {dict(done.unknown)}; replaced: {dict(done.replaced)}")


def placed(data: Any, device: str, channels_last: bool) -> Any:
    """Nested tuples, lists and dictionaries of tensors, on the device; images in channels-last order."""
    if isinstance(data, dict):
        return {key: placed(value, device, channels_last) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(placed(value, device, channels_last) for value in data)
    layout = torch.channels_last if channels_last and data.dim() == 4 else torch.preserve_format
    return data.to(device, memory_format=layout)


# --- classification ---


def _torchvision(name: str, size: Size) -> nn.Module:
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    return model


def _vit(size: Size) -> nn.Module:
    """With a head that is not zero: all gradients below a zero head are zero, which a GPU computes with less power."""
    import torchvision

    model: nn.Module = torchvision.models.vit_b_16(weights=None, num_classes=CLASSES, image_size=size[0])
    head: Any = model.heads
    nn.init.trunc_normal_(head[-1].weight, std=0.02)
    return model


def _images(batch: int, size: Size) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, *size), torch.randint(CLASSES, (batch,))


def _cross_entropy(model: Model, data: Any) -> Tensor:
    x, y = data
    return F.cross_entropy(model(x), y)


# --- semantic segmentation ---


def _deeplab(size: Size) -> nn.Module:
    from torchvision.models import segmentation

    options = {"weights": None, "weights_backbone": None, "aux_loss": False, "num_classes": MAP_CLASSES}
    model: nn.Module = segmentation.deeplabv3_resnet50(**options)
    return model


def _maps(batch: int, size: Size) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, *size), torch.randint(MAP_CLASSES, (batch, *size))


def _map_loss(model: Model, data: Any) -> Tensor:
    x, y = data
    return F.cross_entropy(model(x)["out"], y)


# --- instance segmentation ---


def _mask_rcnn(size: Size) -> nn.Module:
    """torchvision's maskrcnn_resnet50_fpn as it is with weights: frozen BatchNorm (without weights it is BatchNorm).

    The proposals' head is zero: all variants are given the same proposals, the anchors, and so the same work.
    """
    from torchvision.models.detection import MaskRCNN
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops import FrozenBatchNorm2d

    options = {"backbone_name": "resnet50", "weights": None, "norm_layer": FrozenBatchNorm2d, "trainable_layers": 5}
    model: Any = MaskRCNN(resnet_fpn_backbone(**options), BOX_CLASSES, min_size=min(size), max_size=max(size))
    for layer in (model.rpn.head.cls_logits, model.rpn.head.bbox_pred):
        nn.init.zeros_(layer.weight)
    return model  # type: ignore[no-any-return]


def _scenes(batch: int, size: Size) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    height, width = size
    images, targets = [], []
    for _ in range(batch):
        images.append(torch.rand(3, height, width))
        extent = torch.tensor([width, height])
        corner = torch.rand(BOXES, 2) * 0.5 * extent
        boxes = torch.cat([corner, corner + (0.1 + 0.4 * torch.rand(BOXES, 2)) * extent], 1)
        masks = torch.rand(BOXES, height, width) < 0.5
        targets.append({"boxes": boxes, "labels": torch.randint(1, BOX_CLASSES, (BOXES,)), "masks": masks.byte()})
    return images, targets


def _sum_of_losses(model: Model, data: Any) -> Tensor:
    total: Tensor = sum(model(*data).values())
    return total


WORKLOADS: dict[str, Workload] = {
    "resnet50": Workload("BatchNorm", partial(_torchvision, "resnet50"), _images, _cross_entropy, 128, (224, 224)),
    "resnet18": Workload("BatchNorm", partial(_torchvision, "resnet18"), _images, _cross_entropy, 128, (224, 224)),
    "vit_b_16": Workload("LayerNorm", _vit, _images, _cross_entropy, 128, (224, 224), channels_last=False),
    "maskrcnn": Workload("frozen BatchNorm", _mask_rcnn, _scenes, _sum_of_losses, 2, (800, 1333), varies=True),
    "deeplab": Workload("BatchNorm", _deeplab, _maps, _map_loss, 2, (768, 768)),
}
