"""Statistics of several ranks as those of one process on the joined batch: all collectives of ndpp are in this file.

A layer call costs one all-reduce of one flat buffer, and one more in the backward pass.
Forward: n·Cov of every rank is added up, its upper triangle alone; beside it lies a slot for every rank, which that
rank fills and the others leave zero. Adding zeros is exact, so the slots are gathered by the same all-reduce, and what
the means of the ranks differ by enters as centred squares: exact for any split, and the same bits on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .whitening import Moments

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Kept(NamedTuple):
    """What the backward pass of a join needs, of this rank."""

    share: Tensor  # (), of this rank in all rows
    ratio: Tensor  # (), its unit in the common one
    delta: Tensor  # (g, f), its mean - the common one, in the common unit


def group_of(sync: bool | ProcessGroup) -> ProcessGroup | None:
    """The group to share statistics with; None where this process is alone."""
    if sync is False or not dist.is_available() or not dist.is_initialized():
        return None
    group = dist.group.WORLD if sync is True else sync
    return group if group is not None and group.size() > 1 else None


def join(local: Moments, group: ProcessGroup) -> Moments:
    """Moments of the rows of all ranks. The gradient of every rank's loss reaches the rows of every rank."""
    rows, mean, cov, unit, *_ = _Join.apply(*local, group)
    return Moments(rows, mean, cov, unit)


def join_forward(local: Moments, group: ProcessGroup) -> tuple[Moments, Kept]:
    """Moments of the rows of all ranks, in the largest of their units; a rank without rows gives zeros.

    Rows of NaN say that a batch is not finite: those of the result then are NaN on every rank, and its values zero.
    n·Cov is sent in absolute terms, which limits the magnitude of data to about 1e-15 to 1e15 in float32 (1e-150 to
    1e150 in float64): what is larger is treated as not finite, and what is smaller has no variance.
    """
    g, f = local.mean.shape
    world, rank = group.size(), group.rank()
    buffer = local.mean.new_zeros(g * f * (f + 1) // 2 + world * (2 + g * f))
    triangle, slots = buffer[: g * f * (f + 1) // 2], buffer[g * f * (f + 1) // 2 :].view(world, 2 + g * f)
    triangle.copy_(_upper(local.cov * local.unit * local.unit * local.rows))
    slots[rank] = torch.cat([local.rows[None], local.unit[None], (local.mean * local.unit).flatten()])
    buffer = _all_reduce(buffer, group)

    finite = torch.isfinite(buffer).all()
    buffer = torch.where(finite, buffer, 0.0)
    triangle, slots = buffer[: g * f * (f + 1) // 2], buffer[g * f * (f + 1) // 2 :].view(world, 2 + g * f)
    rows, units, means = slots[:, 0], slots[:, 1], slots[:, 2:]
    total, peak = rows.sum(), torch.where(rows > 0, units, 0.0).amax()
    unit = torch.where(peak > 0, peak, 1.0)
    share = (rows / total.clamp_min(1.0))[:, None]
    means = means / unit
    mean = (share * means).sum(0)
    residual = (share * (means - mean)).sum(0)  # the rounding of the first: means that agree have no spread
    mean = mean + residual
    delta = (means - mean).view(world, g, f)
    spread = delta * share[:, :, None].sqrt()
    between = torch.einsum("rgi,rgj->gij", spread, spread)
    within = _symmetric(triangle / unit / unit / total.clamp_min(1.0), g, f)
    merged = Moments(torch.where(finite, total, torch.nan), mean.view(g, f), within + between, unit)
    return merged, Kept(share[rank, 0], local.unit / unit, delta[rank])


def join_adjoint(kept: Kept, grad_mean: Tensor, grad_cov: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's mean and covariance, of the sum of all ranks' losses."""
    g, f = grad_mean.shape
    upper = _upper((grad_cov + grad_cov.mT) / 2)
    buffer = _all_reduce(torch.cat([grad_mean.flatten(), upper]), group)
    dm, dc = buffer[: g * f].view(g, f), _symmetric(buffer[g * f :], g, f)
    dm = dm + 2 * (dc * kept.delta[:, None, :]).sum(2)  # no product of matrices: autocast would round it
    scale = kept.share * kept.ratio
    return dm * scale, dc * (scale * kept.ratio)


class _Join(torch.autograd.Function):
    """The two above, as one differentiable operation. Twice differentiable it is not."""

    @staticmethod
    def forward(rows: Tensor, mean: Tensor, cov: Tensor, unit: Tensor, group: ProcessGroup) -> tuple[Tensor, ...]:
        merged, kept = join_forward(Moments(rows, mean, cov, unit), group)
        return *merged, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        rows, _, _, unit, *kept = output
        ctx.group = inputs[4]
        ctx.mark_non_differentiable(rows, unit, *kept)
        ctx.save_for_backward(*kept)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_mean, grad_cov = join_adjoint(Kept(*ctx.saved_tensors), grads[1], grads[2], ctx.group)
        return None, grad_mean, grad_cov, None, None


def total(values: list[float], like: Tensor, group: ProcessGroup) -> list[float]:
    """A few numbers, each added up over the ranks, outside any graph; `like` says on which device."""
    sums: list[float] = _all_reduce(torch.tensor(values, dtype=torch.float64, device=like.device), group).tolist()
    return sums


def _all_reduce(buffer: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over all ranks; may overwrite the buffer."""
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives as functional

        traced: Any = functional
        done: Tensor = traced.wait_tensor(traced.all_reduce(buffer, "sum", group))
        return done
    try:
        dist.all_reduce(buffer, group=group)
    except RuntimeError as error:
        raise RuntimeError(
            f"the {group.size()} ranks that share statistics (Settings.sync) did not meet here: every one of them must "
            "call every such layer equally often and in the same order, forward and backward, also with an empty input."
            " For a layer that some ranks skip: layer.settings = layer.settings.replace(sync=False). If a rank has "
            f"failed, its own message says why. This one: {error}"
        ) from error
    return buffer


def _upper(matrices: Tensor) -> Tensor:
    """The upper triangles of (g, f, f), flat."""
    i, j = torch.triu_indices(matrices.shape[-1], matrices.shape[-1], device=matrices.device)
    return matrices[:, i, j].flatten()


def _symmetric(upper: Tensor, g: int, f: int) -> Tensor:
    """Back from `_upper`."""
    i, j = torch.triu_indices(f, f, device=upper.device)
    matrices = upper.new_zeros(g, f, f)
    matrices[:, i, j] = upper.view(g, -1)
    matrices[:, j, i] = upper.view(g, -1)
    return matrices
