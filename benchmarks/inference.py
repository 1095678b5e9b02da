"""Inference time of converted networks, as a ratio to the plain ones: before fold_ and after it.

The three take turns within one run, and medians are compared. The plain network has its BatchNorm folded into its
convolutions by torch.fx where it can be traced: that is what the folded one has to equal.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ndpp

from .records import append, header
from .timing import markdown, spread, turns

MODELS = {
    "resnet50": (1, 8),
    "mobilenet_v2": (1, 8),
    "densenet121": (1, 8),
    "vit_b_16": (1, 4),
    "convnext_tiny": (1, 4),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help="names in torchvision.models, comma-separated")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--batch", type=int, help="one batch size for all; by default small and larger")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--out", type=Path, help="append one JSON line per model to this file")


def main(options: argparse.Namespace) -> None:
    print(f"{header(options.device)}; {options.dtype}, {options.size}², median of {options.repeats}\n")
    print(f"{'model':<16}{'batch':>6}{'plain ms':>10}{'IQR':>7}{'converted':>11}{'folded':>9}")
    for name in options.models.split(","):
        for batch in (options.batch,) if options.batch else MODELS.get(name, (1,)):
            measure(name, batch, options)


def measure(name: str, batch: int, options: argparse.Namespace) -> None:
    import torchvision

    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    model = torchvision.models.get_model(name)
    x = torch.randn(batch, 3, options.size, options.size)
    converted = copy.deepcopy(model)
    ndpp.convert_(converted)
    converted.train()(x[:2] if batch > 1 else x.expand(2, -1, -1, -1))  # statistics
    folded = ndpp.fold_(copy.deepcopy(converted))
    variants = {"plain": fused(model), "converted": converted, "folded": folded}
    place = {"device": options.device, "dtype": dtype}
    ready = {key: m.eval().to(**place) for key, m in variants.items()}
    x = x.to(**place)
    calls = {key: partial(m, x) for key, m in ready.items()}
    with torch.inference_mode():
        times = turns(calls, 20 if x.is_cuda else 1, options.repeats, options.device, warmup=2)
    base, iqr = spread(times["plain"])
    ratio = {key: spread(t)[0] / base for key, t in times.items() if key != "plain"}
    cells = f"{ratio['converted']:>11.2f}{ratio['folded']:>9.2f}"
    print(f"{name:<16}{batch:>6}{base:>10.2f}{iqr:>6.0f}%{cells}", flush=True)
    result = {"model": name, "batch": batch, "size": options.size, "dtype": options.dtype, "plain_ms": base}
    append(options.out, {**result, "iqr_percent": iqr, "ratio": ratio}, options.device)


def fused(model: nn.Module) -> nn.Module:
    """BatchNorm in its convolutions, or the model as it is where it cannot be traced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from torch.fx.experimental.optimization import fuse

            folded: nn.Module = fuse(model.eval())
            return folded
        except Exception as error:
            print(f"  (not fused: {type(error).__name__})")
            return model


def table(records: list[dict[str, Any]]) -> str:
    rows = []
    for r in records:
        ratio = [f"{r['ratio'][key]:.2f}" for key in ("converted", "folded")]
        rows.append([r["model"], str(r["batch"]), f"{r['device']}, {r['dtype']}", f"{r['plain_ms']:.1f}", *ratio])
    return markdown(("model", "batch", "device", "plain ms", "converted", "folded"), rows)
