"""Data matrices, sampling plans and blocks."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

import ndpp
from cases import CASES, Case
from ndpp import geometry as geo
from ndpp import masking, sampling
from ndpp import rows as rows_
from ndpp.layers import padding_pairs
from oracles import data_matrix

CPU = torch.device("cpu")
DRAWS = sampling.draw(CPU)


def grid_of(layer: torch.nn.Module, sizes: tuple[int, ...]) -> geo.Grid:
    if isinstance(layer, torch.nn.Linear):
        return geo.pointwise_grid(sizes)
    if layer.transposed:
        return geo.transposed_grid(
            sizes, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.output_padding
        )
    return geo.conv_grid(
        sizes, layer.kernel_size, layer.stride, padding_pairs(layer._reversed_padding_repeated_twice), layer.dilation
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_the_data_matrix(case: Case) -> None:
    """Phase by phase, every entry of the explicit matrix that a tap reaches, in every row; the others are zero."""
    layer, x = case.build(), case.input()
    flat = x if case.layer != "Linear" else x.movedim(-1, 1)
    grid = grid_of(layer, tuple(flat.shape[2:]))
    expected = data_matrix(layer, x)
    groups, n, channels, taps = expected.shape
    everything = expected.movedim(0, 1).reshape(n, groups * channels, taps)
    # Row sets are compared by sorting them on a random projection: phases come in another order than positions.
    found = []
    for phase in grid.phases:
        if not grid.positions(phase):
            continue
        sample = sampling.choose(x.shape[0], phase, sampling.row_budget(x.shape[0], phase, None, None), DRAWS)
        own = grid.taps(phase, x.device).tolist()
        rows = torch.zeros(x.shape[0] * grid.positions(phase), groups * channels, taps, dtype=x.dtype)
        if own:
            rows[:, :, own] = rows_.patches(flat, phase, sample, getattr(layer, "padding_mode", "zeros"))
        found.append(rows)
    got = torch.cat(found)
    assert got.shape == everything.shape
    projection = torch.randn(groups * channels * taps, 3, dtype=x.dtype)
    keys = [(m.flatten(1) @ projection)[:, 0].sort().values for m in (got, everything)]
    torch.testing.assert_close(*keys)
    torch.testing.assert_close(got.sum(0), everything.sum(0))


@given(
    st.integers(1, 300),
    st.lists(st.integers(1, 60), min_size=0, max_size=3),
    st.integers(1, 5000),
)
def test_row_budget_is_kept_and_well_spent(batch: int, counts: list[int], rows: int) -> None:
    phase = tuple(geo.Axis(c, c) for c in counts)
    picks = sampling.row_budget(batch, phase, rows, None)
    total = batch * math.prod(counts)
    assert all(1 <= p <= c for p, c in zip(picks, (batch, *counts), strict=True))
    assert math.prod(picks) <= max(rows, 1)
    if total <= rows:
        assert picks == (batch, *counts)
    else:
        assert math.prod(picks) > rows / 4 or math.prod(picks) >= batch


def test_stride_samples_both_directions() -> None:
    phase = (geo.Axis(10, 10), geo.Axis(7, 7))
    assert sampling.row_budget(4, phase, None, 3) == (4, 4, 3)


@pytest.mark.parametrize(("rows", "stride"), [(None, 3), (256, None), (64, None)])
@pytest.mark.parametrize("size", [(9, 9), (14, 5), (12, 12)])
def test_every_position_is_sampled_in_its_true_proportion(
    size: tuple[int, int], rows: int | None, stride: int | None
) -> None:
    """Borders too, within one call: on a large batch the frequencies are flat."""
    batch = 64
    phase = tuple(geo.Axis(s, s) for s in size)
    counts = torch.zeros(size)
    for _ in range(60):
        sample = sampling.choose(batch, phase, sampling.row_budget(batch, phase, rows, stride), sampling.draw(CPU))
        at = [p.expand(sample.size[0], -1) for p in sample.positions]
        index = at[0][:, :, None] * size[1] + at[1][:, None, :]
        counts += torch.bincount(index.flatten(), minlength=counts.numel()).reshape(size)
    expected = counts.sum() / counts.numel()
    assert ((counts - expected).abs() < 5 * expected.sqrt()).all()


def test_deterministic_gather_is_the_same_gather() -> None:
    layer = ndpp.Conv2d(3, 4, 3, padding=1, settings=ndpp.Settings(rows=20))
    x = torch.randn(4, 3, 7, 7)
    results = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            torch.manual_seed(0)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            y.square().sum().backward()
            results.append((y, leaf.grad))
        finally:
            torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_patches_gradient(mode: str, rows: int | None) -> None:
    (phase,) = geo.conv_grid((5, 4), (3, 2), (2, 1), [(1, 1), (1, 0)], (1, 2)).phases
    sample = sampling.choose(3, phase, sampling.row_budget(3, phase, rows, None), DRAWS)
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda x: rows_.patches(x, phase, sample, mode), (x,))


def test_subsampled_batches_do_not_alias() -> None:
    """Rows that repeat with a period: every residue is drawn."""
    phase = (geo.Axis(1, 1),)
    sample = sampling.choose(8192, phase, (64, 1), DRAWS)
    assert len(set((sample.samples % 128).tolist())) > 30
    assert (sample.samples.diff() > 0).all()


@given(st.integers(2, 600), st.data())
def test_no_sample_is_chosen_twice(batch: int, data: st.DataObject) -> None:
    samples = data.draw(st.integers(1, batch - 1))
    sample = sampling.choose(batch, (geo.Axis(1, 1),), (samples, 1), sampling.draw(CPU))
    assert len(set(sample.samples.tolist())) == samples


@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose2d"])
def test_sampled_statistics_are_unbiased_estimates(name: str) -> None:
    """A constant image with zero padding: the column means count the border, sampled or not."""
    n = int(name[-2])
    options = {"stride": 2} if "Transpose" in name else {"padding": 1}
    sizes = (9,) * n
    x = torch.ones(32, 2, *sizes, dtype=torch.float64)
    x = x + 0.1 * torch.randn_like(x)
    build = getattr(ndpp, name)

    def averaged(settings: ndpp.Settings, calls: int) -> torch.Tensor:
        layer = build(2, 2, 3, **options, dtype=torch.float64, settings=settings)
        with torch.no_grad():
            for _ in range(calls):
                layer(x)
        return torch.cat([layer.running_mean.flatten(), layer.running_cov.flatten()])

    exact = averaged(ndpp.Settings(rows=None), 1)
    for settings_ in (ndpp.Settings(rows=200, momentum=None), ndpp.Settings(rows=None, stride=3, momentum=None)):
        estimate = averaged(settings_, 100)
        assert (estimate - exact).abs().max() < 0.03


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 3), st.integers(1, 4), st.booleans())
@settings(deadline=None)
def test_blocks_cover_all_channels_in_order(channels: int, block: int, groups: int, taps: int, shared: bool) -> None:
    layout = geo.Layout(groups, channels, taps, block, shared)
    parts = layout.parts
    assert parts[0].start == 0
    assert parts[-1].stop == channels
    assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
    sizes = [(p.stop - p.start) // p.blocks for p in parts]
    assert sizes[0] == min(block, channels)  # never shrunk to a divisor
    assert len(sizes) <= 2
    width, number = max(f for _, f in layout.widths), sum(g for g, _ in layout.widths)
    d = torch.eye(width).expand(number, -1, -1)
    weight = torch.randn(groups, 2, channels, taps)
    split = layout.split(d, d[:, 0], weight)
    assert [w.shape[2] for _, _, w in split] == [f for _, f in layout.widths]
    torch.testing.assert_close(layout.join([w @ dp for dp, _, w in split]), weight)


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 3), st.integers(1, 4), st.booleans(), st.data())
@settings(deadline=None)
def test_runs_are_all_blocks_once(
    channels: int, block: int, groups: int, taps: int, shared: bool, data: st.DataObject
) -> None:
    layout = geo.Layout(groups, channels, taps, block, shared)
    columns = data.draw(st.one_of(st.none(), st.integers(1, 2 * channels * taps)))
    runs, first, covered = list(layout.runs(columns)), 0, []
    for run in runs:
        width = run.channels.stop - run.channels.start
        assert width % run.block == 0
        assert run.block * taps == layout.widths[run.part][1]
        assert columns is None or width == run.block or width * taps <= columns
        assert run.own == (slice(run.part, run.part + 1) if shared else slice(first, first + width // run.block))
        covered += range(run.channels.start, run.channels.stop)
        first += width // run.block
    assert sorted(covered) == list(range(groups * channels))
    assert [run.part for run in runs] == sorted(run.part for run in runs)
    assert columns is not None or len(runs) <= 2 * groups


@pytest.mark.parametrize(
    ("channels", "sizes", "most", "shape"),
    [
        (3, (8, 8), None, (3, 8, 8)),
        (3, (8, 8), 64, (3, 8, 8)),
        (3, (64, 64), 1024, (3, 32, 32)),
        (64, (64, 64), 1024, (64, 21, 21)),  # 512 positions of 64 channels
        (2048, (64, 64), 1024, (512, 8, 8)),  # every fourth channel
        (2048, (4, 4), 1024, (2048, 4, 4)),
        (2048, (4, 4), None, (2048, 4, 4)),
        (5, (1000,), 100, (5, 100)),
    ],
)
def test_what_enters_a_scale(channels: int, sizes: tuple[int, ...], most: int | None, shape: tuple[int, ...]) -> None:
    at: tuple[Any, ...] = (..., *sampling.lattice(channels, sizes, most))
    assert torch.empty(2, channels, *sizes)[at].shape[1:] == shape


@pytest.mark.parametrize(
    ("most", "taps", "features", "block"),
    [
        *((64, 1, 288, 64), (64, 9, 288, 32), (64, 49, 288, 4), (64, 27, 288, 8), (64, 300, 288, 1)),
        *((64, 9, None, 64), (256, 1, 288, 256), (256, 1, 100, 64), (64, 9, 9, 1)),
    ],
)
def test_blocks_keep_within_their_features(most: int, taps: int, features: int | None, block: int) -> None:
    assert geo.block_size(most, taps, features) == block


def test_grouped_weights_invert() -> None:
    for shape, groups, transposed in (((6, 2, 3, 3), 2, False), ((4, 3, 2), 2, True), ((5, 7), 1, False)):
        weight = torch.randn(shape)
        back = geo.ungrouped(geo.grouped(weight, groups, transposed), weight, transposed)
        torch.testing.assert_close(back, weight)
        assert back.is_contiguous()
    last = torch.randn(6, 2, 3, 3).to(memory_format=torch.channels_last)
    back = geo.ungrouped(geo.grouped(last, 2, False), last, False)
    assert torch.equal(back, last)
    assert back.stride() == last.stride()


# --- masks ---


@pytest.mark.parametrize("case", [c for c in CASES if c.layer.startswith("Conv")], ids=str)
@pytest.mark.parametrize("from_left", [True, False], ids=["left", "right"])
def test_a_padded_sample_has_the_rows_of_the_sample_alone(case: Case, from_left: bool) -> None:
    layer = case.build()
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        pytest.skip("the other padding modes read the padding of the batch itself")
    strides = layer.stride
    sizes = case.shape[2:]
    inner = tuple(s - st for s, st in zip(sizes, strides, strict=True))
    alone = grid_of(layer, inner)
    whole = grid_of(layer, sizes)
    if not any(alone.positions(p) for p in alone.phases):
        pytest.skip("too small to stand alone")
    valid = torch.zeros(1, *sizes, dtype=torch.bool)
    window = tuple(slice(s - i, None) if not from_left else slice(0, i) for s, i in zip(sizes, inner, strict=True))
    valid[(0, *window)] = True
    counted = 0
    for phase in whole.phases:
        if whole.positions(phase):
            sample = sampling.choose(1, phase, sampling.row_budget(1, phase, None, None), DRAWS)
            counted += int(rows_.row_weights(valid, phase, sample).sum())
    assert counted == sum(alone.positions(p) for p in alone.phases)


@pytest.mark.parametrize(("size", "wanted"), [(8, 4), (7, 4), (224, 56), (9, 3), (10, 10), (5, 10), (100, 75)])
def test_masks_follow_feature_maps(size: int, wanted: int) -> None:
    valid = torch.zeros(1, size, dtype=torch.bool)
    valid[:, : size // 2] = True
    fitted = masking.fit(valid, 1, (wanted,))
    assert fitted.shape == (1, wanted)
    assert abs(int(fitted.sum()) / wanted - (size // 2) / size) <= 1 / wanted
