"""The configuration of a run: frozen dataclasses, changed by `key=value`, written to and read from JSON."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import ndpp

from .errors import ConfigError

Section = TypeVar("Section")

OptimizerName = Literal["sgd", "adamw", "muon", "lamb"]
ScheduleName = Literal["cosine", "polynomial", "inverse-sqrt", "multistep", "constant"]
Precision = Literal["fp32", "bf16", "fp16"]
Parallel = Literal["ddp", "fsdp"]
NormName = Literal["ndpp", "nd", "bn", "syncbn", "frozenbn", "gn", "ln", "frn", "iternorm", "sw", "none"]
NORMS: tuple[str, ...] = get_args(NormName)


def _check(section: Any, least: dict[str, float], above: bool = False) -> None:
    """Refuse numbers below (or not above) a bound; None is no number."""
    for name, bound in least.items():
        value = getattr(section, name, None)
        if value is not None and not (value > bound if above else value >= bound):
            raise ValueError(f"{name}: expected {'more than' if above else 'at least'} {bound}; got {value}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """name: which network; weights: a file of a plain network to start from; options: arguments of its constructor."""

    name: str
    weights: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """path: a folder or file, or the name of a data set that comes along; the rest is common to all tasks.

    format "auto" looks at what is there. skip_bad is how many unusable records are left out before a run stops.
    train_limit and eval_limit use the first so many records only.
    """

    path: str = ""
    format: str = "auto"
    workers: int = 4
    skip_bad: int = 0
    train_limit: int | None = None
    eval_limit: int | None = None

    def __post_init__(self) -> None:
        _check(self, {"workers": 0, "skip_bad": 0, "train_limit": 1, "eval_limit": 1})
        _check(self, dict.fromkeys(("size", "max_size", "vocabulary", "max_tokens", "max_length", "length"), 1))


@dataclass(frozen=True, kw_only=True)
class ImageData(DataConfig):
    """Classification. augment: none, crop (out of a padded image), flip (crop and mirror) or imagenet (random resized
    crop and mirror). The columns are those of parquet files and saved data sets.
    """

    size: int = 224
    augment: Literal["none", "crop", "flip", "imagenet"] = "imagenet"
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    image_column: str = "image"
    label_column: str = "label"


@dataclass(frozen=True, kw_only=True)
class DetectionData(DataConfig):
    """COCO json. Paths of images and annotations are relative to `path`; the short side of images is resized to one
    of `sizes` (the last of them in evaluation), the long side to at most max_size.
    """

    train_images: str = "train2017"
    train_annotations: str = "annotations/instances_train2017.json"
    eval_images: str = "val2017"
    eval_annotations: str = "annotations/instances_val2017.json"
    sizes: tuple[int, ...] = (800,)
    max_size: int = 1333
    flip: bool = True


@dataclass(frozen=True, kw_only=True)
class SegmentationData(DataConfig):
    """Cityscapes layout, or folders of images and of labels with the same file names."""

    train_images: str = "train"
    train_labels: str = "trainannot"
    eval_images: str = "val"
    eval_labels: str = "valannot"
    classes: int = 0
    ignore: int = 255
    crop: tuple[int, int] = (768, 768)
    scales: tuple[float, float] = (0.5, 2.0)
    flip: bool = True
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class TranslationData(DataConfig):
    """Parallel text. A file that ends in .tsv, or is the only one, holds both sides, in `columns`; others come in twos,
    source and target; format tsv or lines says that all are of one kind. Training leaves out what is longer than
    max_length; a batch of one rank has at most max_tokens, padding included, and run.batch_size sentences.
    """

    train: tuple[str, ...] = ("train.de", "train.en")
    valid: tuple[str, ...] = ("valid.de", "valid.en")
    columns: tuple[int, int] = (0, 1)
    vocabulary: int = 10_000
    max_tokens: int = 4096
    max_length: int = 175


@dataclass(frozen=True, kw_only=True)
class LanguageData(DataConfig):
    """Plain text. tokens: bpe (trained on the training text), words (split at white space) or bytes."""

    train: tuple[str, ...] = ("train.txt",)
    valid: tuple[str, ...] = ("valid.txt",)
    tokens: Literal["bpe", "words", "bytes"] = "bpe"
    vocabulary: int = 16_000
    length: int = 512


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """name: which normalisation; settings: of the ndpp layers, whose scale is used by `ndpp` and not by `nd`."""

    name: NormName = "ndpp"
    settings: ndpp.Settings = field(default_factory=lambda: ndpp.Settings(scale="l1"))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """decay_vectors: whether weight decay includes biases and the parameters of norms."""

    name: OptimizerName = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    decay_vectors: bool = True

    def __post_init__(self) -> None:
        _check(self, {"lr": 0, "momentum": 0, "weight_decay": 0})
        if not self.lr < float("inf"):
            raise ValueError(f"lr: expected a finite number; got {self.lr}")
        if self.momentum >= 1 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"momentum and betas: expected numbers below 1; got {self.momentum} and {self.betas}")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """warmup is in steps; milestones are fractions of the run, at each of which the rate is multiplied by gamma."""

    name: ScheduleName = "cosine"
    warmup: int = 0
    final: float = 0.0
    power: float = 0.9
    milestones: tuple[float, ...] = (0.33, 0.66, 0.9)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        _check(self, {"warmup": 0, "final": 0, "power": 0, "gamma": 0})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The loop. steps, if given, counts instead of epochs. batch_size is that of one optimizer step, over all ranks
    and accumulated parts. eval_every and save_every are in steps; 0 is once an epoch. recalibrate is how many batches
    refresh the statistics of ndpp layers before the last evaluation. timeout is for how many seconds ranks wait for
    each other before the run ends.
    """

    out: str = "runs/{recipe}-{norm}"
    epochs: int = 90
    steps: int | None = None
    batch_size: int = 256
    eval_batch_size: int | None = None
    accumulate: int = 1
    clip: float | None = None
    precision: Precision = "fp32"
    tf32: bool = True
    compile: bool = False
    channels_last: bool = False
    ema: float | None = None
    seed: int = 0
    deterministic: bool = False
    device: str = "auto"
    parallel: Parallel = "ddp"
    timeout: int = 1800
    eval_every: int = 0
    save_every: int = 0
    keep: int = 2
    log_every: int = 10
    recalibrate: int = 0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check(self, dict.fromkeys(("epochs", "steps", "batch_size", "eval_batch_size", "accumulate"), 1))
        _check(self, {"keep": 1, "log_every": 1, "eval_every": 0, "save_every": 0, "recalibrate": 0, "seed": 0})
        _check(self, {"timeout": 1})
        _check(self, {"clip": 0}, above=True)
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number from 0 to less than 1; got {self.label_smoothing}")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on."""

    recipe: str
    task: str
    model: ModelConfig
    data: DataConfig
    norm: NormConfig = field(default_factory=NormConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def changed(self, changes: dict[str, Any]) -> Config:
        """A copy with some keys changed: full ones as `optimizer.lr`, or `lr` where no other section has one."""
        config = self
        for key, value in changes.items():
            path = _full_key(config, key)
            config = _with(config, path, value, ".".join(path))
        return config

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = _plain(self)
        return values

    @property
    def out(self) -> str:
        try:
            return self.run.out.format(recipe=self.recipe, norm=self.norm.name, seed=self.run.seed)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"run.out: only {{recipe}}, {{norm}}, {{seed}} stand in braces; got {self.run.out!r}"
            ) from error


# Which dataclass holds the data section of each task.
DATA_SECTIONS: dict[str, type[DataConfig]] = {
    "classification": ImageData,
    "detection": DetectionData,
    "segmentation": SegmentationData,
    "translation": TranslationData,
    "language": LanguageData,
}


def from_dict(values: dict[str, Any]) -> Config:
    """A configuration from what `to_dict` gave and JSON kept."""
    hints = {**typing.get_type_hints(Config), "data": DATA_SECTIONS[values["task"]]}
    return Config(**{name: _built(hints[name], value) for name, value in values.items()})


def _built(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind, localns={"ProcessGroup": object})
        return kind(**{name: _built(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    return tuple(value) if isinstance(value, list) and _options(kind, tuple) else value


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def parsed(assignments: list[str]) -> dict[str, str]:
    """`key=value` as typed on a command line."""
    changes = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set takes KEY=VALUE; got {text!r}")
        changes[key.strip()] = value.strip()
    return changes


def keys(config: Config) -> dict[str, Any]:
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


def _full_key(config: Config, key: str) -> list[str]:
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
        hints = typing.get_type_hints(type(section), localns={"ProcessGroup": object})
        new = _converted(hints[name], value, full)
    try:
        return dataclasses.replace(section, **{name: new})
    except (ValueError, TypeError) as error:  # ndpp.Settings checks itself
        raise ConfigError(f"{full}: {str(error).removeprefix(f'{name}: ')}") from error


def _literal(value: Any) -> Any:
    try:
        return ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError):
        return value


def _options(kind: Any, wanted: Any) -> list[Any]:
    """The alternatives of a type that are `wanted`, itself or as a generic."""
    alternatives = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return [option for option in alternatives if option is wanted or get_origin(option) is wanted]


def _converted(kind: Any, value: Any, key: str) -> Any:
    """A value of the field's type, from text or from Python."""
    original, value = value, _literal(value)
    if isinstance(value, str) and value.lower() in ("true", "false", "none", "null"):
        value = {"true": True, "false": False}.get(value.lower())
    for choice in _options(kind, Literal):
        if original in get_args(choice):
            return original
        raise ConfigError(f"{key}: expected one of {', '.join(get_args(choice))}; got {original!r}")
    if value is None and _options(kind, type(None)):
        return None
    if _options(kind, bool) and isinstance(value, bool):
        return value
    if _options(kind, int) and isinstance(value, int) and not isinstance(value, bool):
        return value
    if _options(kind, float) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    for option in _options(kind, tuple):
        return _as_tuple(option, original, value, key)
    if _options(kind, dict) and isinstance(value, dict):
        return value
    if _options(kind, str) and original is not None:
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
    return " or ".join(names.get(option, str(option)) for option in alternatives)
