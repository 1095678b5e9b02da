"""What all layers share: from an input and its grid of positions to S, μ, D and the weight they fold into."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels, masking, sync, whitening
from .geometry import Grid, Layout, block_size, grouped, ungrouped
from .keeping import seen
from .kernels import Plan
from .products import COMPILED, Link, scaled_output, shifted_output
from .recorded import Recorded, product_dtype
from .sampling import draw, rows_for
from .settings import Settings
from .sharing import Found, Meeting, Visit
from .stages import axes_of, plan_key
from .statistics import RunningMoments
from .transform import Again, Transform, declines, no_autocast
from .whitening import Moments


class Trained(NamedTuple):
    """Of a training call: what the stock operation takes, S, the moments, and if a backward pass follows."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    gain: Tensor | None
    batch: Moments
    awaits_backward: bool
    link: Link | None = None


class Decorrelated(Recorded):
    """Base of the layers: each gives its input as (batch, channels, *sizes) and its grid, and gets D·W and a bias."""

    weight: Tensor
    _transposed = False
    _default_block = 64
    _meeting: Meeting | None = None  # with other layers that read the same tensor

    def _setup(
        self,
        settings: Settings | None,
        groups: int,
        channels: int,
        kernel: tuple[int, ...],
        like: Tensor | None = None,
    ) -> None:
        """Give an initialised stock layer its settings and statistics, on the device of its weight (or of `like`)."""
        like = self.weight if like is None else like
        self._label = f"ndpp.{type(self).__name__}({super().extra_repr()})"  # a constant, for compiled code
        if not like.is_floating_point():
            raise TypeError(f"{self._label}: expected a real floating-point dtype; got {like.dtype}")
        self.settings = settings if settings is not None else Settings()
        s, taps = self.settings, math.prod([int(size) for size in kernel])
        block = s.block if s.block is not None else block_size(self._default_block, taps, s.features)
        self.layout = Layout(int(groups), max(int(channels) // int(groups), 1), taps, block, s.shared)
        self._planned()
        self._register_moments(like.device, like.dtype)

    def _planned(self) -> None:
        """Say what calls will do; again whenever the settings change."""
        s = self.settings
        same = ("scale", "scale_eps", "scale_positions", "solver", "steps", "eps", "shrinkage")
        self._plan = Plan(
            layout=self.layout,
            transposed=self._transposed,
            per_row=self._per_row_scale,
            padding_mode=getattr(self, "padding_mode", "zeros"),
            rows=None if s.stride is not None else rows_for(self.layout.widths[0][1]) if s.rows == "auto" else s.rows,
            stride=None if self._per_row_scale else s.stride,
            **{name: getattr(s, name) for name in same},
        )
        self._plan_unscaled = dataclasses.replace(self._plan, scale="none")
        self._plan_key, self._plan_unscaled_key = plan_key(self._plan), plan_key(self._plan_unscaled)

    def _decorrelate(self, settings: Settings | None) -> None:
        """Make an initialised stock layer, whose class has just become this one, decorrelate."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Decorrelated:
        """As in torch.nn. Nothing that was found for other layers is kept beyond."""
        if self._meeting is not None:
            self._meeting.clear()
        super().train(mode)
        return self

    def reset_parameters(self) -> None:
        """As in torch.nn; the running statistics are reset too."""
        super().reset_parameters()  # type: ignore[misc]
        if "running_cov" in self._buffers:  # torch.nn's constructors call this before there are any
            self.reset_running_stats()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, settings={self.settings!r}"

    def _forward(self, x: Tensor, grid: Grid, operation: Callable[..., Tensor], source: Tensor) -> Tensor:
        bias: Any = self.bias
        return self._product(x, grid, operation, self.weight, bias, source=source)

    def _product(
        self,
        x: Tensor,
        grid: Grid,
        operation: Callable[..., Tensor],
        weight: Tensor,
        bias: Tensor | None,
        others: Sequence[RunningMoments] = (),
        source: Tensor | None = None,
    ) -> Tensor:
        """S·X·D·w + b by the stock operation(input, weight, bias) on (batch, channels, *sizes).

        The output of Linear has its features last.

        `others` are layers of the same settings that are applied to the same input by way of this one: a training call
        counts for them, too. `source` is the input as the layer was given it: by that layers that meet know it.
        """
        if not x.is_floating_point():
            return operation(x, weight, bias)  # torch.nn's own error
        valid = self._valid(x)
        dtype = product_dtype(x, weight)
        batch, gain, awaits_backward, link = None, None, False, None
        with no_autocast(x.device.type):
            if self._collecting is not None and x.numel() > 0:
                x, gain = self._scaled(x, valid, dtype, weight.dtype)
                weight, bias = self._folded(*self._collect(self._every_row(x, gain, grid, valid)), weight, bias)
            elif self._learns and (x.numel() > 0 or sync.group_of(self.settings.sync) is not None):
                layers = (self, *others)
                trained = self._trained(x, grid, weight, bias, valid, dtype, layers, source)
                x, weight, bias, gain, batch, awaits_backward, link = trained
            else:
                x, gain = self._scaled(x, valid, dtype, weight.dtype)
                weight, bias = self._folded(*self._evaluation_root(), weight, bias)
        if gain is None:
            y = operation(x, weight, bias) if self._per_row_scale else shifted_output(operation, x, weight, bias)
        elif self._per_row_scale:  # features last
            y = scaled_output(operation, x, weight, gain.movedim(1, -1), bias, link)
        else:
            bias = bias.reshape(-1, *(1,) * (x.dim() - 2))
            y = scaled_output(operation, x, weight, gain, bias, link)
        if batch is not None and not _is_recomputation():  # last: an error above leaves the statistics alone
            for layer in layers:
                layer._observe(batch, awaits_backward)
        return y

    def _trained(
        self,
        x: Tensor,
        grid: Grid,
        weight: Tensor,
        bias: Tensor | None,
        valid: Tensor | None,
        dtype: torch.dtype,
        layers: Sequence[RunningMoments],
        source: Tensor | None,
    ) -> Trained:
        """A training call, by the way that its case takes."""
        if declines(x, grid, valid, self.layout.taps):
            return self._recorded(x, grid, weight, bias, valid, dtype, layers)
        meeting, visit = self._meeting, self._visit(source, grid, dtype)
        if meeting is None or visit is None:
            return self._transformed(x, grid, weight, bias, valid, dtype, layers)[0]
        found = meeting.fetch(self, visit)
        if found is not None:
            if seen(found.batch.rows) is False:  # each has running statistics of its own for such a batch
                return self._transformed(x, grid, weight, bias, valid, dtype, layers)[0]
            return self._follow(found, weight, bias, dtype, layers)
        trained, found = self._transformed(x, grid, weight, bias, valid, dtype, layers, lead=meeting)
        assert found is not None
        meeting.leave(self, visit, found)
        return trained

    def _visit(self, source: Tensor | None, grid: Grid, dtype: torch.dtype) -> Visit | None:
        """By what layers that meet know that they look for the same; None where each looks for itself.

        Activation checkpointing calls layers twice, without a graph or under hooks the first time, and need not call
        all of a group again: none meets there, so that the rows of the second time are those of the first.
        """
        if self._meeting is None or source is None or torch.compiler.is_compiling() or source.is_inference():
            return None
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if not torch.is_grad_enabled() or _is_recomputation() or hooks is not None:
            return None
        stream = torch.cuda.current_stream(source.device) if source.is_cuda else None
        graph = source.requires_grad, source.grad_fn
        return Visit(source, source._version, (self.settings, self._plan_key, axes_of(grid), dtype, stream, *graph))

    def _follow(
        self,
        found: Found,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        layers: Sequence[RunningMoments],
    ) -> Trained:
        """A training call on what another layer has found in the same tensor."""
        weight, bias = self._folded(*found.used, weight, bias)
        bias, awaits_backward = self._ended(bias, layers)
        return Trained(found.x, weight.to(dtype), bias.to(dtype), found.gain, found.batch, awaits_backward, found.link)

    def _ended(self, bias: Tensor, layers: Sequence[RunningMoments]) -> tuple[Tensor, bool]:
        """Let the backward pass through the bias end the step of these layers, if there will be one."""
        awaits_backward = False
        if not _is_recomputation():
            for layer in layers:
                bias, awaits_backward = layer._end_step_after(bias)
        return bias, awaits_backward

    def _transformed(
        self,
        x: Tensor,
        grid: Grid,
        weight: Tensor,
        bias: Tensor | None,
        valid: Tensor | None,
        dtype: torch.dtype,
        layers: Sequence[RunningMoments],
        lead: Meeting | None = None,
    ) -> tuple[Trained, Found | None]:
        """A training call as one node of the graph; if others follow, what these need."""
        plan, key = self._plan, self._plan_key
        finite = _is_finite(x, None) if self.settings.nonfinite == "raise" else None
        if x.numel() == 0:
            plan, key = self._plan_unscaled, self._plan_unscaled_key
        elif plan.scale == "standardize" or (plan.scale != "none" and (dtype == torch.float16 or self._normalises)):
            x, _ = self._scaled(x, valid, dtype, weight.dtype)
            plan, key = self._plan_unscaled, self._plan_unscaled_key
        draws = draw(x.device, plan.samples_rows)
        again, awaits_backward = None, torch.is_grad_enabled() and not _is_recomputation()
        link = None if plan.scale == "none" else COMPILED
        if not torch.compiler.is_compiling():
            tokens = [] if _is_recomputation() else [layer._begin_call(awaits_backward) for layer in layers]

            def once_more(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
                gain = kernels.scale(x, plan) if plan.scale != "none" else None
                stats = self._usable(self._moments_of_call(x, gain, grid, None, draws, finite))
                d = self._solve(stats)
                for_others = () if lead is None else (d, stats.mean)
                folded, constant = self._folded(d, stats.mean, stats.unit, weight, bias)
                return x, folded.to(dtype), constant.to(dtype), gain, *for_others

            again, link = Again(once_more, tokens), None if link is None else Link()
        group = sync.group_of(self.settings.sync)
        running = self.running_mean, self.running_cov, self.num_batches_tracked
        ends = [layer.step_rows for layer in layers] if awaits_backward else []
        told = (tuple(axes_of(grid)), key, plan, group, again, link, lead, dtype)
        x, weight, bias, *more = Transform.apply(x, weight, bias, draws, finite, *running, *told, *ends)
        moments, gain = Moments(*more[:4]), more[4] if plan.scale != "none" else None
        x = x if finite is None else self._checked(x, moments)
        trained = Trained(x, weight, bias, gain, moments, awaits_backward and bias.requires_grad, link)
        return trained, None if lead is None else Found(x, gain, moments, (more[-3], more[-2], more[-1]), link)

    def _recorded(
        self,
        x: Tensor,
        grid: Grid,
        weight: Tensor,
        bias: Tensor | None,
        valid: Tensor | None,
        dtype: torch.dtype,
        layers: Sequence[RunningMoments],
    ) -> Trained:
        """A training call as plain operations, which autograd records."""
        finite = _is_finite(x, valid) if self.settings.nonfinite == "raise" else None
        x, gain = self._scaled(x, valid, dtype, weight.dtype)
        draws = draw(x.device, self._plan.samples_rows)
        batch = self._moments_of_call(x, gain, grid, valid, draws, finite)
        x = x if finite is None else self._checked(x, batch)
        stats = self._usable(batch)
        weight, bias = self._folded(self._solve(stats), stats.mean, stats.unit, weight, bias)
        bias, awaits_backward = self._ended(bias, layers)
        return Trained(x, weight.to(dtype), bias.to(dtype), gain, batch, awaits_backward)

    def _call(self, function: Callable[..., Any], x: Tensor, *arguments: Any) -> Any:
        """A function of the input, whose errors come under the name of this layer."""
        if torch.compiler.is_compiling():
            return function(x, *arguments)
        try:
            return function(x, *arguments)
        except Exception as error:
            if type(error) not in (RuntimeError, ValueError, TypeError, IndexError) or self._label in str(error):
                raise
            is_tensor = isinstance(x, Tensor)
            seen = f"shape {tuple(x.shape)}, {x.dtype}, on {x.device}" if is_tensor else f"type {type(x).__name__}"
            raise type(error)(f"{self._label}: input of {seen}: {error}") from error

    def _valid(self, x: Tensor) -> Tensor | None:
        """The mask for this input; a layer that only ran under masks must find one when checkpointing runs it again."""
        valid = masking.active()
        if not torch.compiler.is_compiling():
            if not _is_recomputation():
                self._seen_masked.add(valid is not None)
            elif self._seen_masked == {valid is None}:
                ran, runs = ("without", "under") if valid is not None else ("under", "without")
                raise RuntimeError(
                    f"{self._label}: activation checkpointing runs this layer again {runs} ndpp.mask, where it first "
                    f"ran {ran} it; enter ndpp.mask inside the function that is checkpointed"
                )
        if valid is None:
            return None
        try:
            resample = not self._per_row_scale or x.dim() > 3
            return masking.fit(valid, x.shape[0], tuple(x.shape[2:]), resample).to(x.device)
        except ValueError as error:
            raise ValueError(f"{self._label}: {error}") from None

    def _collect(self, batch: Moments) -> tuple[Tensor, Tensor, Tensor]:
        """Add a batch to the statistics being collected; D, μ and unit for its own output."""
        self._gather(batch)
        if self._collecting == "running":
            return self._evaluation_root()
        stats = self._usable(batch)
        return self._solve(stats), stats.mean, stats.unit

    @property
    def _learns(self) -> bool:
        return self.training and not self.settings.freeze and self._collecting is None

    def _checked(self, x: Tensor, batch: Moments) -> Tensor:
        """The input, or FloatingPointError where data in it is not finite; on all ranks, if it is so on one."""
        message = (
            f"{self._label}: the input holds NaN or Inf{' on one of the ranks' if self.settings.sync else ''}; no "
            "statistics were updated. Look at the data and at the layers before this one, or set nonfinite='skip' to "
            "leave such batches out"
        )
        return torch.where(require(~batch.rows.isnan(), message), x, x)  # used, so that compilers keep the check

    def _usable(self, batch: Moments) -> Moments:
        """The batch's moments, or the running ones where it has none to give (all padding, or not finite)."""
        return kernels.usable(batch, self.running_mean, self.running_cov, self.num_batches_tracked, self._plan)

    # --- D·W ---

    def _folded(
        self, d: Tensor, mean: Tensor, unit: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """D·W and b - μ·D·W, in the dtype of the weight."""
        return kernels.folded(d, Moments(unit, mean, d, unit), weight, bias, self._plan)

    def _unfolded(
        self, d: Tensor, mean: Tensor, unit: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """D⁻¹·W and b + μ·W: the parameters for which the layer is the plain one with this weight and bias."""
        groups, weights = self.layout.groups, grouped(weight.double(), self.layout.groups, self._transposed)
        unfolded, shift = [], weights.new_zeros(groups, weights.shape[1])
        for d_part, mean_part, blocks in self.layout.split(d.double(), mean.double(), weights):
            product, constant = whitening.unfold(d_part, mean_part, blocks)
            unfolded.append(product)
            shift = shift + constant.reshape(groups, -1, weights.shape[1]).sum(1)
        product = ungrouped(self.layout.join(unfolded) * unit, weight, self._transposed)
        constant = shift.flatten() * unit if bias is None else bias.double() + shift.flatten() * unit
        return product.to(weight.dtype), constant.to(weight.dtype)


def _is_finite(x: Tensor, valid: Tensor | None) -> Tensor:
    fine = torch.isfinite(x.detach())
    return fine.all() if valid is None else (fine | ~valid[:, None]).all()


def _is_recomputation() -> bool:
    """Inside a backward pass, where activation checkpointing runs the layer again: not a new batch."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@torch.library.custom_op("ndpp::require", mutates_args=())
def require(holds: Tensor, message: str) -> Tensor:
    """`holds`, or FloatingPointError: an operator, so that compiled code can raise as well."""
    if not bool(holds):
        raise FloatingPointError(message)
    return holds.clone()


@require.register_fake
def _(holds: Tensor, message: str) -> Tensor:
    return torch.empty_like(holds)
