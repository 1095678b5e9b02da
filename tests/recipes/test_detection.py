"""Detection: COCO's format and its faults, the networks, average precision, and a few steps of training."""

from __future__ import annotations

import contextlib
import io
import json
import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

pytest.importorskip("torchvision")
pytest.importorskip("pycocotools")

import torchvision
from pycocotools import mask as rle_ops
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import ndpp
from ndpp_recipes.config import Config, DetectionData, ModelConfig
from ndpp_recipes.data.coco import Coco, flipped, uncompressed
from ndpp_recipes.errors import ConfigError, DataError, RecipeError
from ndpp_recipes.models.rcnn import MODELS, load_weights_, rcnn
from ndpp_recipes.tasks import make_task
from ndpp_recipes.tasks.detection import Detection

Content = dict[str, Any]

HEIGHT, WIDTH = 64, 80
IDS = [3, 7, 90]  # of categories: neither from 1 nor without gaps
# x, y, width, height, category, how its mask is written, whether it is a crowd; by image
OBJECTS: list[list[tuple[int, int, int, int, int, str, int]]] = [
    [(4, 6, 20, 30, 90, "polygon", 0), (40, 10, 24, 24, 3, "counts", 0), (30, 44, 30, 12, 7, "text", 0)],
    [(8, 8, 36, 40, 3, "text", 0), (50, 2, 26, 60, 7, "text", 1), (46, 30, 4, 4, 90, "polygon", 0)],
    [],
    [(2, 20, 70, 40, 7, "counts", 0), (10, 2, 16, 16, 90, "polygon", 0)],
]


def filled(x: int, y: int, wide: int, high: int) -> np.ndarray:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[y : y + high, x : x + wide] = 1
    return mask


def segmentation(x: int, y: int, wide: int, high: int, kind: str) -> Any:
    if kind == "polygon":
        return [[x, y, x + wide, y, x + wide, y + high, x, y + high]]
    if kind == "text":
        rle = rle_ops.encode(np.asfortranarray(filled(x, y, wide, high)))
        return {"size": rle["size"], "counts": rle["counts"].decode()}
    column = filled(x, y, wide, high).flatten(order="F")
    ends = np.flatnonzero(np.diff(column)) + 1
    return {"size": [HEIGHT, WIDTH], "counts": np.diff([0, *ends, len(column)]).tolist()}


def content() -> Content:
    images, annotations = [], []
    for number, objects in enumerate(OBJECTS):
        images.append({"id": 100 + number, "file_name": f"{number}.png", "width": WIDTH, "height": HEIGHT})
        for *box, category, kind, crowd in objects:
            x, y, wide, high = box
            shape = {"bbox": box, "area": wide * high, "segmentation": segmentation(x, y, wide, high, kind)}
            ids = {"id": len(annotations), "image_id": 100 + number, "category_id": category, "iscrowd": crowd}
            annotations.append({**ids, **shape})
    categories = [{"id": key, "name": f"kind {key}"} for key in reversed(IDS)]
    return {"images": images, "annotations": annotations, "categories": categories}


def draw(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    for number, objects in enumerate(OBJECTS):
        pixels = generator.integers(0, 60, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        for x, y, wide, high, category, *_ in objects:
            pixels[y : y + high, x : x + wide, IDS.index(category)] = 250
        Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    draw(tmp_path / "images")
    (tmp_path / "all.json").write_text(json.dumps(content()))
    return tmp_path


def opened(root: Path, changed: Content | None = None, **options: Any) -> Coco:
    if changed is not None:
        (root / "all.json").write_text(json.dumps(changed))
    return Coco(root / "images", root / "all.json", **{"masks": True, **options})


def task_of(root: Path, model: str = "mask_rcnn_r18", **data: Any) -> Detection:
    places = {"train_images": "images", "eval_images": "images"}
    files = {"train_annotations": "all.json", "eval_annotations": "all.json"}
    section = DetectionData(path=str(root), **{**places, **files, "sizes": (64,), "max_size": 80, **data})
    task = make_task(Config(recipe="", task="detection", model=ModelConfig(name=model, options=SMALL), data=section))
    assert isinstance(task, Detection)
    return task


SMALL: dict[str, Any] = {
    "anchor_sizes": (8, 16, 32, 64, 128),
    "rpn_post_nms_top_n_train": 64,
    "rpn_post_nms_top_n_test": 64,
    "box_batch_size_per_image": 64,
    "box_detections_per_img": 20,
}


def test_items_hold_what_was_drawn(root: Path) -> None:
    data = pickle.loads(pickle.dumps(opened(root)))
    assert len(data) == 4
    assert data.labels == {3: 1, 7: 2, 90: 3}
    for number, objects in enumerate(OBJECTS):
        item, kept = data[number], [entry for entry in objects if not entry[-1]]
        pixels = np.asarray(Image.open(root / "images" / f"{number}.png"))
        assert torch.equal(item["image"], torch.tensor(pixels).permute(2, 0, 1) / 255)
        target = item["target"]
        corners = [[x, y, x + wide, y + high] for x, y, wide, high, *_ in kept]
        assert torch.equal(target["boxes"], torch.tensor(corners, dtype=torch.float32).reshape(-1, 4))
        assert target["labels"].tolist() == [1 + IDS.index(entry[4]) for entry in kept]
        masks = np.array([filled(*entry[:4]) for entry in kept], np.uint8).reshape(-1, HEIGHT, WIDTH)
        assert torch.equal(target["masks"], torch.from_numpy(masks))
        assert int(target["image_id"]) == number
    assert opened(root, masks=False)[0]["target"].keys() == {"boxes", "labels", "image_id"}
    assert len(opened(root, limit=2)) == 2


def test_flip_turns_image_boxes_and_masks_together(root: Path) -> None:
    item = opened(root)[0]
    image, target = flipped(item["image"], item["target"])
    assert torch.equal(image, item["image"].flip(-1))
    assert torch.equal(torchvision.ops.masks_to_boxes(target["masks"])[:, :2], target["boxes"][:, :2])
    assert not torch.equal(target["boxes"], item["target"]["boxes"])
    again = flipped(image, target)[1]
    assert all(torch.equal(again[key], item["target"][key]) for key in again)
    data, drawn = opened(root, flip=True), []
    for seed in range(40):
        torch.manual_seed(seed)
        drawn.append(torch.equal(data[0]["image"], image))
    assert 8 < sum(drawn) < 32


@pytest.mark.parametrize("seed", range(5))
def test_compressed_counts_are_those_of_the_mask(seed: int) -> None:
    mask = np.random.default_rng(seed).integers(0, 2, (13, 70), dtype=np.uint8)
    mask[:, 20:60] = seed % 2  # a long run takes several characters, and large differences either way
    column = mask.flatten(order="F")
    runs = np.diff([0, *(np.flatnonzero(np.diff(column)) + 1), column.size]).tolist()
    counts = uncompressed(rle_ops.encode(np.asfortranarray(mask))["counts"].decode())
    assert counts == ([0, *runs] if column[0] else runs)


def change(key: str, number: int, **values: Any) -> Callable[[Content, Path], None]:
    def apply(changed: Content, root: Path) -> None:
        changed[key][number].update(values)

    return apply


def twice(key: str) -> Callable[[Content, Path], None]:
    return lambda changed, root: changed[key].append(dict(changed[key][0]))


def without(key: str) -> Callable[[Content, Path], None]:
    return lambda changed, root: changed.pop(key)


def written(data: bytes) -> Callable[[Content, Path], None]:
    return lambda changed, root: (root / "images/0.png").write_bytes(data) and None


def truncated(changed: Content, root: Path) -> None:
    path = root / "images/0.png"
    path.write_bytes(path.read_bytes()[:500])


def deep(changed: Content, root: Path) -> None:
    Image.fromarray(np.full((HEIGHT, WIDTH), 40_000, np.uint16)).save(root / "images/0.png")


def rle(counts: Any, size: Any = (HEIGHT, WIDTH)) -> Callable[[Content, Path], None]:
    return change("annotations", 1, segmentation={"size": list(size), "counts": counts})


# Whether it concerns the whole file or the first image alone; how; what the error says, and of which record.
FAULTS: dict[str, tuple[bool, Any, str, str]] = {
    "no images": (True, without("images"), "'images' is missing", ""),
    "no annotations": (True, without("annotations"), "'annotations' is missing", ""),
    "no categories": (True, without("categories"), "'categories' is missing", ""),
    "image without id": (True, lambda c, r: c["images"][1].pop("id"), "'id'", "images[1]"),
    "entry is no object": (True, lambda c, r: c["annotations"].append(5), "'id'", "annotations[8]"),
    "empty list": (True, lambda c, r: c["images"].clear() or c["annotations"].clear(), "lists none", ""),
    "image id twice": (True, twice("images"), "100 came twice", "images[4]"),
    "category id twice": (True, twice("categories"), "90 came twice", "categories[3]"),
    "unknown image": (True, change("annotations", 2, image_id=5), "of image 5", "annotation 2"),
    "no folder": (True, lambda c, r: (r / "images").rename(r / "other"), "not there", ""),
    "annotation id twice": (False, twice("annotations"), "twice", "annotation 0"),
    "unknown category": (False, change("annotations", 2, category_id=5), "of category 5", "annotation 2"),
    "no category": (False, lambda c, r: c["annotations"][2].pop("category_id"), "'category_id'", "annotation 2"),
    "no file name": (False, lambda c, r: c["images"][0].pop("file_name"), "'file_name'", "image 100"),
    "image not there": (False, lambda c, r: (r / "images/0.png").unlink(), "not there", "0.png"),
    "image is text": (False, written(b"no image"), "cannot be read", "0.png"),
    "image is empty": (False, written(b""), "cannot be read", "0.png"),
    "image is cut off": (False, truncated, "cannot be read", "0.png"),
    "image of 16 bits": (False, deep, "8 bits", "0.png"),
    "other size": (False, change("images", 0, width=81), "81 × 64 and the image file is 80 × 64", "0.png"),
    "box outside": (False, change("annotations", 0, bbox=[60, 5, 22.5, 5]), "inside of the image", "annotation 0"),
    "box left of it": (False, change("annotations", 0, bbox=[-3, 5, 20, 5]), "inside of the image", "annotation 0"),
    "box in the margin": (False, change("annotations", 0, bbox=[-1.5, 5, 1, 5]), "nothing of the bbox", "annotation 0"),
    "box of no width": (False, change("annotations", 0, bbox=[5, 5, 0, 5]), "positive", "annotation 0"),
    "box turned around": (False, change("annotations", 0, bbox=[5, 5, 5, -5]), "positive", "annotation 0"),
    "box of three": (False, change("annotations", 0, bbox=[5, 5, 5]), "four numbers", "annotation 0"),
    "box not finite": (False, change("annotations", 0, bbox=[5, 5, 5, math.nan]), "four numbers", "annotation 0"),
    "short polygon": (False, change("annotations", 0, segmentation=[[1, 1, 5, 5]]), "got 4", "annotation 0"),
    "odd polygon": (False, change("annotations", 0, segmentation=[[1, 1, 5, 5, 1, 9, 3]]), "got 7", "annotation 0"),
    "polygon of text": (False, change("annotations", 0, segmentation=[["1"] * 6]), "finite numbers", "annotation 0"),
    "no polygon": (False, change("annotations", 0, segmentation=[]), "polygons or RLE", "annotation 0"),
    "RLE of other size": (False, rle([30], (5, 6)), "[64, 80]", "annotation 1"),
    "RLE too short": (False, rle([30, 20]), "5120; got 50", "annotation 1"),
    "RLE negative": (False, rle([5130, -10]), "integers from 0", "annotation 1"),
    "RLE of nothing": (False, rle(None), "as text or as a list", "annotation 1"),
    "text RLE too short": (False, rle("05"), "5120; got 5", "annotation 1"),
    "text RLE cut off": (False, rle("o"), "in the middle", "annotation 1"),
    "text RLE of other text": (False, rle("~"), "character", "annotation 1"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_file_and_record_and_spoils_no_other_image(root: Path, name: str) -> None:
    whole, spoil, reason, record = FAULTS[name]
    changed = content()
    spoil(changed, root)
    data = None if whole else opened(root, changed)
    with pytest.raises(DataError) as caught:
        opened(root, changed) if data is None else data[0]
    assert str(root / "all.json") in str(caught.value)
    assert reason in caught.value.reason
    assert record in str(caught.value.record or "")
    if data is not None:
        assert [len(data[number]["target"]["labels"]) for number in (1, 2, 3)] == [2, 0, 2]


@pytest.mark.parametrize(("text", "reason"), [(None, "No such file"), ("{", "not JSON"), ("[]", "'images' is missing")])
def test_a_file_that_is_no_coco_json(root: Path, text: str | None, reason: str) -> None:
    (root / "all.json").unlink() if text is None else (root / "all.json").write_text(text)
    with pytest.raises(DataError, match=reason):
        opened(root)


def test_boxes_are_clipped_by_rounding_and_masks_not_needed_without_masks(root: Path) -> None:
    changed = content()
    changed["annotations"][0].update(bbox=[-1.5, 50, 83, 15.9], segmentation=None)
    assert opened(root, changed, masks=False)[0]["target"]["boxes"][0].tolist() == [0, 50, 80, 64]


def test_a_crowd_may_have_nothing_but_a_box(root: Path) -> None:
    changed = content()
    changed["annotations"][4].update(segmentation=[])
    data = opened(root, changed)
    assert len(data[1]["target"]["masks"]) == 2
    truth = data.ground_truth([1])["annotations"]
    assert [entry["iscrowd"] for entry in truth] == [0, 1, 0]
    assert np.array_equal(rle_ops.decode(truth[1]["segmentation"]), filled(50, 2, 26, 60))


def test_evaluation_data_has_the_categories_of_training(root: Path) -> None:
    changed = content()
    changed["categories"] = [{"id": 3, "name": "kind 3"}, {"id": 7, "name": "kind 7"}]
    changed["annotations"] = [entry for entry in changed["annotations"] if entry["category_id"] != 90]
    (root / "fewer.json").write_text(json.dumps(changed))
    assert len(task_of(root, eval_annotations="fewer.json").eval_set.labels) == 3
    with pytest.raises(DataError, match="90"):
        task_of(root, train_annotations="fewer.json")


class Told(nn.Module):
    """A network whose detections are given."""

    def __init__(self, detections: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.detections = iter(detections)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [next(self.detections) for _ in images]


def perfect(task: Detection) -> list[dict[str, Tensor]]:
    found = []
    for number in range(len(task.eval_set)):
        target = task.eval_set[number]["target"]
        shapes = {"boxes": target["boxes"], "masks": target["masks"][:, None].float()}
        found.append({**shapes, "labels": target["labels"], "scores": torch.linspace(0.9, 0.5, len(target["labels"]))})
    return found


def half_wrong(task: Detection) -> list[dict[str, Tensor]]:
    """Boxes and masks moved by different amounts, a wrong class, a miss, and detections inside of the crowd."""
    found = perfect(task)
    found[0]["boxes"] = found[0]["boxes"] + torch.tensor([[3.0], [0.0], [1.0]])
    found[0]["masks"] = found[0]["masks"].roll(2, -1)
    found[0]["labels"] = found[0]["labels"].roll(1)
    found[1]["boxes"] = torch.cat([found[1]["boxes"][:1] + 2, torch.tensor([[52.0, 4.0, 70.0, 50.0]])])
    found[1]["masks"] = torch.stack(
        [torch.from_numpy(filled(*box)).float() for box in [(8, 8, 30, 40), (52, 4, 18, 46)]]
    )
    found[1]["masks"] = found[1]["masks"][:, None]
    found[1]["labels"], found[1]["scores"] = torch.tensor([1, 2]), torch.tensor([0.8, 0.95])
    found[3] = {key: value[:1] for key, value in found[3].items()}
    return found


def by_hand(root: Path, found: list[dict[str, Tensor]], kind: str) -> list[float]:
    """pycocotools on the file itself, with its own ids but annotations from 1, in its result format."""
    changed = content()
    for annotation in changed["annotations"]:
        annotation["id"] += 1
    (root / "truth.json").write_text(json.dumps(changed))
    rows: list[dict[str, Any]] = []
    for number, detected in enumerate(found):
        for box, label, score, mask in zip(
            *(detected[key] for key in ("boxes", "labels", "scores", "masks")), strict=True
        ):
            x1, y1, x2, y2 = box.tolist()
            shape = np.asfortranarray((mask[0] > 0.5).byte().numpy())
            given = {"bbox": [x1, y1, x2 - x1, y2 - y1]} if kind == "bbox" else {"segmentation": rle_ops.encode(shape)}
            ids = {"image_id": 100 + number, "category_id": IDS[int(label) - 1], "score": float(score)}
            rows.append({**ids, **given})
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(root / "truth.json"))
        evaluation = COCOeval(truth, truth.loadRes(rows), kind)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(value) for value in evaluation.stats[:6]]


def measured(task: Detection, found: list[dict[str, Tensor]], ranks: int = 1) -> dict[str, float]:
    model, meters = Told(found), [task.meter() for _ in range(ranks)]
    for number, indices in enumerate(task.eval_batches(3 if ranks == 1 else 1)):
        meters[number % ranks].update(model, task.collate([task.eval_set[index] for index in indices]))
    return meters[0].result(pickle.loads(pickle.dumps([meter.state() for meter in meters])))


@pytest.mark.parametrize("make", [perfect, half_wrong])
def test_average_precision_is_that_of_pycocotools(
    root: Path, make: Callable[[Detection], list[dict[str, Tensor]]], capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_of(root)
    scores = measured(task, make(task))
    assert capsys.readouterr().out == ""
    assert task.metric in scores
    for kind, name in (("bbox", "bbox"), ("segm", "mask")):
        ours = [scores[f"{name}_{key}"] for key in ("ap", "ap50", "ap75", "aps", "apm", "apl")]
        assert ours == pytest.approx([max(value, 0.0) for value in by_hand(root, make(task), kind)], abs=1e-6)
        assert (ours[0] == pytest.approx(1.0)) if make is perfect else (0.05 < ours[0] < 0.95)
    assert measured(task, make(task), ranks=3) == pytest.approx(scores)


def test_nothing_found_and_nothing_to_find_are_zero(root: Path) -> None:
    task = task_of(root)
    none = [{key: value[:0] for key, value in detected.items()} for detected in perfect(task)]
    scores = measured(task, none)
    assert len(scores) == 12
    assert set(scores.values()) == {0.0}
    found = perfect(task)
    (root / "all.json").write_text(json.dumps({**content(), "annotations": []}))
    assert set(measured(task_of(root), found).values()) == {0.0}


def test_only_images_that_were_seen_count(root: Path) -> None:
    task = task_of(root, "faster_rcnn_r18")
    meter = task.meter()
    target = task.eval_set[0]["target"]
    told = Told([{"boxes": target["boxes"], "labels": target["labels"], "scores": torch.ones(3)}])
    meter.update(told, task.collate([task.eval_set[0]]))
    scores = meter.result([meter.state(), {}])
    assert scores["bbox_ap"] == pytest.approx(1.0)
    assert not any(name.startswith("mask") for name in scores)


@pytest.mark.parametrize("norm_heads", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_converted(name: str, norm_heads: bool) -> None:
    with torch.device("meta"):
        model = rcnn(name, 4, norm_heads=norm_heads)
    assert not [kind for kind in map(type, model.modules()) if "Frozen" in kind.__name__]
    assert all(parameter.requires_grad for parameter in model.parameters())
    report = ndpp.convert_(model, ndpp.Settings(scale="l1"))
    assert report.skipped == ()
    assert report.kept == ()
    kinds = {row.before for row in report.converted}
    assert kinds == {"Conv2d", "Linear", *(["ConvTranspose2d"] if name.startswith("mask") else [])}
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def test_options_reach_the_network_and_others_are_refused() -> None:
    model = rcnn("mask_rcnn_r18", 4, min_size=(48, 64), max_size=96, **SMALL)
    assert model.transform.min_size == (48, 64)
    assert model.roi_heads.detections_per_img == 20
    assert model.rpn.anchor_generator.sizes[0] == (8,)
    assert model.roi_heads.box_predictor.cls_score.out_features == 4
    with pytest.raises(ConfigError, match="rpn_nms_treshold"):
        rcnn("mask_rcnn_r18", 4, rpn_nms_treshold=0.5)
    with pytest.raises(ConfigError, match="5 sizes"):
        rcnn("mask_rcnn_r18", 4, anchor_sizes=(8, 16))
    with pytest.raises(ConfigError, match="mask_rcnn_r50"):
        rcnn("mask_rcnn_r34", 4)


def test_weights_come_from_a_resnet_or_from_a_detector() -> None:
    model = rcnn("mask_rcnn_r18", 4)
    resnet = torchvision.models.resnet18(weights=None)
    load_weights_(model, resnet.state_dict())
    assert torch.equal(model.backbone.body.layer4[1].conv2.weight, resnet.layer4[1].conv2.weight)
    other = rcnn("mask_rcnn_r18", 9)
    before = model.roi_heads.box_predictor.cls_score.weight.clone()
    # as in the files that torchvision offers: norms do not count batches, and a block is its convolution
    state = {k: v for k, v in other.state_dict().items() if not k.endswith("num_batches_tracked")}
    load_weights_(model, {re.sub(r"(_blocks\.\d|rpn\.head\.conv)(\.0)+\.", r"\1.", k): v for k, v in state.items()})
    assert torch.equal(model.roi_heads.mask_head[0][0].weight, other.roi_heads.mask_head[0][0].weight)
    assert torch.equal(model.backbone.fpn.inner_blocks[0][0].weight, other.backbone.fpn.inner_blocks[0][0].weight)
    assert torch.equal(model.roi_heads.box_predictor.cls_score.weight, before)
    with pytest.raises(RecipeError, match="names differ"):
        load_weights_(model, {"weight": torch.zeros(1)})
    with pytest.raises(RecipeError, match="same network"):
        load_weights_(model, torchvision.models.resnet50(weights=None).state_dict())


@pytest.mark.parametrize("name", ["faster_rcnn_r18", "mask_rcnn_r18"])
def test_training_with_ndpp_descends_and_the_network_detects(root: Path, name: str) -> None:
    task = task_of(root, name)
    model = task.build().train()
    ndpp.convert_(model, ndpp.Settings(scale="l1", rows=256, block=16, shared=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch = task.collate([task.train_set[index] for index in (0, 2)])  # the second is empty
    assert task.count(batch) == 2
    losses = []
    for _ in range(3):
        torch.manual_seed(0)  # the same samples of boxes in every step
        optimizer.zero_grad()
        parts = task.loss(model, batch)
        parts["loss"].backward()
        optimizer.step()
        losses.append(parts.pop("loss").item())
        assert losses[-1] == pytest.approx(sum(part.item() for part in parts.values()), rel=1e-5)
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.9 * losses[0], losses
    meter = task.meter()
    with torch.no_grad():
        meter.update(model.eval(), batch)
    assert sorted(meter.state()) == [0, 2]
    scores = meter.result([meter.state()])
    assert all(0 <= value <= 1 for value in scores.values())
    assert ("mask_ap" in scores) == name.startswith("mask")


def test_the_folded_network_is_exported_up_to_its_proposals(root: Path) -> None:
    task = task_of(root, "faster_rcnn_r18")
    model = task.build().eval()
    ndpp.convert_(model, ndpp.Settings(scale="l1", rows=256, block=16))
    ndpp.fold_(model)
    network, inputs = task.exportable(model), task.example()
    with torch.no_grad():
        expected = network(*inputs)
        exported = torch.export.export(network, inputs).module()(*inputs)
        maps = model.backbone(model.transform(list(inputs[0]))[0].tensors)
    for ours, theirs in zip(exported, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(expected) == 15  # five levels of maps, objectness and deltas
    for ours, theirs in zip(expected, maps.values(), strict=False):
        torch.testing.assert_close(ours, theirs)
