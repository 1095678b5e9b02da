"""Faster and Mask R-CNN with a feature pyramid, of torchvision."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN, resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads
from torchvision.models.detection.rpn import RPNHead
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool

from ..errors import ConfigError, RecipeError

MODELS: dict[str, tuple[type[FasterRCNN], str]] = {
    "faster_rcnn_r18": (FasterRCNN, "resnet18"),
    "faster_rcnn_r50": (FasterRCNN, "resnet50"),
    "faster_rcnn_r101": (FasterRCNN, "resnet101"),
    "mask_rcnn_r18": (MaskRCNN, "resnet18"),
    "mask_rcnn_r50": (MaskRCNN, "resnet50"),
    "mask_rcnn_r101": (MaskRCNN, "resnet101"),
}
OWN_OPTIONS = ("anchor_sizes", "aspect_ratios", "norm_heads")
# The layers whose shape depends on the number of classes.
PREDICTORS = ("roi_heads.box_predictor.", "roi_heads.mask_predictor.mask_fcn_logits.")
# The standard deviations they start with.
SMALL = {
    "roi_heads.box_predictor.cls_score": 0.01,
    "roi_heads.box_predictor.bbox_pred": 0.001,
    "roi_heads.mask_predictor.mask_fcn_logits": 0.001,
}


def has_masks(name: str) -> bool:
    return issubclass(_found(name)[0], MaskRCNN)


def rcnn(
    name: str,
    num_classes: int,
    *,
    anchor_sizes: Sequence[int] = (32, 64, 128, 256, 512),
    aspect_ratios: Sequence[float] = (0.5, 1.0, 2.0),
    norm_heads: bool = False,
    **options: Any,
) -> FasterRCNN:
    """num_classes counts the background. anchor_sizes: one for each level of the pyramid. norm_heads: BatchNorm also
    in pyramid, box head (then 4 convolutions and a linear layer) and mask head, as in torchvision's second versions.
    The other options are arguments of torchvision's class.
    """
    kind, backbone_name = _found(name)
    _check_options(kind, name, options)
    if len(anchor_sizes) != 5:
        raise ConfigError(f"model.options.anchor_sizes: expected 5 sizes, one a level; got {anchor_sizes}")
    backbone = resnet_fpn_backbone(
        backbone_name=backbone_name, weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    anchors = AnchorGenerator(tuple((size,) for size in anchor_sizes), (tuple(aspect_ratios),) * 5)
    heads = _normed_heads(kind, backbone, len(aspect_ratios)) if norm_heads else {}
    model: FasterRCNN = kind(backbone, num_classes, rpn_anchor_generator=anchors, **heads, **options)
    _begin_small_(model)
    return model


def _begin_small_(model: nn.Module) -> None:
    """The last layers start near zero, as in the detectors of the paper. torchvision's do not: on inputs of unit
    variance its mask logits would have a standard deviation of 16.
    """
    for name, std in SMALL.items():
        for key, parameter in model.named_parameters():
            if key == f"{name}.weight":
                nn.init.normal_(parameter, std=std)
            elif key == f"{name}.bias":
                nn.init.zeros_(parameter)


def load_weights_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """From a detector of the same kind, whose last layers are left out where it has other classes, or from a ResNet."""
    if any(key.startswith("backbone.") for key in state):
        own, target = model.state_dict(), model
        left_out = {key for key in own if key.startswith(PREDICTORS) and key in state}
        left_out = {key for key in left_out if own[key].shape != state[key].shape}
    else:
        target, left_out = model.get_submodule("backbone.body"), {key for key in state if key.startswith("fc.")}
    loaded = {key: value for key, value in state.items() if key not in left_out}
    try:
        missing, unexpected = target.load_state_dict(loaded, strict=False)
    except RuntimeError as error:
        raise RecipeError(f"model.weights: expected those of the same network: {error}") from error
    wrong = sorted({*missing} - left_out) + sorted(unexpected)
    if wrong:
        raise RecipeError(
            "model.weights: expected a state_dict of this detector or of its ResNet; "
            f"{len(wrong)} names differ, among them {', '.join(wrong[:3])}"
        )


def _found(name: str) -> tuple[type[FasterRCNN], str]:
    if name not in MODELS:
        raise ConfigError(f"model.name: expected one of {', '.join(MODELS)}; got {name!r}")
    return MODELS[name]


def _check_options(kind: type[FasterRCNN], name: str, options: dict[str, Any]) -> None:
    """torchvision itself takes any keyword without a word."""
    taken = {"self", "kwargs", "backbone", "num_classes", "rpn_anchor_generator"}
    known = {*inspect.signature(FasterRCNN).parameters, *inspect.signature(kind).parameters} - taken
    wrong = sorted(set(options) - known)
    if wrong:
        have = ", ".join([*OWN_OPTIONS, *sorted(known)])
        raise ConfigError(f"model.options.{wrong[0]}: {name} has no such option; it has {have}")


def _normed_heads(kind: type[FasterRCNN], backbone: BackboneWithFPN, ratios: int) -> dict[str, nn.Module]:
    norm, width = nn.BatchNorm2d, 256
    inner = [block[0].in_channels for block in backbone.fpn.inner_blocks]
    backbone.fpn = FeaturePyramidNetwork(inner, width, LastLevelMaxPool(), norm_layer=norm)
    heads: dict[str, nn.Module] = {
        "rpn_head": RPNHead(width, ratios, conv_depth=2),
        "box_head": FastRCNNConvFCHead((width, 7, 7), [width] * 4, [1024], norm_layer=norm),
    }
    if issubclass(kind, MaskRCNN):
        heads["mask_head"] = MaskRCNNHeads(width, [width] * 4, 1, norm_layer=norm)
    return heads
