"""Networks for classification by name: our own for small images, torchvision's, and timm's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import MissingExtra, RecipeError

_ALIASES = {"vgg11": "vgg11_bn", "vgg13": "vgg13_bn", "vgg16": "vgg16_bn", "vgg19": "vgg19_bn"}
_NO_AUXILIARY = {"aux_logits": False, "init_weights": True}
_PRESET: dict[str, dict[str, Any]] = {"googlenet": _NO_AUXILIARY, "inception_v3": _NO_AUXILIARY}


def build_classifier(name: str, classes: int, channels: int, size: int, options: Mapping[str, Any]) -> nn.Module:
    """A network for images of `channels` channels (1 or 3) and size×size pixels, freshly initialised."""
    try:
        if name in OWN:
            return OWN[name](classes, channels, size, **options)
        if name.startswith("timm/"):
            return _timm(name.removeprefix("timm/"), classes, channels, size, options)
        return _torchvision(_ALIASES.get(name, name), classes, channels, size, options)
    except TypeError as error:
        raise RecipeError(f"model {name!r} does not take model.options {dict(options)}: {error}") from error


def _resnet18(classes: int, channels: int, size: int, **options: Any) -> nn.Module:
    from .resnet import resnet18_cifar

    return resnet18_cifar(classes, channels, **options)


def _resnet(depth: int) -> Callable[..., nn.Module]:
    def build(classes: int, channels: int, size: int, **options: Any) -> nn.Module:
        from .resnet import resnet_cifar

        return resnet_cifar(depth, classes, channels, **options)

    return build


def _small_cnn(classes: int, channels: int, size: int, **options: Any) -> nn.Module:
    from .cnn import small_cnn

    return small_cnn(classes, channels, **options)


def _vit_small(
    classes: int,
    channels: int,
    size: int,
    *,
    patch: int = 4,
    dim: int = 192,
    depth: int = 6,
    heads: int = 3,
    **more: Any,
) -> nn.Module:
    """torchvision's, with LayerNorm before attention and MLP."""
    from torchvision.models import VisionTransformer

    if size % patch or dim % heads:
        raise RecipeError(f"vit-small: patch {patch} must divide the size {size}, and heads {heads} the dim {dim}")
    model: nn.Module = VisionTransformer(size, patch, depth, heads, dim, 4 * dim, num_classes=classes, **more)
    return with_channels_(model, channels)


OWN: dict[str, Callable[..., nn.Module]] = {
    "cnn": _small_cnn,
    "resnet18-cifar": _resnet18,
    **{f"resnet{depth}-cifar": _resnet(depth) for depth in (20, 32, 44, 56, 110)},
    "vit-small": _vit_small,
}


def _torchvision(name: str, classes: int, channels: int, size: int, options: Mapping[str, Any]) -> nn.Module:
    from torchvision import models

    known = models.list_models(module=models)
    if name not in known:
        raise unknown(name, [*OWN, *_ALIASES, *known], "timm/NAME is any network of timm")
    sized = {"image_size": size} if name.startswith("vit_") else {}
    settings = {"weights": None, "num_classes": classes, **sized, **_PRESET.get(name, {}), **options}
    model: nn.Module = models.get_model(name, **settings)
    return with_channels_(model, channels)


def _timm(name: str, classes: int, channels: int, size: int, options: Mapping[str, Any]) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise MissingExtra("timm", f"model timm/{name}") from error
    if not timm.is_model(name):
        raise unknown(f"timm/{name}", [f"timm/{known}" for known in timm.list_models()], "see timm.list_models()")
    described = timm.get_pretrained_cfg(name)
    sized = {"img_size": size} if described is not None and described.fixed_input_size else {}
    model: nn.Module = timm.create_model(name, num_classes=classes, in_chans=channels, **{**sized, **options})
    return model


def unknown(name: str, known: list[str], hint: str) -> RecipeError:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    guess = f"; did you mean {' or '.join(near)}?" if near else ";"
    return RecipeError(f"no model {name!r}{guess} {hint}")


def with_channels_(model: nn.Module, channels: int) -> nn.Module:
    """The first convolution of a network for RGB made to see grey: its weights for red stay."""
    first = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
    if first.in_channels != channels:
        first.in_channels = channels
        first.weight = nn.Parameter(first.weight.detach()[:, :channels].clone())
    return model
