"""Ranks with batches of different rows and tokens train as one process on all of them."""

import pytest

from tests.ranks.uneven import (
    LOSSES,
    count_through_fillers,
    run_until_all_have_ended,
    train_on_words,
    warnings_of_buffers,
)
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps

ROWS = {2: [[9, 4], [3, 10], [13, 0]], 4: [[5, 1, 4, 3], [6, 0, 0, 7]]}


def require_same(
    world: World, kind: str, loss: str, rows: list[int], *, parts: int = 1, earlier: bool = False
) -> None:
    expected = train_on_words(None, loss, [sum(rows)], 1, earlier)
    for found in world.run(train_on_words, kind, loss, rows, parts, earlier):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-9


@pytest.mark.parametrize(
    ("kind", "loss"),
    mostly_in_sweeps(
        ["ddp", "fsdp"], LOSSES, quick=[("fsdp", "tokens"), *(("ddp", each) for each in LOSSES)]
    ),
)
def test_gradients_and_losses_are_those_of_one_process(world2: World, kind: str, loss: str) -> None:
    for rows in ROWS[2]:
        require_same(world2, kind, loss, rows)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_several_batches_count_as_one_on_every_rank(world2: World, kind: str) -> None:
    require_same(world2, kind, "tokens", [9, 4], parts=3)
    require_same(world2, kind, "tokens", [4, 1], parts=3)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_are_added_to_earlier_ones(world2: World, kind: str) -> None:
    require_same(world2, kind, "tokens", [9, 4], earlier=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_of_four_ranks_are_those_of_one_process(
    world4: World, kind: str, loss: str
) -> None:
    for rows in ROWS[4]:
        require_same(world4, kind, loss, rows)


def test_fillers_leave_no_trace(world2: World) -> None:
    first, second = world2.run(count_through_fillers, [12, 3])
    assert (first["seen"], second["seen"]) == (24, 3)
    assert (first["counted"], second["counted"]) == (36, 6)
    assert first["drew"]
    assert not second["drew"], "of the last step it ran nothing but fillers"
    assert first["samples"] == (12, 12)
    assert second["samples"] == (0, 12)
    assert first["gradient"] == second["gradient"]


def test_fillers_do_not_look_like_forwards_that_change_buffers(world2: World) -> None:
    unchanged, changed = (world2.run(warnings_of_buffers, changes) for changes in (False, True))
    assert unchanged == [[], []]
    assert all("the training forward changes buffers" in each for told in changed for each in told)
    assert changed[0]


def test_ranks_go_on_until_the_data_of_all_have_ended(world2: World) -> None:
    first, second = world2.run(run_until_all_have_ended, 5)
    assert first == [(5, 10, False), (5, 5, True), (5, 5, False), (0, 0, False), (4, 4, False)]
    assert second == [(5, 10, False), (0, 5, True), (0, 5, False), (0, 0, False), (0, 4, True)]
