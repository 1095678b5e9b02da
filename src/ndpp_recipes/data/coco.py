"""Images with boxes and masks, as COCO's json describes them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as rle_ops
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import DataError

Fields = dict[str, tuple[type, ...]]

MARGIN = 2.0  # pixels by which a box may leave its image, from rounding
PLAIN_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of Pillow: at most 8 bits a channel
LISTS: dict[str, Fields] = {  # without these the file makes no sense; all else concerns one image
    "images": {"id": (int, str)},
    "annotations": {"id": (int, str), "image_id": (int, str)},
    "categories": {"id": (int,), "name": (str,)},
}
IMAGE: Fields = {"file_name": (str,), "width": (int, float), "height": (int, float)}
ANNOTATION: Fields = {"category_id": (int,), "bbox": (list,)}


class Coco(Dataset[dict[str, Any]]):
    """Items {"image": (3, H, W) in [0, 1], "target": {boxes (x1 y1 x2 y2), labels, masks if asked for, image_id}}.

    Labels are 1 to K in the order of category ids; `categories` of another data set gives both the same. image_id is
    the position in this data set. Crowds are left out of targets and kept in `ground_truth`.
    """

    def __init__(
        self,
        images: Path,
        annotations: Path,
        *,
        masks: bool,
        flip: bool = False,
        limit: int | None = None,
        categories: dict[int, str] | None = None,
    ) -> None:
        self.folder, self.file, self.masks, self.flip = images, annotations, masks, flip
        lists = _read(self.file)
        own = {entry["id"]: entry["name"] for entry in sorted(lists["categories"], key=lambda entry: entry["id"])}
        self.categories = own if categories is None else categories
        foreign = [f"{key} ({name})" for key, name in own.items() if self.categories.get(key) != name]
        if foreign:
            raise DataError(self.file, f"expected the categories of the training data; got also {', '.join(foreign)}")
        self.labels = {key: label for label, key in enumerate(self.categories, 1)}
        if not self.folder.is_dir():
            raise DataError(self.file, f"expected the images in the folder {self.folder}, which is not there")
        self._problems: dict[int, DataError] = {}
        self._records = _Packed(self._grouped(lists["images"], lists["annotations"])[:limit])

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self._problems:
            raise self._problems[index]
        record = self._records[index]
        image = self._image(record["image"])
        target = {**self._target(record, *image.shape[1:]), "image_id": torch.tensor(index)}
        if self.flip and torch.rand(()) < 0.5:
            image, target = flipped(image, target)
        return {"image": image, "target": target}

    def ground_truth(self, indices: Iterable[int]) -> dict[str, list[dict[str, Any]]]:
        """What COCOeval compares with, crowds included, for images that could be loaded; categories are labels."""
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for index in indices:
            record = self._records[index]
            height, width = (int(record["image"][key]) for key in ("height", "width"))
            images.append({"id": index, "height": height, "width": width})
            for annotation in record["annotations"]:
                # COCOeval takes the id 0 for "no match", so that ids are given anew, from 1.
                ids = {"id": len(annotations) + 1, "image_id": index, "category_id": self._label(annotation)}
                annotations.append({**ids, **self._truth(annotation, height, width)})
        categories = [{"id": self.labels[key], "name": name} for key, name in self.categories.items()]
        return {"images": images, "annotations": annotations, "categories": categories}

    def _truth(self, annotation: dict[str, Any], height: int, width: int) -> dict[str, Any]:
        found = {"bbox": annotation["bbox"], "iscrowd": int(_crowd(annotation))}
        area = annotation["bbox"][2] * annotation["bbox"][3]
        if self.masks:
            found["segmentation"] = encoded(_shape(annotation), height, width)
            area = float(rle_ops.area(found["segmentation"]))
        given = annotation.get("area")
        return {**found, "area": given if isinstance(given, (int, float)) else area}

    def _grouped(self, images: list[Any], annotations: list[Any]) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = [{"image": image, "annotations": []} for image in images]
        where = {image["id"]: index for index, image in enumerate(images)}
        seen: set[int | str] = set()
        for annotation in annotations:
            name = f"annotation {annotation['id']}"
            index = where.get(annotation["image_id"])
            if index is None:
                raise DataError(self.file, f"is of image {annotation['image_id']!r}, which is not in 'images'", name)
            if annotation["id"] in seen:
                self._problems.setdefault(
                    index, DataError(self.file, "expected ids to differ; this one came twice", name)
                )
            seen.add(annotation["id"])
            records[index]["annotations"].append(annotation)
        return records

    def _image(self, entry: dict[str, Any]) -> Tensor:
        _check(self.file, entry, IMAGE, f"image {entry['id']}")
        path = self.folder / entry["file_name"]
        try:
            with Image.open(path) as opened:
                mode, pixels = opened.mode, np.asarray(opened.convert("RGB"))
        except FileNotFoundError:
            raise DataError(self.file, "the image file is not there", path) from None
        except Exception as error:  # Pillow's decoders raise many kinds
            raise DataError(self.file, f"the image file cannot be read: {error}", path) from error
        if mode not in PLAIN_MODES:
            raise DataError(self.file, f"expected an image of 8 bits a channel; got mode {mode}", path)
        wanted, found = (entry["width"], entry["height"]), (pixels.shape[1], pixels.shape[0])
        if wanted != found:
            raise DataError(self.file, f"the json says {_size(wanted)} and the image file is {_size(found)}", path)
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float().div_(255)

    def _target(self, record: dict[str, Any], height: int, width: int) -> dict[str, Tensor]:
        boxes: list[list[float]] = []
        labels: list[int] = []
        masks: list[Tensor] = []
        for annotation in record["annotations"]:
            name = f"annotation {annotation['id']}"
            _check(self.file, annotation, ANNOTATION, name)
            try:
                box, label = clipped(annotation["bbox"], height, width), self._label(annotation)
                mask = decoded(_shape(annotation), height, width) if self.masks else None
            except ValueError as error:
                raise DataError(self.file, str(error), name) from error
            if _crowd(annotation):
                continue
            boxes.append(box)
            labels.append(label)
            masks.extend([] if mask is None else [mask])
        target = {"boxes": torch.tensor(boxes).reshape(-1, 4), "labels": torch.tensor(labels, dtype=torch.int64)}
        if self.masks:
            target["masks"] = torch.stack(masks) if masks else torch.zeros(0, height, width, dtype=torch.uint8)
        return target

    def _label(self, annotation: dict[str, Any]) -> int:
        label = self.labels.get(annotation["category_id"])
        if label is None:
            raise ValueError(f"is of category {annotation['category_id']!r}, which is not in 'categories'")
        return label


class _Packed:
    """Records as JSON in one array: worker processes share it, and would copy Python objects as they count them."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        texts = [json.dumps(record).encode() for record in records]
        self._ends = np.cumsum([0, *map(len, texts)])
        self._text = np.frombuffer(b"".join(texts), np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self._text[self._ends[index] : self._ends[index + 1]].tobytes())
        return record


def flipped(image: Tensor, target: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Left and right exchanged."""
    boxes, width = target["boxes"], image.shape[-1]
    turned = {**target, "boxes": torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)}
    if "masks" in target:
        turned["masks"] = target["masks"].flip(-1)
    return image.flip(-1), turned


def clipped(box: list[Any], height: int, width: int) -> list[float]:
    """Corners x1 y1 x2 y2 of COCO's x y width height, inside of the image."""
    if len(box) != 4 or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in box):
        raise ValueError(f"expected a bbox of four numbers x, y, width, height; got {box}")
    x, y, wide, high = box
    if wide <= 0 or high <= 0:
        raise ValueError(f"expected a bbox of positive width and height; got {box}")
    if min(x, y) < -MARGIN or x + wide > width + MARGIN or y + high > height + MARGIN:
        raise ValueError(f"expected a bbox inside of the image of {_size((width, height))}; got {box}")
    corners = np.array([max(x, 0), max(y, 0), min(x + wide, width), min(y + high, height)], np.float32)
    if (corners[2:] <= corners[:2]).any():  # also what vanishes in float32
        raise ValueError(f"nothing of the bbox {box} is inside of the image of {_size((width, height))}")
    return [float(value) for value in corners]


def encoded(segmentation: Any, height: int, width: int) -> Any:
    """Polygons or RLE as pycocotools' compressed RLE."""
    if isinstance(segmentation, dict):
        return _run_lengths(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError(f"expected a segmentation of polygons or RLE; got {segmentation!r}")
    for polygon in segmentation:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
            count = len(polygon) if isinstance(polygon, list) else repr(polygon)
            raise ValueError(f"expected polygons of an even number of coordinates, 6 or more; got {count}")
        if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in polygon):
            raise ValueError("expected polygons of finite numbers")
    return rle_ops.merge(rle_ops.frPyObjects(segmentation, height, width))


def decoded(segmentation: Any, height: int, width: int) -> Tensor:
    """Polygons or RLE as a mask (H, W) of zeros and ones."""
    return torch.from_numpy(np.ascontiguousarray(rle_ops.decode(encoded(segmentation, height, width))))


def _run_lengths(segmentation: dict[str, Any], height: int, width: int) -> Any:
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if size != [height, width]:
        raise ValueError(f"expected an RLE of size [height, width] = {[height, width]}; got {size}")
    if isinstance(counts, str):
        counts = uncompressed(counts)
    if not isinstance(counts, list) or not all(isinstance(count, int) and count >= 0 for count in counts):
        raise ValueError("expected the counts of an RLE as text or as a list of integers from 0")
    if sum(counts) != height * width:
        raise ValueError(f"expected the counts of an RLE to add up to {height * width}; got {sum(counts)}")
    return rle_ops.frPyObjects({"size": size, "counts": counts}, height, width)


def uncompressed(text: str) -> list[int]:
    """The counts of a compressed RLE: pycocotools reads on where they are too few, and cannot be asked for them.

    Five bits a character, lowest first, with a sign; from the fourth on, each is the difference to the last but one.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - ord("0")
        if not 0 <= bits < 64:
            raise ValueError(f"expected the counts of a compressed RLE; got the character {character!r}")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        value -= (1 << shift) if bits & 16 else 0
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("expected the counts of a compressed RLE; they end in the middle of one")
    return counts


def _read(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The three lists of a COCO json, each with unique ids where that matters for all of the file."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(file, f"expected a COCO json; {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(file, f"expected a COCO json; this is not JSON: {error}") from error
    lists = {}
    for key, fields in LISTS.items():
        found = content.get(key) if isinstance(content, dict) else None
        if not isinstance(found, list):
            raise DataError(file, f"expected a COCO json with the lists {', '.join(LISTS)}; {key!r} is missing")
        for number, entry in enumerate(found):
            _check(file, entry, fields, f"{key}[{number}]")
        lists[key] = found
    for key in ("images", "categories"):
        _check_unique(file, lists[key], key)
        if not lists[key]:
            raise DataError(file, f"expected a COCO json with {key}; it lists none")
    return lists


def _check_unique(file: Path, entries: list[dict[str, Any]], key: str) -> None:
    seen: set[int | str] = set()
    for number, entry in enumerate(entries):
        if entry["id"] in seen:
            raise DataError(file, f"expected ids to differ; {entry['id']!r} came twice", f"{key}[{number}]")
        seen.add(entry["id"])


def _check(file: Path, entry: Any, fields: Fields, record: str) -> None:
    for name, kinds in fields.items():
        value = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(value, kinds):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise DataError(file, f"expected {name!r} of type {expected}; got {value!r}", record)


def _crowd(annotation: dict[str, Any]) -> bool:
    return bool(annotation.get("iscrowd", 0))


def _shape(annotation: dict[str, Any]) -> Any:
    """A crowd, which is only to be ignored, may have nothing but a box."""
    given = annotation.get("segmentation")
    if given or not _crowd(annotation):
        return given
    x, y, wide, high = annotation["bbox"]
    return [[x, y, x + wide, y, x + wide, y + high, x, y + high]]


def _size(size: Sequence[float]) -> str:
    return f"{size[0]} × {size[1]}"
