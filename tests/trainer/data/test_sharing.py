"""Ranks share the rows of a batch: each row exactly once, and no single rows if avoidable."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from automicro import Microbatcher
from automicro.trainer.data.sharing import LoaderSharing, SharedBatchSampler
from automicro.trainer.processes import Process

ROWS = TensorDataset(torch.arange(11))


def share(loader: Any, rank: int, world_size: int, **options: Any) -> Any:
    sharing = LoaderSharing(Process(rank=rank, world_size=world_size, local_rank=rank), seed=3)
    return sharing.share(loader, "train_dataloader", **options)


def rows_of(loader: Any) -> list[list[int]]:
    return [rows.reshape(-1).tolist() for (rows,) in loader]


@given(
    rows=st.integers(0, 60),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 7),
    drop_last=st.booleans(),
)
def test_each_row_comes_once_and_shares_are_balanced(
    rows: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    samplers = [
        SharedBatchSampler(
            range(rows), batch_size, drop_last=drop_last, rank=rank, world_size=world_size, seed=0
        )
        for rank in range(world_size)
    ]
    parts = [list(each) for each in samplers]
    assert [len(each) for each in samplers] == [len(each) for each in parts]
    per_batch = batch_size * world_size
    kept = rows - rows % per_batch if drop_last else rows
    batches = [[*range(start, min(start + per_batch, kept))] for start in range(0, kept, per_batch)]
    assert len(parts[0]) == len(batches), "the first rank always takes part"
    for number, batch in enumerate(batches):
        shares = [part[number] for part in parts if len(part) > number]
        assert [row for share in shares for row in share] == batch
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        # Of three rows, one rank gets all: one more than its full batch of two.
        assert max(sizes) <= max(batch_size, 3)
        if batch_size > 1 and len(batch) > 1:
            assert min(sizes) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3, "shuffle": True},
        {"batch_sampler": [[0, 1, 2], [3, 4], [5, 6, 7, 8], [9], [10]]},
        {"batch_size": None},
        {"batch_size": None, "sampler": RandomSampler(ROWS)},
    ],
)
def test_every_row_comes_exactly_once(options: dict[str, Any]) -> None:
    loaders = [share(DataLoader(ROWS, **options), rank, 3) for rank in range(3)]
    seen = Counter(row for loader in loaders for rows in rows_of(loader) for row in rows)
    assert seen == dict.fromkeys(range(11), 1)


def test_sharing_draws_no_global_random_numbers() -> None:
    loader = share(DataLoader(ROWS, sampler=WeightedRandomSampler([1.0] * 11, 11)), 0, 2)
    here = torch.get_rng_state()
    list(loader.batch_sampler)
    assert torch.equal(torch.get_rng_state(), here)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(4))


class Endless(SequentialSampler):
    def __len__(self) -> int:
        raise TypeError


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([1, 2], "each of 2 ranks would get all of its rows"),
        (DataLoader(Stream()), "each of 2 ranks would get all of its rows"),
        (DataLoader(ROWS, sampler=Endless(ROWS)), "has no length"),
    ],
)
def test_loader_that_cannot_be_shared_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share(loader, 0, 2)


def test_loaders_that_are_shared_already_are_kept() -> None:
    loader = DataLoader(Stream())
    loader.is_sharded = True
    assert share(loader, 0, 2) is loader
    sampler: DistributedSampler[Any] = DistributedSampler(ROWS, num_replicas=2, rank=0)
    loader = DataLoader(ROWS, batch_size=2, sampler=sampler)
    with pytest.warns(UserWarning, match="1 of its 11 rows are repeated in every epoch"):
        assert share(loader, 0, 2) is loader
    with pytest.raises(ValueError, match=r"are repeated in every epoch\. Leave it out"):
        share(loader, 0, 2, is_evaluated=True)


def test_batchnorm_on_single_row_is_explained_with_remedy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), probe=False)
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        microbatcher.backward((torch.randn(1, 4), torch.randn(1, 4)))
    assert "the batch has no other row. Use drop_last=True" in caught.value.__notes__[0]
