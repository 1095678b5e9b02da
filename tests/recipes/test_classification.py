"""Networks for classification, and the task: losses, metrics, weights."""

import json
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ndpp
from ndpp_recipes.config import Config, ImageData, ModelConfig, RunConfig
from ndpp_recipes.data.fashion import NAMES
from ndpp_recipes.errors import RecipeError
from ndpp_recipes.models.classifiers import build_classifier
from ndpp_recipes.tasks import make_task
from ndpp_recipes.tasks.classification import Classification

SMALL = ndpp.Settings(scale="l1", rows=64, block=8)

# Name, channels, size, options, number of parameters for 10 classes where the literature gives one.
MODELS: list[tuple[str, int, int, dict[str, Any], int | None]] = [
    ("cnn", 1, 28, {}, None),
    ("resnet18-cifar", 3, 32, {}, 11_173_962),
    ("resnet18-cifar", 1, 32, {"width": 8}, None),
    ("resnet20-cifar", 3, 32, {}, 269_722),
    ("resnet56-cifar", 3, 32, {}, 853_018),
    ("resnet110-cifar", 3, 32, {}, 1_727_962),
    ("vit-small", 3, 32, {"depth": 2}, None),
    ("resnet18", 1, 32, {}, None),
    ("mobilenet_v3_small", 3, 32, {}, None),
    ("timm/vit_tiny_patch16_224", 3, 32, {"depth": 1}, None),
]
LARGE = ["vgg11", "resnet50", "resnet101", "densenet121", "vit_b_16"]


def config(**run: Any) -> Config:
    data = ImageData(path="fashion", size=28, augment="none", mean=(0.286,), std=(0.353,), train_limit=64)
    model = ModelConfig(name="cnn", options={"width": 4})
    return Config(recipe="x", task="classification", model=model, data=data, run=RunConfig(**run))


@pytest.fixture(scope="module")
def task() -> Classification:
    made = make_task(config(label_smoothing=0.1))
    assert isinstance(made, Classification)
    return made


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("name", "channels", "size", "options", "count"), MODELS, ids=[m[0] for m in MODELS])
def test_models_convert_and_train(name: str, channels: int, size: int, options: dict[str, Any], count: int) -> None:
    model = build_classifier(name, 10, channels, size, options)
    assert count is None or parameters(model) == count
    report = ndpp.convert_(model, SMALL)
    assert report.converted
    assert not report.skipped
    assert not report.kept
    logits = model(torch.randn(2, channels, size, size))
    assert logits.shape == (2, 10)
    F.cross_entropy(logits, torch.tensor([1, 2])).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", LARGE)
def test_large_models_convert(name: str) -> None:
    with torch.device("meta"):
        model = build_classifier(name, 1000, 3, 224, {})
    report = ndpp.convert_(model)
    assert not report.skipped
    assert not report.kept
    assert report.removed, "vgg11 is the one with BatchNorm"


def test_shortcuts_without_parameters() -> None:
    """The first block of a stage, whose weights are 0, gives every second pixel, and zeros around its channels."""
    model = build_classifier("resnet20-cifar", 10, 3, 32, {})
    block = model.get_submodule("stages.1.0").eval()
    nn.init.zeros_(block.get_parameter("conv2.weight"))
    x = torch.rand(1, 16, 8, 8)
    y = block(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert y[:, :8].abs().max() == y[:, 24:].abs().max() == 0


def test_initialisation_is_that_of_torchvision() -> None:
    """He's normal by fan-out: the deviation is √(2 / (outputs · kernel))."""
    for name, module in build_classifier("resnet18-cifar", 10, 3, 32, {}).named_modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 30_000:
            want = (2 / (module.out_channels * module.kernel_size[0] ** 2)) ** 0.5
            assert module.weight.std().item() == pytest.approx(want, rel=0.05), name


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("resnet19", {}, "did you mean .*resnet18"),
        ("resnet18-cifra", {}, "did you mean resnet18-cifar"),
        ("timm/resnet18x", {}, "did you mean timm/resnet18"),
        ("faster_rcnn", {}, "no model 'faster_rcnn'"),
        ("cnn", {"depth": 3}, r"'cnn' does not take model.options \{'depth': 3\}.*depth"),
        ("resnet18", {"colour": 3}, "does not take.*colour"),
        ("vit-small", {"patch": 5}, "patch 5 must divide the size 32"),
    ],
)
def test_unknown_models_and_options(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        build_classifier(name, 10, 3, 32, options)


def test_task(task: Classification) -> None:
    images, labels = batch = task.collate([task.train_set[i] for i in range(6)])
    assert (images.shape, task.count(batch)) == ((6, 1, 28, 28), 6)
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert (len(task.train_set), len(task.eval_set)) == (64, 2000)
    assert json.loads(task.files()["classes.json"]) == list(NAMES)
    model = task.build()
    assert model(*task.example()).shape == (1, 10)
    model.eval()
    log = F.log_softmax(model(images), 1)
    want = -(0.9 * log[range(6), labels] + 0.1 * log.mean(1)).mean()
    torch.testing.assert_close(task.loss(model, batch)["loss"], want)


class Given(nn.Module):
    """Answers with what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_metrics(task: Classification) -> None:
    """Ranks 1, 2, 5, 6 and 10 of the true class, in two batches on two ranks."""
    logits = torch.arange(10.0, 0, -1).repeat(5, 1)
    labels = torch.tensor([0, 1, 4, 5, 9])
    states = []
    for part in ([0, 1], [2, 3, 4]):
        meter = task.meter()
        for i in part:
            meter.update(Given(), (logits[i : i + 1], labels[i : i + 1]))
        states.append(pickle.loads(pickle.dumps(meter.state())))
    result = task.meter().result([*states, task.meter().state()])
    assert (result["top1"], result["top5"]) == (20.0, 60.0)
    assert result["eval_loss"] == pytest.approx(F.cross_entropy(logits, labels).item())


def test_metrics_of_few_classes(task: Classification) -> None:
    meter = task.meter()
    meter.update(Given(), (torch.eye(3), torch.tensor([0, 1, 1])))
    result = meter.result([meter.state()])
    assert result["top1"] == pytest.approx(200 / 3)
    assert result["top5"] == 100


def test_weights(task: Classification) -> None:
    model, other = task.build(), build_classifier("cnn", 7, 1, 28, {"width": 4})
    head = model.get_parameter("14.weight").clone()
    task.load_weights(model, other.state_dict())
    assert torch.equal(model.get_parameter("0.weight"), other.get_parameter("0.weight"))
    assert torch.equal(model.get_parameter("14.weight"), head)
    same = task.build()
    task.load_weights(model, same.state_dict())
    assert torch.equal(model.get_parameter("14.weight"), same.get_parameter("14.weight"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RecipeError, match=r"another network: 0.weight is \(8, 1, 3, 3\) instead of \(4, 1, 3, 3\)"):
        task.load_weights(model, build_classifier("cnn", 10, 1, 28, {"width": 8}).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RecipeError, match=r"are missing .*are not known"):
        task.load_weights(model, {"fc.weight": torch.zeros(1)})


def test_it_learns() -> None:
    """Ten steps of ND++ on 256 images take the loss well below chance (2.30), and evaluation with it."""
    made = make_task(config().changed({"data.train_limit": 256, "data.eval_limit": 200, "model.options.width": 8}))
    model = made.build()
    ndpp.convert_(model, SMALL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        for indices in made.batches(128, torch.Generator().manual_seed(0)):
            optimizer.zero_grad()
            made.loss(model, made.collate([made.train_set[i] for i in indices]))["loss"].backward()
            optimizer.step()
    model.eval()
    meter = made.meter()
    with torch.no_grad():
        for indices in made.eval_batches(100):
            meter.update(model, made.collate([made.eval_set[i] for i in indices]))
    result = meter.result([meter.state()])
    assert result["eval_loss"] < 1.8
    assert result["top1"] > 40
