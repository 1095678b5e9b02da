"""CIFAR-10 and CIFAR-100 as their authors distribute them: pickles for Python, or binary files."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .sources import Array, ArraySource, ImageSets, check_labels

_PIXELS = 3 * 32 * 32
_FIVE = tuple(f"data_batch_{i}" for i in range(1, 6))


@dataclass(frozen=True)
class Layout:
    """labels: the key in a pickle, or how many bytes of labels (the last of them is used) begin a binary record."""

    folder: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels: bytes | int
    names: bytes = b""


LAYOUTS = (
    Layout("cifar-10-batches-py", _FIVE, "test_batch", "batches.meta", b"labels", b"label_names"),
    Layout("cifar-100-python", ("train",), "test", "meta", b"fine_labels", b"fine_label_names"),
    Layout("cifar-10-batches-bin", tuple(f"{name}.bin" for name in _FIVE), "test_batch.bin", "batches.meta.txt", 1),
    Layout("cifar-100-binary", ("train.bin",), "test.bin", "fine_label_names.txt", 2),
)


def find_cifar(path: Path) -> Path | None:
    return next((folder for folder in (path, *(path / x.folder for x in LAYOUTS)) if _layout(folder)), None)


def open_cifar(folder: Path, channels: int) -> ImageSets:
    layout = _layout(folder)
    assert layout is not None  # find_cifar gave the folder
    missing = [name for name in (*layout.train, layout.test, layout.meta) if not (folder / name).is_file()]
    if missing:
        raise DataError(folder, f"{', '.join(missing)} missing, as of {layout.folder}")
    names = _names(folder / layout.meta, layout)
    parts = [_records(folder / name, layout, len(names)) for name in layout.train]
    train = ArraySource(np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), channels)
    return ImageSets(train, ArraySource(*_records(folder / layout.test, layout, len(names)), channels), names)


def _layout(folder: Path) -> Layout | None:
    """By the files that name the classes and hold the test images: `test` and `train` alone may be folders."""
    return next((x for x in LAYOUTS if (folder / x.meta).is_file() or (folder / x.test).is_file()), None)


def _names(path: Path, layout: Layout) -> tuple[str, ...]:
    if isinstance(layout.labels, int):
        try:
            return tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
        except UnicodeDecodeError as error:
            raise DataError(path, f"expected names of classes in UTF-8, one a line: {error}") from error
    names = unpickled(path).get(layout.names)
    if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
        raise DataError(path, f"expected a list of names under {layout.names!r}")
    return tuple(name.decode() for name in names)


def _records(path: Path, layout: Layout, classes: int) -> tuple[Array, npt.NDArray[np.integer]]:
    read = _binary if isinstance(layout.labels, int) else _pickled
    pixels, labels = read(path, layout.labels)
    if len(labels) == 0:
        raise DataError(path, "has no records")
    check_labels(labels, classes, path)
    return pixels.reshape(-1, 3, 32, 32), labels


def _binary(path: Path, label_bytes: Any) -> tuple[Array, npt.NDArray[np.integer]]:
    content = np.fromfile(path, np.uint8)
    size = label_bytes + _PIXELS
    if len(content) % size:
        raise DataError(path, f"{len(content)} bytes are no multiple of a record's {size}: truncated?")
    records = content.reshape(-1, size)
    return records[:, label_bytes:], records[:, label_bytes - 1].astype(np.int64)


def _pickled(path: Path, key: Any) -> tuple[Array, npt.NDArray[np.integer]]:
    content = unpickled(path)
    pixels, labels = content.get(b"data"), np.asarray(content.get(key, ()))
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_PIXELS,):
        raise DataError(path, f"expected an array (count, {_PIXELS}) of uint8 under b'data'")
    if labels.shape != (len(pixels),) or (len(labels) and labels.dtype.kind not in "iu"):
        raise DataError(path, f"expected {len(pixels)} integers under {key!r}, one an image; got {labels.size} values")
    return pixels, labels


class _Unpickler(pickle.Unpickler):
    """Arrays and builtin values only: a pickle from elsewhere could run anything."""

    _ALLOWED = frozenset(
        {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        | {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only numpy arrays are admitted")
        return super().find_class(module, name)


def unpickled(path: Path) -> dict[bytes, Any]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises nearly anything
        raise DataError(path, f"refused or unreadable as a pickle: {error}") from error
    if not isinstance(content, dict):
        raise DataError(path, f"expected a dictionary; got {type(content).__name__}")
    return content
