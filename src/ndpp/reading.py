"""Which layers a model uses without calling them: `F.linear(x, self.qkv.weight)` in the source of a parent."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch import nn

_ABOUT = {"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_cuda", "is_meta"}
_SETUP = ("init", "reset", "load", "extra_repr", "fuse", "reparam", "tie", "resize", "flops", "prune")


def read_by_parents(model: nn.Module) -> dict[nn.Module, str]:
    """Modules whose weight or bias the code of a parent reads, with the name of the parent's class.

    Such a layer computes nothing itself: to decorrelate it would change nothing, and leave its input unnormalised.
    """
    found: dict[nn.Module, str] = {}
    for parent in model.modules():
        kind: Any = type(parent)
        for path in read_by_class(kind):
            try:
                child = parent.get_submodule(path)
            except AttributeError:
                continue
            found.setdefault(child, type(parent).__name__)
    return found


@functools.cache
def read_by_class(kind: Any) -> frozenset[str]:
    """Paths p for which a method of the class reads self.p.weight or self.p.bias to compute with it."""
    paths: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Module:
            break
        if not base.__module__.startswith(("torch.nn.", "ndpp.")):
            paths |= _read_in_source(base)
    return frozenset(paths)


def _read_in_source(kind: type) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return set()
    paths: set[str] = set()
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    for function in body:
        if isinstance(function, ast.FunctionDef) and not any(word in function.name for word in _SETUP):
            paths |= _read_in_function(function)
    return paths


def _read_in_function(function: ast.FunctionDef) -> set[str]:
    above = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    paths: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and node.attr in ("weight", "bias") and isinstance(node.ctx, ast.Load):
            path = _path_from_self(node.value)
            if path and not _is_about(node, above.get(node)):
                paths.add(path)
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
    return isinstance(above, ast.Call) and isinstance(above.func, ast.Name) and above.func.id == "isinstance"
