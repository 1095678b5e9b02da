"""Detection and instance segmentation: COCO's data, torchvision's R-CNNs, pycocotools' average precision."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from pycocotools import mask as rle_ops
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn

from ..config import Config, DetectionData
from ..data.coco import Coco
from ..errors import ConfigError
from ..models.rcnn import has_masks, load_weights_, rcnn
from .base import Meter, Task

Batch = dict[str, list[Any]]
Found = dict[int, dict[str, Any]]  # position of the image → what was detected in it

KINDS = {"bbox": "bbox", "mask": "segm"}  # ours → pycocotools'
SCORES = ("ap", "ap50", "ap75", "aps", "apm", "apl")  # the first six that COCOeval gives


class Detection(Task):
    """Batches are {"images": (3, H, W) in [0, 1] each, "targets"}; the network resizes and normalises by itself."""

    metric: ClassVar[str] = "bbox_ap"

    train_set: Coco
    eval_set: Coco

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        data = config.data
        if not isinstance(data, DetectionData) or data.format not in ("auto", "coco"):
            raise ConfigError(f"data.format: detection reads coco; got {data.format!r}")
        self.data, self.masks, root = data, has_masks(config.model.name), Path(data.path)
        self.train_set = Coco(
            root / data.train_images,
            root / data.train_annotations,
            masks=self.masks,
            flip=data.flip,
            limit=data.train_limit,
        )
        self.eval_set = Coco(
            root / data.eval_images,
            root / data.eval_annotations,
            masks=self.masks,
            limit=data.eval_limit,
            categories=self.train_set.categories,
        )

    def build(self) -> nn.Module:
        options = {"min_size": self.data.sizes, "max_size": self.data.max_size, **self.config.model.options}
        model: nn.Module = rcnn(self.config.model.name, len(self.train_set.categories) + 1, **options)
        return model

    def load_weights(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        load_weights_(model, state)

    def collate(self, items: Sequence[dict[str, Any]]) -> Batch:
        return {"images": [item["image"] for item in items], "targets": [item["target"] for item in items]}

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """In training the losses by name, in evaluation the detections of every image."""
        return model(batch["images"], batch["targets"]) if model.training else model(batch["images"])

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = self.forward(model, batch)
        return {"loss": torch.stack([part.float() for part in losses.values()]).sum(), **losses}

    def meter(self) -> CocoMeter:
        return CocoMeter(self.eval_set, self.masks)

    def example(self) -> tuple[Tensor, ...]:
        """One square image as the network sees it after resizing: its sides are multiples of 32."""
        side = 32 * math.ceil(min(self.data.sizes[-1], self.data.max_size) / 32)
        return (torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)),)

    def exportable(self, model: nn.Module) -> nn.Module:
        """Backbone, pyramid and heads of the region proposals.

        torch.export stops at the rest: how many boxes survive depends on the image, and torchvision branches on it
        in batched_nms. The whole network goes to ONNX by torch.onnx.export(..., dynamo=False) only.
        """
        return Proposals(model)

    def files(self) -> dict[str, str]:
        names = {label: self.train_set.categories[key] for key, label in self.train_set.labels.items()}
        return {"classes.json": json.dumps(names, indent=1, ensure_ascii=False)}


class Proposals(nn.Module):
    """Images (N, 3, H, W) in [0, 1] → the pyramid's maps, then objectness of every level, then box deltas of each."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = model.get_submodule("backbone"), model.get_submodule("rpn.head")
        transform = model.get_submodule("transform")
        self.register_buffer("mean", torch.tensor(transform.image_mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(transform.image_std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        maps = list(self.backbone((images - self.mean) / self.std).values())
        objectness, deltas = self.head(maps)
        return (*maps, *objectness, *deltas)


class CocoMeter(Meter):
    """Average precision of boxes, and of masks. Images that were never seen count for nothing; one seen twice, once."""

    def __init__(self, data: Coco, masks: bool) -> None:
        self.data, self.found, self.kinds = data, dict[int, dict[str, Any]](), ["bbox", "mask"][: 1 + masks]

    def update(self, model: nn.Module, batch: Batch) -> None:
        for target, detected in zip(batch["targets"], model(batch["images"]), strict=True):
            self.found[int(target["image_id"])] = _compact(detected)

    def state(self) -> Found:
        return self.found

    def result(self, states: list[Found]) -> dict[str, float]:
        found = {image: detected for state in states for image, detected in state.items()}
        truth = self.data.ground_truth(sorted(found))
        scores = {}
        for kind in self.kinds:
            values = average_precision(
                truth, [row for image in found for row in _rows(image, found[image], kind)], kind
            )
            scores.update({f"{kind}_{name}": value for name, value in values.items()})
        return scores


def average_precision(
    truth: dict[str, list[dict[str, Any]]], rows: list[dict[str, Any]], kind: str
) -> dict[str, float]:
    """pycocotools' numbers for COCO's annotations and results; 0 where there is nothing to find or nothing found."""
    if not truth["annotations"] or not rows:
        return dict.fromkeys(SCORES, 0.0)
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints
        expected = COCO()
        # It writes into what it is given.
        expected.dataset = {key: [dict(entry) for entry in entries] for key, entries in truth.items()}
        expected.createIndex()
        evaluation = COCOeval(expected, expected.loadRes(rows), KINDS[kind])
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    # -1 says that no object has the size in question.
    return {name: max(float(value), 0.0) for name, value in zip(SCORES, evaluation.stats, strict=False)}


def _compact(detected: dict[str, Tensor]) -> dict[str, Any]:
    """On the CPU, with masks as RLE: those of a whole data set fit in memory."""
    found: dict[str, Any] = {name: detected[name].float().cpu() for name in ("boxes", "scores", "labels")}
    if "masks" in detected:
        masks = (detected["masks"][:, 0] > 0.5).byte().cpu().numpy()
        found["masks"] = [rle_ops.encode(np.asfortranarray(mask)) for mask in masks]
    return found


def _rows(image: int, detected: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """COCO's results. Those of masks have no box, so that objects count as small or large by the mask's area."""
    corners = detected["boxes"]
    boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1).tolist()
    field, shapes = ("bbox", boxes) if kind == "bbox" else ("segmentation", detected["masks"])
    return [
        {"image_id": image, "category_id": int(label), "score": score, field: shape}
        for label, score, shape in zip(detected["labels"].tolist(), detected["scores"].tolist(), shapes, strict=True)
    ]
