"""Images in folders, one for each class, as ImageNet's: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

from pathlib import Path

from ..errors import DataError
from .sources import FileSource, ImageSets

EVALUATION = ("val", "valid", "validation", "test")  # the first that is there; ImageNet's test has no labels
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def find_folders(path: Path) -> Path | None:
    return path if (path / "train").is_dir() else None


def open_folders(path: Path, channels: int) -> ImageSets:
    evaluation = next((path / name for name in EVALUATION if (path / name).is_dir()), None)
    if evaluation is None:
        raise DataError(path, f"has train/, but none of {', '.join(f'{name}/' for name in EVALUATION)}")
    names, others = _classes(path / "train"), _classes(evaluation)
    if names != others:
        alone = sorted(set(names) ^ set(others))
        reason = f"classes differ from those of train/: {_listed(alone)} in one of them only"
        raise DataError(evaluation, reason)
    train, held_out = (FileSource(_files(folder, names), channels) for folder in (path / "train", evaluation))
    return ImageSets(train, held_out, names)


def _classes(folder: Path) -> tuple[str, ...]:
    names = tuple(sorted(x.name for x in folder.iterdir() if x.is_dir() and not x.name.startswith(".")))
    if not names:
        raise DataError(folder, "no classes: expected a folder of images for each")
    return names


def _files(folder: Path, names: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Class by class in turn, so that the first so many records hold all classes."""
    found = []
    for label, name in enumerate(names):
        files = sorted(x for x in (folder / name).rglob("*") if x.suffix.lower() in SUFFIXES and x.is_file())
        if not files:
            raise DataError(folder / name, f"no images: expected files ending in {', '.join(SUFFIXES)}")
        found += [(position, label, file) for position, file in enumerate(files)]
    return [(file, label) for _, label, file in sorted(found)]


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
