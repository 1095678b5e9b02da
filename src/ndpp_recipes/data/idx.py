"""The IDX format of MNIST and Fashion-MNIST, compressed or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from ..errors import DataError
from .sources import Array, ArraySource, ImageSets, check_labels

_FOLDERS = (".", "raw", "*/raw")
_UNSIGNED_BYTE = 8


def find_idx(path: Path) -> Path | None:
    """The folder with the four files: the one given, or where torchvision puts them below it."""
    found = (file for folder in _FOLDERS for file in path.glob(f"{folder}/train-images?idx3-ubyte*"))
    return next((file.parent for file in found), None)


def open_idx(folder: Path, channels: int) -> ImageSets:
    train, labels = read_pair(folder, "train")
    test, test_labels = read_pair(folder, "t10k")
    classes = int(labels.max()) + 1
    check_labels(test_labels, classes, _file(folder, "t10k-labels?idx1-ubyte"))
    if train.shape[1:] != test.shape[1:]:
        raise DataError(folder, f"training images are {train.shape[1:]} and test images {test.shape[1:]}")
    names = tuple(str(label) for label in range(classes))
    return ImageSets(ArraySource(train, labels, channels), ArraySource(test, test_labels, channels), names)


def read_pair(folder: Path, part: str) -> tuple[Array, Array]:
    """Images and labels of `train` or `t10k`."""
    file = _file(folder, f"{part}-labels?idx1-ubyte")
    images = read_idx(_file(folder, f"{part}-images?idx3-ubyte"), 3)
    labels = read_idx(file, 1)
    if len(images) != len(labels) or len(labels) == 0:
        raise DataError(file, f"{len(labels)} labels for {len(images)} images")
    return images, labels


def read_idx(path: Path, dimensions: int) -> Array:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(path, f"cannot be read: {error}") from error
    header = 4 + 4 * dimensions
    magic = (0, 0, _UNSIGNED_BYTE, dimensions)
    if tuple(content[:4]) != magic:
        raise DataError(path, f"expected the magic number {bytes(magic).hex()} of IDX; got {content[:4].hex()!r}")
    if len(content) < header:
        raise DataError(path, f"ends within its header of {header} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    size = math.prod(shape)
    if len(content) - header != size:
        raise DataError(path, f"its header says {shape}, {size} bytes; {len(content) - header} follow")
    values: Array = np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()
    return values


def _file(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(f"{pattern}*"))
    if not found:
        raise DataError(folder, f"no file {pattern.replace('?', '-')} or {pattern.replace('?', '-')}.gz")
    return found[0]
