"""Images in tables: parquet files, or a data set that Hugging Face `datasets` saved to disk."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..config import ImageData
from ..errors import DataError, MissingExtra
from .folders import EVALUATION
from .sources import ImageSets, check_labels, decoded


class TableSource:
    """Rows of an Arrow table; the images are encoded files, decoded when they are asked for."""

    size: tuple[int, int] | None = None

    def __init__(self, images: Any, labels: list[int], path: Path, channels: int) -> None:
        self.images, self.labels, self.path, self.channels = images, labels, path, channels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        value = self.images[index].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise DataError(self.path, f"expected the bytes of an image; got {type(content).__name__}", index)
        return decoded(self.path, self.channels, content, index), self.labels[index]


def find_saved(path: Path) -> Path | None:
    return path if (path / "dataset_dict.json").is_file() else None


def find_parquet(path: Path) -> Path | None:
    return next((x for x in (path, path / "data") if _parts(x, "train")), None)


def _parts(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}[-._0-9]*parquet"))


def open_saved(path: Path, data: ImageData) -> ImageSets:
    datasets = _library("datasets")
    try:
        splits = datasets.load_from_disk(str(path))
        tables = {name: split.with_format("arrow")[:] for name, split in splits.items()}
    except Exception as error:  # several libraries take part
        raise DataError(path, f"cannot be read as a saved data set: {error}") from error
    return _opened({name: (path / name, table) for name, table in tables.items()}, path, data)


def open_parquet(folder: Path, data: ImageData) -> ImageSets:
    files = {name: _parts(folder, name) for name in ("train", *EVALUATION)}
    tables = {name: (_together(found), _read(found, data)) for name, found in files.items() if found}
    return _opened(tables, folder, data)


def _together(files: list[Path]) -> Path:
    """What errors call them: rows are counted over all parts."""
    return files[0] if len(files) == 1 else files[0].with_name(f"{files[0].name} … {files[-1].name}")


def _read(files: list[Path], data: ImageData) -> Any:
    parquet, arrow = _library("pyarrow.parquet"), _library("pyarrow")
    table = None
    for file in files:
        try:
            _check_columns(parquet.read_schema(file).names, file, data)
            part = parquet.read_table(file, columns=[data.image_column, data.label_column])
            table = part if table is None else arrow.concat_tables([table, part])
        except (arrow.ArrowException, OSError) as error:
            raise DataError(file, f"cannot be read as parquet: {str(error).splitlines()[0]}") from error
    return table


def _opened(tables: dict[str, tuple[Path, Any]], path: Path, data: ImageData) -> ImageSets:
    evaluation = next((name for name in EVALUATION if name in tables), None)
    if evaluation is None or "train" not in tables:
        reason = f"expected a train part and one of {', '.join(EVALUATION)}; there are: {', '.join(tables) or 'none'}"
        raise DataError(path, reason)
    names: tuple[str, ...] = ()
    sources = []
    for file, table in (tables["train"], tables[evaluation]):
        _check_columns(table.column_names, file, data)
        labels = _labels(table, file, data)
        names = names or _names(table, data) or tuple(str(label) for label in range(int(labels.max()) + 1))
        check_labels(labels, len(names), file)
        sources.append(TableSource(table[data.image_column], labels.tolist(), file, len(data.mean)))
    return ImageSets(sources[0], sources[1], names)


def _check_columns(columns: list[str], file: Path, data: ImageData) -> None:
    missing = [name for name in (data.image_column, data.label_column) if name not in columns]
    if missing:
        reason = f"no column {' or '.join(missing)}; there are {', '.join(columns)}"
        raise DataError(file, f"{reason}: set data.image_column and data.label_column")


def _labels(table: Any, file: Path, data: ImageData) -> Any:
    labels = table[data.label_column].to_numpy()
    if labels.dtype.kind not in "iu":
        reason = f"expected integers in column {data.label_column}; got {table[data.label_column].type}"
        raise DataError(file, f"{reason}, {table[data.label_column].null_count} of them null")
    if len(labels) == 0:
        raise DataError(file, "has no rows")
    return labels.astype(np.int64)


def _names(table: Any, data: ImageData) -> tuple[str, ...]:
    """Of the classes, where Hugging Face left them in the table's description."""
    described = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    features = described.get("info", {}).get("features", {})
    return tuple(features.get(data.label_column, {}).get("names", ()))


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(name.split(".")[0], "a data set in tables") from error
