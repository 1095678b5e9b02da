"""Tiny data sets in standard formats, and what every recipe needs to be trained on one in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

QUICK = ["run.precision=fp32", "channels_last=false", "data.workers=0", "rows=64", "block=8", "log_every=1"]


def folders(root: Path) -> Path:
    """train/<class>/*.png and test/<class>/*.png; the class is the colour."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 8), ("test", 4)):
        for number, name in enumerate(("red", "green")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = draw.integers(0, 80, (36, 36, 3), dtype=np.uint8)
                pixels[..., number] += 120
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


def coco(root: Path) -> Path:
    """Bright boxes on dark images, as polygons."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        images, annotations = [], []
        (root / split).mkdir(parents=True)
        for i in range(count):
            pixels = draw.integers(0, 60, (64, 64, 3), dtype=np.uint8)
            x, y = (int(v) for v in draw.integers(4, 30, 2))
            pixels[y : y + 24, x : x + 24] = 220
            Image.fromarray(pixels).save(root / split / f"{i}.png")
            images.append({"id": i, "file_name": f"{i}.png", "width": 64, "height": 64})
            polygon = [x, y, x + 24, y, x + 24, y + 24, x, y + 24]
            annotations.append(
                {"id": i, "image_id": i, "category_id": 7, "bbox": [x, y, 24, 24], "area": 576, "iscrowd": 0}
                | {"segmentation": [polygon]}
            )
        content = {"images": images, "annotations": annotations, "categories": [{"id": 7, "name": "box"}]}
        (root / f"{split}.json").write_text(json.dumps(content))
    return root


def labelled(root: Path) -> Path:
    """Images whose right half is another class."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for i in range(count):
            pixels = draw.integers(0, 80, (48, 64, 3), dtype=np.uint8)
            pixels[:, 32:] += 120
            labels = np.zeros((48, 64), np.uint8)
            labels[:, 32:] = 1
            for folder, image in ((split, pixels), (f"{split}annot", labels)):
                (root / folder).mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(root / folder / f"{i}.png")
    return root


def sentences(root: Path) -> Path:
    root.mkdir(parents=True)
    pairs = [(f"das ist die zahl {i}", f"this is the number {i}") for i in range(40)]
    for split, part in (("train", pairs[:32]), ("valid", pairs[32:])):
        for language, column in (("de", 0), ("en", 1)):
            (root / f"{split}.{language}").write_text("".join(pair[column] + "\n" for pair in part))
    return root


def prose(root: Path) -> Path:
    root.mkdir(parents=True)
    for split, count in (("train", 300), ("valid", 40)):
        (root / f"{split}.txt").write_text("".join(f"the cat {i % 7} sat on the mat {i % 5}\n" for i in range(count)))
    return root


class Tiny(NamedTuple):
    make: Callable[[Path], Path]
    changes: list[str]


_DETECTION = [
    *("train_images=train", "train_annotations=train.json", "eval_images=val", "eval_annotations=val.json"),
    *("sizes=64", "max_size=64", "run.batch_size=2", "model.options.rpn_pre_nms_top_n_train=50", "lr=0.01"),
    *("model.options.rpn_post_nms_top_n_train=20", "model.options.rpn_post_nms_top_n_test=10"),
]
_IMAGES = ["run.batch_size=8", "data.size=32"]

TINY: dict[str, Tiny] = {
    "fashion": Tiny(
        lambda root: Path("fashion"), ["train_limit=32", "eval_limit=16", "run.batch_size=16", "model.options.width=8"]
    ),
    "cifar": Tiny(folders, [*_IMAGES, "model.name=resnet18-cifar", "model.options.width=4"]),
    "imagenet": Tiny(folders, [*_IMAGES, "model.name=resnet18"]),
    "vit": Tiny(folders, [*_IMAGES, "model.name=vit-small", "model.options.depth=1"]),
    "vit-small": Tiny(folders, [*_IMAGES, "model.options.depth=1"]),
    "faster-rcnn": Tiny(coco, [*_DETECTION, "model.name=faster_rcnn_r18"]),
    "mask-rcnn": Tiny(coco, [*_DETECTION, "model.name=mask_rcnn_r18"]),
    "deeplab": Tiny(labelled, ["model.name=deeplabv3_resnet18", "crop=32,32", "run.batch_size=2", "eval_batch_size=2"]),
    "translation": Tiny(sentences, ["model.name=transformer-tiny", "vocabulary=300", "max_tokens=120"]),
    "language": Tiny(prose, ["model.name=gpt-tiny", "vocabulary=280", "data.length=16", "run.batch_size=4"]),
}
