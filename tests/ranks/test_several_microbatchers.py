"""Several Microbatchers in one process group: named evaluations, adversaries, one after another."""

import pytest
import torch

from tests.ranks.plans import points
from tests.ranks.several_jobs import (
    ask_with_different_ones,
    compare_beside_another,
    count_threads,
    forget,
    go_on_after_errors,
    take_a_part,
    train_adversaries,
)
from tests.ranks.world import World, world_of

pytestmark = pytest.mark.sweep

KINDS = ["ddp", "fsdp"]
POINTS = ["first batch", "last backward", "successive batches"]


@pytest.mark.parametrize(
    "point", [POINTS[0], *(pytest.param(p, marks=pytest.mark.slow) for p in POINTS[1:])]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_recovers_whichever_microbatcher_is_newer(
    world2: World, kind: str, point: str
) -> None:
    plan = points(2)[point]
    results = world2.run(compare_beside_another, kind, plan)
    assert [result["differing"] for result in results] == [[], []]
    assert sum(result["fired"] for result in results) == len(plan)
    assert all(result["failures"] for result in results)
    if kind == "ddp":  # which sends rank 0's before each step
        assert all(result["buffers_are_common"] for result in results)


@pytest.mark.parametrize("kind", KINDS)
def test_more_microbatchers_need_no_more_connections(world2: World, kind: str) -> None:
    for before, after in world2.run(count_threads, kind):
        assert after == before


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_keeps_a_model_whose_microbatcher_is_gone(world2: World, kind: str) -> None:
    for alive, loss in world2.run(forget, kind):
        assert loss > 0.0
        assert not any(alive)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_go_on_after_every_error_that_all_were_told_of(world2: World, kind: str) -> None:
    healthy, culprit = world2.run(go_on_after_errors, kind)
    assert healthy == [8, "PeerFailedError", 12, "PeerFailedError", 16]
    assert culprit == [8, "BatchError", 12, "BatchError", 16]


def test_two_models_one_trained_through_the_other_recover(world2: World) -> None:
    for found, expected in zip(
        world2.run(train_adversaries, True), world2.run(train_adversaries, False), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_part_of_a_model_that_is_guarded_whole_is_refused(world2: World) -> None:
    for message in world2.run(take_a_part):
        assert "part of a model that another Microbatcher has as a whole" in message
        assert message.endswith("give every Microbatcher the same outermost module")


def test_ranks_that_train_with_different_ones_are_told_and_do_not_hang() -> None:
    with world_of(2) as world:  # it cannot go on
        for message in world.run(ask_with_different_ones):
            assert message.startswith("DesyncError")
            assert "Microbatcher 1" in message
            assert "Microbatcher 2" in message
