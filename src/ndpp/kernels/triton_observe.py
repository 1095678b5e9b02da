"""A call's moments into the step and the running statistics: a launch for the means, and one for the covariances."""

# mypy: ignore-errors
from __future__ import annotations

import functools
import math
from typing import NamedTuple

import triton
import triton.language as tl

from ..whitening import Moments
from .plan import Running
from .triton_launch import Prepared, cdiv, launcher

SIZE = 1024  # entries of a program
FLAGS = 4  # share and weight of the batch; whether it begins a step, and is worth anything


@triton.jit
def _lerp(old, new, share):
    """Exactly `new` for a share of 1."""
    return tl.where(share < 0.5, old + share * (new - old), new - (new - old) * (1 - share))


@triton.jit(do_not_specialize=["blocks", "f"])
def _observe_means(
    delta, running_mean, tracked, step_rows, step_mean, rows, mean, cov, unit,
    blocks, f, momentum, decay,
    CUMULATIVE: tl.constexpr, MORE: tl.constexpr, BEGINS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program: is the batch worth anything, with what weights does it enter; all of the size of the means."""
    u, flags = tl.load(unit), delta + blocks * f
    finite = tl.load(rows) > 0
    for start in tl.range(0, blocks * f, SIZE):
        at = start + tl.arange(0, SIZE)
        block = (at // f).to(tl.int64)
        m = tl.load(mean + at, at < blocks * f, 0.0) * u
        v = tl.load(cov + block * f * f + (at % f) * (f + 1), at < blocks * f, 0.0) * u * u
        fine = (tl.abs(m) < float("inf")) & (tl.abs(v) < float("inf"))  # nor is NaN
        finite = finite & (tl.sum(fine.to(tl.int32), 0) == SIZE)
    before = tl.load(step_rows)
    if BEGINS:
        before = before * 0
    count = tl.where(finite, tl.load(rows), 0.0)
    total = before + count
    share = tl.where(total > 0, count / tl.maximum(total, 1.0), 0.0)
    number = tl.load(tracked) + ((before == 0) & finite).to(tl.int64)
    t = tl.maximum(number, 1).to(tl.float64)
    # In float64: the difference is small for a small momentum.
    weight = 1.0 / t if CUMULATIVE else momentum / (1.0 - tl.exp(t * decay))
    weight = tl.where(number > 1, weight, 1.0)  # as in the twin: nothing is left of what is there at the start
    weight = tl.where(finite, weight.to(tl.float32), 0.0)
    tl.debug_barrier()  # everything was read
    tl.store(tracked, number)
    tl.store(step_rows, total if MORE else total * 0)
    tl.store(flags, share)
    tl.store(flags + 1, weight)
    tl.store(flags + 2, tl.where(before == 0, 1.0, 0.0))
    tl.store(flags + 3, tl.where(finite, 1.0, 0.0))
    for start in tl.range(0, blocks * f, SIZE):
        at = start + tl.arange(0, SIZE)
        old = tl.load(step_mean + at, at < blocks * f, 0.0)
        new = tl.where(finite, tl.load(mean + at, at < blocks * f, 0.0) * u, old)
        value, present = _lerp(old, new, share), tl.load(running_mean + at, at < blocks * f, 0.0)
        tl.store(delta + at, new - old, at < blocks * f)
        target = value + tl.where(before == 0, 0.0, present - old)
        tl.store(running_mean + at, _lerp(present, target, weight), at < blocks * f)
        tl.store(step_mean + at, value, at < blocks * f)


@triton.jit(do_not_specialize=["blocks", "f"])
def _observe_covariances(delta, running_cov, step_cov, cov, unit, blocks, f, SIZE: tl.constexpr):
    flags = delta + blocks * f
    u, share, weight = tl.load(unit), tl.load(flags), tl.load(flags + 1)
    fresh, finite = tl.load(flags + 2) > 0, tl.load(flags + 3) > 0
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < blocks.to(tl.int64) * f * f
    row, column = at // f, at // f // f * f + at % f  # of means
    old = tl.load(step_cov + at, inside, 0.0)
    new = tl.where(finite, tl.load(cov + at, inside, 0.0) * (u * u), old)
    between = share * (1 - share) * tl.load(delta + row, inside, 0.0) * tl.load(delta + column, inside, 0.0)
    value, present = _lerp(old, new, share) + between, tl.load(running_cov + at, inside, 0.0)
    tl.store(running_cov + at, _lerp(present, value + tl.where(fresh, 0.0, present - old), weight), inside)
    tl.store(step_cov + at, value, inside)


class Told(NamedTuple):
    """The launches for one kind of statistics."""

    means: Prepared
    covariances: Prepared


@functools.lru_cache(4096)
def _told(blocks: int, f: int, momentum: float | None, more_may_come: bool, begins: bool) -> Told:
    decay = -math.inf if momentum is None or momentum == 1.0 else math.log1p(-momentum)
    means = launcher(_observe_means, 8, 1, (), momentum is None, more_may_come, begins, SIZE)
    covariances = launcher(_observe_covariances, 4, 1, (), SIZE)
    return Told(
        means.prepared((1, 1, 1), blocks, f, 1.0 if momentum is None else float(momentum), decay),
        covariances.prepared((cdiv(blocks * f * f, SIZE), 1, 1), blocks, f),
    )


def observe_(state: Running, batch: Moments, momentum: float | None, more_may_come: bool, begins: bool = False) -> None:
    """As `plain.observe_`."""
    blocks, f = state.mean.shape
    told = _told(blocks, f, momentum, more_may_come, begins)
    delta = state.mean.new_empty(blocks * f + FLAGS)
    rows, mean, cov, unit = [t.contiguous() for t in batch]
    told.means(delta, state.mean, state.tracked, state.step_rows, state.step_mean, rows, mean, cov, unit)
    told.covariances(delta, state.cov, state.step_cov, cov, unit)
