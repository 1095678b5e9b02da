"""A part of Fashion-MNIST that comes along: 10,000 training and 2,000 test images, the first of each class.

`python -m ndpp_recipes.data.fashion FOLDER` made the file, from the four IDX files of the data set.
"""

from __future__ import annotations

import io
import lzma
import sys
from importlib import resources
from pathlib import Path

import numpy as np

from .idx import read_pair
from .sources import Array, ArraySource, ImageSets

NAMES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_FILE = resources.files(__package__) / "fashion_mnist" / "part.npz.xz"


def open_fashion(channels: int) -> ImageSets:
    train, labels, test, test_labels = load_fashion()
    return ImageSets(ArraySource(train, labels, channels), ArraySource(test, test_labels, channels), NAMES)


def load_fashion() -> tuple[Array, Array, Array, Array]:
    """Images (count, 28, 28) and labels for training, then the same for testing."""
    with np.load(io.BytesIO(lzma.decompress(_FILE.read_bytes()))) as arrays:
        return arrays["train"], arrays["train_labels"], arrays["test"], arrays["test_labels"]


def pack_fashion(folder: Path, train_each: int = 1000, test_each: int = 200) -> bytes:
    """The content of the embedded file."""
    arrays = {}
    for part, name, each in (("train", "train", train_each), ("t10k", "test", test_each)):
        images, labels = read_pair(folder, part)
        # In the order of the files, which is mixed, so that the first so many records hold all classes.
        kept = np.sort(np.concatenate([np.flatnonzero(labels == c)[:each] for c in range(len(NAMES))]))
        arrays[name], arrays[f"{name}_labels"] = images[kept], labels[kept]
    plain = io.BytesIO()
    np.savez(plain, **arrays)
    return lzma.compress(plain.getvalue(), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    Path(str(_FILE)).write_bytes(pack_fashion(Path(sys.argv[1])))
