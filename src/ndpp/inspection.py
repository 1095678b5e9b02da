"""inspect: how correlated the input of every layer is, and what decorrelation makes of it. Changes nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .attention import MultiheadAttention, Projection
from .conversion.planning import Where
from .conversion.report import table as plain_table
from .conversion.surgery import Snapshot, become_, blocks, is_ours, match
from .decorrelated import Decorrelated
from .feeding import evaluating, feed
from .geometry import Grid
from .settings import Settings, named_settings
from .whitening import Moments, merge, statistics_dtype

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDING = torch.finfo(torch.float32).eps  # what cannot be told from no variance, times features and the largest
WIDTH = 120  # columns of the plain table
ABOUT = ("layer", "class", "blocks", "rows", "|x|")
HEAD = (*ABOUT, "condition", "→", "rank", "→", "off-diag", "→", "dead")
NUMBERS = {"condition": "condition number", "rank": "effective rank", "offdiagonal": "off-diagonal energy"}
BEST = {"condition": "1", "rank": "100%", "offdiagonal": "0%"}
FEW_ROWS = "fewer rows than features in a block, so that directions are dead for want of data (use a larger batch)"


class Change(NamedTuple):
    """A number of the data as the layer gets it, and after decorrelation. NaN where there is no variance at all."""

    before: float
    after: float


UNKNOWN = Change(math.nan, math.nan)


@dataclass(frozen=True)
class LayerInspection:
    """What one layer sees."""

    path: str
    kind: str  # its class; "ndpp." marks layers that are converted already
    features: int = 0  # columns of its data matrix
    blocks: str = ""  # how they are decorrelated: blocks × features of each
    rows: int = 0  # of the data matrix, over all calls; 0 if the layer was not measured, for the reason in `notes`
    condition: Change = UNKNOWN  # largest over smallest eigenvalue of Cov that is not dead, of the worst block
    rank: Change = UNKNOWN  # exp(entropy of the normalised eigenvalues), as a share of the features: 1 is white
    offdiagonal: Change = UNKNOWN  # share of ‖Cov‖² that lies off the diagonal: 0 is uncorrelated
    dead: int = 0  # directions without any variance above rounding
    nonfinite: int = 0  # NaN and Inf in its input; data that holds them is left out of everything else
    scale: float = math.nan  # mean |x| of its input
    notes: tuple[str, ...] = ()  # why it was not measured, or what to know of its numbers


@dataclass(frozen=True)
class Inspection:
    """What :func:`ndpp.inspect` found, layer by layer: ``print(inspection)``, or :meth:`print` and :meth:`figure`."""

    layers: tuple[LayerInspection, ...]

    @property
    def measured(self) -> tuple[LayerInspection, ...]:
        return tuple(layer for layer in self.layers if layer.rows)

    @property
    def worst(self) -> tuple[LayerInspection, ...]:
        """The measured layers whose input varies at all, the worst conditioned first."""
        known = [layer for layer in self.measured if not math.isnan(layer.condition.before)]
        return tuple(sorted(known, key=lambda layer: -layer.condition.before))

    @property
    def medians(self) -> dict[str, Change]:
        """Of condition, rank and offdiagonal, over the layers in :attr:`worst`."""
        found = {name: [getattr(layer, name) for layer in self.worst] or [UNKNOWN] for name in NUMBERS}
        return {
            name: Change(*torch.tensor(of, dtype=torch.float64).quantile(0.5, 0).tolist()) for name, of in found.items()
        }

    def __str__(self) -> str:
        head, *rows = _table(self.measured, WIDTH)
        lines = plain_table(head, rows) if rows else []
        for line in self._remarks():
            lines += textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)

    def _remarks(self) -> list[str]:
        """A summary, and every note once, with the layers it is about."""
        if not self.layers:
            return ["no linear or convolutional layers, or none that where= chooses"]
        rest = len(self.layers) - len(self.measured)
        lines = [f"layers measured: {len(self.measured)}, not measured: {rest}; → is after decorrelation"]
        if self.worst:
            medians = (f"{NUMBERS[name]} {' → '.join(_shown(c, name))}" for name, c in self.medians.items())
            worst = (f"{_named(layer)} ({_shown(layer.condition, 'condition')[0]})" for layer in self.worst[:3])
            lines += [f"median: {', '.join(medians)}", f"worst conditioned: {', '.join(worst)}"]
        about: dict[str, list[str]] = {}
        for layer in self.layers:
            for note in layer.notes:
                about.setdefault(note, []).append(_named(layer))
        for note, paths in about.items():
            lines.append(f"{note}: {', '.join(paths[:12])}" + f" and {len(paths) - 12} more" * (len(paths) > 12))
        return lines

    def print(self, console: Any = None) -> None:
        """A table in colour, on a rich console. Needs rich."""
        console = _needed("rich.console").Console() if console is None else console
        head, *rows = _table(self.measured, console.width)
        table = _needed("rich.table").Table(box=None, header_style="bold", pad_edge=False)
        for title in head:
            colour = {"condition": "red", "rank": "red", "off-diag": "red", "→": "green"}.get(title.strip())
            table.add_column(title, style=colour, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(*[table, ""] * bool(rows), *self._remarks(), sep="\n", markup=False, highlight=False)

    def figure(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """The three numbers of every layer, before and after; saved to `path` if given. Needs matplotlib."""
        layers = self.measured
        size = (min(max(7.0, 1.5 + 0.22 * len(layers)), 20.0), 8.0)
        figure: Figure = _needed("matplotlib.figure").Figure(figsize=size, layout="constrained")  # no pyplot: no window
        panels = figure.subplots(3, 1, sharex=True, squeeze=False)[:, 0]
        for panel, (name, title) in zip(panels, NUMBERS.items(), strict=True):
            pairs = [getattr(layer, name) for layer in layers]
            before, after = [pair.before for pair in pairs], [pair.after for pair in pairs]
            panel.vlines(range(len(layers)), before, after, color="0.75", linewidth=1.5, zorder=2)
            for values, color, word in ((before, "#d55e00", "before"), (after, "#0072b2", "after decorrelation")):
                faces = ["white" if FEW_ROWS in layer.notes else color for layer in layers]
                panel.scatter(
                    range(len(layers)), values, s=22, facecolors=faces, edgecolors=color, label=word, zorder=3
                )
            panel.set_ylabel(f"{title}\n({BEST[name]} is best)")
            if name != "condition":
                panel.set_ylim(-0.03, 1.03)
                panel.yaxis.set_major_formatter(_needed("matplotlib.ticker").PercentFormatter(1.0))
            panel.grid(axis="y", color="0.9")
            panel.spines[["top", "right"]].set_visible(False)
        panels[0].set_yscale("log" if self.worst else "linear")
        step = max(math.ceil(len(layers) / 60), 1)  # names stay legible; of more layers only some have theirs
        names = [_shortened(_named(layer), 32) for layer in layers[::step]]
        panels[-1].set_xticks(range(0, len(layers), step), names, rotation=90, fontsize=8)
        panels[-1].set_xlim(-0.7, max(len(layers), 1) - 0.3)
        legend = panels[0].legend(
            loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, borderaxespad=0.2
        )
        for handle, color in zip(legend.legend_handles, ("#d55e00", "#0072b2"), strict=False):
            handle.set_facecolor(color)
        if any(FEW_ROWS in layer.notes for layer in layers):
            panels[0].set_title("hollow: too few rows to tell", loc="left", fontsize=9)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


# --- measuring ---


def inspect(
    model: nn.Module, batch: Any, *, settings: Settings | str | None = None, where: Where | None = None
) -> Inspection:
    """How correlated the input of every layer is on a batch of data, and what decorrelation makes of it.

    Works on plain and on converted models, in evaluation mode and over every row, and changes nothing in the model.

    Args:
        model: any module; linear and convolutional layers and attention in it are looked at.
        batch: a tensor, a mapping (``model(**batch)``), a tuple whose first element is the input, or a function of the
            model, for example ``lambda model: model(source, target)``.
        settings: how to decorrelate, or the name of a preset. By default, ndpp layers by their own settings and others
            by ``Settings()``.
        where: ``where(module, dotted_name)`` says which layers to look at; all by default.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"ndpp.inspect: expected an nn.Module; got {type(model).__name__}")
    chosen = None if settings is None else named_settings(settings)
    for path, module in model.named_modules():
        if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(f"ndpp.inspect: {path} is lazy, without parameters; run a batch through the model first")
    with _unchanged(model), evaluating(model):
        results = _attach_(model, chosen, where)
        feed(model, batch)
    return Inspection(tuple(result() for result in results))


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put back classes, attributes, hooks, buffers and random state, and keep layers from being passed over."""
    snapshot = Snapshot(model, values=False)
    renormed: list[Any] = [m.weight for m in model.modules() if getattr(m, "max_norm", None) is not None]  # when called
    saved = [(t, t._version, t.clone()) for t in (*model.buffers(), *renormed) if not t.is_inference()]
    devices = {t.device.index for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    fast = torch.backends.mha.get_fastpath_enabled()  # nn.Transformer* then reads the weights without calling layers
    compiled = "torch._dynamo" in sys.modules  # code compiled without the hooks would not run them
    stance: Any = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    with torch.random.fork_rng(sorted(devices)), stance:
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            snapshot.restore_()
            for tensor, version, value in saved:
                if tensor._version != version:  # only then: a graph that awaits its backward pass may hold them
                    with torch.no_grad():
                        tensor.copy_(value)


class _Watch:
    """Exact moments of what one layer sees, over every row of every call. Its output is not computed."""

    def __init__(self, path: str, kind: str, twin: Decorrelated) -> None:
        self.path, self.kind, self.twin, self.note = path, kind, twin, "not called"
        self.moments: Moments | None = None
        self.finite, self.nonfinite, self.total = 0, 0, 0.0
        twin.__dict__["_product"] = self._product  # all that forward does once it knows its rows
        twin._collecting = "batch"  # every part of attention is called by itself

    def _product(
        self, x: Tensor, grid: Grid, operation: Callable[..., Tensor], *arguments: Any, source: object = None
    ) -> Tensor:
        self.note = "" if self.note == "not called" else self.note
        valid = self.twin._valid(x)
        seen = (x if valid is None else x.movedim(1, -1)[valid]).to(statistics_dtype(x.dtype))
        finite = torch.isfinite(seen)
        self.finite += int(finite.sum())
        self.nonfinite += int((~finite).sum())
        self.total += float(torch.where(finite, seen, 0.0).abs().sum())
        if x.numel() > 0:
            moments = self.twin._exact_moments(x, grid, valid)
            self.moments = moments if self.moments is None else merge(self.moments, moments)
        return operation(x, *arguments[:2]) if isinstance(self.twin, Projection) else x  # attention goes on from there

    def result(self) -> LayerInspection:
        layout, size = self.twin.layout, self.total / self.finite if self.finite else math.nan
        features, shape = layout.groups * layout.channels * layout.taps, blocks(self.twin)
        notes = [self.note, f"{self.nonfinite} values of the input are not finite" * bool(self.nonfinite)]
        numbers, rows = (UNKNOWN, UNKNOWN, UNKNOWN, 0), 0
        if self.moments is not None and self.moments.rows > 0:
            rows = round(float(self.moments.rows))
            numbers = _compare(self.moments.cov, self.twin._solve(self.moments), layout.widths)
            few = rows * layout.repeats(0) <= max(width for _, width in layout.widths)
            notes.append(FEW_ROWS * few)
        elif not any(notes):
            notes.append("called without data")
        told = tuple(filter(None, notes))
        return LayerInspection(self.path, self.kind, features, shape, rows, *numbers, self.nonfinite, size, told)


def _attach_(model: nn.Module, settings: Settings | None, where: Where | None) -> list[Callable[[], LayerInspection]]:
    """Watch every layer that can be converted, or is; say why of the others."""
    results: list[Callable[[], LayerInspection]] = []
    within: set[nn.Module] = set()  # stock attention, which does not call its parts
    for path, module in list(model.named_modules()):
        ours = is_ours(module)
        found = None if ours else match(module)
        if module in within or isinstance(module, MultiheadAttention) or (found is None and not ours):
            continue
        if isinstance(module, nn.MultiheadAttention):
            within.update(module.modules())
        if where is not None and not where(module, path):
            continue
        kind = f"{'ndpp.' * ours}{type(module).__name__}"
        if found is not None and found.ours is None:
            results.append(functools.partial(LayerInspection, path, kind, notes=(found.reason,)))
            continue
        twin = _twin(module)
        if found is not None and found.ours is not None:
            become_(twin, found.ours, Settings() if settings is None else settings, "")
        elif settings is not None:
            layout = twin.layout
            del twin.__dict__["_settings"]  # a living layer would not take another block or shared
            twin._setup(settings, layout.groups, layout.groups * layout.channels, (layout.taps,), twin.running_cov)
        parts = [(name, part) for name, part in twin.named_modules() if isinstance(part, Decorrelated)]
        watches = [_Watch(".".join(filter(None, (path, name))), kind, part) for name, part in parts]
        module.register_forward_pre_hook(functools.partial(_look, twin, watches), with_kwargs=True)
        results += [watch.result for watch in watches]
    return results


@torch.no_grad()
def _look(twin: Any, watches: Sequence[_Watch], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run the twin on what the layer is about to get, once the hooks of others have seen to it."""
    try:
        twin.forward(*args, **kwargs)
    except Exception as error:  # no reason to keep the other layers from being looked at
        for watch in watches:
            watch.note = f"a call could not be read ({' '.join(str(error).split())})"


def _twin(module: nn.Module) -> Any:
    """An object of the same class and parameters, with no hooks and no mutable state in common."""
    twin: Any = object.__new__(type(module))
    for name, value in module.__dict__.items():
        hooks = isinstance(value, dict) and "hooks" in name
        twin.__dict__[name] = (
            type(value)() if hooks else copy.copy(value) if isinstance(value, (dict, list, set)) else value
        )
    twin.__dict__.pop("forward", None)  # of that object alone: it would run the layer itself
    twin._modules.update({name: _twin(child) for name, child in module._modules.items() if child is not None})
    return twin


def _compare(cov: Tensor, d: Tensor, widths: Sequence[tuple[int, int]]) -> tuple[Change, Change, Change, int]:
    """Condition, rank and off-diagonal energy of Cov and of D·Cov·D, and the number of dead directions."""
    cov, d = cov.double().cpu(), d.double().cpu()
    found, dead, first = [], 0, 0
    for count, width in widths:
        own = (slice(first, first + count), slice(width), slice(width))
        first += count
        before, alive = _numbers(cov[own], torch.ones(count, width, dtype=torch.bool))
        after, _ = _numbers(d[own] @ cov[own] @ d[own], alive)
        found.append(torch.stack([before, after]))
        dead += int((~alive).sum())
    share = torch.cat([torch.full((count,), float(width)) for count, width in widths]).double()
    condition, rank, energy = torch.cat(found, -1).unbind(1)  # each (before and after, blocks)
    worst = condition.amax(-1)
    means = (numbers @ share / share.sum() for numbers in (rank, energy))
    changes = [Change(*pair.tolist()) for pair in (torch.where(worst > 0, worst, math.nan), *means)]
    return changes[0], changes[1], changes[2], dead


def _numbers(matrix: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """(condition, 0 where nothing is alive; rank share; off-diagonal energy) (3, blocks), and what is still alive."""
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2).clamp_min(0)
    alive = alive & (values > values.shape[-1] * ROUNDING * values[:, -1:])  # ascending, before and after
    condition = values[:, -1] / torch.where(alive, values, math.inf).amin(-1)
    total = values.sum(-1)
    spread = values / torch.where(total > 0, total, 1.0)[:, None]
    rank = torch.where(total > 0, torch.special.entr(spread).sum(-1).exp() / values.shape[-1], 0.0)
    energy, diagonal = matrix.square().sum((-2, -1)), matrix.diagonal(dim1=-2, dim2=-1).square().sum(-1)
    off = torch.where(energy > 0, 1 - diagonal / torch.where(energy > 0, energy, 1.0), 0.0).clamp_min(0)
    return torch.stack([condition, rank, off]), alive


# --- showing ---


def _named(layer: LayerInspection) -> str:
    return _shortened(layer.path or "(the model)", 60)


def _shown(change: Change, name: str) -> list[str]:
    forms = (".0%" if name != "condition" else ",.1f" if x < 99.95 else ",.0f" for x in change)
    return ["-" if math.isnan(x) else format(x, form) for x, form in zip(change, forms, strict=True)]


def _table(layers: Sequence[LayerInspection], width: int) -> list[tuple[str, ...]]:
    """The head and a row for each layer. Where there is no room, paths are shortened, and some columns left out."""
    rows: list[tuple[str, ...]] = [HEAD]
    for layer in layers:
        numbers = [text for name in NUMBERS for text in _shown(getattr(layer, name), name)]
        about = (_named(layer), layer.kind, layer.blocks, f"{layer.rows:,}", f"{layer.scale:.2g}")
        rows.append((*about, *numbers, f"{layer.dead:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    kept = list(range(1, len(HEAD)))
    for spare in ("|x|", "rows", "blocks", "class"):
        if min(widths[0], 24) + sum(widths[i] + 2 for i in kept) > width:
            kept.remove(HEAD.index(spare))
    room = max(width - sum(widths[i] + 2 for i in kept), 12)
    return [(_shortened(row[0], room), *(row[i].rjust(widths[i] * (i > 1)) for i in kept)) for row in rows]


def _shortened(text: str, width: int) -> str:
    """With its middle left out: the start says which part of the model, the end which layer."""
    head = (width - 1) // 3
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


def _needed(module: str) -> Any:
    """A module of a package that only shows what was found."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs {module.partition('.')[0]}: pip install 'ndpp[inspect]'") from error
