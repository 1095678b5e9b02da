"""Labelled images for classification, of whatever format, with augmentation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import v2

from ..config import ImageData
from ..errors import ConfigError, DataError
from .cifar import find_cifar, open_cifar
from .fashion import open_fashion
from .folders import find_folders, open_folders
from .idx import find_idx, open_idx
from .sources import ImageSets, Source
from .tables import find_parquet, find_saved, open_parquet, open_saved

Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """find gives the folder that is of this format, at or below a path."""

    looked_for: str
    find: Callable[[Path], Path | None]
    open: Callable[[Path, ImageData], ImageSets]


# In the order in which "auto" tries them.
FORMATS = {
    "cifar": Format(
        "CIFAR-10 or -100 (data_batch_1..5 and test_batch, or train, test and meta; pickles or .bin)",
        find_cifar,
        lambda folder, data: open_cifar(folder, len(data.mean)),
    ),
    "idx": Format(
        "IDX (train-images-idx3-ubyte and three more, with or without .gz)",
        find_idx,
        lambda folder, data: open_idx(folder, len(data.mean)),
    ),
    "datasets": Format("a data set saved by Hugging Face datasets (dataset_dict.json)", find_saved, open_saved),
    "parquet": Format("parquet (train*.parquet and test*.parquet or validation*.parquet)", find_parquet, open_parquet),
    "folder": Format(
        "folders of images (train/CLASS/*.png|jpg and val or test/CLASS)",
        find_folders,
        lambda folder, data: open_folders(folder, len(data.mean)),
    ),
}


def open_images(data: ImageData) -> tuple[Images, Images, tuple[str, ...]]:
    """Training data, evaluation data, and the names of the classes."""
    if len(data.mean) not in (1, 3) or len(data.std) != len(data.mean):
        raise ConfigError(f"data.mean and data.std: expected 1 value (grey) or 3 each; got {data.mean} and {data.std}")
    sets = open_fashion(len(data.mean)) if "fashion" in (data.path, data.format) else _opened(data)
    train = Images(sets.train, data, training=True, limit=data.train_limit)
    return train, Images(sets.evaluation, data, training=False, limit=data.eval_limit), sets.names


class Images(Dataset[tuple[Tensor, int]]):
    """Normalised float images of one size, augmented in training, with their labels."""

    def __init__(self, source: Source, data: ImageData, *, training: bool, limit: int | None = None) -> None:
        self.source = source
        self.count = len(source) if limit is None else min(limit, len(source))
        self.transforms: Sequence[Transform] = [
            *(() if source.size == (data.size, data.size) and data.augment != "imagenet" else _fit(data, training)),
            *(AUGMENTATIONS[data.augment](data.size) if training else ()),
        ]
        # (x / 255 - mean) / std, as two operations.
        std = torch.tensor(data.std).reshape(-1, 1, 1)
        self.factor = 1 / (255 * std)
        self.shift = -torch.tensor(data.mean).reshape(-1, 1, 1) / std

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.source[index]
        for transform in self.transforms:
            image = transform(image)
        return image.to(torch.float32).mul_(self.factor).add_(self.shift), label


class Crop:
    """A random part of the image in a black border, an eighth of its size wide.

    Not torchvision's: small images come by the thousand, and its checks take longer than all else here.
    """

    def __init__(self, size: int) -> None:
        self.size, self.border = size, size // 8

    def __call__(self, image: Tensor) -> Tensor:
        top, left = random.randint(0, 2 * self.border), random.randint(0, 2 * self.border)
        padded = F.pad(image, (self.border,) * 4)
        return padded[:, top : top + self.size, left : left + self.size]


class Flip:
    """Left and right change sides, half of the time."""

    def __call__(self, image: Tensor) -> Tensor:
        return image.flip(-1) if random.random() < 0.5 else image


# By data.augment: what happens in training to an image, which is of the right size already except for "imagenet".
AUGMENTATIONS: dict[str, Callable[[int], list[Transform]]] = {
    "none": lambda size: [],
    "crop": lambda size: [Crop(size)],
    "flip": lambda size: [Crop(size), Flip()],
    "imagenet": lambda size: [v2.RandomResizedCrop(size), Flip()],
}


def _fit(data: ImageData, training: bool) -> list[Transform]:
    """To the size of the network, without distortion."""
    if data.augment != "imagenet":
        return [v2.Resize(data.size), v2.CenterCrop(data.size)]
    return [] if training else [v2.Resize(round(data.size * 256 / 224)), v2.CenterCrop(data.size)]


def _opened(data: ImageData) -> ImageSets:
    path = Path(data.path)
    if data.format not in ("auto", *FORMATS):
        raise ConfigError(f"data.format: expected one of auto, fashion, {', '.join(FORMATS)}; got {data.format!r}")
    tried = list(FORMATS.values()) if data.format == "auto" else [FORMATS[data.format]]
    looked_for = "; ".join(kind.looked_for for kind in tried)
    if not data.path or not path.is_dir():
        there = "there is a file" if path.is_file() else "there is nothing"
        raise DataError(data.path or "data.path", f"expected a folder with {looked_for}; {there}")
    for kind in tried:
        folder = kind.find(path)
        if folder is not None:
            return kind.open(folder, data)
    names = sorted(x.name for x in path.iterdir())
    there = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    raise DataError(path, f"expected {looked_for}; there are: {there or 'no files'}")
