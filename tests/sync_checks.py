"""What N ranks compute against one process on the joined batch. Runs on every rank (see ranks.py); rank 0 compares."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ndpp
from cases import BY_LAYER, CASES, Case
from ndpp import Settings, kernels
from oracles import as_rows, layer_output

Check = Callable[[Path], str | None]
CHECKS: dict[int, dict[str, Check]] = {2: {}, 4: {}}
EXACT = Settings(rows=None, sync=True, eps=1e-3)
VARIANTS = {
    "newton-shared": EXACT.replace(shared=True),
    "newton-own": EXACT.replace(steps=5, eps=1e-5, shrinkage=0.05),
    "eigh": EXACT.replace(solver="eigh", eps=1e-2),
    "minimax": EXACT.replace(solver="minimax"),
    "l1": EXACT.replace(scale="l1", shared=True),
    "std": EXACT.replace(scale="std", steps=2),
    "standardize": EXACT.replace(scale="standardize", shared=True),
    "cumulative": EXACT.replace(momentum=None),
}


def check(*ranks: int) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        for count in ranks:
            CHECKS[count][function.__name__.replace("_", " ")] = function
        return function

    return add


# --- comparison ---


def gathered(value: Any, group: Any = None) -> list[Any]:
    """The values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return found


def differences(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-10) -> str:
    """What differs by more than the tolerance, relative to its norm."""
    if got.keys() != want.keys():
        return f"{sorted(got)} instead of {sorted(want)}"
    wrong = []
    for name, value in want.items():
        if got[name].shape != value.shape:
            wrong.append(f"{name}: shape {tuple(got[name].shape)} instead of {tuple(value.shape)}")
            continue
        a, b = got[name].detach().double(), value.detach().double()
        if bool(torch.isfinite(b).all()):
            size = float(b.norm())
            difference = float((a - b).norm()) / (size if size > 1e-12 else 1.0)
            if not difference <= tolerance:
                wrong.append(f"{name}: {difference:.1e}")
        elif not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            wrong.append(f"{name}: not finite elsewhere")
    return ", ".join(wrong)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those of the state, and the rows of a step that is not over."""
    kept = ("running_mean", "running_cov", "num_batches_tracked", "step_rows")
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if name.endswith(kept)}


def unequal_bits(ranks: Sequence[dict[str, Tensor]]) -> str:
    """Buffers that are not the same on every rank, bit by bit."""
    names = [n for n in ranks[0] if not all(torch.equal(ranks[0][n], other[n]) for other in ranks)]
    return f"not the same bits on all ranks: {', '.join(names)}" * bool(names)


def sizes(split: str, total: int, ranks: int) -> list[int]:
    """Samples of each rank."""
    if split == "even":
        return [total // ranks + (rank < total % ranks) for rank in range(ranks)]
    if split == "uneven":  # 7 + 1
        return [total - ranks + 1, *[1] * (ranks - 1)]
    assert split == "empty"
    return [0, total - ranks // 2 + 1, *[0, 1] * (ranks // 2 - 1)] if ranks > 2 else [0, total]


def own(x: Tensor, counts: list[int]) -> Tensor:
    return x.split(counts)[dist.get_rank()]


# --- one layer ---


def run_layer(layer: nn.Module, xs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Output and gradients of the last of several steps."""
    for x, cotangent in zip(xs, cotangents, strict=True):
        layer.zero_grad()
        x = x.detach().clone().requires_grad_()
        y = layer(x)
        (y * cotangent).sum().backward()
    return {"y": y.detach(), "dx": x.grad, **{f"d{n}": p.grad for n, p in layer.named_parameters()}}


def joined(ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Samples one after the other, gradients of parameters added up."""
    return {
        name: torch.cat([r[name] for r in ranks]) if name in ("y", "dx") else sum(r[name] for r in ranks)
        for name in ranks[0]
    }  # type: ignore[return-value]


def layer_check(folder: Path, case: Case, settings: Settings, split: str, oracle: bool = False) -> str | None:
    x = torch.cat([case.input(seed=seed) for seed in range(2)])
    xs = [x, 1.5 * x.flip(0) + 0.3]
    layer, alone = (case.build(s, dtype=torch.float64) for s in (settings, settings.replace(sync=False)))
    with torch.no_grad():
        shape = case.stock(dtype=torch.float64)(x).shape
    cotangents = [torch.sin(torch.arange(shape.numel(), dtype=x.dtype) + i).reshape(shape) for i in range(2)]
    counts = sizes(split, len(x), dist.get_world_size())
    got = run_layer(layer, [own(x, counts) for x in xs], [own(c, counts) for c in cotangents])
    ranks, states = gathered(got), gathered(buffers(layer))
    if dist.get_rank():
        return None
    want = run_layer(alone, xs, cotangents)
    wrong = [differences(joined(ranks), want), differences(states[0], buffers(alone)), unequal_bits(states)]
    if oracle:
        block = settings.block or (256 if case.layer == "Linear" else 64)
        options = {n: getattr(settings, n) for n in ("shared", "solver", "steps", "eps", "shrinkage", "scale")}
        y = layer_output(alone, xs[1], alone.weight, alone.bias, block=block, **options)
        wrong.append(differences({"oracle": as_rows(alone, joined(ranks)["y"])}, {"oracle": y}, 1e-9))
    return "; ".join(filter(None, wrong))


def _add_layer_checks() -> None:
    def add(ranks: int, name: str, *arguments: Any) -> None:
        CHECKS[ranks][name] = functools.partial(layer_check, **dict(zip(NAMES, arguments, strict=False)))

    for name, case in BY_LAYER.items():
        add(2, f"{name}, 7 + 1, data matrix", case, EXACT, "uneven", True)
        add(2, f"{name}, an empty rank", case, EXACT, "empty")
        add(4, f"{name}, four ranks, most with one sample", case, EXACT, "uneven", True)
        add(4, f"{name}, four ranks, two empty", case, EXACT, "empty")
    for variant, settings in VARIANTS.items():
        for name in ("Linear", "Conv2d", "ConvTranspose2d"):
            add(2, f"{name}, {variant}, 7 + 1", BY_LAYER[name], settings, "uneven")
            add(2, f"{name}, {variant}, an empty rank", BY_LAYER[name], settings, "empty")
    for case in CASES:
        add(2, f"{case}, even", case, EXACT, "even")


NAMES = ("case", "settings", "split", "oracle")
_add_layer_checks()


def linear(settings: Settings = EXACT, **options: Any) -> ndpp.Linear:
    torch.manual_seed(1)
    return ndpp.Linear(6, 4, settings=settings, **{"dtype": torch.float64, **options})


def data(rows: int = 24, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return (x @ torch.randn(6, 6, generator=generator, dtype=torch.float64) + 0.7).to(dtype)


def wave(y: Tensor) -> Tensor:
    return torch.sin(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)


def against_one(layer: nn.Module, alone: nn.Module, step: Callable[[nn.Module, bool], dict[str, Tensor]]) -> str | None:
    """Compare `step(layer, joined)` on the ranks with the same on one process; it says what it has of "y" and "dx"."""
    ranks, states = gathered(step(layer, False)), gathered(buffers(layer))
    if dist.get_rank():
        return None
    want = step(alone, True)
    wrong = [differences(joined(ranks), want), differences(states[0], buffers(alone)), unequal_bits(states)]
    return "; ".join(filter(None, wrong))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {f"d{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}


ALONE = EXACT.replace(sync=False)


@check(2, 4)
def one_row_on_each_rank(folder: Path) -> str | None:
    x = data(dist.get_world_size())
    counts = [1] * len(x)

    def step(layer: nn.Module, whole: bool) -> dict[str, Tensor]:
        z = (x if whole else own(x, counts)).clone().requires_grad_()
        y = layer(z)
        cotangent = wave(torch.empty(len(x), 4, dtype=x.dtype))
        (y * (cotangent if whole else own(cotangent, counts))).sum().backward()
        return {"y": y.detach(), "dx": z.grad, **gradients(layer)}

    return against_one(linear(), linear(ALONE), step)


@check(2)
def several_calls_in_a_step_with_images_of_different_sizes(folder: Path) -> str | None:
    """Pyramid levels: the second call of rank 0 has nothing; images of rank 1 are larger. One update for all."""
    generator = torch.Generator().manual_seed(0)

    def images(n: int, size: int) -> Tensor:
        return torch.randn(n, 3, size, size + 1, generator=generator, dtype=torch.float64) + size / 5

    calls = [[images(2, 8), images(3, 12)], [images(0, 6), images(2, 5)]]

    def step(layer: nn.Module, whole: bool) -> dict[str, Tensor]:
        total = torch.zeros((), dtype=torch.float64)
        outputs = []
        for call in calls:
            parts = call if whole else [call[dist.get_rank()]]
            if whole:
                outputs.append(whole_call(layer, parts))
            else:
                outputs.append(layer(parts[0]).flatten())
        for y in outputs:
            total = total + y.pow(3).sum()
        total.backward()
        return {**gradients(layer)}

    def whole_call(layer: nn.Module, parts: list[Tensor]) -> Tensor:
        """One process cannot run images of two sizes: a linear layer on their patches is the same function."""
        rows = [nn.functional.unfold(p, 3).transpose(1, 2).reshape(-1, 27) for p in parts if len(p)]
        return layer(torch.cat(rows)).flatten()

    torch.manual_seed(1)
    conv = ndpp.Conv2d(3, 4, 3, dtype=torch.float64, settings=EXACT)
    flat = ndpp.Linear(27, 4, dtype=torch.float64, settings=ALONE)
    flat.load_state_dict({k: v.flatten(1) if k == "weight" else v for k, v in conv.state_dict().items()})
    got = step(conv, False)
    got["dweight"] = got["dweight"].flatten(1)
    ranks, states = gathered(got), gathered(buffers(conv))
    if dist.get_rank():
        return None
    wrong = [differences(joined(ranks), step(flat, True)), differences(states[0], buffers(flat)), unequal_bits(states)]
    return "; ".join(filter(None, wrong)) or ("not one update" * (int(conv.num_batches_tracked) != 1))


@check(2)
def non_finite_on_one_rank_is_left_out_on_all(folder: Path) -> str | None:
    wrong = []
    for bad in (math.nan, math.inf):
        layer, x = linear(), data()
        layer(own(x, [12, 12])).sum().backward()
        before = buffers(layer)
        z = own(x, [12, 12]).clone()
        if dist.get_rank() == 1:
            z[3, 2] = bad
        z.requires_grad_()
        y = layer(z)
        want = linear_like(layer)(z)
        served = torch.allclose(torch.nan_to_num(y, 0, 0, 0), torch.nan_to_num(want, 0, 0, 0), rtol=1e-12, atol=1e-12)
        y.sum().backward()
        kept = not differences(buffers(layer), before)
        gradient = bool(torch.isfinite(z.grad).all()) or dist.get_rank() == 1
        wrong += [f"rank {r}: {v}" for r, v in enumerate(gathered((served, kept, gradient))) if not all(v)]
    return "; ".join(wrong)


def linear_like(layer: nn.Module) -> nn.Module:
    """The layer with its running statistics."""
    other = linear(ALONE)
    other.load_state_dict(layer.state_dict())
    return other.eval()


@check(2)
def non_finite_raises_on_all_ranks_if_asked(folder: Path) -> str | None:
    layer, x = linear(EXACT.replace(nonfinite="raise")), own(data(), [12, 12])
    layer(x)
    before = buffers(layer)
    said = ""
    try:
        layer(x * (math.nan if dist.get_rank() else 1.0))
    except FloatingPointError as error:
        said = str(error)
    layer(x)  # the ranks still meet
    told = gathered("on one of the ranks" in said and int(layer.num_batches_tracked) == 2 and bool(before))
    return "" if all(told) else f"{told}"


@check(2)
def no_update_where_no_rank_has_rows(folder: Path) -> str | None:
    layer = linear()
    layer(own(data(), [12, 12])).sum().backward()
    before = buffers(layer)
    x = torch.zeros(0, 6, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    fine = y.shape == (0, 4) and x.grad is not None and not differences(buffers(layer), before)
    return "" if all(gathered(bool(fine))) else "changed"


@check(2)
def magnitudes_far_from_one(folder: Path) -> str | None:
    """Within the range that is promised: as one process; beyond it the running statistics serve, on every rank."""
    wrong = []
    for scale in (1e-13, 1e13, 1e30):
        settings = EXACT.replace(eps=0.0)
        layer = linear(settings, dtype=torch.float32)
        alone = linear(settings.replace(sync=False), dtype=torch.float32)
        x = data(dtype=torch.float32) * scale
        y = gathered(layer(own(x, [20, 4])).detach())
        states = gathered(buffers(layer))
        wrong.append(unequal_bits(states))
        if scale < 1e20:
            wrong.append(differences({"y": torch.cat(y)}, {"y": alone(x)}, 1e-4))
            covs = [{"cov": one.running_cov / scale**2} for one in (layer, alone)]
            wrong.append(differences(*covs, 1e-5))
        elif int(layer.num_batches_tracked):
            wrong.append("statistics beyond the range were kept")
    return "; ".join(filter(None, wrong))


@check(2)
def a_large_mean_costs_no_precision(folder: Path) -> str | None:
    """Float32 at mean/std = 1000, and constant columns, against float64."""
    x = data(64) / 3 + 1000
    x[:, 5] = 1000.123
    layer = linear(EXACT.replace(momentum=None), dtype=torch.float32)
    layer(own(x, [47, 17]).float())
    centred = x.float().double() - x.float().double().mean(0)
    cov = centred.T @ centred / 64
    constant = float(layer.running_cov[0, 5, 5])
    wrong = differences({"cov": layer.running_cov[0]}, {"cov": cov}, 1e-4)
    return wrong or (f"a constant column has variance {constant}" if constant > 1e-12 else "")


@check(2, 4)
def buffers_are_the_same_bits_in_float32(folder: Path) -> str | None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 5))
    ndpp.convert_(model, Settings(rows=64, sync=True))
    torch.manual_seed(dist.get_rank())  # other data, other rows on every rank
    for step in range(4):
        x = torch.randn(0 if step == dist.get_rank() else 2 + dist.get_rank(), 3, 8, 8)
        model(x).square().sum().backward()
    states = gathered(buffers(model))
    tracked = int(model[0].num_batches_tracked)
    return unequal_bits(states) or ("" if tracked == 4 else f"{tracked} steps tracked")


@check(2)
def the_row_budget_is_that_of_the_group(folder: Path) -> str | None:
    seen, original = [], kernels.moments

    def count(x: Any, gain: Any, draws: Any, view: Any, plan: Any) -> Any:
        seen.append(view.budget[0])
        return original(x, gain, draws, view, plan)

    kernels.moments = count
    try:
        for settings in (Settings(rows=32, sync=True), Settings(rows=32), Settings(rows=1, sync=True)):
            ndpp.Linear(6, 4, settings=settings)(torch.randn(100, 6))
    finally:
        kernels.moments = original
    return "" if seen == [16, 32, 1] else f"{seen} rows instead of 16, 32 and 1"


@check(2)
def masks(folder: Path) -> str | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, 6, generator=generator, dtype=torch.float64)
    valid = torch.arange(7) < torch.tensor([7, 3, 0, 5, 1])[:, None]
    counts = [2, 3]

    def step(layer: nn.Module, whole: bool) -> dict[str, Tensor]:
        z = (x if whole else own(x, counts)).clone().requires_grad_()
        inside = valid if whole else own(valid, counts)
        with ndpp.mask(inside):
            y = layer(z)
        (y * inside[..., None]).pow(3).sum().backward()
        return {"y": y.detach() * inside[..., None], "dx": z.grad, **gradients(layer)}

    def step_without_any(layer: nn.Module, whole: bool) -> dict[str, Tensor]:  # all that rank 0 has is padding
        z = (x[1:3] if whole else own(x[1:3].flip(0), [1, 1])).clone().requires_grad_()
        with ndpp.mask(valid[1:3] if whole else own(valid[1:3].flip(0), [1, 1])):
            layer(z).pow(3).sum().backward()
        return {**gradients(layer)}

    first = against_one(linear(), linear(ALONE), step)
    second = against_one(linear(), linear(ALONE), step_without_any)
    return first or second


@check(2)
def attention(folder: Path) -> str | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 8, generator=generator, dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([5, 2, 3, 5, 4, 1])[:, None]

    def build(settings: Settings) -> nn.Module:
        torch.manual_seed(1)
        model = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
        ndpp.convert_(model, settings)
        return model

    def step(model: nn.Module, whole: bool, counts: list[int]) -> dict[str, Tensor]:
        z = (x if whole else own(x, counts)).clone().requires_grad_()
        gone = padding if whole else own(padding, counts)
        y, _ = model(z, z, z, key_padding_mask=gone)
        y = y.masked_fill(gone[..., None], 0.0)
        y.pow(3).sum().backward()
        return {"y": y.detach(), "dx": z.grad, **gradients(model)}

    steps = [functools.partial(step, counts=counts) for counts in ([5, 1], [6, 0])]
    wrong = [against_one(build(EXACT), build(ALONE), one) for one in steps]
    return "; ".join(filter(None, wrong))


class Gated(nn.Module):
    """Two layers that read one tensor, and one that reads what they make of it."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(settings), linear(settings), nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        y: Tensor = self.down(self.gate(x).tanh() * self.up(x))
        return y


@check(2)
def layers_that_read_one_tensor(folder: Path) -> str | None:
    """The ranks meet once each way for all of these layers."""
    met, original = [], dist.all_reduce

    def step(model: nn.Module, whole: bool, counts: Sequence[int]) -> dict[str, Tensor]:
        z = (data() if whole else own(data(), list(counts))).clone().requires_grad_()
        y = model(z)
        y.pow(3).sum().backward()
        return {"y": y.detach(), "dx": z.grad, **gradients(model)}

    wrong = []
    try:
        dist.all_reduce = lambda buffer, **options: met.append(buffer) or original(buffer, **options)
        for counts in ((20, 4), (24, 0)):
            model, alone = Gated(EXACT), Gated(ALONE)
            found = ndpp.share_(model, data())
            met.clear()
            wrong.append(against_one(model, alone, functools.partial(step, counts=counts)))
            if found != [("gate", "up")] or len(met) != 2:
                wrong.append(f"{found} met {len(met)} times")
    finally:
        dist.all_reduce = original
    return "; ".join(filter(None, wrong))


@check(2)
def mixed_precision_by_autocast(folder: Path) -> str | None:
    """Statistics and their gradients stay in float32, also where the backward pass is under autocast."""
    wrong = []
    for counts in ([20, 4], [24, 0]):

        def step(layer: nn.Module, whole: bool, counts: list[int] = counts) -> dict[str, Tensor]:
            x = data(dtype=torch.float32)
            z = (x if whole else own(x, counts)).clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(z)
                y.float().square().sum().backward()
            return {"y": y.detach().float(), "dx": z.grad, **gradients(layer)}

        layer, alone = linear(dtype=torch.float32), linear(ALONE, dtype=torch.float32)
        ranks, states = gathered(step(layer, False)), gathered(buffers(layer))
        wrong += [differences(joined(ranks), step(alone, True), 0.02), differences(states[0], buffers(alone), 1e-5)]
        wrong += [unequal_bits(states)]
    return "; ".join(filter(None, wrong))


@check(2, 4)
def one_all_reduce_each_way_of_the_size_that_is_documented(folder: Path) -> str | None:
    sizes, original = [], dist.all_reduce
    try:
        dist.all_reduce = lambda buffer, **options: sizes.append(buffer.numel()) or original(buffer, **options)
        layer = ndpp.Conv2d(5, 4, 3, settings=EXACT.replace(block=2))
        x = torch.randn(2, 5, 6, 6, requires_grad=True)
        layer(x).sum().backward()
        layer(x.detach()).sum().backward()  # a first layer
    finally:
        dist.all_reduce = original
    (g, f), ranks = layer.running_mean.shape, dist.get_world_size()
    forward, backward = g * f * (f + 1) // 2 + ranks * (g * f + 2), g * f * (f + 1) // 2 + g * f
    return "" if sizes == [forward, backward, forward] else f"{sizes} instead of {[forward, backward, forward]}"


# --- groups ---


@check(4)
def a_group_for_each_half_of_the_ranks(folder: Path) -> str | None:
    """Each half computes as one process of its own, with layers of its own size; copies share the group."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    group = halves[half]
    torch.manual_seed(1)
    settings = EXACT.replace(sync=group)
    layer = ndpp.Linear(6, 4 + half, dtype=torch.float64, settings=settings)  # a pipeline of two stages, say
    layer = copy.deepcopy(layer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        again = pickle.loads(pickle.dumps(layer))
    fine = layer.settings.sync is group and again.settings.sync is True and "cannot be pickled" in str(said[0].message)
    alone = ndpp.Linear(6, 4 + half, dtype=torch.float64, settings=ALONE)
    alone.load_state_dict(layer.state_dict())
    x, counts = data(10, seed=half), [7, 3]
    mine = x.split(counts)[dist.get_rank() % 2]
    y = gathered(layer(mine).detach(), group)
    states = gathered(buffers(layer), group)
    wrong = differences({"y": torch.cat(y)}, {"y": alone(x)}) or differences(states[0], buffers(alone))
    wrong = wrong or unequal_bits(states) or ("" if fine else "copies have another group")
    return "; ".join(filter(None, gathered(wrong)))


@check(4)
def a_group_of_others_is_refused(folder: Path) -> str | None:
    group = dist.new_group([0, 1])
    said = ""
    try:
        Settings(sync=group)
    except ValueError as error:
        said = str(error)
    told = gathered("that this rank is a member of; got" in said)
    return "" if told == [False, False, True, True] else f"{told}"


@check(2)
def one_rank_by_itself_needs_nobody(folder: Path) -> str | None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    layer = linear(EXACT.replace(sync=groups[dist.get_rank()]))
    if dist.get_rank() == 0:
        layer(data(8)).sum().backward()  # rank 1 does not
    return ""


# --- the machinery around ---


@check(2)
def activation_checkpointing(folder: Path) -> str | None:
    counts, x = [9, 0], data(9)

    def build(settings: Settings) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
        ndpp.convert_(model, settings)
        return model

    wrong = []
    for reentrant in (True, False):

        def step(model: nn.Module, whole: bool, reentrant: bool = reentrant) -> dict[str, Tensor]:
            for _ in range(2):
                model.zero_grad()
                z = (x if whole else own(x, counts)).clone().requires_grad_()
                y = model(z) if whole else checkpoint(model, z, use_reentrant=reentrant)
                y.pow(3).sum().backward()
            return {"y": y.detach(), "dx": z.grad, **gradients(model)}

        wrong.append(against_one(build(EXACT), build(ALONE), step))
    return "; ".join(filter(None, wrong))


def network(settings: Settings) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 25, 5),
    ).double()
    ndpp.convert_(model, settings)
    return model


def images(count: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.3


def trained(model: nn.Module, counts: list[int] | None, steps: int = 3, accumulate: int = 1) -> None:
    """Steps of SGD on the sum of all losses, which wrappers average over the ranks; None is one process."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(steps):
        for part in range(accumulate):
            x = images(seed=10 * step + part)
            x = x if counts is None else own(x, counts)
            waits = part + 1 < accumulate and counts is not None and hasattr(model, "no_sync")
            with model.no_sync() if waits else nullcontext():
                loss = model(x).square().sum() / 8
                (loss if counts is None else loss * dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare_trained(model: nn.Module, counts: list[int], tolerance: float = 1e-10, **options: Any) -> str | None:
    """A wrapped network trained on ranks against the plain one on one process."""
    trained(model, counts, **options)
    plain = {n.removeprefix("module."): p for n, p in model.named_parameters()}
    full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in plain.items()}
    states = gathered({n.removeprefix("module."): b for n, b in buffers(model).items()})
    if dist.get_rank():
        return None
    alone = network(ALONE)
    trained(alone, None, **options)
    wrong = [differences(full, dict(alone.named_parameters()), tolerance)]
    wrong += [differences(states[0], buffers(alone), tolerance), unequal_bits(states)]
    return "; ".join(filter(None, wrong))


def _ddp(folder: Path, accumulate: int = 1, counts: Sequence[int] = (7, 1), **options: Any) -> str | None:
    model = nn.parallel.DistributedDataParallel(network(EXACT), **options)
    return compare_trained(model, list(counts), accumulate=accumulate)


CHECKS[2]["DDP"] = _ddp
CHECKS[2]["DDP, an empty rank"] = functools.partial(_ddp, counts=(8, 0))
CHECKS[2]["DDP, static graph"] = functools.partial(_ddp, static_graph=True)
CHECKS[2]["DDP, unused parameters"] = functools.partial(_ddp, find_unused_parameters=True)
CHECKS[2]["DDP, no broadcast of buffers"] = functools.partial(_ddp, broadcast_buffers=False)
CHECKS[2]["DDP, accumulation under no_sync"] = functools.partial(_ddp, accumulate=2)


@check(2)
def DDP_two_forward_passes_before_a_backward(folder: Path) -> str | None:
    """DDP writes to the buffers in between, which no backward pass may need."""
    x = images()

    def step(model: nn.Module, whole: bool) -> dict[str, Tensor]:
        runs = model if whole else nn.parallel.DistributedDataParallel(model)
        outputs = [runs(z if whole else own(z, [7, 1])) for z in (x, x + 1)]
        sum(y.square().sum() for y in outputs).backward()
        return gradients(model)  # DDP averages them, and `joined` adds those of all ranks up again

    return against_one(network(EXACT), network(ALONE), step)


def sharded(settings: Settings, mesh: Any = None, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    model = network(settings)
    for layer in model:
        if isinstance(layer, (ndpp.Conv2d, ndpp.Linear, ndpp.ConvTranspose2d)):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


@check(2, 4)
def FSDP2(folder: Path) -> str | None:
    return compare_trained(sharded(EXACT), sizes("uneven", 8, dist.get_world_size()))


@check(2)
def FSDP2_with_activations_in_place(folder: Path) -> str | None:
    """What a layer returns is no view, which they could not change."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for inplace in (False, True):
        torch.manual_seed(0)
        parts = [ndpp.Linear(8, 8, settings=EXACT), nn.ReLU(inplace), ndpp.Linear(8, 2, settings=EXACT)]
        model = nn.Sequential(*parts).double()
        for part in (parts[0], parts[2], model):
            fully_shard(part)
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
        model(x).pow(3).sum().backward()
        found.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    return differences(found[1], found[0], 1e-12)


@check(4)
def HSDP(folder: Path) -> str | None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return compare_trained(sharded(EXACT, mesh), [4, 2, 1, 1])


@check(4)
def HSDP_with_statistics_of_the_shard_group(folder: Path) -> str | None:
    """Half of the ranks is one process: the gradients of both halves are averaged."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh.get_group("shard")
    model = sharded(EXACT.replace(sync=group), mesh)
    x = own(images(), [2, 2, 3, 1])
    (model(x).square().sum() * 4).backward()
    full = {f"d{n}": p.grad.full_tensor() for n, p in model.named_parameters()}
    half = dist.get_rank() // 2
    alone = [network(ALONE), network(ALONE)]
    for one, z in zip(alone, images().split(4), strict=True):
        one(z).square().sum().backward()
    want = {n: sum(gradients(one)[n] for one in alone) for n in full}
    wrong = differences(full, want) or differences(buffers(model), buffers(alone[half]))
    return "; ".join(filter(None, gathered(wrong)))


def weight_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: g for n, g in gradients(model).items() if "weight" in n}


@check(2)
def FSDP2_in_mixed_precision(folder: Path) -> str | None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = sharded(EXACT, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    alone = network(ALONE)
    for counts in ([5, 3], [8, 0]):
        y = model(own(images(), counts))
        y.float().square().sum().backward()
        alone(images()).square().sum().backward()
    states = gathered(buffers(model))
    kinds = {b.dtype for n, b in buffers(model).items() if n.endswith(("mean", "cov"))}
    found = {f"d{n}": 2 * p.grad.full_tensor() for n, p in model.named_parameters()}  # FSDP divides by the ranks
    wrong = [unequal_bits(states), differences(states[0], buffers(alone), 0.05)]
    wrong += [differences({n: g for n, g in found.items() if "weight" in n}, weight_gradients(alone), 0.05)]
    wrong += [f"{y.dtype}"] if y.dtype != torch.bfloat16 else []
    wrong += [f"{kinds}"] if kinds != {torch.float64} else []
    return "; ".join(filter(None, wrong))


@check(4)
def a_sharded_checkpoint_is_written_by_four_ranks(folder: Path) -> str | None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = sharded(EXACT)
    trained(model, [2, 2, 2, 2])
    dcp.save(get_model_state_dict(model), checkpoint_id=folder.parent / "sharded")
    return ""


@check(2)
def and_read_by_two(folder: Path) -> str | None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model = sharded(EXACT)
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder.parent / "sharded")
    set_model_state_dict(model, state)
    full = {n: p.full_tensor() for n, p in model.named_parameters()}
    states = gathered(buffers(model))
    alone = network(ALONE)
    trained(alone, None)
    wrong = differences(full, dict(alone.named_parameters())) or unequal_bits(states)
    return wrong or differences(states[0], buffers(alone))


@check(2)
def recalibration_over_loaders_of_unequal_length(folder: Path) -> str | None:
    """Three batches here, one there: exact over all rows. DDP, which copies buffers of rank 0, is not in the way."""
    x = data(30)
    loaders = [[x[:7], x[7:9], x[9:20]], [x[20:]]]
    wrong = []
    for wrap in (False, True):
        layer, alone = linear(), linear(ALONE)
        model = nn.parallel.DistributedDataParallel(layer) if wrap else layer
        count = ndpp.recalibrate_(model, loaders[dist.get_rank()])
        ndpp.recalibrate_(alone, [*loaders[0], *loaders[1]])
        states = gathered(buffers(layer))
        wrong += [unequal_bits(states), differences(states[0], buffers(alone)), f"{count} batches" * (count != 4)]
    none = ndpp.recalibrate_(linear(), loaders[0] if dist.get_rank() else [])
    return "; ".join(filter(None, gathered("; ".join(filter(None, [*wrong, f"{none} batches" * (none != 3)])))))


@check(2)
def recalibration_under_FSDP2(folder: Path) -> str | None:
    """Loaders of equal length. The first layer sees what it would in one process; the others meet at the end alone."""
    model, alone = sharded(EXACT), network(ALONE)
    batches = [images(seed=seed) for seed in range(4)]
    count = ndpp.recalibrate_(model, batches[dist.get_rank() :: 2])
    ndpp.recalibrate_(alone, batches)
    states = gathered(buffers(model))
    wrong = [unequal_bits(states), differences(buffers(model[0]), buffers(alone[0])), f"{count} batches" * (count != 4)]
    return "; ".join(filter(None, wrong))


@check(2)
def second_derivatives(folder: Path) -> str | None:
    counts, x = [9, 3], data(12)

    def step(layer: nn.Module, whole: bool) -> dict[str, Tensor]:
        z = (x if whole else own(x, counts)).clone().requires_grad_()
        (dx,) = torch.autograd.grad(layer(z).pow(3).sum(), z, create_graph=True)
        (twice,) = torch.autograd.grad(dx.pow(3).sum(), z)
        return {"y": dx.detach(), "dx": twice}

    return against_one(linear(), linear(ALONE), step)


@check(2)
def a_failure_in_recalibration_reaches_all_ranks(folder: Path) -> str | None:
    layer = linear()
    layer(own(data(), [12, 12])).sum().backward()
    before, said = buffers(layer), ""
    try:
        ndpp.recalibrate_(layer, [data(5), data(5) if dist.get_rank() else data(5)[:, :3]])
    except RuntimeError as error:
        said = str(error)
    expected = "1 of 2 ranks failed" if dist.get_rank() else "shape (5, 3)"
    wrong = differences(buffers(layer), before) if expected in said else f"said {said!r}"
    return "; ".join(filter(None, gathered(wrong)))


@check(2)
def conversion_with_calibration_gives_all_ranks_the_same_weights(folder: Path) -> str | None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).double()
    model.train()(data())
    model.eval()
    want = model(data())
    ndpp.convert_(model, EXACT, calibration=[own(data(), [18, 6])])
    state = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return unequal_bits(gathered(state)) or differences({"y": model.eval()(data())}, {"y": want}, 1e-6)


@check(2)
def layers_in_evaluation_or_frozen_meet_nobody(folder: Path) -> str | None:
    if dist.get_rank() == 0:
        linear().eval()(data())
        linear(EXACT.replace(freeze=True))(data()).sum().backward()
    return ""


@check(2)
def a_layer_that_one_rank_skips_is_named(folder: Path) -> str | None:
    """In a group of little patience: an error that names the layer and the way out; then the way out."""
    from datetime import timedelta

    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    layer, said = linear(EXACT.replace(sync=group)), ""
    if dist.get_rank() == 0:
        try:
            layer(data())
        except RuntimeError as error:
            said = str(error)
    told = gathered(said)[0]
    layer.settings = layer.settings.replace(sync=False)
    if dist.get_rank() == 0:
        layer(data()).sum().backward()
    parts = ("ndpp.Linear(in_features=6", "did not meet", "replace(sync=False)")
    return "" if all(part in told for part in parts) else f"said: {told}"


def _compiled(folder: Path, backend: str, counts: Sequence[int], layers: int) -> str | None:
    """A whole graph, collectives and all, forward and backward."""

    def build(settings: Settings) -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))[: 2 * layers - 1].double()
        ndpp.convert_(model, settings)
        return model

    def step(model: nn.Module, whole: bool) -> dict[str, Tensor]:
        compiled = model if whole else torch.compile(model, backend=backend, fullgraph=True)
        for seed in range(3):
            model.zero_grad()
            x = data(12, seed)
            z = (x if whole else own(x, list(counts))).clone().requires_grad_()
            y = compiled(z)
            y.pow(3).sum().backward()
        return {"y": y.detach(), "dx": z.grad, **gradients(model)}

    return against_one(build(EXACT), build(ALONE), step)


CHECKS[2]["compiled, traced, an empty rank"] = functools.partial(
    _compiled, backend="aot_eager", counts=(12, 0), layers=2
)
CHECKS[2]["compiled, inductor"] = functools.partial(_compiled, backend="inductor", counts=(9, 3), layers=1)
