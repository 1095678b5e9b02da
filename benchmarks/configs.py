"""The table of training configurations, by name.

bn-lr0.1                                     BatchNorm (+he: torchvision's initialisation; +nowarm: no warm-up)
default, paper                               ndpp.Settings() and ndpp.Settings.paper()
nd-SOLVER[STEPS]-shared|own-rROWS-REG        ndpp; +l1 with scale, +lr1 at lr 1.0 without momentum
where REG is eps1e-5, eps1e-2 (ε as it is) or shrink0.1 (times the mean eigenvalue; ε stays 1e-5).
default+block=16+rows=1024                   the default with some settings changed
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import itertools
from dataclasses import dataclass
from typing import Any

import ndpp

STEPS = (2, 3, 4, 5)
ROWS = (2048, 4096, 8192)
REGULARISERS: dict[str, dict[str, float]] = {
    "eps1e-5": {"eps": 1e-5},
    "eps1e-2": {"eps": 1e-2},
    **{f"shrink{value}": {"shrinkage": value} for value in (0.01, 0.03, 0.1, 0.3)},
}


@dataclass(frozen=True)
class Config:
    """One way to train; settings None is BatchNorm."""

    settings: ndpp.Settings | None
    lr: float = 0.1
    momentum: float = 0.9
    warmup_epochs: float = 0.0
    he: bool = False


def table() -> dict[str, Config]:
    configs = {"default": Config(ndpp.Settings()), "paper": Config(ndpp.Settings.paper())}
    for lr in (0.05, 0.1, 0.2, 0.4):
        plain = Config(None, lr=lr, warmup_epochs=1.0)
        configs[f"bn-lr{lr}"] = plain
        configs[f"bn-lr{lr}+he"] = dataclasses.replace(plain, he=True)
        configs[f"bn-lr{lr}+nowarm"] = dataclasses.replace(plain, warmup_epochs=0.0)
    for name, settings in _decorrelated().items():
        for scale in ("none", "l1"):
            with_scale = Config(ndpp.Settings(**settings, scale=scale))
            full_name = name + ("+l1" if scale == "l1" else "")
            configs[full_name] = with_scale
            configs[f"{full_name}+lr1"] = dataclasses.replace(with_scale, lr=1.0, momentum=0.0)
    return configs


def _decorrelated() -> dict[str, dict[str, Any]]:
    solvers: list[tuple[str, dict[str, Any]]] = [("eigh", {"solver": "eigh"})]
    solvers += [(f"{name}{k}", {"solver": name, "steps": k}) for name in ("newton", "minimax") for k in STEPS]
    found = {}
    for (solver, how), (word, shared), rows, (reg, strength) in itertools.product(
        solvers, (("shared", True), ("own", False)), ROWS, REGULARISERS.items()
    ):
        found[f"nd-{solver}-{word}-r{rows}-{reg}"] = {**how, "shared": shared, "rows": rows, **strength}
    return found


def select(patterns: str) -> dict[str, Config]:
    """Configurations of a comma-separated list of names and fnmatch patterns, in the order given."""
    everything, chosen = table(), {}
    for pattern in filter(None, patterns.split(",")):
        if "=" in pattern:
            chosen[pattern] = changed(pattern)
            continue
        names = fnmatch.filter(everything, pattern)
        if not names:
            raise SystemExit(f"no configuration matches {pattern!r}; see --list")
        chosen.update({name: everything[name] for name in names})
    return chosen


def changed(name: str) -> Config:
    """The configuration of a name like default+block=16+rows=None."""
    start, *changes = name.split("+")
    fields = {field.name for field in dataclasses.fields(ndpp.Settings)}
    pairs = [change.partition("=")[::2] for change in changes]
    if start != "default" or {field for field, _ in pairs} - fields:
        raise SystemExit(f"expected default+FIELD=VALUE… with fields of ndpp.Settings; got {name!r}")
    return Config(ndpp.Settings(**{field: _value(text) for field, text in pairs}))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word, like l1
