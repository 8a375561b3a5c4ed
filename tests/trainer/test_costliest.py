"""The search for the costliest batches finds them and changes nothing."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from automicro.trainer.data.sharing import LoaderSharing, SharedSampler
from automicro.trainer.processes import Process
from automicro.trainer.rehearsal import CLASSES, COSTLIEST, find_costliest, undisturbed
from tests.trainer.rehearsals import Texts, loader_of, log_normal, padded


class KnownCosts(Sampler[list[int]]):
    """Batches with known costs, so no row has to be loaded."""

    def __init__(self, batches: list[list[int]], costs: list[float]) -> None:
        self.batches, self.costs = batches, costs

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def batch_costs(self) -> list[float]:
        return self.costs


class Unreadable(Texts):
    def __getitem__(self, row: int) -> Any:
        raise AssertionError("nobody has to look at a row")


def test_each_rank_finds_costs_of_its_own_batches() -> None:
    sampler = KnownCosts([[0], [1, 2], [3, 4, 5], [6]], [1.0, 9.0, 2.0, 5.0])
    loader = DataLoader(Unreadable([3] * 7), batch_sampler=sampler, collate_fn=padded)
    found = []
    for rank in range(2):
        place = Process(rank=rank, world_size=2, local_rank=rank)
        sharing = LoaderSharing(place, seed=3)
        shared = sharing.share(loader, "train_dataloader")
        assert isinstance(shared.batch_sampler, SharedSampler)
        scan = find_costliest(shared, "train_dataloader")
        found.append([(each.index, each.cost, each.rows) for each in scan.batches])
    assert found == [
        [(1, 2.0, (3, 4, 5)), (0, 1.0, (0,))],
        [(0, 9.0, (1, 2)), (1, 5.0, (6,))],
    ]


@pytest.mark.parametrize("seed", range(5))
def test_costliest_and_longest_batches_are_found(seed: int) -> None:
    source = random.Random(seed)
    lengths = log_normal(seed, 200, most=400)
    order = [sorted(source.sample(range(200), source.randint(1, 9))) for _ in range(60)]
    loader = DataLoader(Texts(lengths), batch_sampler=order, collate_fn=padded)
    scan = find_costliest(loader, "train_dataloader", rows_of=lambda batch: len(batch[0]))
    costs = [2 * len(rows) * max(lengths[row] for row in rows) for rows in order]
    row_costs = [2 * max(lengths[row] for row in rows) for rows in order]
    found = [each.index for each in scan.batches]
    assert [costs[index] for index in found[:COSTLIEST]] == sorted(costs)[: -COSTLIEST - 1 : -1]
    assert max(row_costs) in [row_costs[index] for index in found]
    assert len(found) == len(set(found)) <= COSTLIEST + 1 + CLASSES
    for each in scan.batches:
        again = each.make()
        assert (2 * again[0].numel(), each.rows) == (each.cost, tuple(order[each.index]))


class Counting(IterableDataset[Any]):
    """Rows that differ in each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return (torch.full((self.passes + row,), 1) for row in range(6))


def test_search_does_not_advance_pass_counter_of_stream() -> None:
    loader = DataLoader(Counting(), batch_size=2, collate_fn=padded)
    with undisturbed(loader):
        scan = find_costliest(loader, "train_dataloader")
    first, second, third = (batch[0].shape[1] for batch in loader)
    assert [each.cost for each in scan.batches[:3]] == [4 * third, 4 * second, 4 * first]
    assert scan.seen == scan.total == 3


def test_infinite_loader_stops_at_limit_with_note(mocker: Any) -> None:
    mocker.patch("automicro.trainer.rehearsal.SCANNED_BATCHES", 4)

    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield torch.ones(3)

    scan = find_costliest(DataLoader(Endless(), batch_size=2), "train_dataloader")
    assert str(scan) == "the first 4 of an unknown number of batches"
    assert not scan.is_complete


def test_search_covers_only_batches_that_evaluation_uses() -> None:
    loader = loader_of([3, 3, 90, 90], 2)
    scan = find_costliest(loader, "eval_dataloader", most_batches=1)
    assert [each.index for each in scan.batches] == [0]
    assert str(scan) == "all 1 batches"
