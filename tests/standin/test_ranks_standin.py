"""Two ranks on two devices: one runs out of memory, in forward or on its backward thread."""

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.world import World, world_of
from tests.standin.hungry import ROWS
from tests.standin.rank_jobs import train


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of(2) as world:
        yield world


@pytest.mark.parametrize("short_rank", [0, 1])
@pytest.mark.parametrize("demand", [(16, 0), (0, 16)], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_where_one_rank_runs_out_of_memory_both_end_with_the_bits_of_a_run_at_the_same_sizes(
    kind: str, demand: tuple[int, int], short_rank: int, world: World
) -> None:
    expected = world.run(train, kind, demand, None, ROWS // 2)
    found = world.run(train, kind, demand, short_rank, None)
    for one, other in zip(expected, found, strict=True):
        assert one["ooms"] == [0, 0, 0]
        assert other["ooms"] == [0, 1, 0]
        assert other["size"] == ROWS // 2
        state = other["state"]
        differing = [
            name for name, each in one["state"].items() if not torch.equal(each, state[name])
        ]
        assert differing == []
