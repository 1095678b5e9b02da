"""How a layer decorrelates: one frozen object, and the presets worth a name."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch.distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Scale = Literal["none", "l1", "rms", "std", "standardize"]
Solver = Literal["quartic", "newton", "minimax", "eigh"]
NonFinite = Literal["skip", "raise"]
Auto = Literal["auto"]

ONE_BLOCK = 1 << 30  # larger than any layer


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings:
    """What every ndpp layer takes as ``settings=``. Immutable; change one with :meth:`replace`.

    Args:
        scale: S, each sample's own scale: ``"none"``, ``"l1"`` (mean |x|), ``"rms"`` (√ mean x², as RMSNorm),
            ``"std"`` (σ only) or ``"standardize"`` ((x - mean) / σ, as LayerNorm). Per row for Linear, per sample
            tensor for convolutions.
        scale_eps: added to the square of that scale (for l1 to the scale). 0 keeps scale invariance exact; norms that
            conversion replaces by a scale bring theirs.
        scale_positions: at most about so many positions of a sample enter the scale of a convolution, on a fixed, even
            grid, and fewer of many channels: beyond some 32,000 values more change it little, and cost a pass over the
            input. None = all.
        block: channels (features for Linear) decorrelated together; None is 64 for convolutions and 256 for
            Linear, within `features`. Larger than the layer means one block. What it does not divide is a smaller last
            block.
        features: where `block` is None, a block has at most so many columns (channels times taps of the kernel): 32
            channels of a 3×3 kernel. Products of blocks cost the cube of their columns. None = no limit, as the paper.
        shared: one D for all blocks of a layer, which are stacked as extra rows (the paper), or one D per block. A
            smaller last block always has its own.
        solver: ``"newton"`` (coupled inverse Newton, truncated after ``steps``), ``"quartic"`` (the polynomial of
            degree four closest to that: two products in place of five for three steps, and within 0.5% of them),
            ``"minimax"`` (the same products as newton with the best coefficients for ``steps``) or ``"eigh"`` (exact;
            directions of no variance are dropped).
        steps: iterations of newton and minimax, and of newton that quartic follows (5 at most: within 5% for
            four, 15% for five); eigh ignores it.
        eps: ε, added to the diagonal of Cov as it is.
        shrinkage: added to the diagonal of Cov times its mean eigenvalue, so that it follows the data's scale.
        rows: at most this many output positions enter the statistics, drawn anew each call; None = every position.
            ``"auto"`` is 8 for each column of a block, from 512 to 4096. A transposed convolution looks at one
            position of each phase at least. Ranks that share statistics share this number as well.
        stride: the paper's sampling: every stride-th position along each spatial axis of a convolution, in place of
            ``rows``.
        momentum: weight of the newest step in the running statistics; None = cumulative average.
        sync: share the statistics of training between ranks, which then compute as one process on the joined batch:
            True (the default process group, where one is initialised), a process group that this rank belongs to, or
            False. All ranks of it must call the layer equally often. Where a layer is pickled, a group becomes True.
        freeze: running statistics are not updated, and training uses them too.
        nonfinite: a batch with NaN or Inf in the rows looked at is left out of all statistics (``"skip"``: the running
            ones serve that batch); or NaN or Inf anywhere in it raises FloatingPointError (``"raise"``: costs a pass
            over the input and a device synchronisation per call).
    """

    scale: Scale = "none"
    scale_eps: float = 0.0
    scale_positions: int | None = 1024
    block: int | None = None
    features: int | None = 288
    shared: bool = False
    solver: Solver = "quartic"
    steps: int = 3
    eps: float = 1e-5
    shrinkage: float = 0.0
    rows: int | Auto | None = "auto"
    stride: int | None = None
    momentum: float | None = 0.1
    sync: bool | ProcessGroup = False
    freeze: bool = False
    nonfinite: NonFinite = "skip"

    def __post_init__(self) -> None:
        for name, kind in (("scale", Scale), ("solver", Solver), ("nonfinite", NonFinite)):
            self._require(name, getattr(self, name) in get_args(kind), f"one of {', '.join(map(repr, get_args(kind)))}")
        for name in ("block", "features", "stride", "scale_positions", "rows"):
            value, words = getattr(self, name), ", 'auto'" if name == "rows" else ""
            fits = value is None or (_is_int(value) and value >= 1) or (name == "rows" and value == "auto")
            self._require(name, fits, f"None{words} or an integer of at least 1")
        most = 5 if self.solver == "quartic" else 50
        more = " (solver='newton' takes more)" if self.solver == "quartic" else ""
        words = f"an integer from 1 to {most} for solver={self.solver!r}{more}"
        self._require("steps", _is_int(self.steps) and 1 <= self.steps <= most, words)
        for name in ("eps", "shrinkage", "scale_eps"):
            value = getattr(self, name)
            self._require(name, _is_number(value) and 0 <= value < float("inf"), "a finite number of at least 0")
        in_range = self.momentum is None or (_is_number(self.momentum) and 0 < self.momentum <= 1)
        self._require("momentum", in_range, "None (cumulative average) or a number in (0, 1]")
        for name in ("shared", "freeze"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        is_group = torch.distributed.is_available() and isinstance(self.sync, torch.distributed.ProcessGroup)
        expected = "True, False or a torch.distributed process group that this rank is a member of"
        self._require("sync", isinstance(self.sync, bool) or is_group, expected)
        for field in dataclasses.fields(self):  # numbers of numpy and others as Python's own
            value = getattr(self, field.name)
            if _is_number(value):
                object.__setattr__(self, field.name, int(value) if _is_int(value) else float(value))
        if self.stride is not None and self.rows not in (None, "auto"):
            raise ValueError(
                f"Settings: stride={self.stride} and rows={self.rows} are two ways to sample; "
                "keep one (set rows=None or stride=None)"
            )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"Settings: {name} must be {expected}; got {getattr(self, name)!r}")

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"Settings({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def replace(self, **changes: Any) -> Settings:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __copy__(self) -> Settings:
        return self

    def __deepcopy__(self, memo: object) -> Settings:
        return self  # immutable, and a process group cannot be copied

    def __getstate__(self) -> dict[str, Any]:
        """A process group lives in its process alone: what is pickled shares with all ranks instead, and says so."""
        state = dict(self.__dict__)
        if not isinstance(self.sync, bool):
            warnings.warn(
                "Settings: a process group cannot be pickled; what is read back has sync=True, all ranks of the "
                "default group. To train it with another: layer.settings = layer.settings.replace(sync=group)",
                stacklevel=2,
            )
            state["sync"] = True
        return state

    @classmethod
    def paper(cls, **changes: Any) -> Settings:
        """Exactly the paper: 5 Newton steps, ε = 1e-5, one shared D of 64 channels, every third position."""
        sampling = {"rows": None, "stride": 3} if changes.get("rows") is None else {"stride": None}
        solver = {"solver": "newton", "steps": 5, "eps": 1e-5}
        every = {"features": None, "scale_positions": None}
        return cls(**{"shared": True, **every, **solver, **sampling, **changes})

    @classmethod
    def exact(cls, **changes: Any) -> Settings:
        """No approximation: eigendecomposition, every position, one block, ε = 0. For small layers and for tests."""
        every = {"rows": None, "block": ONE_BLOCK, "scale_positions": None}
        return cls(**{"shared": False, "solver": "eigh", "eps": 0.0, **every, **changes})


def _is_int(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


# The paper's choices for its tasks, by name: `ndpp.convert_(model, "detection")`. Scale invariance made a difference in
# detection and in transformers, and next to none in classification and segmentation, which the paper reports without.
PRESETS = {
    "classification": Settings.paper(),
    "detection": Settings.paper(scale="l1", stride=5),
    "segmentation": Settings.paper(),
    "transformer": Settings.paper(scale="standardize", stride=1),
}


def named_settings(settings: Settings | str | None) -> Settings:
    """Settings as they are, by the name of a task, or the default."""
    if isinstance(settings, str):
        if settings not in PRESETS:
            raise ValueError(f"settings: no preset {settings!r}; one of {', '.join(map(repr, PRESETS))}, or a Settings")
        return PRESETS[settings]
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings: expected an ndpp.Settings, the name of a preset or None; got {settings!r}")
    return Settings() if settings is None else settings
