"""What a training call is told: constants of a layer, and the rows of one input."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..geometry import Layout, Phase


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class View:
    """The rows of one call: the positions of its input, and how many of them are looked at."""

    phase: Phase
    budget: tuple[int, ...]
