"""Which layers a model uses without calling them: `F.linear(x, self.qkv.weight)` in the source of a parent."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any, NamedTuple

from torch import nn

_ABOUT = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_cuda", "is_meta"}


class Read(NamedTuple):
    """The class whose code reads the weight or bias of a module, and whether it reads values or asks for the dtype."""

    parent: str
    values: bool


def read_by_parents(model: nn.Module) -> dict[nn.Module, Read]:
    """Modules whose weight or bias the code of a parent reads.

    A layer whose values are read computes nothing itself: to decorrelate it would change nothing, and leave its input
    unnormalised.
    """
    found: dict[nn.Module, Read] = {}
    for parent in model.modules():
        kind: Any = type(parent)
        for path, values in read_by_class(kind):
            try:
                child = parent.get_submodule(path)
            except AttributeError:
                continue
            values = values or (child in found and found[child].values)
            found[child] = Read(type(parent).__name__, values)
    return found


@functools.cache
def read_by_class(kind: Any) -> frozenset[tuple[str, bool]]:
    """Paths p for which the class reads self.p.weight or self.p.bias while it computes, and whether their values."""
    methods: dict[str, ast.FunctionDef] = {}
    for base in kind.__mro__:
        if base is nn.Module:
            break
        if not base.__module__.startswith(("torch.nn.", "ndpp.")):
            methods = {**_methods(base), **methods}  # nearer classes override
    reached: set[str] = set()
    waiting = {name for name in methods if "forward" in name or name == "__call__"}
    while waiting:
        name = waiting.pop()
        reached.add(name)
        called = {_path_from_self(n.func) for n in ast.walk(methods[name]) if isinstance(n, ast.Call)}
        waiting |= {other for other in called if other in methods} - reached
    return frozenset(read for name in reached for read in _read_in_function(methods[name]))


def _methods(kind: type) -> dict[str, ast.FunctionDef]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    return {function.name: function for function in body if isinstance(function, ast.FunctionDef)}


def _read_in_function(function: ast.FunctionDef) -> set[tuple[str, bool]]:
    above = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    paths: set[tuple[str, bool]] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr in ("weight", "bias") and isinstance(node.ctx, ast.Load):
            path = _path_from_self(node.value)
            if path:
                paths.add((path, not _is_about(node, above.get(node))))
    return paths


def _path_from_self(node: ast.expr) -> str:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names)) if isinstance(node, ast.Name) and node.id == "self" else ""


def _is_about(node: ast.Attribute, above: ast.AST | None) -> bool:
    """Whether this asks for the dtype, the device or the presence of the tensor, and not for its values."""
    if isinstance(above, ast.Attribute):
        return above.attr in _ABOUT
    if isinstance(above, ast.Compare):
        return all(isinstance(op, (ast.Is, ast.IsNot)) for op in above.ops)
    if isinstance(above, ast.Call) and isinstance(above.func, ast.Attribute):
        return above.func.attr in ("to", "type_as") and node in above.args
    return isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id == "isinstance"
