"""What conversion did: a plain data object that prints as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..settings import Settings


@dataclass(frozen=True)
class Row:
    """One layer or norm: what it was, what it became ("" = left alone), and why or how."""

    path: str
    before: str
    after: str = ""
    blocks: str = ""
    settings: Settings | None = None
    note: str = ""


@dataclass(frozen=True)
class Report:
    """What :func:`ndpp.convert_` did. ``print(report)`` shows the table.

    Attributes:
        layers: every linear and convolutional layer, converted or not.
        norms: every normalisation, removed or kept.
        parameters_before, parameters_after: number of values.
        added: names of Parameters that no optimizer knows yet; see :meth:`new_parameters`.
        change: with ``calibration=``, the largest relative change of an output; None otherwise.
    """

    layers: tuple[Row, ...]
    norms: tuple[Row, ...]
    parameters_before: int
    parameters_after: int
    added: tuple[str, ...] = ()
    change: float | None = None

    @property
    def converted(self) -> tuple[Row, ...]:
        return tuple(row for row in self.layers if row.after)

    @property
    def skipped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.layers if not row.after)

    @property
    def removed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.norms if row.after)

    @property
    def kept(self) -> tuple[Row, ...]:
        return tuple(row for row in self.norms if not row.after)

    def new_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """For an optimizer that was there before: ``optimizer.add_param_group({"params": ...})``."""
        return [model.get_parameter(name) for name in self.added]

    def __str__(self) -> str:
        rows = [_line(row) for row in (*self.layers, *self.norms)]
        lines = table(("path", "from → to", "blocks", "settings", "note"), rows)
        lines.append(
            f"layers: {len(self.converted)} converted, {len(self.skipped)} left alone; "
            f"norms: {len(self.removed)} removed, {len(self.kept)} kept; "
            f"{self.parameters_before:,} → {self.parameters_after:,} parameters"
        )
        if self.added:
            more = f" and {len(self.added) - 5} more" if len(self.added) > 5 else ""
            lines.append(f"new parameters, unknown to existing optimizers: {', '.join(self.added[:5])}{more}")
        if self.change is not None:
            lines.append(f"largest relative change of an output on the calibration data: {self.change:.1e}")
        return "\n".join(lines)


def _line(row: Row) -> tuple[str, ...]:
    to = f"{row.before} → {row.after}" if row.after else row.before
    settings = repr(row.settings).removeprefix("Settings") if row.settings is not None else ""
    return row.path or "(the model)", to, row.blocks, "default" if settings == "()" else settings, row.note


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns side by side, without those that are empty."""
    used = [i for i in range(len(head)) if i == 0 or any(row[i] for row in rows)]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in used]
    lines = ["  ".join(row[i].ljust(w) for i, w in zip(used, widths, strict=True)).rstrip() for row in (head, *rows)]
    return [lines[0], "─" * min(max(map(len, lines)), 120), *lines[1:], ""]
