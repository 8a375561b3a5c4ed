"""Ranks share the rows of a batch: each row exactly once, and no single rows if avoidable."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from automicro import Microbatcher
from automicro.trainer.data.sharing import SharedBatchSampler


def parts_of(
    rows: int, batch_size: int, world_size: int, *, drop_last: bool
) -> list[list[list[int]]]:
    """Return the batches of each rank."""
    samplers = [
        SharedBatchSampler(
            range(rows), batch_size, drop_last=drop_last, rank=rank, world_size=world_size, seed=0
        )
        for rank in range(world_size)
    ]
    parts = [list(each) for each in samplers]
    assert [len(each) for each in samplers] == [len(each) for each in parts]
    return parts


@given(
    rows=st.integers(0, 60),
    batch_size=st.integers(1, 6),
    world_size=st.integers(1, 7),
    drop_last=st.booleans(),
)
def test_each_row_comes_once_and_shares_are_balanced(
    rows: int, batch_size: int, world_size: int, drop_last: bool
) -> None:
    parts = parts_of(rows, batch_size, world_size, drop_last=drop_last)
    per_batch = batch_size * world_size
    kept = rows - rows % per_batch if drop_last else rows
    batches = [
        list(range(start, min(start + per_batch, kept))) for start in range(0, kept, per_batch)
    ]
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


def test_batchnorm_on_single_row_is_explained_with_remedy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    microbatcher = Microbatcher(model, loss_fn=nn.MSELoss(), probe=False)
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        microbatcher.backward((torch.randn(1, 4), torch.randn(1, 4)))
    assert "the batch has no other row. Use drop_last=True" in caught.value.__notes__[0]
