"""Attention: torch.nn's in every argument, decorrelated as the explicit formula says, and back to torch.nn's."""

import copy
import io
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ndpp
from ndpp import Settings
from ndpp.attention import INPUTS, MultiheadAttention, Projection, ScaledMultiheadAttention

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")

EXACT = Settings(solver="eigh", rows=None, eps=1e-2)
E, H = 8, 2
OTHER_SIZES = {"kdim": 6, "vdim": 4}


@dataclass(frozen=True)
class Case:
    """One way to build the module and to call it."""

    build: dict[str, Any] = field(default_factory=dict)
    kind: str = "cross"  # cross: three tensors; kv: key is value; self: all one; qk: query is key
    batched: bool = True
    padding: str | None = None  # bool or float
    mask: str | None = None  # bool or float, 2 or 3
    call: dict[str, Any] = field(default_factory=dict)


SELF = {"kind": "self"}
CAUSAL = {"kind": "self", "mask": "causal"}
CASES = {
    "cross": Case(),
    "kv": Case(kind="kv"),
    "self": Case(**SELF),
    "self batch_first": Case({"batch_first": True}, **SELF),
    "qk batch_first": Case({"batch_first": True}, "qk", padding="bool"),
    "no bias": Case({"bias": False}, padding="bool"),
    "other sizes": Case(OTHER_SIZES),
    "other sizes no bias": Case({**OTHER_SIZES, "bias": False, "batch_first": True}, padding="float", mask="float3"),
    "only vdim": Case({"vdim": 5}, "qk", padding="bool"),
    "one head": Case({"num_heads": 1}, mask="bool3", call={"need_weights": False}),
    "unbatched": Case(batched=False, call={"average_attn_weights": False}),
    "unbatched self masks": Case({"batch_first": True}, "self", False, "bool", "bool2"),
    "unbatched 3-D mask": Case(batched=False, mask="float3", call={"need_weights": False}),
    "unbatched everything": Case({"add_bias_kv": True, "add_zero_attn": True, **OTHER_SIZES}, "cross", False, "float"),
    "padding bool": Case({"batch_first": True}, padding="bool", call={"need_weights": False}),
    "padding float": Case(padding="float", call={"need_weights": False}),
    "self padding": Case(padding="bool", **SELF),
    "self padding float": Case({"batch_first": True}, padding="float", call={"need_weights": False}, **SELF),
    "mask bool 2-D": Case(mask="bool2"),
    "mask float 2-D": Case(mask="float2", call={"need_weights": False}),
    "mask bool 3-D": Case({"batch_first": True}, mask="bool3", call={"average_attn_weights": False}),
    "mask float 3-D": Case(mask="float3", padding="float", call={"need_weights": False}),
    "both masks": Case({"batch_first": True}, padding="bool", mask="bool2", **SELF),
    "unlike masks": Case(padding="bool", mask="float2", call={"need_weights": False}),
    "causal": Case({"batch_first": True}, call={"is_causal": True, "need_weights": False}, **CAUSAL),
    "causal weights": Case(call={"is_causal": True}, **CAUSAL),
    "causal padding": Case(padding="bool", call={"is_causal": True, "need_weights": False}, **CAUSAL),
    "causal hint on another mask": Case(
        {"add_zero_attn": True}, mask="2", call={"is_causal": True, "need_weights": False}
    ),
    "bias_kv": Case({"add_bias_kv": True}, padding="bool", mask="float2"),
    "bias_kv sdpa": Case({"add_bias_kv": True, "batch_first": True}, padding="bool", call={"need_weights": False}),
    "zero_attn": Case({"add_zero_attn": True}, padding="float", call={"average_attn_weights": False}),
    "both extra keys": Case(
        {"add_bias_kv": True, "add_zero_attn": True, "bias": False}, mask="bool3", call={"need_weights": False}
    ),
    "dropout": Case({"dropout": 0.3}, padding="bool", mask="float2"),
    "dropout sdpa": Case({"dropout": 0.3, "batch_first": True}, call={"need_weights": False}, **SELF),
}


def stock(case: Case) -> nn.MultiheadAttention:
    """torch.nn's module, with biases that are not zero."""
    torch.manual_seed(1)
    options = {"embed_dim": E, "num_heads": H, **case.build}
    module = nn.MultiheadAttention(**options, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn_like(parameter))
    return module


def convert(module: nn.MultiheadAttention, settings: Settings = EXACT) -> MultiheadAttention:
    """As ndpp.convert_ does, on a copy."""
    ours: Any = copy.deepcopy(module)
    ours.__class__ = MultiheadAttention
    ours._decorrelate(settings)
    return ours


def lengths_mask(lengths: list[int], size: int) -> Tensor:
    """True where there is padding."""
    return torch.arange(size) >= torch.tensor(lengths)[:, None]


def arguments(case: Case, seed: int = 0) -> tuple[list[Tensor], dict[str, Any]]:
    """Query, key and value, and keywords; in the layout that the module takes."""
    g = torch.Generator().manual_seed(seed)
    queries = 13 if not case.batched else 7
    keys = queries if case.kind in ("self", "qk") else queries + 2
    kdim, vdim = case.build.get("kdim", E), case.build.get("vdim", E)
    mix = torch.randn(16, 16, generator=g, dtype=torch.float64)

    def tokens(length: int, size: int) -> Tensor:
        x = torch.randn(3, length, size, generator=g, dtype=torch.float64) @ mix[:size, :size] + mix[0, :size]
        if not case.batched:
            return x[0]
        return x if case.build.get("batch_first") else x.transpose(0, 1).contiguous()

    query, key = tokens(queries, E), tokens(keys, kdim)
    value = tokens(keys, vdim)
    if case.kind in ("self", "qk"):
        key = query
    if case.kind in ("self", "kv"):
        value = key
    call = dict(case.call)
    if case.padding:
        padding = lengths_mask([keys, keys - 2, keys - 3], keys)
        padding = padding if case.batched else padding[2]
        soft = torch.randn(padding.shape, generator=g, dtype=torch.float64)
        call["key_padding_mask"] = padding if case.padding == "bool" else soft.masked_fill(padding, -torch.inf)
    if case.mask == "causal":
        call["attn_mask"] = nn.Transformer.generate_square_subsequent_mask(queries, dtype=torch.float64)
    elif case.mask:
        heads = case.build.get("num_heads", H)
        shape = (queries, keys) if "2" in case.mask else ((3 if case.batched else 1) * heads, queries, keys)
        soft = torch.randn(shape, generator=g, dtype=torch.float64)
        hidden = soft > 0.5
        hidden[..., 0] = False  # every query sees a key that is no padding
        call["attn_mask"] = hidden if "bool" in case.mask else soft.masked_fill(hidden, -torch.inf)
    return [query, key, value], call


def assert_alike(got: tuple[Tensor, Any], want: tuple[Tensor, Any], tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    assert (got[1] is None) == (want[1] is None)
    if want[1] is not None:
        torch.testing.assert_close(got[1], want[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_without_data_it_is_the_stock_module(name: str) -> None:
    """Mean 0 and covariance I: output and weights of torch.nn, for every way to call it."""
    case = CASES[name]
    module = stock(case)
    inputs, call = arguments(case)
    want = module.eval()(*inputs, **call)
    ours = convert(module)
    assert not any(part.training for part in ours.modules())
    assert_alike(ours(*inputs, **call), want)
    assert_alike(ours(*[x.clone() for x in inputs], **call), want)


# --- the formula ---


def scaled(x: Tensor, mode: str, eps: float = 0.0) -> Tensor:
    if mode == "none":
        return x
    if mode == "l1":
        return x / x.abs().mean(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + eps).sqrt()


def whitened(x: Tensor, keep: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """D·W and b - μ·D·W by an eigendecomposition of the covariance of the rows to keep; x is (batch, length, size)."""
    rows = x.reshape(-1, x.shape[-1]) if keep is None else x[keep]
    mean = rows.mean(0)
    cov = (rows - mean).T @ (rows - mean) / len(rows)
    values, vectors = torch.linalg.eigh(cov + eps * torch.eye(len(cov), dtype=cov.dtype))
    product = weight @ (vectors @ torch.diag(values**-0.5) @ vectors.T)
    return product, (0.0 if bias is None else bias) - product @ mean


def oracle(
    module: nn.MultiheadAttention, inputs: list[Tensor], call: dict[str, Any], scale: str, eps: float
) -> tuple[Tensor, Any]:
    """torch's own functional attention with folded weights, for which each data matrix is made explicitly."""
    call = {"need_weights": True, "average_attn_weights": True, **call}
    batched = inputs[0].dim() == 3
    same = inputs[0] is inputs[1]
    turn = batched and module.batch_first
    flat = [scaled(x, scale) for x in inputs]
    rows = [x if turn else x.transpose(0, 1) if batched else x[None] for x in flat]  # (batch, length, size)
    padding = call.get("key_padding_mask")
    keep = None
    if padding is not None:
        keep = ~padding if padding.dtype == torch.bool else padding != -torch.inf
        keep = keep if batched else keep[None]
    of_query = keep if same else None
    packed = module.in_proj_weight
    weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight) if packed is None else packed.chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    folded = [
        whitened(x, k, w, b, eps) for x, k, w, b in zip(rows, (of_query, keep, keep), weights, biases, strict=True)
    ]
    context, shares = F.multi_head_attention_forward(
        *[x.transpose(0, 1) if turn else x for x in flat],
        module.embed_dim,
        module.num_heads,
        None,
        torch.cat([b for _, b in folded]),
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        module.dropout,
        torch.eye(E, dtype=torch.float64),
        None,
        training=module.training,
        use_separate_proj_weight=True,
        q_proj_weight=folded[0][0],
        k_proj_weight=folded[1][0],
        v_proj_weight=folded[2][0],
        **call,
    )
    context = context.transpose(0, 1) if batched else context[None]
    context = scaled(context, scale)
    y = F.linear(context, *whitened(context, of_query, module.out_proj.weight, module.out_proj.bias, eps))
    return (y if turn else y.transpose(0, 1) if batched else y[0]), shares


def loss(result: tuple[Tensor, Any]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for part in (part for part in result if part is not None):
        total = total + (part * torch.sin(torch.arange(part.numel(), dtype=part.dtype)).reshape(part.shape)).sum()
    return total


def leaves(inputs: list[Tensor]) -> list[Tensor]:
    """Copies that require gradients; the same tensor where it was the same."""
    copies = {id(x): x.clone().requires_grad_() for x in inputs}
    return [copies[id(x)] for x in inputs]


@pytest.mark.parametrize("scale", ["none", "l1", "standardize"])
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_explicit_formula(name: str, scale: Any) -> None:
    """Output, weights, every gradient and all statistics; padding is in none of them."""
    case = CASES[name]
    plain = stock(case)
    ours = convert(plain, EXACT.replace(scale=scale))
    inputs, call = arguments(case)
    results, gradients = [], []
    for module in (ours, plain):
        arrays = leaves(inputs)
        torch.manual_seed(5)  # of dropout
        result = module(*arrays, **call) if module is ours else oracle(plain, arrays, call, scale, EXACT.eps)
        loss(result).backward()
        results.append(result)
        named = {n: p.grad for n, p in module.named_parameters()}
        gradients.append({**named, **{f"input {i}": x.grad for i, x in enumerate(arrays)}})
    assert_alike(*results, tolerance=1e-9)
    assert gradients[0].keys() == gradients[1].keys()
    for key, want in gradients[1].items():
        error = (gradients[0][key] - want).norm() / want.norm()
        assert error < 1e-8, (key, error)


@pytest.mark.parametrize("kind", ["self", "cross", "qk", "kv"])
@pytest.mark.parametrize("padding", ["bool", "float"])
def test_padding_is_in_no_statistics(kind: str, padding: str) -> None:
    """Mean and covariance are those of real keys; of real queries too, where a query is a key."""
    case = Case({"batch_first": True}, kind, padding=padding)
    ours = convert(stock(case))
    inputs, call = arguments(case)
    given = call["key_padding_mask"]
    keep = ~given if padding == "bool" else given != -torch.inf
    assert not keep.all()
    for x in {id(x): x for x in inputs[1:]}.values():
        x[~keep] = 1e4
    seen: list[Tensor] = []
    ours.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    ours(*inputs, **call)
    queries = inputs[0][keep] if inputs[0] is inputs[1] else inputs[0].flatten(0, 1)
    context = seen[0][keep] if inputs[0] is inputs[1] else seen[0].flatten(0, 1)
    expected = {"q_proj": queries, "k_proj": inputs[1][keep], "v_proj": inputs[2][keep], "out_proj": context}
    for name, rows in expected.items():
        part = getattr(ours, name)
        torch.testing.assert_close(part.running_mean[0], rows.mean(0))
        torch.testing.assert_close(part.running_cov[0], rows.T.cov(correction=0))


def test_a_mask_that_is_active_stays() -> None:
    case = Case({"batch_first": True}, "self", padding="bool")
    one, other = convert(stock(case)), convert(stock(case))
    (x, _, _), call = arguments(case)
    valid = ~lengths_mask([2, 6, 7], 7)
    with ndpp.mask(valid):
        one(x, x, x, **call)
    for part in ("q_proj", "k_proj", "v_proj"):
        torch.testing.assert_close(getattr(one, part).running_mean[0], x[valid].mean(0))
    with ndpp.mask(None):
        other(x, x, x, **call)
    torch.testing.assert_close(other.k_proj.running_mean[0], x[~call["key_padding_mask"]].mean(0))


def test_padding_may_hold_anything() -> None:
    """Output of real queries, and every parameter's gradient, whatever the padding holds; a sample may be all of it."""
    case = Case({"batch_first": True}, "self", padding="bool")
    (x, _, _), call = arguments(case)
    call["key_padding_mask"][1] = True
    keep = ~call["key_padding_mask"]
    found = []
    for fill in (0.0, 1e3):
        ours = convert(stock(case))
        ours.train()
        filled = torch.where(keep[..., None], x, fill)
        y, _ = ours(filled, filled, filled, need_weights=False, **call)
        y[keep].square().sum().backward()
        found.append([y[keep], *[p.grad for p in ours.parameters()], ours.out_proj.running_cov])
        assert ours.out_proj.num_batches_tracked == 1
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_gradcheck() -> None:
    case = Case(OTHER_SIZES, padding="bool", mask="float2")
    ours = convert(stock(case), EXACT.replace(eps=0.1))
    inputs, call = arguments(case)
    assert torch.autograd.gradcheck(lambda *tensors: ours(*tensors, **call), leaves(inputs), fast_mode=True)


# --- back to torch.nn ---


def train(module: nn.MultiheadAttention, case: Case, steps: int = 2) -> None:
    """So that statistics are there; dropout off, so that evaluation is what training saw."""
    module.train()
    for step in range(steps):
        inputs, call = arguments(case, seed=step + 1)
        loss(module(*inputs, **call)).backward()
    module.zero_grad()
    module.eval()


class ScaledLinear(nn.Linear):
    """What stands for an out_proj with a scale that was folded."""

    scale: str
    scale_eps: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(scaled(x, self.scale, self.scale_eps))


@torch.no_grad()
def fold(ours: MultiheadAttention) -> nn.MultiheadAttention:
    """As ndpp.fold_ does."""
    out, scale = ours.out_proj, ours.out_proj.settings.scale
    assert scale in ("none", "l1", "standardize")
    ours._restore_stock_()
    kind = nn.Linear if scale == "none" else ScaledLinear
    folded = kind(E, E, dtype=torch.float64)
    for parameter, value in zip(
        folded.parameters(), out._folded(*out._evaluation_root(), out.weight, out.bias), strict=True
    ):
        parameter.copy_(value)
    folded.scale, folded.scale_eps = scale, out.settings.scale_eps
    ours.out_proj = folded
    return ours


@pytest.mark.parametrize("scale", ["none", "standardize"])
@pytest.mark.parametrize("name", CASES)
def test_folding_keeps_the_evaluation(name: str, scale: Any) -> None:
    case = CASES[name]
    ours = convert(stock(case), EXACT.replace(scale=scale, scale_eps=0.1))
    before = {n: (p, p.detach().clone()) for n, p in ours.named_parameters()}
    train(ours, case)
    inputs, call = arguments(case)
    want = ours(*inputs, **call)
    folded = fold(ours)
    assert type(folded) is (nn.MultiheadAttention if scale == "none" else ScaledMultiheadAttention)
    assert {n for n, _ in folded.named_children()} == {"out_proj"}
    assert_alike(folded(*inputs, **call), want, 1e-10)
    for n, (parameter, value) in before.items():
        assert torch.equal(parameter, value), f"{n} was written to, and may be tied"
    assert all(folded.get_parameter(n) is not before[n][0] for n in before if n.startswith(("in_proj", "q_proj")))
    clone = pickle.loads(pickle.dumps(folded))
    assert_alike(clone(*inputs, **call), want, 1e-10)


def test_folded_modules_take_the_fast_path_again() -> None:
    case = Case({"batch_first": True}, "self")
    ours = convert(stock(case))
    train(ours, case)
    (x, _, _), _ = arguments(case)
    want = ours(x, x, x)
    folded = fold(ours)
    with torch.no_grad():
        assert_alike(folded(x, x, x), want, 1e-10)
    assert not folded._forward_pre_hooks
    assert folded.out_proj.bias is not None
    assert type(folded).forward is nn.MultiheadAttention.forward


@pytest.mark.parametrize("scale", ["none", "l1"])
def test_fold_(scale: Any) -> None:
    """By ndpp.fold_: each part is of torch.nn's own class again, where S allows that."""
    case = Case({"bias": False}, padding="bool")
    ours = convert(stock(case), EXACT.replace(scale=scale))
    train(ours, case)
    inputs, call = arguments(case)
    want = ours(*inputs, **call)
    folded = ndpp.fold_(ours)
    assert_alike(folded(*inputs, **call), want, 1e-10)
    if scale == "none":
        assert [type(part) for part in folded.modules()] == [type(part) for part in stock(case).modules()]
    empty = inputs[0][:, :0]
    assert folded(empty, inputs[1][:, :0], inputs[2][:, :0])[0].shape == empty.shape


def test_folding_keeps_what_is_frozen() -> None:
    ours = convert(stock(Case({"bias": False})))
    ours.in_proj_weight.requires_grad_(False)
    ours._restore_stock_()
    assert not ours.in_proj_weight.requires_grad
    assert not ours.in_proj_bias.requires_grad
    assert ours.out_proj.weight.requires_grad


@pytest.mark.parametrize("part", ["q_proj", "v_proj", "out_proj"])
def test_a_scale_of_one_part_is_kept(part: str) -> None:
    """The stock module reads the weight of out_proj and never calls it: it cannot stand for one with a scale."""
    case = Case()
    ours = convert(stock(case))
    getattr(ours, part).settings = EXACT.replace(scale="standardize")
    train(ours, case)
    inputs, call = arguments(case)
    want = ours(*inputs, **call)
    assert_alike(fold(ours)(*inputs, **call), want, 1e-10)


# --- any arguments ---


def outcome(module: nn.Module, inputs: list[Tensor], call: dict[str, Any]) -> Any:
    """The result, or the error as a text."""
    try:
        return module(*inputs, **call)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        {name: st.booleans() for name in ("bias", "add_bias_kv", "add_zero_attn", "batch_first")},
        optional={"kdim": st.integers(1, 5), "vdim": st.integers(1, 5), "num_heads": st.sampled_from([1, 4, 8])},
    ),
    st.sampled_from(["cross", "kv", "self", "qk"]),
    st.booleans(),
    st.sampled_from([None, "bool", "float"]),
    st.sampled_from([None, "bool2", "bool3", "float2", "float3"]),
    st.fixed_dictionaries({"need_weights": st.booleans(), "average_attn_weights": st.booleans()}),
    st.booleans(),
    st.booleans(),
)
def test_any_arguments(
    build: dict[str, Any],
    kind: str,
    batched: bool,
    padding: str | None,
    mask: str | None,
    call: dict[str, Any],
    is_causal: bool,
    training: bool,
) -> None:
    """Evaluation is torch.nn's; training has its shapes, counts one batch, and what torch refuses is refused alike."""
    case = Case(build, kind, batched, padding, mask, {**call, "is_causal": is_causal})
    module = stock(case).train(training)
    inputs, keywords = arguments(case)
    ours = convert(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want, got = outcome(module, inputs, keywords), outcome(ours, inputs, keywords)
    if isinstance(want, str):
        assert got == want
        assert ours.q_proj.num_batches_tracked == 0
        return
    if not training:
        assert_alike(got, want)
    assert got[0].shape == want[0].shape
    assert [p.num_batches_tracked.item() for p in ours.modules() if isinstance(p, ndpp.Linear)] == [int(training)]


def _bad_calls() -> dict[str, tuple[dict[str, Any], list[Any], dict[str, Any]]]:
    def x(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    good = [x(3, 2, E), x(5, 2, E), x(5, 2, E)]
    return {
        "query size": ({}, [x(3, 2, 5), *good[1:]], {}),
        "key size": ({}, [good[0], x(5, 2, 3), x(5, 2, 3)], {}),
        "key and value": ({}, [good[0], good[1], x(4, 2, E)], {}),
        "key size, separate": (OTHER_SIZES, [good[0], x(5, 2, 5), x(5, 2, 4)], {}),
        "value length, separate": (OTHER_SIZES, [good[0], x(5, 2, 6), x(4, 2, 4)], {}),
        "batch": ({}, [good[0], x(5, 3, E), x(5, 3, E)], {}),
        "dimensions": ({}, [x(3, E), *good[1:]], {}),
        "one dimension": ({}, [x(E), x(E), x(E)], {}),
        "four dimensions": ({}, [x(1, 3, 2, E), *good[1:]], {}),
        "mask dimensions": ({}, good, {"attn_mask": x(5)}),
        "mask 2-D": ({}, good, {"attn_mask": x(5, 3)}),
        "mask 3-D": ({}, good, {"attn_mask": x(2, 3, 5)}),
        "mask of integers": ({}, good, {"attn_mask": torch.zeros(3, 5, dtype=torch.int64)}),
        "mask 3-D unbatched": ({}, [g[:, 0] for g in good], {"attn_mask": x(3, 3, 5), "is_causal": True}),
        "padding dimensions": ({}, good, {"key_padding_mask": x(5)}),
        "padding shape": ({}, good, {"key_padding_mask": x(5, 2)}),
        "padding batch": ({}, good, {"key_padding_mask": x(1, 5)}),
        "padding shape, unbatched": ({}, [g[:, 0] for g in good], {"key_padding_mask": x(4)}),
        "causal without a mask": ({}, good, {"is_causal": True, "need_weights": False}),
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", _bad_calls())
def test_errors_are_torchs_and_leave_no_trace(name: str, batch_first: bool, training: bool) -> None:
    build, inputs, call = _bad_calls()[name]
    module = stock(Case({**build, "batch_first": batch_first})).train(training)
    if batch_first:
        inputs = [x.transpose(0, 1) if x.dim() == 3 else x for x in inputs]
    with pytest.raises((AssertionError, RuntimeError)) as want:
        module(*inputs, **call)
    ours = convert(module)
    with pytest.raises(type(want.value)) as got:
        ours(*inputs, **call)
    assert str(got.value) == str(want.value)
    assert all(part.num_batches_tracked == 0 for part in ours.children())


def test_errors_come_before_any_fast_path() -> None:
    """torch's fast path would take this padding of the wrong length, or fail on it in another way."""
    case = Case({"batch_first": True}, "self")
    ours = convert(stock(case).eval())
    (x, _, _), _ = arguments(case)
    with torch.no_grad(), pytest.raises(AssertionError, match=r"Expected key_padded_mask.shape\[1\] to be 7"):
        ours(x, x, x, key_padding_mask=torch.zeros(3, 6, dtype=torch.bool))


def test_errors_name_the_projection() -> None:
    ours = convert(stock(Case()))
    x = torch.randn(3, 2, E)
    with pytest.raises(RuntimeError, match=r"ndpp.MultiheadAttention\(8, 2\).q_proj: .*float32"):
        ours(x, x, x)
    with ndpp.mask(torch.ones(4, 4, dtype=torch.bool)), pytest.raises(ValueError, match=r"q_proj: expected a mask"):
        ours(x.double(), x.double(), x.double())


def test_empty_batches_and_lengths() -> None:
    module = stock(Case({"batch_first": True, "add_zero_attn": True, "add_bias_kv": True}))
    ours = convert(module)
    for shape in ((0, 3, E), (2, 0, E)):
        x = torch.zeros(shape, dtype=torch.float64)
        for need_weights in (True, False):
            want, _ = module(x, x, x, need_weights=need_weights)
            got, _ = ours(x, x, x, need_weights=need_weights)
            assert got.shape == want.shape
    assert ours.q_proj.num_batches_tracked == 0


# --- as a part of models ---


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(3)
    return nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, dtype=torch.float64, **options)


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("scale", ["none", "standardize"])
@pytest.mark.parametrize("bias", [True, False])
def test_fast_path_of_encoder_layers(bias: bool, scale: Any, restored: bool) -> None:
    """It reads weights and skips modules: it may run only once the module is torch.nn's own again."""
    layer = encoder_layer(bias=bias)
    layer.self_attn = convert(layer.self_attn, EXACT.replace(scale=scale))
    x, padding = torch.randn(3, 7, E, dtype=torch.float64), lengths_mask([7, 5, 4], 7)
    layer(x, src_key_padding_mask=padding).sum().backward()
    assert layer.self_attn.q_proj.num_batches_tracked == 1
    layer.eval()
    want = layer(x, src_key_padding_mask=padding)[~padding]
    if restored:
        layer.self_attn = fold(layer.self_attn)
    with torch.no_grad():
        got = layer(x, src_key_padding_mask=padding)[~padding]
    torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_a_remedy() -> None:
    encoder = nn.TransformerEncoder(encoder_layer(), 1).eval()
    encoder.layers[0].self_attn = convert(encoder.layers[0].self_attn)
    x, padding = torch.randn(3, 7, E, dtype=torch.float64), lengths_mask([7, 5, 4], 7)
    want = encoder(x, src_key_padding_mask=padding)
    with torch.no_grad():
        with pytest.raises(AssertionError, match="use_nested_tensor = False"):
            encoder(x, src_key_padding_mask=padding)
        encoder.use_nested_tensor = False
        torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), want)


def test_transformer_trains_and_shares_memory_padding() -> None:
    """Encoder, decoder and cross-attention of nn.Transformer, with all of its masks."""
    torch.manual_seed(0)
    model = nn.Transformer(E, H, 1, 1, 16, dropout=0.0, batch_first=True)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            model.set_submodule(name, convert(module))
    source, target = torch.randn(3, 7, E), torch.randn(3, 5, E)
    padding, causal = lengths_mask([7, 5, 4], 7), model.generate_square_subsequent_mask(5)
    y = model(
        source,
        target,
        tgt_mask=causal,
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
        tgt_key_padding_mask=lengths_mask([5, 5, 2], 5).float().masked_fill(lengths_mask([5, 5, 2], 5), -torch.inf),
        tgt_is_causal=True,
    )
    y.sum().backward()
    torch.testing.assert_close(model.encoder.layers[0].self_attn.k_proj.running_mean[0], source[~padding].mean(0))
    parts = [part for part in model.modules() if isinstance(part, Projection)]
    assert len(parts) == 9
    assert all(part.num_batches_tracked == 1 for part in parts)


def test_attributes_and_names_stay() -> None:
    module = stock(Case({"add_bias_kv": True}))
    ours = convert(module)
    names = {n for n, _ in module.named_parameters()}
    assert {n for n, _ in ours.named_parameters()} == names
    assert isinstance(ours, nn.MultiheadAttention)
    assert isinstance(ours.out_proj, ndpp.Linear)
    assert (ours.embed_dim, ours.num_heads, ours.head_dim, ours._qkv_same_embed_dim) == (E, H, E // H, True)
    assert "settings=Settings(" in repr(ours)
    ours.k_proj.running_mean.fill_(1.0)
    ours.k_proj.reset_parameters()
    assert ours.k_proj.running_mean.abs().max() == 0
    tied: Any = copy.deepcopy(module)
    weight = tied.in_proj_weight
    tied.__class__ = MultiheadAttention
    tied._decorrelate(EXACT)
    assert tied.in_proj_weight is weight


def test_construction_is_torchs() -> None:
    """The same random numbers, arguments by position, and an out_proj that already decorrelates is left alone."""
    torch.manual_seed(0)
    want = nn.MultiheadAttention(E, H, 0.1, True, True, False, 6, 4, True, "cpu", torch.float64)
    torch.manual_seed(0)
    got = MultiheadAttention(E, H, 0.1, True, True, False, 6, 4, True, "cpu", torch.float64, settings=EXACT)
    for (name, a), (_, b) in zip(want.named_parameters(), got.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert (got.dropout, got.batch_first, got.kdim, got.vdim) == (0.1, True, 6, 4)
    assert all(part.settings is EXACT for part in got.children())
    assert MultiheadAttention(4, 2).q_proj.settings == Settings()
    with pytest.raises(TypeError, match=r"settings must be an ndpp.Settings"):
        MultiheadAttention(4, 2, settings="exact")  # type: ignore[arg-type]
    module = nn.MultiheadAttention(4, 2)
    module.out_proj = ndpp.Linear(4, 4)
    held = module.out_proj.running_cov
    module.__class__ = MultiheadAttention
    module._decorrelate(EXACT)
    assert module.out_proj.running_cov is held


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "state_dict"])
def test_copies_go_on_alike(way: str) -> None:
    case = Case({"batch_first": True, **OTHER_SIZES}, padding="bool")
    ours = convert(stock(case))
    inputs, call = arguments(case)
    pending = ours(*inputs, **call)
    if way == "deepcopy":
        other = copy.deepcopy(ours)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(ours))
    elif way == "torch.save":
        stream = io.BytesIO()
        torch.save(ours, stream)
        stream.seek(0)
        other = torch.load(stream, weights_only=False)
    else:
        other = MultiheadAttention(E, H, batch_first=True, **OTHER_SIZES, dtype=torch.float64, settings=EXACT)
        other.load_state_dict(ours.state_dict())
    loss(pending).backward()
    for module in (ours, other):
        train(module, case)
    assert ours.state_dict().keys() == other.state_dict().keys()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)
    assert_alike(other(*inputs, **call), ours(*inputs, **call))


@pytest.mark.parametrize("build", [{}, OTHER_SIZES], ids=["packed", "separate"])
def test_state_of_a_plain_module(build: dict[str, Any]) -> None:
    """Loaded into ours it evaluates as the plain module did; a state without versions must say what it lacks."""
    case = Case(build)
    plain, ours = stock(case), convert(stock(case))
    train(ours, case)
    ours.load_state_dict(plain.state_dict())
    inputs, call = arguments(case)
    assert_alike(ours.eval()(*inputs, **call), plain.eval()(*inputs, **call))
    train(ours, case)
    state = {**plain.state_dict(), **{n: v for n, v in ours.state_dict().items() if n.startswith("out_proj.running")}}
    with pytest.raises(RuntimeError, match=r"Missing key.*q_proj.running_mean"):
        ours.load_state_dict(state)
    train(ours, case)
    ours.load_state_dict(state, strict=False)  # a dict without versions, as files of tensors have it
    assert all(getattr(ours, name).num_batches_tracked == 0 for name in INPUTS)


def test_autocast() -> None:
    case = Case({"batch_first": True, "add_bias_kv": True}, padding="bool", mask="bool2")
    inputs, call = arguments(case)
    module = stock(case).float()
    ours = convert(module)
    inputs = [x.float() for x in inputs]
    for need_weights in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, _ = ours.train()(*inputs, need_weights=need_weights, **call)
            assert y.dtype == torch.bfloat16
        y.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())
    assert all(part.running_cov.dtype == torch.float32 for part in ours.children())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = module.eval()(*inputs, **call)
        got = convert(module)(*inputs, **call)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    case = Case({"batch_first": True}, "self", padding="bool")
    (x, _, _), call = arguments(case)
    found = []
    for again in (True, False):
        ours = convert(stock(case))

        def run(x: Tensor, ours: nn.Module = ours) -> Tensor:
            y: Tensor = ours(x, x, x, **call)[0]
            return y

        leaf = x.clone().requires_grad_()
        y = checkpoint(run, leaf, use_reentrant=reentrant) if again else run(leaf)
        y.square().sum().backward()
        assert ours.k_proj.num_batches_tracked == 1
        found.append([leaf.grad, ours.in_proj_weight.grad, ours.k_proj.running_cov])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


# --- compilers ---


@pytest.fixture
def strict_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


COMPILED = {
    "aot_eager": Case({"batch_first": True}, "self", padding="bool", call={"need_weights": False}),
    "eager": Case({"add_bias_kv": True, **OTHER_SIZES}, padding="float", mask="float2"),
}


@pytest.mark.usefixtures("strict_compiler")
@pytest.mark.parametrize("backend", COMPILED)
def test_compiled(backend: str) -> None:
    """Training with padding in one graph, with the statistics and gradients of eager; then evaluation in another."""
    case = COMPILED[backend]
    options = EXACT.replace(solver="newton", steps=1, scale="std" if backend == "eager" else "none")
    eager, ours = convert(stock(case), options), convert(stock(case), options)
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    for step in range(2):
        inputs, call = arguments(case, step)
        call["key_padding_mask"] = call["key_padding_mask"].roll(step, 0)
        for module in (eager, compiled):
            loss(module(*inputs, **call)).backward()
    for (key, got), (_, want) in zip(ours.state_dict().items(), eager.state_dict().items(), strict=True):
        torch.testing.assert_close(got, want, msg=key)
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert ndpp.masking.active() is None
    if backend == "eager":
        torch._dynamo.reset()
        ours.eval()
        assert_alike(compiled(*inputs, **call), ours(*inputs, **call), 1e-9)


@pytest.mark.parametrize("folded", [False, True])
def test_export(folded: bool) -> None:
    case = Case({"batch_first": True}, "self", padding="bool")
    ours = convert(stock(case), EXACT.replace(scale="standardize"))
    train(ours, case)
    module = fold(ours) if folded else ours
    inputs, call = arguments(case)
    program = torch.export.export(module, tuple(inputs), call)
    inputs, call = arguments(case, seed=4)
    assert_alike(program.module()(*inputs, **call), module(*inputs, **call), 1e-9)


def test_parts_in_another_mode_or_watched_are_called_by_themselves() -> None:
    m = ndpp.attention.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(4, 5, 8)
    m(x, x, x)
    assert [int(p.num_batches_tracked) for p in (m.q_proj, m.k_proj, m.v_proj)] == [1, 1, 1]
    torch.testing.assert_close(m.k_proj.running_cov, m.q_proj.running_cov)
    m.k_proj.eval()
    before = m.k_proj.running_cov.clone()
    m(x, x, x)
    assert [int(p.num_batches_tracked) for p in (m.q_proj, m.k_proj, m.v_proj)] == [2, 1, 2]
    assert torch.equal(m.k_proj.running_cov, before)
    m.k_proj.train()
    shapes = []
    m.v_proj.register_forward_hook(lambda module, args, y: shapes.append(tuple(y.shape)))
    m(x, x, x)
    assert shapes == [(4, 5, 8)]
