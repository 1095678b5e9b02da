"""The normalisations that a recipe can be trained with: ndpp's, and those it is compared to."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

import ndpp

from ..config import NormConfig
from ..errors import RecipeError
from .frn import FRN
from .iternorm import IterNorm
from .replace import Replaced, replace_norms_
from .switchable import SwitchableWhitening

__all__ = ["FRN", "IterNorm", "Replaced", "SwitchableWhitening", "apply_norm_", "replace_norms_"]


def apply_norm_(model: nn.Module, norm: NormConfig, calibration: Iterable[Any] | None = None) -> str:
    """Give a plain network the normalisation of a run, in place; says in a line what was done."""
    if norm.name == "ndpp":
        return _convert_(model, norm.name, norm.settings, calibration)
    if norm.name == "nd":
        return _convert_(model, norm.name, norm.settings.replace(scale="none"), calibration)
    done = replace_norms_(model, norm.name)
    if norm.name != "none" and not done.replaced and not done.kept:
        left = f"; {_counted(done.unknown)} is none that is known" if done.unknown else ""
        raise RecipeError(f"norm {norm.name}: the network has no normalisation to replace{left}")
    parts = (("replaced", done.replaced), ("kept", done.kept), ("unknown and kept", done.unknown))
    said = [f"{_counted(kinds)} {what}" for what, kinds in parts if kinds]
    return f"{norm.name}: {'; '.join(said) or 'there were no norms'}"


def _convert_(model: nn.Module, name: str, settings: ndpp.Settings, calibration: Iterable[Any] | None) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ndpp.convert_: nothing changed")  # an error here, below
        try:
            report = ndpp.convert_(model, settings, calibration=calibration)
        except (ValueError, TypeError) as error:
            raise RecipeError(f"norm {name}: {error}") from error
    if not report.converted:
        why = sorted({row.note for row in report.skipped}) or ["the network has no linear or convolutional layers"]
        raise RecipeError(f"norm {name}: no layer was converted: {'; '.join(why[:3])}")
    return f"{name}: {len(report.converted)} layers converted, {len(report.removed)} norms removed"


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
