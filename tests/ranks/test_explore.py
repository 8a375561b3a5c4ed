"""Ranks with clocks of their own explore sizes as one."""

import pytest

from tests.ranks.explore_jobs import train
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps


@pytest.mark.parametrize(
    ("wrapper", "rows"),
    mostly_in_sweeps(["ddp", "fsdp"], [(12, 12), (12, 7)], quick=[("fsdp", (12, 7))]),
)
def test_all_ranks_try_the_same_sizes_and_end_with_the_same(
    world2: World, wrapper: str, rows: tuple[int, int]
) -> None:
    first, second = world2.run(train, wrapper, rows)
    assert first == second
    assert len(set(first["sizes"])) > 1
    assert first["told"][-1].startswith("explored for ")
    assert len(set(first["sizes"][-8:])) == 1
