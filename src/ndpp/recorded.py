"""μ and Cov of a layer's input as plain operations, which autograd records: every case, masks and phases included."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import kernels, sync, whitening
from .geometry import Grid, Phase
from .keeping import is_traced
from .rows import patches, row_weights
from .sampling import Sample, choose, every, row_budget
from .statistics import RunningMoments
from .transform import budget, no_autocast
from .whitening import Moments

ELEMENTS_AT_ONCE = 1 << 24  # of a data matrix, where every row is looked at


class Rows(NamedTuple):
    """Sampled rows of one phase, and how many output positions of the batch they stand for."""

    values: Tensor  # (n, channels, own taps)
    weight: Tensor | None  # (n,), under a mask
    positions: Tensor  # ()
    taps: Tensor  # where they stand among all taps of the kernel


class Normalised(torch.autograd.Function):
    """S·X of rows, by kernels."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, mode: str, eps: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.told = mode, eps, dtype
        return kernels.normalised(rows, mode, eps, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (mode, eps, dtype) = ctx.saved_tensors, ctx.told
        if not torch.is_grad_enabled():
            by = kernels.plain if torch._C._functorch.is_legacy_batchedtensor(grad) else kernels  # several at once
            return by.normalised_adjoint(grad, rows, mode, eps), None, None, None
        with no_autocast(rows.device.type):  # as in the forward pass
            leaf = torch.ops.aten.alias(rows)
            y = kernels.plain.normalised(leaf, mode, eps, dtype)
            return torch.autograd.grad(y, leaf, grad, create_graph=True)[0], None, None, None


class Recorded(RunningMoments):
    """S, and the moments of the rows of S·X."""

    _per_row_scale = False  # Linear: S is of each row, not of the whole sample

    # --- S ---

    def _scaled(
        self, x: Tensor, valid: Tensor | None, dtype: torch.dtype, of_weight: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """The input, and a gain for the output where scale commutes with the layer and its range allows.

        `dtype` is that of the products: where it is narrow, the input is scaled. Where it is not that of the weight,
        autocast would bring the input to it.
        """
        inside = inside_part = None
        if valid is not None and not self._per_row_scale:
            inside = valid[:, None]
        if inside is not None:  # the layer pads with zeros, and so must batching: a sample is what it is alone
            x = torch.where(inside, x, 0.0)
        mode = self.settings.scale
        if mode == "none" or x.numel() == 0:
            return x, None
        if self._normalises:
            rows = x.movedim(1, -1)
            cast = x.dtype if dtype == of_weight else dtype
            if not is_traced() and kernels.declines_normal(rows, cast) is None:
                return Normalised.apply(rows, mode, self.settings.scale_eps, cast).movedim(-1, 1), None
            if self.settings.scale_eps > 0:
                return kernels.plain.normalised(rows, mode, self.settings.scale_eps, x.dtype).movedim(-1, 1), None
        part, dim = kernels.scaled_part(x, self._plan)
        if inside is not None:
            inside_part = kernels.scaled_part(inside, self._plan)[0]
        center, gain = whitening.sample_scale(part, mode, dim, inside_part, self.settings.scale_eps)
        if mode != "standardize" and dtype != torch.float16:
            return x, gain
        scaled = ((x.to(gain.dtype) - center) * gain).to(x.dtype)
        return (scaled if inside is None else torch.where(inside, scaled, 0.0)), None

    @property
    def _normalises(self) -> bool:
        """Whether S·X is what LayerNorm or RMSNorm makes of rows: by a kernel, or where there is an ε by torch's."""
        mode = self.settings.scale
        return self._per_row_scale and (mode == "standardize" or (mode == "rms" and self.settings.scale_eps > 0))

    # --- μ and Cov ---

    def _moments_of_call(
        self, x: Tensor, gain: Tensor | None, grid: Grid, valid: Tensor | None, draws: Tensor, finite: Tensor | None
    ) -> Moments:
        """Of the rows that this call looks at, on all ranks."""
        group = sync.group_of(self.settings.sync)
        rows = budget(self._plan, group)
        phases = [phase for phase in grid.phases if grid.positions(phase)] if x.numel() > 0 else []
        batch = self._batch_moments([self._rows(x, gain, grid, phase, valid, draws, rows) for phase in phases])
        batch = Moments(*(value.to(whitening.statistics_dtype(x.dtype)) for value in batch))  # also of no rows
        if finite is not None:
            batch = batch._replace(rows=torch.where(finite, batch.rows, torch.nan))
        if group is None:
            return batch
        if x.requires_grad and not batch.mean.requires_grad:  # no rows here, but others have: join their backward
            batch = batch._replace(mean=batch.mean + x[:0].sum().to(batch.mean.dtype))
        return sync.join(batch, group)

    def _rows(
        self,
        x: Tensor,
        gain: Tensor | None,
        grid: Grid,
        phase: Phase,
        valid: Tensor | None,
        draws: Tensor,
        rows: int | None,
    ) -> Rows:
        """The rows of S·X in one phase that this call looks at."""
        positions = x.shape[0] * grid.positions(phase)
        if rows is not None and len(grid.phases) > 1:  # each phase has its share
            rows = max(rows * grid.positions(phase) // sum([grid.positions(p) for p in grid.phases]), 1)
        stride = None if self._per_row_scale else self.settings.stride
        sample = choose(x.shape[0], phase, row_budget(x.shape[0], phase, rows, stride), draws)
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
        dtype = product_dtype(x, x)
        with no_autocast(x.device.type):
            return self._every_row(*self._scaled(x, valid, dtype, x.dtype), grid, valid)

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
        for index in range(len(self.layout.parts)):
            repeat = self.layout.repeats(index)
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


def product_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """What the stock operation computes in. The range of float16 is one that a gain after the product could leave."""
    kind = x.device.type
    if kind in ("cpu", "cuda") and weight.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype
