"""The pure functions: values against float64 references, gradients by gradcheck."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from ndpp import roots
from ndpp import whitening as w
from ndpp.whitening import Moments
from oracles import covariance, inverse_sqrt


def spd(g: int = 2, f: int = 4, condition: float = 20.0) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(g, f, f, dtype=torch.float64))
    return q @ torch.diag_embed(torch.logspace(0, -torch.tensor(condition).log10().item(), f).double()) @ q.mT


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# --- S ---


@pytest.mark.parametrize("mode", ["l1", "rms", "std", "standardize"])
def test_sample_scale_gradient(mode: str) -> None:
    x = rand(3, 2, 5)
    valid = torch.rand(3, 1, 5) < 0.7
    for v in (None, valid):
        for eps in (0.0, 0.1):
            assert gradcheck(lambda x, v=v, eps=eps: w.sample_scale(x, mode, (1, 2), v, eps), (x,))


@pytest.mark.parametrize("size", [1e-18, 1e-3, 1.0, 1e18])
def test_sample_scale_with_eps_is_that_of_the_norms(size: float) -> None:
    x = size * torch.randn(5, 8)
    for mode, norm in (("standardize", nn.LayerNorm(8, eps=1e-4)), ("rms", nn.RMSNorm(8, eps=1e-4))):
        center, gain = w.sample_scale(x, mode, (1,), eps=1e-4)
        torch.testing.assert_close((x - center) * gain, norm.double()(x.double()).float().detach())


@pytest.mark.parametrize("mode", ["l1", "rms", "std", "standardize"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1e18, 1e-18])
def test_sample_scale_of_a_constant_sample_is_finite(mode: str, value: float) -> None:
    x = torch.full((2, 3, 4), value, requires_grad=True)
    center, gain = w.sample_scale(x, mode, (1, 2))
    y = (x - center) * gain
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()
    assert y.abs().max() < 1e7


# --- moments ---


def test_moments_are_the_mean_and_covariance() -> None:
    rows = rand(3, 20, 5)
    assert gradcheck(w.moments, (rows,))
    mean, cov = w.moments(rows)
    for g in range(3):
        expected = covariance(rows[g])
        torch.testing.assert_close((mean[g], cov[g]), expected)


def test_moments_leave_out_rows_of_no_weight() -> None:
    rows, weight = rand(2, 12, 3), (torch.arange(12) % 3 > 0).double()
    assert gradcheck(w.moments, (rows, weight))
    mean, cov = w.moments(rows, weight)
    expected = w.moments(rows[:, weight > 0])
    torch.testing.assert_close((mean, cov), expected)


@pytest.mark.parametrize("ratio", [1e2, 1e3, 1e4])
def test_moments_survive_a_mean_far_from_zero(ratio: float) -> None:
    rows = torch.randn(1, 5000, 4, dtype=torch.float64) + ratio
    _, cov = w.moments(rows.float())
    _, expected = covariance(rows[0].float().double())
    assert (cov[0] - expected).norm() / expected.norm() < 1e-5


def test_constant_columns_have_exactly_no_variance() -> None:
    _, cov = w.moments(torch.full((1, 777, 3), 0.1) * torch.tensor([1.0, 1e18, 1e-18]))
    assert (cov == 0).all()


def as_moments(rows: Tensor, unit: float = 1.0) -> Moments:
    mean, cov = w.moments(rows / unit) if rows.shape[1] else (rows.new_zeros(1, 3), rows.new_zeros(1, 3, 3))
    return Moments(rows.new_tensor(float(rows.shape[1])), mean, cov, rows.new_tensor(unit))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 99))
def test_merging_any_split_is_the_whole(sizes: list[int], seed: int) -> None:
    """Uneven, empty and single-row pieces, each in a unit of its own."""
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(1, n, 3, dtype=torch.float64, generator=generator) + i for i, n in enumerate(sizes)]
    merged = functools.reduce(w.merge, [as_moments(p, 2.0 ** (i - 2)) for i, p in enumerate(pieces)])
    whole = as_moments(torch.cat(pieces, 1))
    assert merged.rows == whole.rows
    if whole.rows > 0:
        torch.testing.assert_close(merged.mean * merged.unit, whole.mean)
        torch.testing.assert_close(merged.cov * merged.unit**2, whole.cov)


def test_merge_gradient() -> None:
    def merged(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        m = w.merge(as_moments(a), as_moments(b, 4.0))
        return m.mean, m.cov

    assert gradcheck(merged, (rand(1, 4, 3), rand(1, 7, 3)))


def test_phases_assemble_to_the_matrix_with_its_zeros() -> None:
    taps, sizes, channels = [(0, 2), (1,), (3, 4)], [5, 7, 4], 2
    phases = [rand(1, n, channels * len(t)) for n, t in zip(sizes, taps, strict=True)]
    full = []
    for rows, t in zip(phases, taps, strict=True):
        wide = torch.zeros(rows.shape[1], channels, 5, dtype=torch.float64)
        wide[:, :, list(t)] = rows[0].detach().reshape(-1, channels, len(t))
        full.append(wide.flatten(1))
    full.append(torch.zeros(3, channels * 5, dtype=torch.float64))  # positions that no tap reaches
    expected = covariance(torch.cat(full))
    shares = [torch.tensor(n / 19, dtype=torch.float64) for n in sizes]

    def assembled(*phases: Tensor) -> tuple[Tensor, Tensor]:
        index = [torch.tensor(t) for t in taps]
        return w.assemble_phases([w.moments(rows) for rows in phases], index, shares, 5)

    mean, cov = assembled(*phases)
    torch.testing.assert_close((mean[0], cov[0]), expected)
    assert gradcheck(assembled, phases)


# --- D ---


@pytest.mark.parametrize("solver", ["quartic", "newton", "minimax", "eigh"])
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_inverse_sqrt_gradient_is_that_of_what_was_computed(solver: str, steps: int) -> None:
    def root(a: Tensor) -> Tensor:
        return roots.inverse_sqrt((a + a.mT) / 2, solver=solver, steps=steps)

    a = spd().requires_grad_()
    assert gradcheck(root, (a,))
    if solver != "eigh":
        assert gradgradcheck(root, (a,), atol=1e-4)


def test_newton_is_the_iteration_of_the_method() -> None:
    a = spd(1, 6, 1000.0)
    for steps in (1, 2, 5, 9):
        torch.testing.assert_close(
            roots.inverse_sqrt(a, solver="newton", steps=steps)[0], inverse_sqrt(a[0], "newton", steps)
        )


@pytest.mark.parametrize(("steps", "error"), [(3, 0.0053), (4, 0.047), (5, 0.145)])
def test_no_quartic_is_closer_to_newton(steps: int, error: float) -> None:
    """Its relative error is equally large at six points, with alternating signs: Chebyshev's criterion for the best."""
    grid = torch.linspace(0, 1, 100001, dtype=torch.float64)
    newton, m = torch.ones_like(grid), grid
    for _ in range(steps):
        t = (3 - m) / 2
        newton, m = newton * t, t * t * m
    constant, slope, times, inner, shift = roots.quartic_coefficients(steps)
    quartic = constant + slope * grid + times * (grid**2 + inner * grid + shift) ** 2
    off = quartic / newton - 1
    signs = off.sign()
    changes = (signs[1:] != signs[:-1]).nonzero().flatten() + 1
    peaks = [part.abs().max() for part in off.tensor_split(changes)]
    assert len(peaks) == 6
    assert max(peaks) < error
    torch.testing.assert_close(torch.stack(peaks), peaks[0].expand(6), rtol=1e-3, atol=0)


@pytest.mark.parametrize("steps", [1, 2])
def test_few_newton_steps_are_a_quartic(steps: int) -> None:
    a = spd(2, 6, 1000.0)
    newton, quartic = (roots.inverse_sqrt(a, solver=name, steps=steps) for name in ("newton", "quartic"))
    torch.testing.assert_close(quartic, newton)


def test_quartic_is_its_polynomial() -> None:
    a = spd(1, 512, 1000.0)  # large enough that half of a product is copied
    torch.testing.assert_close(roots.inverse_sqrt(a, solver="quartic", steps=3)[0], inverse_sqrt(a[0], "quartic", 3))


def test_products_per_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """11 matrix products for 5 steps, not 15; 2 for their quartic."""
    count = 0
    original = roots.symmetric_product

    def counting(*pairs: tuple[Tensor, Tensor], **kwargs: Any) -> Tensor:
        nonlocal count
        count += len(pairs)
        return original(*pairs, **kwargs)

    a = spd()
    monkeypatch.setattr(roots, "symmetric_product", counting)
    roots.inverse_sqrt(a, solver="newton", steps=5)
    assert count == 11
    roots.inverse_sqrt(a, solver="quartic", steps=5)
    assert count == 13


@pytest.mark.parametrize("condition", [1e2, 1e3, 1e4])
def test_minimax_beats_newton_at_equal_products(condition: float) -> None:
    a = spd(1, 32, condition)
    eye = torch.eye(32, dtype=a.dtype)

    def error(solver: str) -> float:
        d = roots.inverse_sqrt(a, solver=solver, steps=5)[0]
        return float((d @ a[0] @ d - eye).norm() / 32**0.5)

    assert error("minimax") < 0.6 * error("newton")


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_minimax_keeps_its_promise(steps: int) -> None:
    """Every eigenvalue from some ℓ to 1 ends within 1% of 1, and ℓ falls with the steps."""
    sigma = torch.logspace(-8, 0, 20000, dtype=torch.float64)
    out = sigma.clone()
    for alpha, beta in roots.minimax_coefficients(steps):
        out = out * (alpha + beta * out.square())
    inside = (out - 1).abs() <= 0.0101
    covered = sigma[~inside].max() if (~inside).any() else sigma[0]
    assert inside[sigma > covered].all()
    assert covered < [0, 0.85, 0.5, 0.22, 0, 0.05, 0, 0, 0.002][steps]
    assert (out < 1.0101).all()


def test_newton_amplifies_at_most_by_its_truncation() -> None:
    a = torch.diag(torch.tensor([1.0, 1e-12, 1e-14])).double()[None]
    d = roots.inverse_sqrt(a, solver="newton", steps=5)[0]
    assert d[1, 1] == pytest.approx(1.5**5, rel=1e-4)


@pytest.mark.parametrize("solver", ["newton", "minimax", "eigh"])
@pytest.mark.parametrize("kind", ["zero", "identity", "repeated", "rank one", "huge", "tiny"])
def test_degenerate_matrices_have_finite_roots_and_gradients(solver: str, kind: str) -> None:
    v = torch.tensor([1.0, 2.0, -1.0])
    a = {
        "zero": torch.zeros(3, 3),
        "identity": torch.eye(3),
        "repeated": torch.diag(torch.tensor([2.0, 2.0, 5.0])),
        "rank one": torch.outer(v, v),
        "huge": torch.diag(v.square()) * 1e36,
        "tiny": torch.diag(v.square()) * 1e-20,
    }[kind][None].requires_grad_()
    d = roots.inverse_sqrt(a, solver=solver, steps=4)
    (d * torch.linspace(-1, 1, 9).reshape(3, 3)).sum().backward()
    assert torch.isfinite(d).all()
    assert torch.isfinite(a.grad).all()
    if kind == "zero":
        assert (d == 0).all()


def test_eigh_gradient_at_equal_eigenvalues() -> None:
    """d/dt (I + tE)^(-1/2) = -E/2 at t = 0, in every direction."""
    a = torch.eye(4, dtype=torch.float64)[None].requires_grad_()
    cotangent = torch.randn(1, 4, 4, dtype=torch.float64)
    (roots.inverse_sqrt(a, solver="eigh", steps=1) * cotangent).sum().backward()
    torch.testing.assert_close(a.grad, -(cotangent + cotangent.mT) / 4)


def test_eigh_is_a_pseudo_inverse_root() -> None:
    basis = torch.randn(5, 3, dtype=torch.float64)
    a = (basis @ basis.t())[None]
    d = roots.inverse_sqrt(a, solver="eigh", steps=1)
    torch.testing.assert_close(d @ d, torch.linalg.pinv(a, rtol=1e-12))


@pytest.mark.parametrize("eps", [0.0, 1e-5, 0.3])
@pytest.mark.parametrize("shrinkage", [0.0, 0.2])
def test_regularise_follows_the_units(eps: float, shrinkage: float) -> None:
    cov = spd(2, 4)
    cov[1, 3:] = 0
    cov[1, :, 3:] = 0
    unit = torch.tensor(8.0, dtype=torch.float64)
    a = roots.regularise(cov / unit**2, unit, eps=eps, shrinkage=shrinkage, widths=torch.tensor([4, 3])) * unit**2
    for g, f in enumerate((4, 3)):
        ridge = eps + shrinkage * cov[g].trace() / f
        inside = torch.diag((torch.arange(4) < f).double())
        torch.testing.assert_close(a[g], cov[g] + ridge * inside)


def test_regularise_and_decorrelate_gradients() -> None:
    unit, widths = torch.tensor(2.0, dtype=torch.float64), torch.tensor([4, 3])
    rows = rand(2, 9, 4)

    def root(rows: Tensor) -> Tensor:
        mean, cov = w.moments(rows)
        stats = Moments(unit * 9, mean, cov, unit)
        return roots.decorrelate(stats, solver="newton", steps=4, eps=1e-3, shrinkage=0.1, widths=widths)

    assert gradcheck(lambda cov: roots.regularise(cov, unit, eps=1e-3, shrinkage=0.1, widths=widths), (rand(2, 4, 4),))
    assert gradcheck(root, (rows,))


def test_fold_gradient() -> None:
    for d in (rand(1, 3, 3), rand(4, 3, 3)):
        mean = rand(d.shape[0], 3)
        assert gradcheck(w.fold, (d, mean, rand(4, 2, 3)))


def test_padding_of_a_smaller_block_does_not_touch_it() -> None:
    a = spd(1, 5)
    padded: Any = torch.nn.functional.pad(a, (0, 2, 0, 2))
    for solver in ("quartic", "newton", "minimax", "eigh"):
        d = roots.inverse_sqrt(padded, solver=solver, steps=4)
        torch.testing.assert_close(d[:, :5, :5], roots.inverse_sqrt(a, solver=solver, steps=4))
        assert (d[:, :5, 5:] == 0).all()
