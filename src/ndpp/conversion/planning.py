"""What conversion will do to a model, decided before anything is touched."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..settings import Settings, named_settings
from . import norms as normalisation
from .norms import Norm
from .reading import Read, read_by_parents
from .surgery import is_ours, match, sizes

Where = Callable[[nn.Module, str], bool]
Overrides = Mapping[str, "Settings | str | None"]


@dataclass
class LayerPlan:
    """A layer: our class for it and its settings, or why it is left alone."""

    path: str
    module: nn.Module
    ours: type[Any] | None
    settings: Settings
    note: str = ""

    @property
    def decorrelates(self) -> bool:
        return self.ours is not None or is_ours(self.module)


@dataclass
class NormPlan:
    """A normalisation: whether it goes, and why not."""

    path: str
    module: nn.Module
    norm: Norm | None
    remove: bool
    note: str = ""
    remove_asked: bool = True  # norms="remove"
    read: Read | None = None  # code that reads its weight
    by_neighbour: bool = False  # kept for want of a decorrelated layer after it
    before: LayerPlan | None = None  # the layers around it, in the order of registration
    after: list[LayerPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kind_name = type(self.module).__name__  # while it still is one


@dataclass
class Plan:
    layers: list[LayerPlan]
    norms: list[NormPlan]


def make_plan(model: nn.Module, settings: Settings, where: Where | None, overrides: Overrides, norms: str) -> Plan:
    items: list[LayerPlan | NormPlan] = []
    reasons = _Reasons(model, where, overrides)
    inside: set[nn.Module] = set()  # parts of a MultiheadAttention, which belong to it
    for path, module in model.named_modules():
        if module in inside or "parametrizations" in path.split("."):
            continue
        if is_ours(module):
            items.append(LayerPlan(path, module, None, settings, "an ndpp layer already"))
            inside.update(module.modules())
        elif (found := _matched(module, path)) is not None:
            chosen = reasons.settings(path, settings)
            why = found.reason or reasons.against(path, module)
            items.append(LayerPlan(path, module, None if why else found.ours, chosen or settings, why))
            if isinstance(module, nn.MultiheadAttention):
                inside.update(module.out_proj.modules())
                for name, part in module.out_proj.named_modules() if why else ():
                    full = ".".join(filter(None, (path, "out_proj", name)))
                    if match(part) is not None:
                        items.append(LayerPlan(full, part, None, settings, "its attention was left alone"))
        elif normalisation.is_named_norm(module):
            read = reasons.read.get(module)
            known = normalisation.recognise(module) if norms == "remove" else None
            items.append(NormPlan(path, module, known, False, read=read))
    reasons.check_patterns([item.path for item in items if isinstance(item, LayerPlan)])
    plan = Plan([i for i in items if isinstance(i, LayerPlan)], [i for i in items if isinstance(i, NormPlan)])
    for norm in plan.norms:
        _decide(norm, items, norms)
    _decide_last_blocks(model, plan)
    return plan


def _matched(module: nn.Module, path: str) -> Any:
    try:
        return match(module)
    except ValueError as error:
        raise ValueError(f"ndpp.convert_: {path}: {type(module).__name__} is {error}") from None


class _Reasons:
    """Why a layer that could be converted is not."""

    def __init__(self, model: nn.Module, where: Where | None, overrides: Overrides) -> None:
        self.where = where
        self.overrides = {pattern: None if s is None else named_settings(s) for pattern, s in overrides.items()}
        self.read = read_by_parents(model)
        self.names: dict[str, list[str]] = {}  # all names of a module, by the first one
        first: dict[nn.Module, str] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.names.setdefault(first.setdefault(module, path), []).append(path)
        self.holders: dict[int, list[str]] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                self.holders.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)

    def pattern(self, path: str) -> str | None:
        names = self.names[path]
        return next((p for p in self.overrides if any(fnmatch.fnmatchcase(name, p) for name in names)), None)

    def settings(self, path: str, default: Settings) -> Settings | None:
        pattern = self.pattern(path)
        return default if pattern is None else self.overrides[pattern]

    def against(self, path: str, module: nn.Module) -> str:
        if self.where is not None and not self.where(module, path):
            return "excluded by where"
        pattern = self.pattern(path)
        if pattern is not None and self.overrides[pattern] is None:
            return f"excluded by overrides[{pattern!r}]"
        if pattern is not None:
            return ""  # to name it is to ask for it, whatever follows
        read = self.read.get(module)
        if read is not None and read.values:
            return f"{read.parent} computes with its weight, and may never call it (name it in overrides if it does)"
        for name, parameter in module.named_parameters():  # of attention: with its output projection
            tied = [other for other in self.holders[id(parameter)] if other != f"{path}.{name}".strip(".")]
            if tied:
                return f"its {name} is tied to {', '.join(tied)} (name this layer in overrides to convert it)"
        return ""

    def check_patterns(self, paths: list[str]) -> None:
        used = {self.pattern(path) for path in paths}
        every = [name for path in paths for name in self.names[path]]
        for pattern in self.overrides:
            if pattern not in used and not any(fnmatch.fnmatchcase(name, pattern) for name in every):
                near = difflib.get_close_matches(pattern, every, 1, 0.5) or every[:3]
                hint = f"; layers are called {', '.join(map(repr, near))}" if near else "; it has no layers"
                raise ValueError(f"ndpp.convert_: overrides[{pattern!r}] matches no layer of the model{hint}")


# --- norms: redundant where what follows decorrelates ---


def _decide(plan: NormPlan, items: list[LayerPlan | NormPlan], norms: str) -> None:
    """Without data, the order in which modules were registered stands for the order of computation."""
    at = items.index(plan)
    before = next((item for item in reversed(items[:at]) if isinstance(item, LayerPlan)), None)
    following: list[LayerPlan] = []
    for item in items[at + 1 :]:
        if isinstance(item, NormPlan) and following:
            break
        if isinstance(item, LayerPlan):
            following.append(item)
    plan.before, plan.after = before, following
    plan.remove_asked = norms == "remove"
    plan.note = _reason_to_keep(plan, items, norms)
    plan.remove = not plan.note


def _decide_last_blocks(model: nn.Module, plan: Plan) -> None:
    """Blocks of a stack are alike, and the last one goes with the rest.

    Where norms are registered after the layers of their block, the last block has other neighbours than the rest.
    """

    def place(norm: NormPlan) -> tuple[str, type[nn.Module]]:
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", norm.path), type(model.get_submodule(_parent(norm.path)))

    removed = {place(norm) for norm in plan.norms if norm.remove}
    for norm in plan.norms:
        if norm.by_neighbour and place(norm) in removed and place(norm)[1] not in _CONTAINERS:
            norm.remove, norm.note = True, ""


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _reason_to_keep(plan: NormPlan, items: list[LayerPlan | NormPlan], norms: str) -> str:
    if norms == "keep":
        return 'norms="keep"'
    if plan.norm is None:
        return "not a normalisation that ndpp knows to replace"
    if plan.read is not None and plan.read.values:
        return f"{plan.read.parent} reads its weight"
    if plan.after:
        if not plan.after[0].decorrelates:
            plan.by_neighbour = True
            return f"{plan.after[0].path}, the layer after it, is not decorrelated"
    elif not _has_decorrelated_sibling(plan, items):
        plan.by_neighbour = True
        return "no decorrelated layer after it"
    size = norm_size(plan.module)
    near = [sizes(plan.before.module)[1]] if plan.before else []
    near += [sizes(layer.module)[0] for layer in plan.after[:1]]
    if size is not None and near and size not in near:
        return f"its {size} features are those of no neighbouring layer"
    return ""


def _has_decorrelated_sibling(plan: NormPlan, items: list[LayerPlan | NormPlan]) -> bool:
    parent = _parent(plan.path)
    siblings = (item for item in items if isinstance(item, LayerPlan) and _parent(item.path) == parent)
    return bool(parent) and any(item.decorrelates for item in siblings)


def norm_size(module: nn.Module) -> int | None:
    """Features or channels that a norm has values for, where it says so."""
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, (tuple, list)):
        return int(shape[0]) if len(shape) == 1 else None
    for name in ("num_features", "num_channels"):
        if isinstance(size := getattr(module, name, None), int):
            return size
    gamma, _ = normalisation.affine(module)
    return None if gamma is None else gamma.numel()
