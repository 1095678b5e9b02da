"""Labelled images in every format, written here as their authors do, and what is said of damaged ones."""

import gzip
import io
import json
import lzma
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from ndpp_recipes.config import ImageData
from ndpp_recipes.data.fashion import NAMES, load_fashion, pack_fashion
from ndpp_recipes.data.images import open_images
from ndpp_recipes.errors import ConfigError, DataError

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
GENERATOR = np.random.default_rng(0)
COLOUR = GENERATOR.integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2]


def data(path: Path, **changes: Any) -> ImageData:
    settings = {"size": 32, "augment": "none", "mean": MEAN, "std": STD, **changes}
    return ImageData(path=str(path), **settings)


def expected(image: np.ndarray) -> Tensor:
    """By torchvision, from height × width × colour."""
    steps = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    result: Tensor = v2.Compose(steps)(image)
    return result.as_subclass(torch.Tensor)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def write_folders(root: Path, held_out: str = "val") -> None:
    for part in ("train", held_out):
        for i, label in enumerate(LABELS):
            folder = root / part / f"class{label}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i:02}.png").write_bytes(png(COLOUR[i]))


def write_one(root: Path, image: np.ndarray) -> None:
    for part in ("train", "val"):
        (root / part / "a").mkdir(parents=True)
        (root / part / "a" / "one.png").write_bytes(png(image))


def rows(images: np.ndarray) -> np.ndarray:
    """As CIFAR keeps them: red, green, blue planes in a row."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def write_cifar10(root: Path, labels: list[int] = LABELS) -> None:
    root.mkdir(exist_ok=True)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (root / name).write_bytes(pickle.dumps({b"data": rows(COLOUR), b"labels": labels}, protocol=2))
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"cat", b"dog", b"owl"]}))


def write_cifar100(root: Path) -> None:
    for name in ("train", "test"):
        content = {b"data": rows(COLOUR), b"fine_labels": LABELS, b"coarse_labels": [0] * 12}
        (root / name).write_bytes(pickle.dumps(content))
    (root / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"cat", b"dog", b"owl"]}))


def write_binary(root: Path, names: list[str], meta: str, label_bytes: int) -> None:
    labels = np.array(LABELS, np.uint8)[:, None]
    first = [np.full_like(labels, 77)] * (label_bytes - 1)
    for name in names:
        np.concatenate([*first, labels, rows(COLOUR)], 1).tofile(root / name)
    (root / meta).write_text("cat\ndog\nowl\n\n")


def write_cifar10_binary(root: Path) -> None:
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    write_binary(root, names, "batches.meta.txt", 1)


def write_cifar100_binary(root: Path) -> None:
    write_binary(root, ["train.bin", "test.bin"], "fine_label_names.txt", 2)


def write_parquet(root: Path, column: str = "image") -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({column: datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "owl"])})
    content = {column: [{"bytes": png(image), "path": None} for image in COLOUR], "label": LABELS}
    table = datasets.Dataset.from_dict(content, features=features)
    half = 5
    table.select(range(half)).to_parquet(root / "train-00000-of-00002.parquet")
    table.select(range(half, 12)).to_parquet(root / "train-00001-of-00002.parquet")
    table.to_parquet(root / "test-00000-of-00001.parquet")


def write_plain_parquet(root: Path) -> None:
    """Bytes and integers, without a word on classes."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [png(image) for image in COLOUR], "label": LABELS})
    for name in ("train", "validation"):
        parquet.write_table(table, root / f"{name}.parquet")


def write_saved(root: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"image": [{"bytes": png(image)} for image in COLOUR], "label": LABELS})
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(root)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(root: Path, ending: str = "", grey: np.ndarray = COLOUR[..., 0], labels: Any = LABELS) -> None:
    root.mkdir(parents=True, exist_ok=True)
    pack: Callable[[bytes], bytes] = gzip.compress if ending else bytes
    for part in ("train", "t10k"):
        (root / f"{part}-images-idx3-ubyte{ending}").write_bytes(pack(idx(grey)))
        (root / f"{part}-labels-idx1-ubyte{ending}").write_bytes(pack(idx(np.array(labels, np.uint8))))


FORMATS = {
    "folder": (write_folders, ("class0", "class1", "class2"), 12),
    "folder, test": (lambda root: write_folders(root, "test"), ("class0", "class1", "class2"), 12),
    "cifar10": (write_cifar10, ("cat", "dog", "owl"), 60),
    "cifar10 below": (lambda root: write_cifar10(root / "cifar-10-batches-py"), ("cat", "dog", "owl"), 60),
    "cifar100": (write_cifar100, ("cat", "dog", "owl"), 12),
    "cifar10 binary": (write_cifar10_binary, ("cat", "dog", "owl"), 60),
    "cifar100 binary": (write_cifar100_binary, ("cat", "dog", "owl"), 12),
    "parquet": (write_parquet, ("cat", "dog", "owl"), 12),
    "plain parquet": (write_plain_parquet, ("0", "1", "2"), 12),
    "saved": (write_saved, ("0", "1", "2"), 12),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_found_and_read(name: str, tmp_path: Path) -> None:
    write, names, count = FORMATS[name]
    write(tmp_path)
    train, evaluation, found = open_images(data(tmp_path))
    assert found == names
    assert (len(train), len(evaluation)) == (count, 12)
    for i in (0, 5, 11):
        for image, label in (train[i], evaluation[i]):
            torch.testing.assert_close(image, expected(COLOUR[i]))
            assert label == LABELS[i]


@pytest.mark.parametrize(("folder", "ending"), [(".", ""), (".", ".gz"), ("FashionMNIST/raw", ".gz")])
def test_idx(folder: str, ending: str, tmp_path: Path) -> None:
    write_idx(tmp_path / folder, ending)
    train, evaluation, names = open_images(data(tmp_path, mean=(0.5,), std=(0.25,)))
    image, label = train[4]
    assert (names, label, len(evaluation), image.shape) == (("0", "1", "2"), 1, 12, (1, 32, 32))
    torch.testing.assert_close(image[0], (torch.from_numpy(COLOUR[4, ..., 0]) / 255 - 0.5) / 0.25)
    colour, _ = open_images(data(tmp_path))[0][4]
    torch.testing.assert_close(colour, expected(COLOUR[4, ..., :1].repeat(3, -1)))


def test_grey_from_colour(tmp_path: Path) -> None:
    """The same from files, by PIL, and from arrays, by torchvision, which rounds down."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_cifar100(tmp_path / "a")
    write_folders(tmp_path / "b")
    changes = {"mean": (0.0,), "std": (1 / 255,)}
    for folder in "ab":
        image, _ = open_images(data(tmp_path / folder, **changes))[0][7]
        want = torch.from_numpy(COLOUR[7] @ np.array([0.299, 0.587, 0.114]))
        assert (image[0] - want).abs().max() < 1.1


def test_embedded_fashion() -> None:
    train, labels, test, test_labels = load_fashion()
    assert (train.shape, test.shape, len(NAMES)) == ((10_000, 28, 28), (2_000, 28, 28), 10)
    assert np.bincount(labels).tolist() == [1000] * 10
    assert np.bincount(test_labels).tolist() == [200] * 10
    # Fashion-MNIST begins with an ankle boot and two T-shirts; its mean is .286 and its deviation .353.
    assert labels[:3].tolist() == [9, 0, 0]
    assert abs(train.mean() / 255 - 0.286) < 0.002
    assert abs(train.std() / 255 - 0.353) < 0.002
    first, second, names = open_images(ImageData(path="fashion", size=28, mean=(0.286,), std=(0.353,), train_limit=100))
    assert (len(first), len(second), names) == (100, 2000, NAMES)


def test_fashion_is_packed_in_the_order_of_the_files(tmp_path: Path) -> None:
    labels = [9, 1, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    images = np.arange(14, dtype=np.uint8)[:, None, None].repeat(28, 1).repeat(28, 2)
    write_idx(tmp_path, ".gz", images, labels)
    with np.load(io.BytesIO(lzma.decompress(pack_fashion(tmp_path, train_each=2, test_each=1)))) as arrays:
        assert arrays["train"][:, 0, 0].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
        assert arrays["test_labels"].tolist() == [9, 1, 0, 2, 3, 4, 5, 6, 7, 8]


def test_crop_and_flip_cut_from_a_black_border(tmp_path: Path) -> None:
    """Every item is one of the 9 × 9 places of the padded image, mirrored or not, and most of them come up."""
    write_cifar100(tmp_path)
    plain = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}
    padded = torch.nn.functional.pad(torch.from_numpy(COLOUR[3]).permute(2, 0, 1).float(), (4,) * 4)
    places = {(t, x): padded[:, t : t + 32, x : x + 32] for t in range(9) for x in range(9)}
    for augment, flips in (("crop", (False,)), ("flip", (False, True))):
        train, evaluation, _ = open_images(data(tmp_path, augment=augment, **plain))
        wanted = {(*k, f): (v.flip(-1) if f else v).round() for k, v in places.items() for f in flips}
        random.seed(0)
        images = [train[3][0].round() for _ in range(150)]
        seen = [next(k for k, v in wanted.items() if torch.equal(v, image)) for image in images]
        assert len(set(seen)) > 60
        assert {k[2] for k in seen} == set(flips)
        torch.testing.assert_close(evaluation[3][0], padded[:, 4:-4, 4:-4])


def test_sizes(tmp_path: Path) -> None:
    """Other sizes are resized without distortion, and the middle is taken."""
    wide = np.zeros((40, 80, 3), np.uint8)
    wide[:, 40:] = 255
    write_one(tmp_path, wide)
    for augment in ("none", "crop", "flip", "imagenet"):
        train, evaluation, _ = open_images(data(tmp_path, augment=augment, mean=(0.0,) * 3, std=(1.0,) * 3))
        assert train[0][0].shape == evaluation[0][0].shape == (3, 32, 32)
        assert evaluation[0][0][:, :, :12].max() == 0
        assert evaluation[0][0][:, :, 20:].min() == 1
    torch.manual_seed(0)
    assert len({round(float(train[0][0].mean()), 3) for _ in range(10)}) > 5


def test_imagenet_evaluates_on_the_middle(tmp_path: Path) -> None:
    """Resized to 256/224 of the size: the white border of an image of 64² is just outside of the middle 56²."""
    image = np.full((64, 64, 3), 255, np.uint8)
    image[4:60, 4:60] = 0
    write_one(tmp_path, image)
    for augment, brightest in (("imagenet", 0.0), ("none", 1.0)):
        _, evaluation, _ = open_images(data(tmp_path, size=56, augment=augment, mean=(0.0,) * 3, std=(1.0,) * 3))
        assert evaluation[0][0].max() == pytest.approx(brightest, abs=0.05)


def test_limits_take_all_classes_of_folders(tmp_path: Path) -> None:
    write_folders(tmp_path)
    train, evaluation, _ = open_images(data(tmp_path, train_limit=3, eval_limit=100))
    assert (len(train), len(evaluation)) == (3, 12)
    assert [train[i][1] for i in range(3)] == [0, 1, 2]


class Evil:
    def __reduce__(self) -> Any:
        return print, ("should never run",)


def spoil_pickle(root: Path) -> None:
    write_cifar10(root)
    (root / "data_batch_3").write_bytes(pickle.dumps({b"data": Evil(), b"labels": LABELS}))


def spoil(write: Callable[..., None], name: str, change: Callable[[bytes], bytes | None]) -> Callable[[Path], None]:
    def spoiled(root: Path) -> None:
        write(root)
        content = change((root / name).read_bytes())
        (root / name).unlink()
        if content is not None:
            (root / name).write_bytes(content)

    return spoiled


def more_classes(root: Path) -> None:
    write_folders(root)
    (root / "val" / "unheard").mkdir()


def empty_class(root: Path) -> None:
    write_folders(root)
    for part in ("train", "val"):
        (root / part / "class3").mkdir()


def no_classes(root: Path) -> None:
    (root / "train").mkdir()
    (root / "val").mkdir()


def fewer_labels(root: Path) -> None:
    write_idx(root)
    (root / "train-labels-idx1-ubyte").write_bytes(idx(np.array(LABELS[:5], np.uint8)))


def null_labels(root: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("train", "test"):
        parquet.write_table(arrow.table({"image": [b"", b""], "label": [1, None]}), root / f"{name}.parquet")


SPOILED = {
    "nothing there": (lambda root: None, "", r"train/CLASS.*no files"),
    "no evaluation": (lambda root: (root / "train").mkdir(), "", r"none of val/, valid/, validation/, test/"),
    "no classes": (no_classes, "train", "no classes"),
    "classes differ": (more_classes, "val", "unheard"),
    "empty class": (empty_class, "train/class3", "no images"),
    "pickle": (spoil_pickle, "data_batch_3", r"asks for builtins\.print"),
    "truncated pickle": (spoil(write_cifar10, "test_batch", lambda x: x[:500]), "test_batch", "unreadable"),
    "batch missing": (spoil(write_cifar10, "data_batch_2", lambda x: None), "", "data_batch_2 missing"),
    "labels of pickle": (lambda root: write_cifar10(root, LABELS[:5]), "data_batch_1", "expected 12 integers.*got 5"),
    "label of pickle": (lambda root: write_cifar10(root, [*LABELS[:11], 3]), "data_batch_1 [11]", "3 is not in 0"),
    "binary": (spoil(write_cifar10_binary, "test_batch.bin", lambda x: x[:-9]), "test_batch.bin", "3073"),
    "magic number": (spoil(write_idx, "train-images-idx3-ubyte", lambda x: b"\1" + x[1:]), "train-images", "00000803"),
    "truncated idx": (spoil(write_idx, "t10k-images-idx3-ubyte", lambda x: x[:-1]), "t10k-images", "12288 bytes; 1228"),
    "short idx": (spoil(write_idx, "t10k-images-idx3-ubyte", lambda x: x[:9]), "t10k-images", "within its header"),
    "idx missing": (spoil(write_idx, "t10k-labels-idx1-ubyte", lambda x: None), "", "no file t10k-labels-idx1-ubyte"),
    "idx counts": (fewer_labels, "train-labels", "5 labels for 12 images"),
    "truncated gz": (
        spoil(lambda root: write_idx(root, ".gz"), "train-images-idx3-ubyte.gz", lambda x: x[:99]),
        "train-images-idx3-ubyte.gz",
        "cannot be read",
    ),
    "label of idx": (
        spoil(write_idx, "t10k-labels-idx1-ubyte", lambda x: x[:-1] + b"\7"),
        "t10k-labels-idx1-ubyte [11]",
        r"label 7 is not in 0\.\.2",
    ),
    "parquet": (spoil(write_plain_parquet, "train.parquet", lambda x: x[:50]), "train.parquet", "as parquet"),
    "columns": (lambda root: write_parquet(root, "img"), "train-0", "no column image; there are img, label"),
    "null labels": (null_labels, "train.parquet", "expected integers.*1 of them null"),
    "saved": (spoil(write_saved, "train/state.json", lambda x: b"{"), "", "saved data set"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_wrong_is_said(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write, where, reason = SPOILED[name]
    write(tmp_path)
    with pytest.raises(DataError, match=reason) as caught:
        open_images(data(tmp_path))
    assert str(caught.value).startswith(str(tmp_path / where))
    assert "never run" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["truncated", "text", "deep", "jpeg"])
def test_a_bad_image_is_a_bad_record(kind: str, tmp_path: Path) -> None:
    write_folders(tmp_path)
    file = tmp_path / "train" / "class1" / "04.png"
    deep, jpeg = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(deep, "PNG")
    Image.fromarray(COLOUR[0]).save(jpeg, "JPEG")
    content = {
        "truncated": file.read_bytes()[:-500],
        "text": b"not an image",
        "deep": deep.getvalue(),
        "jpeg": jpeg.getvalue()[:-400],
    }
    file.write_bytes(content[kind])
    train, _, _ = open_images(data(tmp_path))
    assert train[3][1] == 0
    with pytest.raises(DataError, match=r"04\.png: (cannot be read as an image|expected 8 bits)") as caught:
        train[4]
    assert caught.value.path == str(file)


def test_a_bad_image_of_a_table_is_a_bad_record(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images = [{"bytes": png(COLOUR[0])}, {"bytes": b"no image"}, {"bytes": None}]
    for name in ("train", "test"):
        parquet.write_table(arrow.table({"image": images, "label": [0, 1, 0]}), tmp_path / f"{name}.parquet")
    train, _, _ = open_images(data(tmp_path))
    assert train[0][1] == 0
    for record, reason in ((1, "cannot be read as an image"), (2, "expected the bytes of an image; got NoneType")):
        with pytest.raises(DataError, match=reason) as caught:
            train[record]
        assert caught.value.record == record


def test_paths_and_settings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a folder with CIFAR.*IDX.*parquet.*there is nothing"):
        open_images(data(tmp_path / "none"))
    write_folders(tmp_path)
    with pytest.raises(DataError, match=r"expected IDX \(train-images.*there are: train, val"):
        open_images(data(tmp_path, format="idx"))
    with pytest.raises(ConfigError, match=r"one of auto, fashion, cifar, idx.*got 'zip'"):
        open_images(data(tmp_path, format="zip"))
    with pytest.raises(ConfigError, match="1 value"):
        open_images(data(tmp_path, mean=(0.1, 0.2)))
    assert json.dumps(open_images(data(tmp_path, format="folder"))[2]) == '["class0", "class1", "class2"]'
