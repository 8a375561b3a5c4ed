"""Parts with sizes of their own on several ranks: each has its own slices."""

import pytest

from tests.ranks.nested_jobs import differences, exact_batchnorm, refusal, shortage_in_backward
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps

pytestmark = pytest.mark.sweep

WAYS = ("ddp", "ddp, unused", "ddp, view", "ddp, unused, view", "root", "part of its own")


@pytest.mark.parametrize(
    ("how", "gives_loss", "in_own_loop"),
    mostly_in_sweeps(WAYS, [True, False], [True, False], few=8),
)
def test_gradients_are_exact_where_one_rank_alone_has_smaller_slices(
    world2: World, how: str, gives_loss: bool, in_own_loop: bool
) -> None:
    first, second = world2.run(differences, how, gives_loss, in_own_loop)
    assert max(first["error"], second["error"]) < 1e-6
    assert max(first["sizes"]) <= 3
    assert second["sizes"] == [8]
    if not in_own_loop:
        assert first["outer"] == second["outer"] == (8, 1)


def test_a_part_with_sharded_modules_inside_is_refused_by_name(world2: World) -> None:
    assert all("apply fully_shard to the part itself" in said for said in world2.run(refusal))


@pytest.mark.parametrize("how", ["ddp", "root", "part of its own"])
def test_all_ranks_repeat_the_same_size_where_one_part_has_a_smaller_one(
    world2: World, how: str
) -> None:
    first, second = world2.run(shortage_in_backward, how)
    assert first["outer"] == second["outer"] == 8
    assert first["attempts"] == second["attempts"]
    assert max(first["sizes"]) <= 3
    assert second["sizes"] == [8]
    assert first["gradients"] == second["gradients"]


def test_batchnorm_has_the_statistics_of_the_batch_of_its_rank(world2: World) -> None:
    first, second = world2.run(exact_batchnorm)
    assert len(first) == 6
    assert max(*first, *second) < 1e-12
