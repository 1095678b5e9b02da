"""Segmentation: data as Cityscapes and in folders, DeepLab, the loss and the metric."""

import copy
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torchvision.models import resnet18

import ndpp
from ndpp_recipes.config import Config, ModelConfig, RunConfig, SegmentationData
from ndpp_recipes.data.segmentation import CITYSCAPES, open_segmentation
from ndpp_recipes.errors import ConfigError, DataError, RecipeError
from ndpp_recipes.models.segmenters import build_segmenter
from ndpp_recipes.tasks import make_task
from ndpp_recipes.tasks.segmentation import Segmentation

PLAIN: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}
SMALL = ndpp.Settings(scale="l1", rows=64, block=8)


def scene(height: int, width: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Upright stripes of the classes; the red of a pixel is 40 times its class."""
    labels = np.tile(np.arange(width) * classes // width, (height, 1)).astype(np.uint8)
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image[..., 0] = 40 * labels
    return image, labels


def write_folders(root: Path, sizes: tuple[tuple[int, int], ...] = ((32, 48), (40, 32)), indexed: bool = False) -> None:
    for part in ("train", "val"):
        for folder in (part, f"{part}annot"):
            (root / folder).mkdir()
        for i, size in enumerate(sizes):
            image, labels = scene(*size)
            labels[0, :4] = 255
            Image.fromarray(image).save(root / part / f"{i}.png")
            picture = Image.fromarray(labels)
            if indexed:
                picture.putpalette(list(range(256)) * 3)
            picture.save(root / f"{part}annot" / f"{i}.png")


def write_cityscapes(root: Path, ending: str, labels: np.ndarray) -> None:
    for part in ("train", "val"):
        for folder in ("leftImg8bit", "gtFine"):
            (root / folder / part / "ulm").mkdir(parents=True)
        stem = "ulm_000000_000019"
        Image.fromarray(scene(8, 16)[0]).save(root / "leftImg8bit" / part / "ulm" / f"{stem}_leftImg8bit.png")
        Image.fromarray(labels).save(root / "gtFine" / part / "ulm" / f"{stem}_gtFine_{ending}.png")


def data(root: Path, **changes: Any) -> SegmentationData:
    return SegmentationData(path=str(root), **{"crop": (24, 40), **PLAIN, **changes})


def task(root: Path, options: dict[str, Any] | None = None, **run: Any) -> Segmentation:
    config = Config(
        recipe="x",
        task="segmentation",
        model=ModelConfig(name="deeplabv3_resnet18", options=options or {}),
        data=data(root),
        run=RunConfig(**run),
    )
    made = make_task(config)
    assert isinstance(made, Segmentation)
    return made


@pytest.mark.parametrize("indexed", [False, True])
def test_folders(indexed: bool, tmp_path: Path) -> None:
    write_folders(tmp_path, indexed=indexed)
    train, evaluation, names = open_segmentation(data(tmp_path))
    assert (len(train), len(evaluation), names) == (2, 2, ("0", "1", "2"))
    image, labels = evaluation[0]
    want, regions = scene(32, 48)
    regions[0, :4] = 255
    torch.testing.assert_close(image, torch.from_numpy(want).permute(2, 0, 1).float())
    assert torch.equal(labels, torch.from_numpy(regions).long())
    assert len(open_segmentation(data(tmp_path, train_limit=1))[0]) == 1


def test_cityscapes(tmp_path: Path) -> None:
    """Train ids as they are; label ids become the 19 that are trained, in Cityscapes' order."""
    trained = {7: 0, 8: 1, 11: 2, 17: 5, 21: 8, 26: 13, 33: 18, 0: 255, 6: 255, 9: 255, 29: 255, 255: 255}
    ids = np.resize(np.array(list(trained), np.uint8), (8, 16))
    (tmp_path / "ids").mkdir()
    write_cityscapes(tmp_path / "ids", "labelIds", ids)
    (tmp_path / "train").mkdir()
    write_cityscapes(tmp_path / "train", "labelTrainIds", np.resize(np.array([0, 18, 255], np.uint8), (8, 16)))
    _, evaluation, names = open_segmentation(data(tmp_path / "ids"))
    assert names == CITYSCAPES
    assert len(names) == 19
    assert evaluation[0][1].flatten().tolist() == [trained[int(i)] for i in ids.flatten()]
    _, evaluation, _ = open_segmentation(data(tmp_path / "train"))
    assert sorted(set(evaluation[0][1].flatten().tolist())) == [0, 18, 255]
    _, evaluation, _ = open_segmentation(data(tmp_path / "train", ignore=30))
    assert sorted(set(evaluation[0][1].flatten().tolist())) == [0, 18, 30]


def test_augmentation_keeps_image_and_labels_together(tmp_path: Path) -> None:
    """Red says which class a pixel is of, through scale, crop, flip and padding."""
    write_folders(tmp_path)
    train, _, _ = open_segmentation(data(tmp_path, scales=(0.5, 2.0)))
    random.seed(0)
    directions, paddings = set(), set()
    for draw in range(40):
        image, labels = train[draw % 2]
        assert image.shape == (3, 24, 40)
        assert labels.shape == (24, 40)
        valid = labels != 255
        wrong = (image[0] - 40 * labels).abs()[valid] > 20.5  # between neighbouring stripes
        assert wrong.float().mean() < 0.05
        border = (image == 0).all(0)
        paddings.add(bool(border[-1].all()))
        assert (labels[border] == 255).float().mean() > 0.9 if border.any() else True
        row = labels[2][valid[2]]
        directions.add(int((row[-1] - row[0]).sign()))
    assert {-1, 1} <= directions
    assert paddings == {True, False}


def test_no_flip(tmp_path: Path) -> None:
    write_folders(tmp_path)
    train, _, _ = open_segmentation(data(tmp_path, scales=(1.0, 1.0), crop=(40, 48), flip=False))
    image, labels = train[0]
    want, regions = scene(32, 48)
    torch.testing.assert_close(image[:, :32], torch.from_numpy(want).permute(2, 0, 1).float())
    assert torch.equal(labels[1:32], torch.from_numpy(regions)[1:].long())
    assert (labels[32:] == 255).all()
    assert (image[:, 32:] == 0).all()


def test_batches_of_different_sizes(tmp_path: Path) -> None:
    write_folders(tmp_path)
    made = task(tmp_path)
    images, labels = made.collate([made.eval_set[0], made.eval_set[1]])
    assert images.shape == (2, 3, 40, 48)
    assert (labels[0, 32:] == 255).all()
    assert (labels[1, :, 32:] == 255).all()
    assert torch.equal(labels[1, :, :32], made.eval_set[1][1])
    assert made.example()[0].shape == (1, 3, 24, 40)
    assert json.loads(made.files()["classes.json"]) == ["0", "1", "2"]


def rewrite(root: Path, name: str, labels: np.ndarray | bytes | None) -> None:
    (root / name).unlink()
    if isinstance(labels, bytes):
        (root / name).write_bytes(labels)
    elif labels is not None:
        Image.fromarray(labels).save(root / name)


RECORDS = {
    "value": (scene(32, 48)[1] + 40, r"expected labels in 0\.\.2 or 255 .*got 40, 41, 42"),
    "size": (scene(16, 48)[1], "expected the image's 32 × 48 pixels .*got 16 × 48"),
    "colour": (scene(32, 48)[0], "8-bit grey or indexed image; got mode RGB"),
    "corrupt": (b"no image", "cannot be read as an image"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_bad_records(name: str, tmp_path: Path) -> None:
    write_folders(tmp_path)
    labels, reason = RECORDS[name]
    rewrite(tmp_path, "trainannot/0.png", labels)
    train, evaluation, _ = open_segmentation(data(tmp_path, classes=3))
    assert evaluation[0][1].max() == 255
    with pytest.raises(DataError, match=reason) as caught:
        train[0]
    assert caught.value.path == str(tmp_path / "trainannot" / "0.png")


def test_bad_images_and_unread_labels(tmp_path: Path) -> None:
    """A truncated image is a bad record; classes are counted over the labels that can be read."""
    write_folders(tmp_path)
    (tmp_path / "train" / "1.png").write_bytes((tmp_path / "train" / "1.png").read_bytes()[:-900])
    rewrite(tmp_path, "valannot/1.png", b"")
    train, evaluation, names = open_segmentation(data(tmp_path))
    assert len(names) == 3
    for records in (train, evaluation):
        with pytest.raises(DataError, match=r"1\.png: cannot be read"):
            records[1]


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"leftImg8bit.*there is no train, trainannot, val, valannot"):
        open_segmentation(data(tmp_path))
    with pytest.raises(DataError, match="no images"):
        open_segmentation(data(tmp_path, format="cityscapes"))
    write_folders(tmp_path)
    rewrite(tmp_path, "valannot/1.png", None)
    with pytest.raises(DataError, match=r"val \[1\.png\]: 1 of 2 images have no labels \(valannot/SAME-NAME"):
        open_segmentation(data(tmp_path))
    with pytest.raises(ConfigError, match="auto, cityscapes, folder; got 'zip'"):
        open_segmentation(data(tmp_path, format="zip"))
    write_cityscapes(tmp_path, "labelIds", np.zeros((8, 16), np.uint8))
    next((tmp_path / "gtFine" / "val").glob("*/*")).unlink()
    with pytest.raises(DataError, match=r"leftImg8bit/val \[ulm_.*1 of 1 images have no labels"):
        open_segmentation(data(tmp_path))


def test_labels_that_are_all_ignored(tmp_path: Path) -> None:
    write_folders(tmp_path, ((8, 8),))
    for part in ("trainannot", "valannot"):
        rewrite(tmp_path, f"{part}/0.png", np.full((8, 8), 255, np.uint8))
    with pytest.raises(DataError, match=r"no label other than 255 \(data.ignore\) in 2 files"):
        open_segmentation(data(tmp_path))


class Given(nn.Module):
    """Answers with what it is given."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": x}


def test_loss(tmp_path: Path) -> None:
    write_folders(tmp_path)
    logits = torch.randn(2, 3, 4, 5, requires_grad=True)
    labels = torch.randint(0, 3, (2, 4, 5))
    labels[0, :2] = 255
    for smoothing in (0.0, 0.1):
        made = task(tmp_path, label_smoothing=smoothing)
        want = F.cross_entropy(logits, labels, ignore_index=255, label_smoothing=smoothing)
        torch.testing.assert_close(made.loss(Given(), (logits, labels))["loss"], want)
        nothing = made.loss(Given(), (logits, torch.full_like(labels, 255)))["loss"]
        (gradient,) = torch.autograd.grad(nothing, logits)
        assert nothing.item() == gradient.abs().max().item() == 0


def test_auxiliary_loss(tmp_path: Path) -> None:
    write_folders(tmp_path)
    made = task(tmp_path, options={"aux_loss": True})
    batch = made.collate([made.train_set[0], made.train_set[1]])
    model = made.build().eval()
    with torch.no_grad():
        outputs, losses = model(batch[0]), made.loss(model, batch)
    out, aux = (F.cross_entropy(outputs[name], batch[1], ignore_index=255) for name in ("out", "aux"))
    torch.testing.assert_close(losses["aux"], aux)
    torch.testing.assert_close(losses["loss"], out + 0.4 * aux)


def test_metric_by_hand(tmp_path: Path) -> None:
    """Class 0: 2 of 3 pixels in the union; 1: 1 of 2; 2 is neither there nor found. Two ranks, one idle."""
    write_folders(tmp_path)
    made = task(tmp_path)
    found = torch.tensor([[0, 0, 0, 1, 2, 2]])
    labels = torch.tensor([[0, 0, 1, 1, 255, 255]])
    meter = made.meter()
    meter.update(Given(), (F.one_hot(found, 3).movedim(-1, 1)[:, :, None].float(), labels[:, None]))
    result = meter.result([pickle.loads(pickle.dumps(meter.state())), made.meter().state()])
    assert result["miou"] == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)
    assert result["pixel_accuracy"] == pytest.approx(75)
    with pytest.raises(RecipeError, match="every pixel"):
        meter.result([made.meter().state()])


def test_metric_is_that_of_torchmetrics(tmp_path: Path) -> None:
    metrics = pytest.importorskip("torchmetrics.classification")
    write_folders(tmp_path)
    made = task(tmp_path)
    oracle = metrics.MulticlassJaccardIndex(3, ignore_index=255)
    meters = [made.meter(), made.meter()]
    for i in range(6):
        logits, labels = torch.randn(2, 3, 7, 9), torch.randint(0, 3, (2, 7, 9))
        labels[torch.rand(2, 7, 9) < 0.2] = 255
        meters[i % 2].update(Given(), (logits, labels))
        oracle.update(logits.argmax(1), labels)
    result = meters[0].result([meter.state() for meter in meters])
    assert result["miou"] == pytest.approx(100 * oracle.compute().item(), rel=1e-5)


@pytest.mark.parametrize("batch", [1, 2])
def test_deeplab_trains_at_any_batch(batch: int) -> None:
    """ASPP's pooling leaves one pixel a channel, of which BatchNorm at batch 1 makes nothing; ND++ does."""
    model = build_segmenter("deeplabv3_resnet18", 3, 3, {"aux_loss": True})
    images = torch.randn(batch, 3, 32, 48)
    if batch == 1:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            copy.deepcopy(model)(images)
    report = ndpp.convert_(model, SMALL)
    assert not report.skipped
    assert not report.kept
    outputs = model(images)
    assert {name: out.shape for name, out in outputs.items()} == dict.fromkeys(("out", "aux"), (batch, 3, 32, 48))
    (outputs["out"].square().mean() + outputs["aux"].square().mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.eval()(images)["out"].isfinite().all()


@pytest.mark.parametrize("name", ["deeplabv3_resnet50", "deeplabv3_resnet101"])
def test_large_models_convert(name: str) -> None:
    with torch.device("meta"):
        model = build_segmenter(name, 19, 3, {"aux_loss": True})
    report = ndpp.convert_(model)
    assert not report.skipped
    assert not report.kept


def test_weights(tmp_path: Path) -> None:
    write_folders(tmp_path)
    made = task(tmp_path)
    model, backbone = made.build(), resnet18(weights=None)
    made.load_weights(model, backbone.state_dict())
    assert torch.equal(model.get_parameter("backbone.layer4.1.conv2.weight"), backbone.layer4[1].conv2.weight)
    other = build_segmenter("deeplabv3_resnet18", 7, 3, {"aux_loss": True})
    head = model.get_parameter("classifier.4.weight").clone()
    made.load_weights(model, other.state_dict())
    assert torch.equal(model.get_parameter("classifier.1.weight"), other.get_parameter("classifier.1.weight"))
    assert torch.equal(model.get_parameter("classifier.4.weight"), head)
    with pytest.raises(RecipeError, match="another network"):
        made.load_weights(model, build_segmenter("deeplabv3_resnet50", 3, 3, {}).state_dict())
    with pytest.raises(RecipeError, match="did you mean deeplabv3_resnet50"):
        build_segmenter("deeplab_resnet50", 3, 3, {})
    with pytest.raises(RecipeError, match="does not take"):
        build_segmenter("deeplabv3_resnet18", 3, 3, {"depth": 1})


def test_it_learns(tmp_path: Path) -> None:
    """Stripes that colour gives away: most pixels are right after a few steps, and export gives logits."""
    write_folders(tmp_path, ((32, 48), (32, 32)))
    made = task(tmp_path)
    model = made.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = made.collate([made.eval_set[0], made.eval_set[1]])
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = made.loss(model, batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
    assert made.exportable(model.eval())(*made.example()).shape == (1, 3, 24, 40)
