"""recalibrate_: exact statistics over a loader."""

import copy

import pytest
import torch
from torch import Tensor, nn

import ndpp
from cases import CASES, Case
from ndpp import Settings
from oracles import block_ranges, covariance, data_matrix
from test_convert import network


def moments_of_all(layer: nn.Module, x: Tensor, block: int | None) -> list[tuple[Tensor, Tensor]]:
    matrix = data_matrix(layer, x)
    channels = matrix.shape[2]
    ranges = block_ranges(channels, block or channels)
    return [covariance(rows[:, a:b].flatten(1)) for rows in matrix for a, b in ranges]


@pytest.mark.parametrize("elements", [1, 500, 1 << 24], ids=["row by row", "some at once", "all at once"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_statistics_are_exact_over_uneven_batches(case: Case, elements: int, monkeypatch) -> None:
    """Against the data matrix of all data in one, whatever the batches and the memory at hand."""
    monkeypatch.setattr(recorded, "ELEMENTS_AT_ONCE", elements)
    layer = case.build(Settings(rows=2, momentum=0.3), dtype=torch.float64)
    x = torch.cat([case.input(seed=seed) * (1 + seed) + seed for seed in range(2)])
    layer(x)  # what was there before does not matter
    first = max(x.shape[0] // 3, 1)
    assert ndpp.recalibrate_(layer, [x[:first], x[first:]]) == 2
    want = moments_of_all(layer, x, case.block)
    groups, per = layer.layout.groups, [p.blocks for p in layer.layout.parts]
    order = []  # full blocks of all groups come first, then the smaller last ones
    for part, blocks in enumerate(per):
        start = sum(per[:part])
        order += [g * sum(per) + start + b for g in range(groups) for b in range(blocks)]
    for got_mean, got_cov, index in zip(layer.running_mean, layer.running_cov, order, strict=True):
        mean, cov = want[index]
        f = mean.numel()
        torch.testing.assert_close(got_mean[:f], mean.flatten())
        torch.testing.assert_close(got_cov[:f, :f], cov)
    assert layer.num_batches_tracked == 2
    assert layer.step_rows == 0


def test_network_statistics_are_those_of_its_batches() -> None:
    """Every layer computes with the statistics of the batch, as in training; dropout is off, other norms evaluate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    ndpp.convert_(model, Settings(rows=None), norms="keep")
    batches = [torch.randn(7, 4).double(), torch.randn(4, 4).double()]
    reference = copy.deepcopy(model)
    reference[2].eval(), reference[3].eval()
    hidden = torch.cat([reference[:4](x) for x in batches])
    model[3].eval()
    ndpp.recalibrate_(model, batches)
    mean, cov = covariance(hidden)
    torch.testing.assert_close(model[4].running_mean[0], mean.flatten())
    torch.testing.assert_close(model[4].running_cov[0], cov)
    assert [m.training for m in model] == [True, True, True, False, True]
    assert model.training
    assert model[3].num_batches_tracked == 0


def test_masks_count() -> None:
    layer = ndpp.Linear(4, 2, dtype=torch.float64)
    x, valid = torch.randn(3, 5, 4).double(), torch.arange(5) < torch.tensor([5, 2, 3])[:, None]

    def masked(model: nn.Module) -> Tensor:
        with ndpp.mask(valid):
            return model(x)

    ndpp.recalibrate_(layer, [masked])
    mean, cov = covariance(x[valid])
    torch.testing.assert_close(layer.running_mean[0], mean.flatten())
    torch.testing.assert_close(layer.running_cov[0], cov)


@pytest.mark.parametrize("batch", [lambda x: x, lambda x: (x, 1), lambda x: [x], lambda x: {"input": x}])
def test_batches_of_all_kinds(batch) -> None:
    layer = ndpp.Linear(4, 2)
    x = torch.randn(6, 4)
    assert ndpp.recalibrate_(layer, iter([batch(x)])) == 1
    torch.testing.assert_close(layer.running_mean[0], x.mean(0))


def test_training_goes_on_from_there() -> None:
    model = network()
    ndpp.convert_(model)
    batches = [torch.randn(4, 3, 9, 9) for _ in range(10)]
    ndpp.recalibrate_(model, batches)
    before = model[0].running_cov.clone()
    model(batches[0]).sum().backward()
    assert model[0].num_batches_tracked == 11
    weight = 0.1 / (1 - 0.9**11)  # the newest step counts as after ten others
    assert (model[0].running_cov - before).norm() < weight * 2 * before.norm()


def test_errors_leave_statistics_alone() -> None:
    model = network()
    ndpp.convert_(model)
    model(torch.randn(4, 3, 9, 9)).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"0: ndpp\.Conv2d"):
        ndpp.recalibrate_(model, [torch.randn(4, 3, 9, 9), torch.randn(4, 5, 9, 9)])
    with pytest.raises(ValueError, match="at least one batch"):
        ndpp.recalibrate_(model, [])
    torch.testing.assert_close(model.state_dict(), before)
    assert model.training
    assert model[0]._collecting is None
    with pytest.raises(ValueError, match="no ndpp layers"):
        ndpp.recalibrate_(nn.Linear(3, 3), [torch.randn(2, 3)])


def test_bad_batches_and_unused_layers() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    model.forward = lambda x: model["used"](x)
    ndpp.convert_(model)
    x = torch.randn(8, 3)
    with pytest.warns(UserWarning, match="1 layers saw no finite data and keep their statistics: unused"):
        ndpp.recalibrate_(model, [x, x * float("nan")])
    torch.testing.assert_close(model["used"].running_mean[0], x.mean(0))


def test_frozen_layers_keep_theirs() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    ndpp.convert_(model, overrides={"0": Settings(freeze=True)})
    ndpp.recalibrate_(model, [torch.randn(8, 3)])
    assert [int(m.num_batches_tracked) for m in model] == [0, 1]


def test_progress_bar(capsys) -> None:
    pytest.importorskip("rich")
    layer = ndpp.Linear(3, 3)
    ndpp.recalibrate_(layer, [torch.randn(8, 3)] * 3, progress=True)
    assert "recalibrating" in capsys.readouterr().err
    ndpp.recalibrate_(layer, [torch.randn(8, 3)] * 3)
    assert capsys.readouterr().err == ""
