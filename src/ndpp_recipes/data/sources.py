"""Where labelled images come from: in memory or in files. A source gives uint8 tensors (channels, height, width)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from ..errors import DataError

Array = npt.NDArray[np.uint8]

_MODES = {1: "L", 3: "RGB"}
_DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")


class Source(Protocol):
    """size is that of every image (height, width) where it is known beforehand."""

    size: tuple[int, int] | None

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]: ...


@dataclass(frozen=True)
class ImageSets:
    """What a data set for classification comes to."""

    train: Source
    evaluation: Source
    names: tuple[str, ...]


class ArraySource:
    """Images in memory: (count, height, width) for grey ones, or (count, channels, height, width)."""

    def __init__(self, images: Array, labels: Sequence[int] | npt.NDArray[np.integer], channels: int) -> None:
        pixels = torch.from_numpy(np.require(images, requirements=["C", "W"]))
        self.images = _with_channels(pixels.unsqueeze(1) if pixels.ndim == 3 else pixels, channels)
        self.labels = [int(label) for label in labels]
        self.size: tuple[int, int] | None = (self.images.shape[-2], self.images.shape[-1])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


class FileSource:
    """Image files, decoded when they are asked for."""

    size: tuple[int, int] | None = None

    def __init__(self, files: Sequence[tuple[Path, int]], channels: int) -> None:
        self.files, self.channels = files, channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        return decoded(path, self.channels), label


def decoded(path: Path, channels: int, content: bytes | None = None, record: object = None) -> Tensor:
    """The pixels of an image file, or of one whose bytes are a record of another file."""
    with image_file(path, content, record) as image:
        if image.mode in _DEEP:
            raise DataError(path, f"expected 8 bits a channel; got mode {image.mode}: convert it", record)
        pixels = np.array(image.convert(_MODES[channels]))
    return torch.from_numpy(pixels).reshape(*pixels.shape[:2], channels).permute(2, 0, 1).contiguous()


@contextlib.contextmanager
def image_file(path: Path, content: bytes | None = None, record: object = None) -> Iterator[Image.Image]:
    """The image, decoded; DataError where that fails."""
    try:
        with Image.open(path if content is None else io.BytesIO(content)) as image:
            image.load()
            yield image
    except DataError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        reason = str(error).partition(" <_io")[0]  # Pillow shows the object it read from
        raise DataError(path, f"cannot be read as an image: {reason}", record) from error


def check_labels(labels: npt.NDArray[np.integer], classes: int, path: Path) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        reason = f"label {labels[wrong[0]]} is not in 0..{classes - 1} ({len(wrong)} labels are not)"
        raise DataError(path, reason, int(wrong[0]))


def _with_channels(images: Tensor, channels: int) -> Tensor:
    if images.shape[1] == channels:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1)
    from torchvision.transforms.v2.functional import rgb_to_grayscale

    grey: Tensor = rgb_to_grayscale(images)
    return grey
