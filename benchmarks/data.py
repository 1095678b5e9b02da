"""Image sets as uint8 arrays, from class folders, JPEG sheets or one .npz file that is easy to carry about.

Class folders: train/<class>/*.png and test/<class>/*.png. Sheets: train_NN.jpg and test_NN.jpg, each 50×50 images of
32×32, beside labels.npz. `pack` writes the .npz; it keeps sheets as they are, since decoded images hardly compress.
"""

from __future__ import annotations

import argparse
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
SPLITS = ("train", "test")
SIDE, TILE = 50, 32  # of a sheet, in images; of an image, in pixels


def load(folder: Path | None, cache: Path | None) -> dict[str, Bytes]:
    """{split}_images (n, 32, 32, 3) and {split}_labels (n,). The cache is read if it exists, and written if not."""
    if cache is not None and cache.exists():
        with np.load(cache) as stored:
            packed = {name: stored[name] for name in stored.files}
    elif folder is None:
        raise FileNotFoundError(f"no data: give --data DIR, or --cache FILE.npz that exists (got {cache})")
    else:
        packed = _sheets(folder) if (folder / "labels.npz").exists() else _folders(folder)
        if cache is not None:
            _write(cache, packed)
    return _decoded(packed)


def part(arrays: dict[str, Bytes], split: str, count: int | None) -> tuple[Bytes, Bytes]:
    """Images and labels of a split; `count` of them, evenly spaced, since sets come sorted by class."""
    images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    n = min(count or len(labels), len(labels))
    index = np.arange(n) * len(labels) // n
    return images[index], labels[index]


def hold_out(arrays: dict[str, Bytes], count: int) -> dict[str, Bytes]:
    """`count` evenly spaced training images as the test split: to choose by, and leave the real one alone."""
    n = len(arrays["train_labels"])
    held = np.zeros(n, bool)
    held[np.arange(count) * n // count] = True
    kept = {f"train_{what}": arrays[f"train_{what}"][~held] for what in ("images", "labels")}
    return kept | {f"test_{what}": arrays[f"train_{what}"][held] for what in ("images", "labels")}


def _folders(root: Path) -> dict[str, Bytes]:
    """Ordered by file name, which is the order of the sheets."""
    from PIL import Image

    packed = {}
    for split in SPLITS:
        classes = sorted(path.name for path in (root / split).iterdir() if path.is_dir())
        files = sorted((root / split).glob("*/*.png"), key=lambda path: (path.name, path.parent.name))
        if not files:
            raise FileNotFoundError(f"no images under {root / split}/<class>/*.png")
        packed[f"{split}_images"] = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in files])
        packed[f"{split}_labels"] = np.array([classes.index(path.parent.name) for path in files], np.uint8)
    return packed


def _sheets(root: Path) -> dict[str, Bytes]:
    packed = {path.stem: np.frombuffer(path.read_bytes(), np.uint8) for path in sorted(root.glob("*_*.jpg"))}
    with np.load(root / "labels.npz") as stored:
        # Folders sort classes by name: the same numbers from either layout.
        number = np.argsort(np.argsort(stored["classes"]))
        return packed | {f"{split}_labels": number[stored[split]].astype(np.uint8) for split in SPLITS}


def _decoded(packed: dict[str, Bytes]) -> dict[str, Bytes]:
    decoded: dict[str, Bytes] = {}
    for split in SPLITS:
        images, labels = packed.get(f"{split}_images"), packed[f"{split}_labels"]
        if images is None:
            sheets = sorted(name for name in packed if name.startswith(split) and name[-1].isdigit())
            images = _tiles(packed[name] for name in sheets)
        if len(images) != len(labels):
            raise ValueError(f"{split}: {len(images)} images and {len(labels)} labels")
        decoded |= {f"{split}_images": images, f"{split}_labels": labels}
    return decoded


def _tiles(sheets: Iterable[Bytes]) -> Bytes:
    from PIL import Image

    decoded = (np.asarray(Image.open(io.BytesIO(sheet.tobytes()))) for sheet in sheets)
    grids = (sheet.reshape(SIDE, TILE, SIDE, TILE, 3).transpose(0, 2, 1, 3, 4) for sheet in decoded)
    return np.concatenate([grid.reshape(-1, TILE, TILE, 3) for grid in grids])


def _write(cache: Path, packed: dict[str, Bytes]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_name(f"{os.getpid()}-{cache.name}")
    arrays: dict[str, Any] = dict(packed)
    np.savez_compressed(partial, **arrays)
    partial.replace(cache)  # several processes may write the same cache


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder with class folders or sheets")
    parser.add_argument("--cache", type=Path, required=True, help="the .npz file to write")


def main(options: argparse.Namespace) -> None:
    options.cache.unlink(missing_ok=True)
    for name, array in load(options.data, options.cache).items():
        print(f"{name}: {array.dtype} {array.shape}")
    print(f"{options.cache}: {options.cache.stat().st_size / 2**20:.1f} MiB")
