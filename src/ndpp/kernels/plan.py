"""What a training call is told: constants of a layer, and the rows of one input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..geometry import Layout, Phase


@dataclass(frozen=True, eq=False)  # as keys they are what they are: comparing their fields takes longer than a launch
class Plan:
    """What a layer's arguments and settings say about its statistics. Constant over calls."""

    layout: Layout
    transposed: bool
    per_row: bool  # S is of each row, not of the whole sample
    padding_mode: str
    scale: str
    scale_eps: float
    scale_positions: int | None
    solver: str
    steps: int
    eps: float
    shrinkage: float
    rows: int | None
    stride: int | None

    def outputs(self, weight: Tensor) -> int:
        return weight.shape[1] * self.layout.groups if self.transposed else weight.shape[0]

    @property
    def samples_rows(self) -> bool:
        return self.rows is not None or self.stride is not None


@dataclass(frozen=True, eq=False)
class View:
    """The rows of one call: the positions of its input, and how many of them are looked at."""

    phase: Phase
    budget: tuple[int, ...]


class Folded(NamedTuple):
    """What the stock operation is given, and by what it was found."""

    weight: Tensor  # D·W
    constant: Tensor  # b - μ·D·W
    d: Tensor
    mean: Tensor  # those of the batch, or the running ones where it had none to give
    unit: Tensor


class Running(NamedTuple):
    """The buffers of a layer, which `observe_` writes to."""

    mean: Tensor  # (g, f)
    cov: Tensor  # (g, f, f)
    tracked: Tensor  # ()
    step_rows: Tensor  # (); those of the present step, and their moments
    step_mean: Tensor
    step_cov: Tensor
