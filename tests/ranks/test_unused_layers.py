"""Layers that not every microbatch uses: trained exactly, or refused; nobody waits."""

from typing import Any

import pytest

from automicro.ranks.interface import Report
from automicro.ranks.simulated import SimulatedWorld
from automicro.ranks.votes import Votes
from tests.ranks.plans import points
from tests.ranks.test_recovery import require_recovered
from tests.ranks.unused_jobs import (
    go_past_the_wrapper,
    keep_an_earlier_gradient,
    leave_a_shard_out,
    shard_tied_blocks,
    train_where_a_layer_is_left_out,
    use_a_second_model,
)
from tests.ranks.world import World, world_of
from tests.sweeps import mostly_in_sweeps

# Where the rows of each rank that need the layer stand.
ORDERS = [("first", "last"), ("first", "first"), ("none", "last"), ("none", "none")]
KINDS = ["plain", "bucket views", "hooked", "reentrant", "frozen later", "find unused"]


def require_exact(world: World, kind: str, orders: tuple[str, ...], **options: Any) -> list[Any]:
    results = world.run(train_where_a_layer_is_left_out, kind, orders, **options)
    for result in results:
        assert result["worst"] <= 1e-12
    return results


@pytest.mark.parametrize("orders", ORDERS, ids=" and ".join)
def test_a_layer_that_a_last_microbatch_leaves_out_is_trained_exactly(
    world2: World, orders: tuple[str, str]
) -> None:
    for result in require_exact(world2, "plain", orders):
        left_out = {"never.bias", "never.weight"}
        left_out |= {"rare.bias", "rare.weight"} if orders == ("none", "none") else set()
        assert set(result["nones"]) == left_out, "as in one process"


@pytest.mark.slow
@pytest.mark.parametrize("orders", ORDERS, ids=" and ".join)
@pytest.mark.parametrize("kind", [*KINDS, "sharded"])
@pytest.mark.parametrize("fails_in", [(), (0,), (1, 2)], ids=str)
def test_it_is_trained_exactly_however_it_is_wrapped(
    world3: World, kind: str, orders: tuple[str, str], fails_in: tuple[int, ...]
) -> None:
    require_exact(world3, kind, (*orders, "first"), fails_in=fails_in, halves=bool(fails_in))


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_exactly_with_options(world2: World, kind: str) -> None:
    require_exact(world2, kind, ("first", "last"), steps=2)


def test_a_sharded_layer_is_trained_exactly_where_torch_reduces_unused_ones(world2: World) -> None:
    require_exact(world2, "sharded", ("first", "last"))


@pytest.mark.parametrize("kind", mostly_in_sweeps(["ddp", "fsdp"], quick=["ddp"]))
def test_a_model_that_leaves_layers_out_recovers(world2: World, kind: str) -> None:
    require_recovered(world2, kind, points(2)["two ranks"], rare=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("point", points(2))
def test_a_model_that_leaves_layers_out_recovers_anywhere(
    world2: World, kind: str, point: str
) -> None:
    require_recovered(world2, kind, points(2)[point], rare=True)


def test_only_a_parameter_that_no_rank_uses_costs_a_further_vote(world2: World) -> None:
    used = require_exact(world2, "frozen later", ("last", "first"))[0]["votes"]
    never = require_exact(world2, "plain", ("last", "first"))[0]["votes"]
    assert (used[-1], never[-1]) == (3, 3), "never is left out here by both"
    assert require_exact(world2, "find unused", ("last", "first"))[0]["votes"][-1] == 2


def test_an_earlier_gradient_outlives_steps_that_do_not_use_its_parameter(world2: World) -> None:
    assert world2.run(keep_an_earlier_gradient) == [[True, True, True]] * 2


def test_a_forward_past_the_wrapper_is_refused_in_the_first_step(world2: World) -> None:
    for text, *with_gradients in world2.run(go_past_the_wrapper):
        assert "model.module(…)" in text
        assert with_gradients == [], "rolled back"


def test_a_shard_that_a_rank_leaves_out_is_named_and_not_waited_for() -> None:
    with world_of(2) as world:  # it cannot go on
        for result in world.run(leave_a_shard_out, [1]):
            assert result["text"].startswith("DesyncError")
            assert "all-gather of 'rare'" in result["text"]
            assert "set_reduce_scatter_unused_params" in result["text"]
            assert result["attempts"] == [1, 1]


def test_a_shard_that_all_ranks_leave_out_takes_no_smaller_microbatches(world2: World) -> None:
    for result in world2.run(leave_a_shard_out, [0, 1]):
        assert result["text"] == ""
        assert result["attempts"] == [1] * 4
        assert result["failed_sizes"] == [()] * 4
        assert result["sizes"] == [6] * 4


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_second_wrapped_model_has_to_be_known(world2: World, kind: str) -> None:
    for text in world2.run(use_a_second_model, kind, known=False, frozen=False):
        assert "modules=[…]" in text
    assert world2.run(use_a_second_model, kind, known=True, frozen=False, fails=True) == ["", ""]


def test_a_second_model_that_communicates_with_nobody_may_be_unknown(world2: World) -> None:
    assert world2.run(use_a_second_model, "ddp", known=False, frozen=True) == ["", ""]


def test_blocks_with_tied_weights_are_left_to_the_whole_model(world2: World) -> None:
    for differences in world2.run(shard_tied_blocks):
        assert max(differences) <= 1e-12


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_ranks_find_what_none_of_them_used(world_size: int) -> None:
    world = SimulatedWorld(world_size)
    everywhere = {3, 40, 77}

    def work(rank: int) -> tuple[int, list[int]]:
        unused = [place in everywhere or place % (world_size + 1) == rank for place in range(80)]
        votes = Votes(world.exchange(rank))
        _, _, found = votes.commit(Report(), flag=False, unused=unused)
        return votes.count, [place for place, is_unused in enumerate(found) if is_unused]

    for count, found in world.run(work):
        assert count > 1
        expected = everywhere if world_size > 1 else everywhere | set(range(0, 80, 2))
        assert found == sorted(expected)


def test_one_rank_that_used_all_settles_it_in_one_vote() -> None:
    world = SimulatedWorld(2)

    def work(rank: int) -> tuple[int, bool]:
        votes = Votes(world.exchange(rank))
        _, _, unused = votes.commit(Report(), flag=False, unused=[rank == 1] * 3)
        return votes.count, any(unused)

    assert world.run(work) == [(1, False)] * 2
