"""Invariant 5: the layer equals the explicit data-matrix formula, in value and in every gradient."""

import pytest
import torch
from torch import Tensor

from cases import CASES, Case
from ndpp import Settings
from oracles import as_rows, layer_output

VARIANTS = {
    "newton-shared": Settings(rows=None, shared=True, solver="newton", steps=3, eps=1e-3),
    "quartic-own": Settings(rows=None, shared=False, solver="quartic", steps=3, eps=1e-4),
    "newton-own": Settings(rows=None, shared=False, solver="newton", steps=5, eps=1e-5, shrinkage=0.05),
    "eigh-own": Settings(rows=None, shared=False, solver="eigh", eps=1e-2),
    "l1": Settings(rows=None, shared=True, scale="l1", eps=1e-3),
    "rms": Settings(rows=None, scale="rms", solver="newton", eps=1e-3, steps=2),
    "std": Settings(rows=None, shared=False, scale="std", solver="newton", eps=1e-3, steps=2),
    "standardize": Settings(rows=None, shared=True, scale="standardize", eps=1e-3),
}


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / (b.norm() + 1e-30))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_is_the_data_matrix_formula(case: Case, variant: str) -> None:
    settings = VARIANTS[variant]
    layer = case.build(settings, dtype=torch.float64)
    block = layer.settings.block or (256 if case.layer == "Linear" else 64)
    options = {name: getattr(settings, name) for name in ("shared", "solver", "steps", "eps", "shrinkage", "scale")}

    def run(expected: bool) -> dict[str, Tensor]:
        x = case.input().requires_grad_()
        weight = layer.weight.detach().clone().requires_grad_()
        bias = None if layer.bias is None else layer.bias.detach().clone().requires_grad_()
        if expected:
            y = layer_output(layer, x, weight, bias, block=block, **options)
        else:
            parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
            y = as_rows(layer, torch.func.functional_call(layer, parameters, (x,)))
        cotangent = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape)
        (y * cotangent).sum().backward()
        leaves = {"input": x, "weight": weight, "bias": bias}
        return {"output": y.detach(), **{f"d{n}": v.grad for n, v in leaves.items() if v is not None}}

    got, want = run(expected=False), run(expected=True)
    assert got.keys() == want.keys()
    errors = {name: difference(got[name], want[name]) for name in want}
    assert max(errors.values()) < 1e-8, errors
