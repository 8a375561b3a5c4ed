"""Whatever the ranks have for themselves, all decide alike."""

from pathlib import Path

import pytest

from automicro.ranks.warm_up import COMMUNICATION_SHARE
from tests.ranks.agreeing import (
    climb,
    clip,
    count_residents,
    decline,
    fail_to_clip,
    race,
    remember,
    run_out,
    scale,
    train_within,
)
from tests.ranks.jobs import connections
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps

KINDS = ["ddp", "fsdp"]


@pytest.mark.parametrize("kind", mostly_in_sweeps(KINDS, quick=["fsdp"]))
def test_ranks_with_other_limits_find_one_size(world2: World, kind: str) -> None:
    limit = {"ddp": "330KiB", "fsdp": "300KiB"}[kind]
    first, second = world2.run(train_within, kind, ["10MiB", limit])
    assert first == second
    assert first["failed"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["offload", "auto"])
def test_ranks_go_up_and_down_between_levels_together(world2: World, kind: str, when: str) -> None:
    first, second = world2.run(climb, kind, when)
    assert first == second
    # One rank alone has long rows that fit at level 1 only, in the first and third step.
    assert first["levels"] == ["offload", "plain"] * 2
    assert first["failed"] == [3, 0, 0, 0]


@pytest.mark.parametrize("kind", mostly_in_sweeps(KINDS, quick=["ddp"]))
def test_ranks_choose_the_fastest_level_together(world2: World, kind: str) -> None:
    first, second = world2.run(race, kind)
    assert first == second
    assert first["levels"][-1] == ("offload", 8)
    assert any("plain" in said for said in first["told"])
    assert first["told"][-1] == "None"


@pytest.mark.parametrize("size", ["auto", 4])
def test_what_fits_nowhere_is_said_on_every_rank(world2: World, size: int | str) -> None:
    first, second = world2.run(run_out, size)
    assert first[0] == "SampleTooLargeError"
    assert second[0] == ("SampleTooLargeError" if size == "auto" else "OutOfMemoryError")
    assert first[2]
    assert second[2]
    if size == 4:
        assert 'microbatch_size="auto"' in first[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_declined_is_declined_by_all(world2: World, kind: str) -> None:
    first, second = world2.run(decline, kind)
    assert first["committed"] == (False, True)
    assert first["clean"]
    assert first["counted"] == 8
    assert first == second


def test_a_remembered_size_is_that_of_rank_0(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(remember, str(tmp_path))
    assert first == second
    assert first[2] == ["0"], "only rank 0 writes"
    assert first[3] == first[1][0] < 256
    assert first[4] == ()


@pytest.mark.parametrize("kind", KINDS)
def test_the_norm_that_is_clipped_is_that_of_the_whole_gradient(world2: World, kind: str) -> None:
    expected = clip(None, [11])
    for found in world2.run(clip, kind, [7, 4]):
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_overflowed_on_one_rank_is_left_out_by_all(
    world2: World, kind: str
) -> None:
    first, second = world2.run(scale, kind)
    assert first == second
    assert first["stepped"] == [True, False, True]
    assert first["scales"] == [1024.0, 512.0, 512.0]


def test_all_ranks_learn_that_one_had_no_memory_to_clip(world2: World) -> None:
    first, second = world2.run(fail_to_clip)
    assert first.startswith("PeerFailedError")
    assert "rank 1: OptimizerStepError: clipping the gradient ran out of memory" in first
    assert second.startswith("OptimizerStepError")


def test_what_lies_on_a_device_whatever_the_size_is_its_own_shards(world2: World) -> None:
    for said, held in world2.run(count_residents):
        assert held <= said < 1.2 * held  # each tensor is rounded up to 512 bytes


FEW, MANY = 64, 8 * 2**20
CONNECTED = {
    "ddp": ["all_reduce SUM of 2", "broadcast SUM of 2"],
    "fsdp": [
        "all_reduce SUM of 2",
        "all_gather SUM of 2",
        "reduce_scatter SUM of 2",
        "reduce_scatter AVG of 2",
    ],
}


@pytest.mark.parametrize("kind", mostly_in_sweeps(KINDS, quick=["ddp"]))
def test_all_communicators_are_connected_once_before_the_first_attempt(
    world2: World, kind: str
) -> None:
    one, other = world2.run(connections, kind, takes_memory=True)
    assert one == other
    assert one["ran"] == [f"{use}: {count}" for use in CONNECTED[kind] for count in (FEW, MANY)]
    assert set(one["before"]) == {len(one["ran"])}, "a forward came first, or one was repeated"
    assert one["share"] == COMMUNICATION_SHARE
    quiet, _ = world2.run(connections, kind, takes_memory=False)
    assert (quiet["ran"], quiet["share"]) == ([], 0.0), "gloo has nothing on a device"
    assert quiet["votes"] == one["votes"]


def test_ranks_that_would_connect_other_things_say_so_and_wait_for_none(world2: World) -> None:
    for found in world2.run(connections, "ddp", takes_memory=True, alone=1):
        assert (
            "first connecting all_reduce of 2, broadcast of 2, all_gather of 2)" in found["failed"]
        )
        assert found["ran"] == []
