"""The recipes: functions that return a complete configuration for a normalisation, and the paper's presets of them."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ndpp import Settings
from ndpp.settings import PRESETS as PAPER

from .config import (
    NORMS,
    Config,
    DetectionData,
    ImageData,
    LanguageData,
    ModelConfig,
    NormConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    SegmentationData,
    TranslationData,
)
from .errors import ConfigError

OURS = ("ndpp", "nd")

RECIPES: dict[str, Callable[[str], Config]] = {}


def _recipe(function: Callable[[str], Config]) -> Callable[[str], Config]:
    RECIPES[function.__name__.replace("_", "-")] = function
    return function


def _norm(name: str, settings: Settings) -> NormConfig:
    """With statistics of all ranks, as in the paper: a few images on each are enough then."""
    return NormConfig(name=name, settings=settings.replace(sync=True))  # type: ignore[arg-type]


@_recipe
def fashion(norm: str) -> Config:
    """Clothes in 28×28 grey pixels: the small network of `ndpp race`, on the embedded part of Fashion-MNIST.

    Quick on a CPU. Learning rates are the best of 0.05, 0.1, 0.2 and 0.4 for BatchNorm (82.6 % in the end) and of 0.05,
    0.1 and 0.2 for ND++ (87.9 %), one seed each; other normalisations have BatchNorm's.
    """
    return Config(
        recipe="fashion",
        task="classification",
        model=ModelConfig(name="cnn"),
        data=ImageData(path="fashion", size=28, augment="crop", mean=(0.286,), std=(0.353,), workers=0),
        norm=_norm(norm, Settings(scale="l1", rows=512, block=16)),
        optimizer=OptimizerConfig(lr=0.2 if norm in OURS else 0.1, weight_decay=5e-4),
        run=RunConfig(epochs=8, batch_size=256, eval_batch_size=500, eval_every=20, save_every=39),
    )


@_recipe
def cifar(norm: str) -> Config:
    """32×32 images, as CIFAR-10 and -100: ResNet-18 with a 3×3 stem, or resnet20/56/110-cifar, or any other network.

    The paper trains ResNet-110 on CIFAR-100 in 80 epochs with ND++ to 74.74 %, Switchable Whitening in 160 to 73.52 %.
    Baselines warm up for an epoch of CIFAR (200 steps); ND++ and ND do not.
    """
    return Config(
        recipe="cifar",
        task="classification",
        model=ModelConfig(name="resnet18-cifar"),
        data=ImageData(size=32, augment="flip", mean=(0.507, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
        norm=_norm(norm, Settings(scale="l1")),
        optimizer=OptimizerConfig(lr=0.1, weight_decay=5e-4),
        schedule=ScheduleConfig(warmup=0 if norm in OURS else 200),
        run=RunConfig(epochs=30, precision="bf16", channels_last=True, eval_batch_size=1000),
    )


@_recipe
def imagenet(norm: str) -> Config:
    """Photographs at 224×224, in folders as ImageNet's: ResNet-50, VGG-11, DenseNet-121, any torchvision or timm name.

    ImageNet, 90 epochs, top-1 in the paper: VGG-11 72.24 (SyncBN 71.11), ResNet-50 77.95 (76.25), ResNet-101 79.40
    (77.37), DenseNet-121 76.11 (74.65).
    """
    return Config(
        recipe="imagenet",
        task="classification",
        model=ModelConfig(name="resnet50"),
        data=ImageData(workers=8),
        norm=_norm(norm, Settings(scale="l1")),
        optimizer=OptimizerConfig(lr=0.1, weight_decay=1e-4),
        schedule=ScheduleConfig(warmup=0 if norm in OURS else 1000),
        run=RunConfig(epochs=90, batch_size=256, precision="bf16", channels_last=True),
    )


@_recipe
def vit(norm: str) -> Config:
    """A vision transformer at 224×224: ViT-B/16, or any other.

    CIFAR-10 from scratch, 10,000 steps of SGD at batch 512 in the paper: 80 % with ND++, 70 % with LayerNorm.
    """
    return Config(
        recipe="vit",
        task="classification",
        model=ModelConfig(name="vit_b_16"),
        data=ImageData(augment="imagenet", workers=8),
        norm=_norm(norm, Settings(scale="standardize")),
        optimizer=OptimizerConfig(lr=0.1 if norm in OURS else 0.03, weight_decay=1e-4),
        schedule=ScheduleConfig(warmup=0 if norm in OURS else 500),
        run=RunConfig(steps=10_000, batch_size=512, clip=1.0, precision="bf16", eval_every=500),
    )


@_recipe
def vit_small(norm: str) -> Config:
    """A small vision transformer for 32×32 images, in patches of 4, trained with AdamW where LayerNorm is used."""
    ours = norm in OURS
    return Config(
        recipe="vit-small",
        task="classification",
        model=ModelConfig(name="vit-small"),
        data=ImageData(size=32, augment="flip", mean=(0.507, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762)),
        norm=_norm(norm, Settings(scale="standardize")),
        optimizer=OptimizerConfig(lr=0.1, weight_decay=1e-4)
        if ours
        else OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.05, decay_vectors=False),
        schedule=ScheduleConfig(warmup=0 if ours else 500),
        run=RunConfig(epochs=30, precision="bf16", clip=1.0, eval_batch_size=1000),
    )


def _detector(recipe: str, model: str, norm: str) -> Config:
    ours = norm in OURS
    return Config(
        recipe=recipe,
        task="detection",
        model=ModelConfig(name=model),
        data=DetectionData(sizes=(800,), max_size=1333),
        norm=_norm(norm, Settings(scale="l1")),
        optimizer=OptimizerConfig(lr=0.1 if ours else 0.02, weight_decay=1e-4),
        schedule=ScheduleConfig(name="multistep", milestones=(2 / 3, 11 / 12), warmup=0 if ours else 500),
        run=RunConfig(epochs=12, batch_size=16, precision="bf16"),
    )


@_recipe
def faster_rcnn(norm: str) -> Config:
    """Boxes: Faster R-CNN with a ResNet-FPN, on COCO json.

    COCO box AP in the paper (R50, fine-tuned, MLPerf implementation): ND++ 37.37, frozen BN 36.35, GN 35.9;
    R101 (Detectron2): 43.24 against 42.0.
    """
    return _detector("faster-rcnn", "faster_rcnn_r50", norm)


@_recipe
def mask_rcnn(norm: str) -> Config:
    """Boxes and masks: Mask R-CNN with a ResNet-FPN, on COCO json; every layer decorrelates, heads included.

    COCO box / mask AP in the paper (R50, MLPerf): ND++ 38.36 / 35.07, frozen BN 37.14 / 33.97, GN 36.32 / 33.52. From
    scratch at learning rate 0.1: ND++ 38.86 / 35.56, GN 35.21 / 33.66. At batch 128 / 256 / 512: 38.61 / 38.40 / 37.45.
    """
    return _detector("mask-rcnn", "mask_rcnn_r50", norm)


@_recipe
def deeplab(norm: str) -> Config:
    """Semantic segmentation: DeepLabv3 with its ASPP, on Cityscapes or folders of images and labels.

    Cityscapes mIoU in the paper, 200 epochs: from scratch 72.69 (SyncBN 69.30), fine-tuned 77.50 (75.70), R101 79.23
    (77.28). Polynomial decay 0.9; learning rate 0.1 for ND++ and 0.01 for SyncBN were the best.
    """
    return Config(
        recipe="deeplab",
        task="segmentation",
        model=ModelConfig(name="deeplabv3_resnet50"),
        data=SegmentationData(),
        norm=_norm(norm, Settings(scale="l1")),
        optimizer=OptimizerConfig(lr=0.1 if norm in OURS else 0.01, weight_decay=1e-4),
        schedule=ScheduleConfig(name="polynomial", power=0.9),
        run=RunConfig(epochs=200, batch_size=24, eval_batch_size=4, precision="bf16"),
    )


@_recipe
def translation(norm: str) -> Config:
    """Translation: an encoder-decoder Transformer (6+6 layers, 512/1024, 4 heads) on parallel text, shared BPE.

    IWSLT14 German to English BLEU in the paper after 20,000 steps: ND++ 35.9 with cosine decay and no warm-up,
    LayerNorm 35.2 with inverse-square-root decay after 4,000 steps of warm-up.
    """
    ours = norm in OURS
    return Config(
        recipe="translation",
        task="translation",
        model=ModelConfig(name="transformer-iwslt"),
        data=TranslationData(),
        norm=_norm(norm, Settings(scale="standardize")),
        optimizer=OptimizerConfig(name="adamw", lr=5e-4, weight_decay=1e-4, betas=(0.9, 0.98), decay_vectors=False),
        schedule=ScheduleConfig() if ours else ScheduleConfig(name="inverse-sqrt", warmup=4000),
        run=RunConfig(steps=20_000, batch_size=8192, label_smoothing=0.1, precision="bf16", clip=1.0, eval_every=1000),
    )


@_recipe
def language(norm: str) -> Config:
    """A language model: a decoder-only Transformer on plain text, its perplexity per token.

    WikiText-103 in the paper: ND++ 29.54 with cosine decay and no warm-up, LayerNorm 31.48 with inverse-square-root
    decay after 4,000 steps of warm-up.
    """
    ours = norm in OURS
    return Config(
        recipe="language",
        task="language",
        model=ModelConfig(name="transformer-lm"),
        data=LanguageData(),
        norm=_norm(norm, Settings(scale="standardize")),
        optimizer=OptimizerConfig(name="adamw", lr=5e-4, weight_decay=0.01, betas=(0.9, 0.98), decay_vectors=False),
        schedule=ScheduleConfig() if ours else ScheduleConfig(name="inverse-sqrt", warmup=4000),
        run=RunConfig(steps=20_000, batch_size=64, precision="bf16", clip=1.0, eval_every=1000),
    )


@dataclass(frozen=True)
class Preset:
    """A recipe with the paper's numbers: changes for every normalisation, and more of them for ndpp and nd."""

    recipe: str
    about: str
    changes: Mapping[str, Any]
    ours: Mapping[str, Any]


_CLASSIFICATION = PAPER["classification"].replace(scale="l1")  # "the complete version" of the supplement
_IMAGENET = {"run.batch_size": 2048, "run.epochs": 90, "schedule.name": "cosine"}
LR1 = {"optimizer.lr": 1.0, "optimizer.momentum": 0.0}


def _settings(settings: Settings) -> dict[str, Any]:
    names = ("scale", "scale_positions", "features", "shared", "solver", "steps", "eps", "rows", "stride")
    return {f"norm.settings.{name}": getattr(settings, name) for name in names}


def _classifier(model: str, about: str, decays: tuple[float, float]) -> dict[str, Preset]:
    """Weight decays of the baseline and of ND++ (supplement: 1e-4/5e-4/5e-4 and 5e-4/1e-3/1e-3).

    The rate is not in the paper: 0.1 for a batch of 256, in proportion.
    """
    base = {**_IMAGENET, "model.name": model, "optimizer.weight_decay": decays[0], "schedule.warmup": 0}
    ours = {**_settings(_CLASSIFICATION), "optimizer.weight_decay": decays[1]}
    name = f"paper-{model}"
    return {
        name: Preset("imagenet", f"{about}, batch 2048, 90 epochs, cosine", {**base, "optimizer.lr": 0.8}, ours),
        f"{name}-lr1": Preset("imagenet", f"{about}, learning rate 1.0 without momentum", {**base, **LR1}, ours),
    }


def _mask_rcnn(suffix: str, about: str, changes: Mapping[str, Any]) -> dict[str, Preset]:
    ours = _settings(PAPER["detection"])
    return {f"paper-mask-rcnn{suffix}": Preset("mask-rcnn", about, {"schedule.warmup": 0, **changes}, ours)}


def _large(batch: int, decay: float) -> dict[str, Preset]:
    changes = {"run.batch_size": batch, "optimizer.weight_decay": decay, "optimizer.lr": 0.1}
    return _mask_rcnn(f"-{batch}", f"fine-tuned at batch {batch} without warm-up", changes)


_DEEPLAB = {"run.epochs": 200, "run.batch_size": 24, "optimizer.weight_decay": 1e-4}

PRESETS: dict[str, Preset] = {
    **_classifier("vgg11", "VGG-11", (1e-4, 5e-4)),
    **_classifier("resnet50", "ResNet-50", (5e-4, 1e-3)),
    **_classifier("resnet101", "ResNet-101", (5e-4, 1e-3)),
    **_classifier("densenet121", "DenseNet-121", (5e-4, 1e-3)),
    "paper-resnet110": Preset(
        "cifar",
        "ResNet-110 on CIFAR-100, 80 epochs",
        {"model.name": "resnet110-cifar", "run.epochs": 80, "run.batch_size": 128},
        _settings(_CLASSIFICATION),
    ),
    **_mask_rcnn("", "fine-tuned for 12 epochs (give model.weights)", {"optimizer.lr": 0.1}),
    **_mask_rcnn(
        "-scratch", "from scratch at learning rate 0.1, 37 epochs (3x)", {"optimizer.lr": 0.1, "run.epochs": 37}
    ),
    **_mask_rcnn("-lr1", "learning rate 1.0 without momentum", LR1),
    **_large(128, 2.5e-4),
    **_large(256, 5e-4),
    **_large(512, 1e-3),
    "paper-deeplab": Preset(
        "deeplab", "fine-tuned for 200 epochs (give model.weights)", _DEEPLAB, _settings(PAPER["segmentation"])
    ),
    "paper-deeplab-scratch": Preset("deeplab", "from scratch, 200 epochs", _DEEPLAB, _settings(PAPER["segmentation"])),
    "paper-deeplab-lr1": Preset(
        "deeplab", "from scratch at lr 1.0", {**_DEEPLAB, **LR1}, _settings(PAPER["segmentation"])
    ),
    "paper-vit": Preset(
        "vit",
        "ViT-B/16 on CIFAR at 224×224, 10,000 steps",
        {"run.steps": 10_000, "run.batch_size": 512, "optimizer.lr": 0.1},
        _settings(PAPER["transformer"]),
    ),
    "paper-translation": Preset(
        "translation",
        "IWSLT14, 20,000 steps of 8 × 4,096 tokens (accumulated; on 8 ranks set run.accumulate=1)",
        {"run.steps": 20_000, "data.max_tokens": 4096, "run.accumulate": 8},
        _settings(PAPER["transformer"]),
    ),
    "paper-language": Preset(
        "language",
        "WikiText-103 (the paper does not say for how many steps)",
        {},
        _settings(PAPER["transformer"]),
    ),
}


def recipe(
    name: str, *, norm: str = "ndpp", data: str | None = None, changes: Mapping[str, Any] | None = None
) -> Config:
    """The configuration of a recipe or preset, with changes: ``{"optimizer.lr": 1.0}``."""
    fixed = sorted({"norm.name", "task", "recipe"} & {*(changes or {})})
    if fixed:
        raise ConfigError(f"{fixed[0]} cannot be set: schedule and data follow it; choose a recipe and --norm instead")
    if norm not in NORMS:
        raise ConfigError(f"no normalisation {norm!r}{_nearest(norm, NORMS)}; there are {', '.join(NORMS)}")
    preset = PRESETS.get(name)
    base = preset.recipe if preset is not None else name
    if base not in RECIPES:
        raise ConfigError(f"no recipe {name!r}{_nearest(name, [*RECIPES, *PRESETS])}; `ndpp recipes` lists them")
    config = RECIPES[base](norm)
    if preset is not None:
        config = config.changed({**preset.changes, **(preset.ours if norm in OURS else {})})
        config = config.changed({"recipe": name})
    if data is not None:
        config = config.changed({"data.path": data})
    return config.changed(dict(changes or {}))


def card(name: str) -> str:
    """What a recipe or preset is, and what the paper got with it."""
    preset = PRESETS.get(name)
    text = inspect.cleandoc(RECIPES[preset.recipe if preset else name].__doc__ or "")
    return text if preset is None else f"{preset.recipe}: {preset.about}.\n\n{text}"


def _nearest(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
