"""Running moments of a layer: BatchNorm's vocabulary, sufficient statistics as state, one update per step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.autograd.forward_ad
from torch import Tensor, nn

from .geometry import Layout
from .keeping import is_traced, readable
from .kernels import Plan, Running, absolute, newest_weight, observe_, root
from .settings import Settings
from .stages import observe_op_
from .sync import join
from .whitening import Moments, in_unit, merge, statistics_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


STATE = ("running_mean", "running_cov", "num_batches_tracked", "step_rows", "step_mean", "step_cov")


class RunningMoments(nn.Module):
    """Buffers and their upkeep, for layers that have a `settings` and a `layout`.

    A step is what awaits one backward pass: calls whose outputs are still waiting for it are merged into one update, as
    if their rows had come in one batch. Without a graph (no_grad, frozen weights) every call is a step.
    """

    _version = 2  # of the state_dict; 1 is that of torch.nn's layers, which hold no statistics

    layout: Layout
    _plan: Plan
    _label: str  # the layer in messages
    running_mean: Tensor  # (g, f)
    running_cov: Tensor  # (g, f, f)
    num_batches_tracked: Tensor  # ()
    step_rows: Tensor  # rows gathered since the last backward pass, with their moments; not part of the state
    step_mean: Tensor
    step_cov: Tensor

    @property
    def settings(self) -> Settings:
        """May be replaced on a living layer, but for the fields that its statistics are built by."""
        return self._settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        if not isinstance(settings, Settings):
            raise TypeError(f"{self._label}: settings must be an ndpp.Settings; got {settings!r}")
        fixed = ("block", "features", "shared")
        present = self.__dict__.get("_settings")
        if present is not None and any(getattr(present, name) != getattr(settings, name) for name in fixed):
            raise ValueError(
                f"{self._label}: block, features and shared are fixed once a layer is built, from {present!r} to "
                f"{settings!r}; build a new layer with these settings"
            )
        self._settings = settings
        if present is not None:
            self._planned()

    def _planned(self) -> None:
        """Say what calls will do; the settings have changed."""
        raise NotImplementedError

    def _register_moments(self, device: torch.device, dtype: torch.dtype) -> None:
        g, f = sum(g for g, _ in self.layout.widths), max(f for _, f in self.layout.widths)
        options: dict[str, Any] = {"device": device, "dtype": statistics_dtype(dtype)}
        self.register_buffer("running_mean", torch.empty(g, f, **options))
        self.register_buffer("running_cov", torch.empty(g, f, f, **options))
        self.register_buffer("num_batches_tracked", torch.empty((), dtype=torch.long, device=device))
        self.register_buffer("step_rows", torch.empty((), **options), persistent=False)
        self.register_buffer("step_mean", torch.empty(g, f, **options), persistent=False)
        self.register_buffer("step_cov", torch.empty(g, f, f, **options), persistent=False)
        self._forget()
        self.reset_running_stats()

    def _forget(self) -> None:
        """What belongs to this object alone, and neither to its state nor to a copy."""
        self._present = PresentStep()
        self._seen_masked: set[bool] = set()  # whether calls in this mode were under a mask, for those that run again
        self._cache: tuple[tuple[object, ...], list[int], tuple[Tensor, Tensor, Tensor]] | None = None
        self._collecting: Literal["batch", "running"] | None = None  # gathers all data seen, and uses these statistics

    @torch.no_grad()
    def reset_running_stats(self) -> None:
        """Forget all data: mean 0, covariance I, nothing tracked. Evaluation is then the stock layer."""
        for buffer in (self.running_mean, self.running_cov, self.step_mean, self.step_cov, self.step_rows):
            buffer.zero_()
        widths = self.layout.feature_counts(self.running_cov.device)
        columns = torch.arange(self.running_cov.shape[-1], device=self.running_cov.device)
        inside = columns < (widths if isinstance(widths, int) else widths[:, None])
        self.running_cov.diagonal(dim1=-2, dim2=-1).copy_(inside)
        self.num_batches_tracked.zero_()

    # --- training ---

    def _observe(self, batch: Moments, more_may_come: bool) -> None:
        """Take this call's moments into the step, and the step into the running statistics."""
        buffers: Any = self._buffers
        state = Running(*[buffers[name] for name in STATE])
        if torch.compiler.is_compiling():
            with torch.no_grad():
                observe_op_(*state, [*batch], self.settings.momentum, more_may_come)
            return
        begins, self._present.begins = self._present.begins, False
        if readable(state.cov):
            self._observe_now(batch, more_may_come, begins)
        else:
            observe_(state, batch, self.settings.momentum, more_may_come, begins)

    def _step(self) -> Moments:
        return Moments(self.step_rows, self.step_mean, self.step_cov, torch.ones_like(self.step_rows))

    @torch.no_grad()
    def _observe_now(self, batch: Moments, more_may_come: bool, begins: bool) -> None:
        """Where it can be asked whether there is something to observe, and if there was in this step."""
        if begins:
            self.step_rows.zero_()
        new, usable = absolute(batch, self.step_rows)
        if usable:
            self._observe_usable(new)
        if not more_may_come:
            self.step_rows.zero_()

    def _observe_usable(self, new: Moments) -> None:
        fresh = bool(self.step_rows == 0)
        step = new if fresh else merge(self._step(), new)
        self.num_batches_tracked.add_(int(fresh))
        weight = newest_weight(self.num_batches_tracked, self.settings.momentum, self.running_mean.dtype)
        for running, value, old in (
            (self.running_mean, step.mean, self.step_mean),
            (self.running_cov, step.cov, self.step_cov),
        ):
            running.lerp_(value, weight) if fresh else running.add_(weight * (value - old))
            old.copy_(value)
        self.step_rows.copy_(step.rows)

    @torch.no_grad()
    def _gather(self, batch: Moments) -> None:
        """Take a batch into the statistics being collected: exact over all batches, by their rows."""
        new, usable = absolute(batch, self.step_rows)
        mean, cov = (torch.where(usable, n, old) for n, old in ((new.mean, self.step_mean), (new.cov, self.step_cov)))
        step = merge(self._step(), Moments(torch.where(usable, new.rows, 0.0), mean, cov, new.unit))
        for old, value in ((self.step_rows, step.rows), (self.step_mean, step.mean), (self.step_cov, step.cov)):
            old.copy_(value)

    def _begin_collecting(self, using: Literal["batch", "running"]) -> None:
        """From here on every call adds its rows to the statistics, and computes with those of its batch or the old."""
        for buffer in (self.step_rows, self.step_mean, self.step_cov):
            buffer.zero_()
        self._collecting = using

    @torch.no_grad()
    def _join_collected(self, group: ProcessGroup) -> None:
        """Put together what the ranks have collected, each by itself."""
        rows, mean, cov, unit = join(self._step(), group)
        self.step_rows.copy_(rows.nan_to_num(0.0))
        self.step_mean.copy_(mean * unit)
        self.step_cov.copy_(cov * unit.square())

    @torch.no_grad()
    def _end_collecting(self, batches: int) -> float:
        """The rows collected; they become the running statistics, unless there were no batches or no rows."""
        rows = float(self.step_rows)
        if batches > 0 and rows > 0:
            self.running_mean.copy_(self.step_mean)
            self.running_cov.copy_(self.step_cov)
            self.num_batches_tracked.fill_(batches)
        self.step_rows.zero_()
        self._collecting = None
        return rows

    def _begin_call(self, awaits_backward: bool) -> object | None:
        """Before a call: begin a step, unless outputs of this one still await their backward pass. Its token."""
        awaiting = self._present.awaiting
        if awaiting is None or awaiting() is None:
            self._present.begins = True  # the last call's graph is gone, with or without a backward pass
        if not awaits_backward:
            return None
        token = _Token()
        self._present.awaiting = weakref.ref(token)
        return token

    def _end_step_after(self, shift: Tensor) -> tuple[Tensor, bool]:
        """Let the backward pass through `shift` end the step that this call belongs to, if there will be one."""
        follows = shift.requires_grad and torch.is_grad_enabled()
        if not torch.compiler.is_compiling():
            follows = follows and torch.autograd.forward_ad._current_level < 0  # derivatives have come by then
        token = None if torch.compiler.is_compiling() else self._begin_call(follows)
        if not follows:
            return shift, False
        ended: Tensor = _EndOfStep.apply(shift, self.step_rows, token)
        return ended, True

    def _new_step(self) -> None:
        if torch.is_inference_mode_enabled() or not self.step_rows.is_inference():
            self.step_rows.zero_()

    # --- evaluation ---

    def _running(self) -> Moments:
        tracked = self.num_batches_tracked.to(self.running_mean.dtype)
        return in_unit(tracked, self.running_mean, self.running_cov, self.settings.eps)

    def _evaluation_root(self) -> tuple[Tensor, Tensor, Tensor]:
        """D, μ and their unit from the running moments, computed once for as long as the buffers are what they are."""
        buffers = (self.running_mean, self.running_cov, self.num_batches_tracked)
        if is_traced() or any(buffer.is_inference() for buffer in buffers):  # those keep no version
            return self._solve_running()
        objects, versions = (self.settings, *buffers), [buffer._version for buffer in buffers]
        kept = self._cache
        if kept is None or versions != kept[1] or any(a is not b for a, b in zip(objects, kept[0], strict=True)):
            with torch.inference_mode(False), torch.no_grad():
                kept = self._cache = (objects, versions, self._solve_running())
        return kept[2]

    @torch.no_grad()
    def _solve_running(self) -> tuple[Tensor, Tensor, Tensor]:
        stats = self._running()
        return self._solve(stats), stats.mean, stats.unit

    def _solve(self, stats: Moments) -> Tensor:
        """D of these moments, in their unit. A layer that has seen no data is the stock layer: D = I."""
        return root(stats, self._plan)

    # --- state ---

    def train(self, mode: bool = True) -> RunningMoments:
        """As in torch.nn. A change of mode drops what was cached: a replayed CUDA graph changes buffers unseen."""
        if mode != self.training:
            self._cache = None
            self._seen_masked = set()
            self._new_step()
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningMoments:
        """Casting to half precision moves the statistics but keeps their precision; materialising clears them."""
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            before = kept[name]
            if buffer is None or before is None or not buffer.is_floating_point():
                continue
            if buffer.dtype != statistics_dtype(buffer.dtype) and before.dtype == statistics_dtype(before.dtype):
                self._buffers[name] = before.to(buffer.device, statistics_dtype(buffer.dtype))
        if kept["running_cov"].is_meta and not self.running_cov.is_meta:  # type: ignore[union-attr]
            self.reset_running_stats()
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """With the scale beside the version: weights are worth nothing under another."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata[prefix[:-1]].update(scale=self.settings.scale, scale_eps=self.settings.scale_eps)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Statistics of another block size or sharing get a remedy beside torch's own message on shapes."""
        metadata, errors = args[0], args[-1]
        if metadata.get("version", 0) > self._version:
            errors.append(
                f"{prefix or 'the layer'}: its state has version {metadata['version']}, this ndpp knows up to "
                f"{self._version}; load it with the newer ndpp that wrote it"
            )
        scale = metadata.get("scale", self.settings.scale), metadata.get("scale_eps", self.settings.scale_eps)
        own = self.settings.scale, self.settings.scale_eps
        if scale[0] != own[0] or (scale[0] != "none" and scale[1] != own[1]):
            errors.append(
                f"{prefix[:-1] or 'the layer'}: its state is that of scale={scale[0]!r}, scale_eps={scale[1]:g}, and "
                f"this layer has {self.settings!r}; convert with the same arguments as then (with any batch, if that "
                "was with calibration), or set the settings of the layer, and load again"
            )
        weight, own_weight = state_dict.get(prefix + "weight"), self._parameters.get("weight")
        same_layer = own_weight is None or (isinstance(weight, Tensor) and weight.shape == own_weight.shape)
        for name in ("running_mean", "running_cov"):
            given, own = state_dict.get(prefix + name), getattr(self, name)
            if same_layer and isinstance(given, Tensor) and given.shape != own.shape:
                errors.append(
                    f"{prefix}{name}: expected statistics of {tuple(own.shape)} (blocks, features, ...) for "
                    f"{self.settings!r}, got {tuple(given.shape)}; "
                    "build the layer with the block, features and shared settings of the checkpoint"
                )
        self._load_plain(state_dict, prefix, *args)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name in ("running_mean", "running_cov"):  # assign=True takes tensors as they are
            given = self._buffers[name]
            if given is not None and given.dtype != statistics_dtype(given.dtype):
                self._buffers[name] = given.to(statistics_dtype(given.dtype))
        if (self.step_cov.device, self.step_cov.dtype) != (self.running_cov.device, self.running_cov.dtype):
            self.step_mean, self.step_cov = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_cov)
            self.step_rows = torch.zeros_like(self.running_mean[0, 0])
        self._new_step()  # in place wherever possible: a captured CUDA graph goes on writing to these buffers

    def _load_plain(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The state of a plain layer has no statistics: the layer then forgets its own, and evaluates as that layer."""
        names = ("running_mean", "running_cov", "num_batches_tracked")
        if any(prefix + name in state_dict for name in names) or prefix + "weight" not in state_dict:
            return
        metadata, missing = args[0], args[2]
        self.reset_running_stats()
        if 1 <= metadata.get("version", 0) < self._version:  # written by a torch.nn layer: this is all it has
            state_dict.update({prefix + name: getattr(self, name).clone() for name in names})
        elif not any(_PLAIN_STATE in key for key in missing):  # once, for whoever reads the names that are missing
            missing.append(f"{prefix}running_*: {_PLAIN_STATE}")

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in _OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forget()


_PLAIN_STATE = (
    "no statistics in this state; if it is that of a plain model, load it before ndpp.convert_(model, "
    "calibration=batches), or with strict=False to evaluate as that model"
)
_OWN = ("_present", "_seen_masked", "_cache", "_collecting")


class _Token:
    """Lives exactly as long as the graph of one call."""


class PresentStep:
    """What the host knows of the step that a layer is in."""

    awaiting: weakref.ref[_Token] | None = None  # the graph of its latest call, while it lives
    begins = False  # with the call that is being made


class _EndOfStep(torch.autograd.Function):
    """Identity whose backward pass starts a new step. Compiles and captures: the step is a tensor."""

    @staticmethod
    def forward(shift: Tensor, step_rows: Tensor, token: _Token | None) -> Tensor:
        return shift.view_as(shift)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, ctx.step_rows, ctx.token = inputs  # not saved tensors: they are meant to change before the backward pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.step_rows.zero_()
        return grad, None, None
