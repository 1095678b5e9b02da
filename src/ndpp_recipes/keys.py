"""Every key of a configuration: their names, and new values for them, from text or from Python."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from .errors import ConfigError

Section = TypeVar("Section")


def changed(config: Section, changes: dict[str, Any]) -> Section:
    """A copy with some keys changed: full ones as `optimizer.lr`, or `lr` where no other section has one."""
    for key, value in changes.items():
        path = _full_key(config, key)
        config = _with(config, path, value, ".".join(path))
    return config


def parsed(assignments: list[str]) -> dict[str, str]:
    """`key=value` as typed on a command line."""
    changes = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes KEY=VALUE; got {text!r}")
        changes[key.strip()] = value.strip()
    return changes


def keys(config: Any) -> dict[str, Any]:
    """Every key that can be set, with its value."""
    found: dict[str, Any] = {}

    def visit(section: Any, prefix: str) -> None:
        for name in (f.name for f in dataclasses.fields(section)):
            value = getattr(section, name)
            if dataclasses.is_dataclass(value):
                visit(value, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = value

    visit(config, "")
    return found


def _full_key(config: Any, key: str) -> list[str]:
    known = keys(config)
    if key in known or key.startswith("model.options."):
        return key.split(".", 2) if key.startswith("model.options.") else key.split(".")
    ends = [full for full in known if full.endswith(f".{key}")]
    depth = min((full.count(".") for full in ends), default=0)
    ends = [full for full in ends if full.count(".") == depth]  # run.steps before norm.settings.steps
    if len(ends) == 1:
        return ends[0].split(".")
    if len(ends) > 1:
        raise ConfigError(f"{key!r} could be {' or '.join(ends)}; give the full key")
    short = {full.rsplit(".", 1)[-1]: full for full in known}
    near = difflib.get_close_matches(key, [*known, *short], n=1, cutoff=0.5)
    hint = f"; did you mean {short.get(near[0], near[0])!r}?" if near else "; `ndpp recipes show NAME` lists all keys"
    raise ConfigError(f"no key {key!r}{hint}")


def _with(section: Any, path: list[str], value: Any, full: str) -> Any:
    name, *rest = path
    if isinstance(section, dict):
        return {**section, name: _literal(value)}
    if rest:
        new = _with(getattr(section, name), rest, value, full)
    else:
        new = _converted(hints(type(section))[name], value, full)
    try:
        return dataclasses.replace(section, **{name: new})
    except (ValueError, TypeError) as error:  # ndpp.Settings checks itself
        raise ConfigError(f"{full}: {str(error).removeprefix(f'{name}: ')}") from error


def _literal(value: Any) -> Any:
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


def hints(section: Any) -> dict[str, Any]:
    """The types of its fields. A process group has no name that could be typed: `sync` is true or false."""
    return typing.get_type_hints(section, localns={"ProcessGroup": bool})


def options(kind: Any, wanted: Any) -> list[Any]:
    """The alternatives of a type that are `wanted`, itself or as a generic."""
    alternatives = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [option for option in alternatives if option is wanted or get_origin(option) is wanted]


def _converted(kind: Any, value: Any, key: str) -> Any:
    """A value of the field's type, from text or from Python."""
    original, value = value, _literal(value)
    if isinstance(value, str) and value.lower() in ("true", "false", "none", "null"):
        value = {"true": True, "false": False}.get(value.lower())
    for choice in options(kind, Literal):
        if original in get_args(choice):
            return original
        if kind is choice:
            raise ConfigError(f"{key}: expected one of {', '.join(get_args(choice))}; got {original!r}")
    if value is None and options(kind, type(None)):
        return None
    if options(kind, bool) and isinstance(value, bool):
        return value
    if options(kind, int) and isinstance(value, int) and not isinstance(value, bool):
        return value
    if options(kind, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    for option in options(kind, tuple):
        return _as_tuple(option, original, value, key)
    if options(kind, dict) and isinstance(value, dict):
        return value
    if options(kind, str) and original is not None:
        return str(original)
    raise ConfigError(f"{key}: expected {_described(kind)}; got {original!r}")


def _as_tuple(kind: Any, original: Any, value: Any, key: str) -> Any:
    items = list(value) if isinstance(value, (tuple, list)) else None
    if items is None:
        items = original.split(",") if isinstance(original, str) else [value]
    inner, *more = get_args(kind)
    size = None if more and more[-1] is Ellipsis else 1 + len(more)
    if size is not None and len(items) != size:
        raise ConfigError(f"{key}: expected {size} values separated by commas; got {original!r}")
    return tuple(_converted(inner, item, key) for item in items)


def _described(kind: Any) -> str:
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "none", dict: "{}"}
    alternatives = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    words = [get_args(option) if get_origin(option) is Literal else (names.get(option),) for option in alternatives]
    return " or ".join(str(word or option) for option, some in zip(alternatives, words, strict=True) for word in some)
