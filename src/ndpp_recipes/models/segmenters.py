"""Networks for segmentation by name: torchvision's, and a small DeepLab."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torchvision.models import get_model, list_models, resnet18, segmentation
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
from torchvision.models.segmentation.fcn import FCNHead

from ..errors import RecipeError
from .classifiers import unknown, with_channels_
from .weights import load_

SMALL = "deeplabv3_resnet18"


def build_segmenter(name: str, classes: int, channels: int, options: Mapping[str, Any]) -> nn.Module:
    """A network that gives {"out": logits of the image's size}, and "aux" with the option aux_loss."""
    known = list_models(module=segmentation)
    if name not in (SMALL, *known):
        raise unknown(name, [SMALL, *known], f"there are {', '.join([SMALL, *known])}")
    try:
        model = _small(classes, **options) if name == SMALL else _torchvision(name, classes, options)
    except TypeError as error:
        raise RecipeError(f"model {name!r} does not take model.options {dict(options)}: {error}") from error
    return with_channels_(model, channels)


def load_weights_(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """From a segmenter, whose last layers are left out where it has other classes, or from a ResNet."""
    if not any(name.startswith("backbone.") for name in state):
        load_(model.get_submodule("backbone"), {k: v for k, v in state.items() if not k.startswith("fc.")}, ())
        return
    if getattr(model, "aux_classifier", None) is None:
        state = {name: value for name, value in state.items() if not name.startswith("aux_classifier.")}
    load_(model, state, heads=("classifier.4", "aux_classifier.4"))


def _torchvision(name: str, classes: int, options: Mapping[str, Any]) -> nn.Module:
    settings = {"weights": None, "weights_backbone": None, "num_classes": classes, **options}
    model: nn.Module = get_model(name, **settings)
    return model


def _small(classes: int, aux_loss: bool = False) -> nn.Module:
    """On ResNet-18, whose blocks cannot dilate: its features are a 32nd of the image's size."""
    layers = {"layer4": "out", **({"layer3": "aux"} if aux_loss else {})}
    backbone = IntermediateLayerGetter(resnet18(weights=None), return_layers=layers)
    model: nn.Module = DeepLabV3(backbone, DeepLabHead(512, classes), FCNHead(256, classes) if aux_loss else None)
    return model
