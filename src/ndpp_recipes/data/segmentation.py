"""Images with a class for every pixel: Cityscapes, or folders of images and of labels."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize

from ..config import SegmentationData
from ..errors import ConfigError, DataError
from .folders import SUFFIXES
from .sources import Array, decoded, image_file

CITYSCAPES = (
    *("road", "sidewalk", "building", "wall", "fence", "pole", "traffic light", "traffic sign", "vegetation"),
    *("terrain", "sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
# Which of the label ids are trained, in the order of the train ids.
_TRAINED = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_LABEL_FILES = ("_gtFine_labelTrainIds.png", "_gtFine_labelIds.png")
_LABEL_MODES = ("L", "P", "1")

Pair = tuple[Path, Path]
Item = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Pairs:
    """Files of images and labels, and the names of the classes where the layout knows them."""

    train: list[Pair]
    evaluation: list[Pair]
    names: tuple[str, ...] = ()


def open_segmentation(data: SegmentationData) -> tuple[Pixels, Pixels, tuple[str, ...]]:
    """Training data, evaluation data, and the names of the classes (numbers where they have none)."""
    if len(data.mean) not in (1, 3) or len(data.std) != len(data.mean):
        raise ConfigError(f"data.mean and data.std: expected 1 value (grey) or 3 each; got {data.mean} and {data.std}")
    if min(data.crop) < 1 or data.classes < 0 or not 0 <= data.ignore <= 255:
        raise ConfigError(
            "data.crop, data.classes, data.ignore: expected sizes of at least 1, a number of classes (0: found in the "
            f"labels) and a grey value; got {data.crop}, {data.classes}, {data.ignore}"
        )
    pairs = _pairs(data)
    classes = data.classes or len(pairs.names) or _count(pairs.train + pairs.evaluation, data)
    names = pairs.names if len(pairs.names) == classes else tuple(str(label) for label in range(classes))
    train = Pixels(pairs.train[: data.train_limit], data, classes, training=True)
    return train, Pixels(pairs.evaluation[: data.eval_limit], data, classes, training=False), names


class Pixels(Dataset[Item]):
    """Normalised images (channels, height, width) and labels (height, width); of the size of the crop in training."""

    def __init__(self, files: Sequence[Pair], data: SegmentationData, classes: int, *, training: bool) -> None:
        self.files, self.data, self.classes, self.training = files, data, classes, training
        self.mean = torch.tensor(data.mean).reshape(-1, 1, 1)
        self.std = torch.tensor(data.std).reshape(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Item:
        image_file, label_file = self.files[index]
        image = decoded(image_file, len(self.data.mean))
        labels = torch.from_numpy(_labels(label_file, self.data.ignore))
        if labels.shape != image.shape[1:]:
            have, want = " × ".join(map(str, labels.shape)), " × ".join(map(str, image.shape[1:]))
            raise DataError(label_file, f"expected the image's {want} pixels (height × width); got {have}", image_file)
        self._check(labels, label_file)
        if self.training:
            image, labels = self._augmented(image, labels)
        image, labels = (image.float() / 255 - self.mean) / self.std, labels.long()
        return padded(image, labels, self.data.crop, self.data.ignore) if self.training else (image, labels)

    def _check(self, labels: Tensor, file: Path) -> None:
        seen = torch.bincount(labels.flatten(), minlength=256).nonzero().flatten().tolist()
        wrong = [value for value in seen if value >= self.classes and value != self.data.ignore]
        if wrong:
            expected = f"labels in 0..{self.classes - 1} or {self.data.ignore} (data.ignore)"
            raise DataError(file, f"expected {expected}; got {', '.join(map(str, wrong))}")

    def _augmented(self, image: Tensor, labels: Tensor) -> Item:
        """At a random scale, as much of it as the crop holds, from anywhere, and mirrored half of the time."""
        scale = random.uniform(*self.data.scales)
        size = [max(1, round(side * scale)) for side in labels.shape]
        image = resize(image, size, antialias=True)
        labels = resize(labels[None], size, interpolation=InterpolationMode.NEAREST_EXACT)[0]
        height, width = (min(have, crop) for have, crop in zip(size, self.data.crop, strict=True))
        top, left = random.randint(0, size[0] - height), random.randint(0, size[1] - width)
        image = image[:, top : top + height, left : left + width]
        labels = labels[top : top + height, left : left + width]
        if self.data.flip and random.random() < 0.5:
            image, labels = image.flip(-1), labels.flip(-1)
        return image, labels


def padded(image: Tensor, labels: Tensor, size: Sequence[int], ignore: int) -> Item:
    """At least of a size (height, width): a normalised image with its mean, labels with `ignore`."""
    bottom, right = (max(0, want - have) for want, have in zip(size, labels.shape, strict=True))
    return F.pad(image, (0, right, 0, bottom)), F.pad(labels, (0, right, 0, bottom), value=ignore)


def _labels(file: Path, ignore: int) -> Array:
    pixels = _indices(file)
    if not file.name.endswith(_LABEL_FILES):
        return pixels
    table = np.arange(256, dtype=np.uint8)
    if file.name.endswith(_LABEL_FILES[1]):
        table[:] = 255
        table[list(_TRAINED)] = np.arange(len(_TRAINED))
    table[table == 255] = ignore
    mapped: Array = table[pixels]
    return mapped


def _indices(file: Path) -> Array:
    with image_file(file) as image:
        if image.mode not in _LABEL_MODES:
            raise DataError(file, f"expected labels as an 8-bit grey or indexed image; got mode {image.mode}")
        return np.array(image, dtype=np.uint8)


def _count(pairs: list[Pair], data: SegmentationData) -> int:
    """One more than the largest label. A file that cannot be read is reported when its turn comes."""
    largest = -1
    for _, file in pairs:
        try:
            values = np.flatnonzero(np.bincount(_labels(file, data.ignore).ravel()))
        except DataError:
            continue
        largest = max([largest, *values[values != data.ignore].tolist()])
    if largest < 0:
        raise DataError(pairs[0][1].parent, f"no label other than {data.ignore} (data.ignore) in {len(pairs)} files")
    return largest + 1


def _pairs(data: SegmentationData) -> Pairs:
    root = Path(data.path)
    if data.format not in ("auto", "cityscapes", "folder"):
        raise ConfigError(f"data.format: expected one of auto, cityscapes, folder; got {data.format!r}")
    if data.format == "cityscapes" or (data.format == "auto" and (root / "leftImg8bit").is_dir()):
        return Pairs(_cityscapes(root, "train"), _cityscapes(root, "val"), CITYSCAPES)
    folders = (data.train_images, data.train_labels, data.eval_images, data.eval_labels)
    missing = [name for name in folders if not (root / name).is_dir()]
    if not data.path or missing:
        expected = "leftImg8bit and gtFine (Cityscapes), or the folders that data.train_images and so on name"
        raise DataError(data.path or "data.path", f"expected {expected}; there is no {', '.join(missing)}")
    train, evaluation = (_same_stem(root / folders[i], root / folders[i + 1]) for i in (0, 2))
    return Pairs(train, evaluation)


def _cityscapes(root: Path, part: str) -> list[Pair]:
    images = sorted((root / "leftImg8bit" / part).glob("*/*_leftImg8bit.png"))
    found: list[tuple[Path, Path | None]] = []
    for image in images:
        stem = image.name.removesuffix("_leftImg8bit.png")
        files = (root / "gtFine" / part / image.parent.name / f"{stem}{ending}" for ending in _LABEL_FILES)
        found.append((image, next((file for file in files if file.is_file()), None)))
    return _complete(found, root / "leftImg8bit" / part, f"gtFine/{part}/CITY/*{_LABEL_FILES[0]} or *{_LABEL_FILES[1]}")


def _same_stem(images: Path, labels: Path) -> list[Pair]:
    files = {file.stem: file for file in labels.iterdir() if file.suffix.lower() in SUFFIXES}
    found = [(file, files.get(file.stem)) for file in sorted(images.iterdir()) if file.suffix.lower() in SUFFIXES]
    return _complete(found, images, f"{labels.name}/SAME-NAME.png")


def _complete(found: list[tuple[Path, Path | None]], folder: Path, expected: str) -> list[Pair]:
    missing = [image for image, label in found if label is None]
    if not found:
        raise DataError(folder, "no images")
    if missing:
        raise DataError(folder, f"{len(missing)} of {len(found)} images have no labels ({expected})", missing[0].name)
    return [(image, label) for image, label in found if label is not None]
