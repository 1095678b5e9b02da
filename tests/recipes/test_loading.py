"""Batches depend on seed, epoch and position alone: not on workers, ranks before them, or where an epoch is begun."""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recipes.toy import Toy, config

from ndpp_recipes.errors import DataError
from ndpp_recipes.loading import Loader, micro_batch, random_state, restore_random_
from ndpp_recipes.parallel import Place

CPU = torch.device("cpu")


def _loader(place: Place | None = None, out: Path | None = None, bad: Any = (), **options: Any) -> Loader:
    loader = Loader(Toy(config(**options), bad=bad), place or Place(0, 1, CPU))
    if out is not None:
        loader.list_bad_in(out)
    return loader


def _records(steps: Any) -> list[list[int]]:
    return [[int(x) for part in step for x in part[0][:, 0]] for step in steps]


def test_an_epoch_has_every_record_once() -> None:
    steps = _records(_loader().epoch(0))
    assert [len(step) for step in steps] == [4] * 5
    assert sorted(chain(*steps)) == list(range(20))
    assert steps != _records(_loader().epoch(1))
    assert steps != _records(_loader(seed=1).epoch(0))
    assert steps == _records(_loader().epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_can_begin_anywhere(workers: int) -> None:
    """With the same augmentation, whatever was drawn before, in this process or in workers."""
    whole = [part[0] for step in _loader().epoch(3) for part in step]
    torch.rand(5)
    random.random()
    np.random.rand()
    rest = [part[0] for step in _loader(workers=workers).epoch(3, start=2) for part in step]
    torch.testing.assert_close(torch.cat(rest), torch.cat(whole[2:]), rtol=0, atol=0)


def test_loading_leaves_the_generators_alone() -> None:
    for workers in (0, 2):
        state = random_state()
        drawn = float(torch.rand(())), np.random.rand(), random.random()
        restore_random_(state)
        list(_loader(workers=workers).epoch(0))
        list(_loader(workers=workers).evaluation())
        assert (float(torch.rand(())), np.random.rand(), random.random()) == drawn


def test_ranks_and_parts_share_an_epoch() -> None:
    alone = _records(_loader(batch_size=4).epoch(0))
    ranks = [_records(_loader(Place(rank, 2, CPU), batch_size=8).epoch(0)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == [alone[0] + alone[1], alone[2] + alone[3]]
    parts = list(_loader(batch_size=8, accumulate=2).epoch(0))
    assert [len(step) for step in parts] == [2, 2]
    seen = [set(chain(*_records([[b] for b in _loader(Place(r, 2, CPU)).evaluation()]))) for r in (0, 1)]
    assert seen[0] | seen[1] == set(range(7))
    assert not seen[0] & seen[1]


def test_batches_that_do_not_divide() -> None:
    assert micro_batch(12, 2, 3) == 2
    with pytest.raises(DataError, match=r"10 does not divide into 3 ranks × accumulate 2"):
        micro_batch(10, 2, 3)
    with pytest.raises(DataError, match=r"20 records make 5 batches of 4, fewer than one step takes \(1 ranks"):
        next(_loader(batch_size=24, accumulate=6).epoch(0))


def test_a_bad_record_stops_with_its_name() -> None:
    with pytest.raises(DataError, match=r"numbers.txt \[3\]: not a number. --skip-bad N leaves up to N out"):
        list(_loader(bad=[3]).epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_records_are_replaced_counted_and_listed(tmp_path: Path, workers: int) -> None:
    listed = tmp_path / "bad.jsonl"
    loader = _loader(out=listed, bad=[3, 4], skip_bad=2, workers=workers)
    steps = _records(loader.epoch(0))
    assert [len(step) for step in steps] == [4] * 5
    assert sorted(chain(*steps)) == sorted([*(set(range(20)) - {3, 4}), 5, 5])
    list(loader.epoch(1))
    lines = sorted(json.loads(line)["text"] for line in listed.read_text().splitlines())
    assert lines == ["numbers.txt [3]: not a number", "numbers.txt [4]: not a number"]
    again = _loader(out=listed, bad=[3, 4], skip_bad=2, workers=workers)  # after a restart they count on
    list(again.epoch(0))
    assert len(listed.read_text().splitlines()) == 2
    assert len(again.bad) == 2


def test_what_was_found_before_there_was_a_file_is_listed(tmp_path: Path) -> None:
    loader = _loader(bad=[3], skip_bad=1)
    list(loader.epoch(0))
    loader.list_bad_in(tmp_path / "bad.jsonl")
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 1


def test_a_torn_line_of_the_list_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"te')
    loader = _loader()
    loader.list_bad_in(tmp_path / "bad.jsonl")
    assert loader.bad == {"a"}


def test_nothing_but_bad_records_is_an_error_and_no_endless_loop() -> None:
    with pytest.raises(DataError, match=r"32 records in a row cannot be used"):
        list(_loader(bad=range(20), skip_bad=1000).epoch(0))


def test_too_many_bad_records_are_all_named() -> None:
    with pytest.raises(DataError, match=r"3 bad records, and --skip-bad is 2:\n.*\[1\].*\n.*\[2\].*\n.*\[3\]"):
        list(_loader(bad=[1, 2, 3], skip_bad=2).epoch(0))


def test_bad_records_are_left_out_of_evaluation() -> None:
    loader = _loader(bad=[0, 1, 2, 3, 5], skip_bad=5)
    assert list(chain(*_records([[b] for b in loader.evaluation()]))) == [4, 6]


def test_the_state_of_all_generators_survives_a_file(tmp_path: Path) -> None:
    random.gauss(0, 1)
    np.random.randn()
    torch.save(random_state(), tmp_path / "state.pt")
    drawn = torch.rand(3), np.random.randn(3), random.gauss(0, 1)
    restore_random_(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(torch.rand(3), drawn[0])
    assert np.array_equal(np.random.randn(3), drawn[1])
    assert random.gauss(0, 1) == drawn[2]
