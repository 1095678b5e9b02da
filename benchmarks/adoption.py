"""Fine-tuning a trained BatchNorm network as it is, and adopted by ndpp: CIFAR-100, ResNet-18, 50 classes each.

The network is trained on classes 0 to 49, gets a new head, and is fine-tuned on classes 50 to 99: with BatchNorm as it
was, and after `ndpp.convert_(model, calibration=...)`, with the same data, order, budget and learning rates. The loss
of function by conversion is measured on all test images before fine-tuning.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ndpp

from . import data
from .records import append, header
from .resnet import ResNet, he_
from .training import WEIGHT_DECAY, ImageSet

HALF = 50


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=Path, required=True, help=".npz of CIFAR-100, from `pack`")
    parser.add_argument("--out", type=Path, help="append one JSON line per run to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rates", default="0.01,0.03,0.1,0.3", help="learning rates of fine-tuning, all for both")
    parser.add_argument("--epochs", type=int, default=10, help="of training on the first half")
    parser.add_argument("--tune-epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--calibration", type=int, default=10, help="batches")
    parser.add_argument("--images", type=int, help="use only N images of either split, evenly spaced")


def main(options: argparse.Namespace) -> None:
    print(header(options.device))
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    arrays = data.load(None, options.cache)
    splits = [data.part(arrays, split, options.images) for split in ("train", "test")]
    first, second = (halves(splits, options.device, upper) for upper in (False, True))
    for seed in map(int, options.seeds.split(",")):
        torch.manual_seed(seed)
        model = ResNet(HALF, options.width, None)
        he_(model)
        model = model.to(options.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        train(model, *first, epochs=options.epochs, rate=0.2, warmup=1.0, seed=seed, options=options)
        accuracy = [test(model, first[1])]
        calibration = [x.contiguous(memory_format=torch.channels_last) for x, _ in batches(first[0], options)]
        adopted = copy.deepcopy(model)
        report = ndpp.convert_(adopted, calibration=calibration)
        accuracy.append(test(adopted, first[1]))
        print(f"seed {seed}: BatchNorm {accuracy[0]:.2f} %, adopted {accuracy[1]:.2f} %, change {report.change:.1e}")
        for rate in map(float, options.rates.split(",")):
            for name, start in (("batchnorm", model), ("adopted", adopted)):
                curve = fine_tune(copy.deepcopy(start), second, rate, seed, options)
                print(f"  {name:<10} lr {rate:<5} " + " ".join(f"{a:6.2f}" for a in curve), flush=True)
                record = {"method": name, "rate": rate, "seed": seed, "accuracies": curve, "before": accuracy}
                plan = {"epochs": options.epochs, "tune_epochs": options.tune_epochs, "batch": options.batch}
                append(options.out, {**record, "change": report.change, "plan": plan}, options.device)


def halves(splits: Any, device: str, upper: bool) -> tuple[ImageSet, ImageSet]:
    sets = []
    for images, labels in splits:
        mine = (labels >= HALF) == upper
        sets.append(ImageSet(images[mine], labels[mine] % HALF, device))
    return sets[0], sets[1]


def batches(images: ImageSet, options: argparse.Namespace) -> list[tuple[Tensor, Tensor]]:
    return [pair for _, pair in zip(range(options.calibration), images.augmented(options.batch, 77), strict=False)]


def fine_tune(
    model: nn.Module, sets: tuple[ImageSet, ImageSet], rate: float, seed: int, options: argparse.Namespace
) -> list[float]:
    """A new head of the same kind, then all of the network."""
    torch.manual_seed(100 + seed)
    head: Any = model.head
    nn.init.kaiming_uniform_(head.weight, a=math.sqrt(5))
    nn.init.zeros_(head.bias)
    return train(model, *sets, epochs=options.tune_epochs, rate=rate, warmup=0.0, seed=50 + seed, options=options)


def train(
    model: nn.Module,
    images: ImageSet,
    held_out: ImageSet,
    *,
    epochs: int,
    rate: float,
    warmup: float,
    seed: int,
    options: argparse.Namespace,
) -> list[float]:
    """SGD with momentum, cosine to zero; test accuracy after every epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=WEIGHT_DECAY)
    per_epoch = len(images) // options.batch
    done, curve = 0, []
    for epoch in range(epochs):
        model.train()
        for x, y in images.augmented(options.batch, 1000 * seed + epoch):
            progress = done / (epochs * per_epoch)
            scale = min(1.0, (done + 1) / max(warmup * per_epoch, 1)) * 0.5 * (1 + math.cos(math.pi * progress))
            optimizer.param_groups[0]["lr"] = rate * scale
            optimizer.zero_grad()
            with torch.autocast(options.device, torch.bfloat16, enabled=options.device != "cpu"):
                logits = model(x)
            F.cross_entropy(logits.float(), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
        curve.append(test(model, held_out))
    return curve


@torch.no_grad()
def test(model: nn.Module, images: ImageSet) -> float:
    """Accuracy in percent, in float32: what conversion may change must not hide in rounding."""
    model.eval()
    right = sum(int((model(x).argmax(1) == y).sum()) for x, y in images.plain())
    return 100 * right / len(images)


def table(records: list[dict[str, Any]]) -> str:
    """Final accuracy by method and learning rate, mean and spread over seeds."""
    runs: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for record in records:
        runs.setdefault((record["method"], record["rate"]), []).append(record)
    epochs = records[0]["plan"]["tune_epochs"]
    head = ["fine-tuned", "learning rate", "seeds", *(f"epoch {i + 1}" for i in range(epochs)), "± std"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (method, rate), group in sorted(runs.items()):
        curves = list(zip(*(record["accuracies"] for record in group), strict=True))
        means = [f"{statistics.mean(values):.2f}" for values in curves]
        spread = f"{statistics.stdev(curves[-1]):.2f}" if len(group) > 1 else "-"
        lines.append("| " + " | ".join([method, f"{rate:g}", str(len(group)), *means, spread]) + " |")
    return "\n".join(lines)
