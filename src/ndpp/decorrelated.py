"""What all layers share: from an input and its grid of positions to S, μ, D and the weight they fold into."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import masking, sync, whitening
from .geometry import (
    Grid,
    Layout,
    Phase,
    Sample,
    choose,
    every,
    matrix_weight,
    patches,
    row_budget,
    row_weights,
    weight_matrix,
)
from .settings import Settings
from .statistics import RunningMoments
from .whitening import Moments

ELEMENTS_AT_ONCE = 1 << 24  # of a data matrix, where every row is looked at


class Rows(NamedTuple):
    """Sampled rows of one phase, and how many output positions of the batch they stand for."""

    values: Tensor  # (n, channels, own taps)
    weight: Tensor | None  # (n,), under a mask
    positions: Tensor  # ()
    taps: Tensor  # where they stand among all taps of the kernel


class Decorrelated(RunningMoments):
    """Base of the layers: each gives its input as (batch, channels, *sizes) and its grid, and gets D·W and a bias."""

    weight: Tensor
    _transposed = False
    _default_block = 64
    _per_row_scale = False  # Linear: S is of each row, not of the whole sample

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
        block = self.settings.block if self.settings.block is not None else self._default_block
        self.layout = Layout(groups, max(channels // groups, 1), math.prod(kernel), block, self.settings.shared)
        self._register_moments(like.device, like.dtype)

    def _decorrelate(self, settings: Settings | None) -> None:
        """Make an initialised stock layer, whose class has just become this one, decorrelate."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """As in torch.nn; the running statistics are reset too."""
        super().reset_parameters()  # type: ignore[misc]
        if "running_cov" in self._buffers:  # torch.nn's constructors call this before there are any
            self.reset_running_stats()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, settings={self.settings!r}"

    def _forward(self, x: Tensor, grid: Grid, operation: Callable[..., Tensor]) -> Tensor:
        bias: Any = self.bias
        return self._product(x, grid, operation, self.weight, bias)

    def _product(
        self, x: Tensor, grid: Grid, operation: Callable[..., Tensor], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """S·X·D·w + b by the stock operation(input, weight, bias) on (batch, channels, *sizes)."""
        if not x.is_floating_point():
            return operation(x, weight, bias)  # torch.nn's own error
        valid = self._valid(x)
        narrow = _runs_in_float16(x)
        with _no_autocast(x.device.type):
            x, gain = self._scaled(x, valid, narrow)
            batch, awaits_backward = None, False
            if self._collecting is not None and x.numel() > 0:
                weight, bias = self._folded(*self._collect(self._every_row(x, gain, grid, valid)), weight, bias)
            elif self._learns and (x.numel() > 0 or sync.group_of(self.settings.sync) is not None):
                batch, x = self._moments_of_call(x, gain, grid, valid)
                stats = self._usable(batch)
                weight, bias = self._folded(self._solve(stats), stats.mean, stats.unit, weight, bias)
                if not _is_recomputation():
                    bias, awaits_backward = self._end_step_after(bias)
            else:
                weight, bias = self._folded(*self._evaluation_root(), weight, bias)
        if gain is None:
            y = operation(x, weight, bias)
        else:
            y = operation(x, weight, None)
            y = (y * gain + bias.reshape(-1, *(1,) * (y.dim() - 2))).to(y.dtype)
        if batch is not None and not _is_recomputation():  # last: an error above leaves the statistics alone
            self._observe(batch, awaits_backward)
        return y

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

    # --- S ---

    def _scaled(self, x: Tensor, valid: Tensor | None, narrow: bool) -> tuple[Tensor, Tensor | None]:
        """The input, and a gain for the output where scale commutes with the layer and its range allows."""
        inside = None if valid is None or self._per_row_scale else valid[:, None]
        if inside is not None:  # the layer pads with zeros, and so must batching: a sample is what it is alone
            x = torch.where(inside, x, 0.0)
        mode = self.settings.scale
        if mode == "none" or x.numel() == 0:
            return x, None
        dim = (1,) if self._per_row_scale else tuple(range(1, x.dim()))
        center, gain = whitening.sample_scale(x, mode, dim, inside, self.settings.scale_eps)
        if mode != "standardize" and not narrow:
            return x, gain
        scaled = ((x.to(gain.dtype) - center) * gain).to(x.dtype)
        return (scaled if inside is None else torch.where(inside, scaled, 0.0)), None

    # --- μ and Cov ---

    @property
    def _learns(self) -> bool:
        return self.training and not self.settings.freeze and self._collecting is None

    def _moments_of_call(
        self, x: Tensor, gain: Tensor | None, grid: Grid, valid: Tensor | None
    ) -> tuple[Moments, Tensor]:
        """Of the rows that this call looks at, on all ranks; and the input, to be used once it is checked."""
        group = sync.group_of(self.settings.sync)
        ranks = 1 if group is None else group.size()
        phases = [phase for phase in grid.phases if grid.positions(phase)] if x.numel() > 0 else []
        batch = self._batch_moments([self._rows(x, gain, grid, phase, valid, ranks) for phase in phases])
        batch = Moments(*(value.to(whitening.statistics_dtype(x.dtype)) for value in batch))  # also of no rows
        checks = self.settings.nonfinite == "raise"
        if checks:
            batch = batch._replace(rows=torch.where(_is_finite(x, valid), batch.rows, torch.nan))
        if group is not None:
            if x.requires_grad and not batch.mean.requires_grad:  # no rows here, but others have: join their backward
                batch = batch._replace(mean=batch.mean + x[:0].sum().to(batch.mean.dtype))
            batch = sync.join(batch, group)
        return batch, self._checked(x, batch) if checks else x

    def _rows(
        self, x: Tensor, gain: Tensor | None, grid: Grid, phase: Phase, valid: Tensor | None, ranks: int = 1
    ) -> Rows:
        """The rows of S·X in one phase that this call looks at. The budget is that of all ranks."""
        positions = x.shape[0] * grid.positions(phase)
        rows = None if self.settings.rows is None else max(self.settings.rows // ranks, 1)
        if rows is not None and len(grid.phases) > 1:  # each phase has its share
            rows = max(rows * grid.positions(phase) // sum([grid.positions(p) for p in grid.phases]), 1)
        stride = None if self._per_row_scale else self.settings.stride
        sample = choose(x.shape[0], phase, row_budget(x.shape[0], phase, rows, stride), x.device)
        return self._rows_at(x, gain, grid, phase, valid, sample, positions)

    def _rows_at(
        self,
        x: Tensor,
        gain: Tensor | None,
        grid: Grid,
        phase: Phase,
        valid: Tensor | None,
        sample: Sample,
        positions: int,
    ) -> Rows:
        """The rows of this sample, which stand for so many positions."""
        taps = grid.taps(phase, x.device)
        dtype = whitening.statistics_dtype(x.dtype)
        weight = None if valid is None else row_weights(valid, phase, sample).to(dtype)
        count = torch.full((), float(positions), dtype=dtype, device=x.device)
        if weight is not None:
            count = count * weight.mean()
        if len(taps) == 0:  # these outputs are the bias alone: all zeros, which only count
            return Rows(x.new_zeros(0), weight, count, taps)
        values = patches(x, phase, sample, getattr(self, "padding_mode", "zeros")).to(dtype)
        if gain is not None:
            values = values * self._row_gain(gain, phase, sample)
        if weight is not None:
            values = torch.where(weight[:, None, None] > 0, values, 0.0)
        return Rows(values, weight, count, taps)

    def _exact_moments(self, x: Tensor, grid: Grid, valid: Tensor | None) -> Moments:
        """Of S·X over every position, without anything else that a call does."""
        narrow = _runs_in_float16(x)
        with _no_autocast(x.device.type):
            return self._every_row(*self._scaled(x, valid, narrow), grid, valid)

    def _every_row(self, x: Tensor, gain: Tensor | None, grid: Grid, valid: Tensor | None) -> Moments:
        """Moments over every position, in chunks of bounded memory."""
        most = max(ELEMENTS_AT_ONCE // (x.shape[1] * self.layout.taps), 1)
        chunks = [every(x.shape[0], phase, most, x.device) for phase in grid.phases if grid.positions(phase)]
        phases = [phase for phase in grid.phases if grid.positions(phase)]
        total: Moments | None = None
        for samples in itertools.zip_longest(*chunks):
            rows = [
                self._rows_at(x, gain, grid, phase, valid, sample, math.prod(sample.size))
                for phase, sample in zip(phases, samples, strict=True)
                if sample is not None
            ]
            part = self._batch_moments(rows)
            part = part._replace(rows=part.rows.nan_to_num(0.0))  # what is not finite stays out
            total = part if total is None else whitening.merge(total, part)
        assert total is not None
        return total

    def _collect(self, batch: Moments) -> tuple[Tensor, Tensor, Tensor]:
        """Add a batch to the statistics being collected; D, μ and unit for its own output."""
        self._gather(batch)
        if self._collecting == "running":
            return self._evaluation_root()
        stats = self._usable(batch)
        return self._solve(stats), stats.mean, stats.unit

    def _row_gain(self, gain: Tensor, phase: Phase, sample: Sample) -> Tensor:
        if self._per_row_scale:
            return patches(gain, phase, sample)
        chosen = gain if sample.samples is None else gain.index_select(0, sample.samples)
        return chosen.reshape(-1, 1, 1).repeat_interleave(math.prod(sample.size[1:]), 0)

    def _batch_moments(self, phases: Sequence[Rows]) -> Moments:
        """Moments of this call. A batch with non-finite values has a count of NaN, and zeros for values."""
        total = torch.stack([rows.positions for rows in phases]).sum() if phases else torch.zeros_like(self.step_rows)
        used = [rows for rows in phases if len(rows.taps)]
        if not used:  # no rows, or padding cropped all that the taps reach: every output is the bias
            zeros = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_cov)
            return Moments(total, *zeros, torch.ones_like(total))
        unit, finite = self._unit(used)
        stacked = [self.layout.stack(torch.where(finite, rows.values, 0.0) / unit) for rows in used]
        shares = [rows.positions / total.clamp_min(1.0) for rows in used]
        parts = []
        for index, part in enumerate(self.layout.parts):
            repeat = self.layout.repeats(part)
            each = [
                whitening.moments(stack[index], None if rows.weight is None else rows.weight.repeat_interleave(repeat))
                for stack, rows in zip(stacked, used, strict=True)
            ]
            if len(phases) > 1 or len(used[0].taps) < self.layout.taps:
                each = [whitening.assemble_phases(each, [rows.taps for rows in used], shares, self.layout.taps)]
            parts.append(each[0])
        mean, cov = self.layout.pack(parts)
        return Moments(torch.where(finite, total, torch.nan), mean, cov, unit)

    def _unit(self, used: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """A unit near the magnitude of the rows, and whether they are finite."""
        peak = torch.stack([rows.values.detach().abs().amax() for rows in used]).amax()
        finite = torch.isfinite(peak)
        floor = max(math.sqrt(self.settings.eps), whitening.SMALLEST_UNIT)
        return whitening.magnitude(torch.where(finite, peak, 1.0)).clamp_min(floor), finite

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
        usable = batch.rows > 0
        return Moments(*(torch.where(usable, b, r) for b, r in zip(batch, self._running(), strict=True)))

    # --- D·W ---

    def _folded(
        self, d: Tensor, mean: Tensor, unit: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """D·W and b - μ·D·W, in the dtype of the weight."""
        groups, taps = self.layout.groups, self.layout.taps
        matrix = weight_matrix(weight.to(d.dtype), groups, self._transposed)
        folded, shift = [], matrix.new_zeros(groups, matrix.shape[-1])
        for d_part, mean_part, blocks in self.layout.split(d, mean, matrix):
            product, constant = whitening.fold(d_part, mean_part, blocks)
            folded.append(product.reshape(groups, -1, taps, matrix.shape[-1]))
            shift = shift + constant.reshape(groups, -1, matrix.shape[-1]).sum(1)
        product = matrix_weight(torch.cat(folded, 1) / unit, weight, self._transposed)
        constant = -shift.flatten() if bias is None else bias.to(d.dtype) - shift.flatten()
        return product.to(weight.dtype), constant.to(weight.dtype)

    def _unfolded(
        self, d: Tensor, mean: Tensor, unit: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """D⁻¹·W and b + μ·W: the parameters for which the layer is the plain one with this weight and bias."""
        groups, taps = self.layout.groups, self.layout.taps
        matrix = weight_matrix(weight.double(), groups, self._transposed)
        unfolded, shift = [], matrix.new_zeros(groups, matrix.shape[-1])
        for d_part, mean_part, blocks in self.layout.split(d.double(), mean.double(), matrix):
            product, constant = whitening.unfold(d_part, mean_part, blocks)
            unfolded.append(product.reshape(groups, -1, taps, matrix.shape[-1]))
            shift = shift + constant.reshape(groups, -1, matrix.shape[-1]).sum(1)
        product = matrix_weight(torch.cat(unfolded, 1) * unit, weight, self._transposed)
        constant = shift.flatten() * unit if bias is None else bias.double() + shift.flatten() * unit
        return product.to(weight.dtype), constant.to(weight.dtype)


def _is_finite(x: Tensor, valid: Tensor | None) -> Tensor:
    fine = torch.isfinite(x.detach())
    return fine.all() if valid is None else (fine | ~valid[:, None]).all()


def _runs_in_float16(x: Tensor) -> bool:
    """Whether the stock operation will compute in float16, whose range a gain after the product could leave."""
    kind = x.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    return x.dtype == torch.float16 or autocast


def _is_recomputation() -> bool:
    """Inside a backward pass, where activation checkpointing runs the layer again: not a new batch."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@torch.library.custom_op("ndpp::require", mutates_args=())
def require(holds: Tensor, message: str) -> Tensor:
    """`holds`, or FloatingPointError: an operator, so that compiled code can raise as well."""
    if not bool(holds):
        raise FloatingPointError(message)
    return holds.clone()


@require.register_fake
def _(holds: Tensor, message: str) -> Tensor:
    return torch.empty_like(holds)
