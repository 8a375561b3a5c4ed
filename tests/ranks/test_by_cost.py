"""Ranks whose rows vary in length train as one process on all of them, whatever each rank has."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.ranks import by_cost
from tests.ranks.by_cost import Lengths
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps

LONG, SHORT = [9, 3, 17, 5, 5, 12, 2, 8], [4, 2, 3, 6, 1]
CASES: dict[str, list[Lengths]] = {
    "rows and lengths": [[LONG], [SHORT]],
    "no rows on one rank": [[LONG], [[]]],
    "no padding on one rank": [[[6, 6, 6]], [LONG]],
    "several batches": [[LONG, SHORT, [11]], [[2], [7, 30], SHORT]],
    "fewer batches on one rank": [[LONG, SHORT], [[13, 1]]],
    "one row each": [[[5]], [[14]]],
}
KINDS = ["ddp", "fsdp"]


def require_same(world: World, kind: str, ranks: Sequence[Lengths], **options: Any) -> list[Any]:
    padded, sees = options.get("padded"), options.get("sees_padding", False)
    whole = by_cost.expected(ranks, padded=padded, sees_padding=sees)
    found: list[Any] = world.run(by_cost.train, kind, ranks, **options)
    for rank in found:
        assert len(rank["found"]) == len(whole)
        for one, other in zip(rank["found"], whole, strict=True):
            assert float((one - other).abs().max()) <= 1e-9
    assert len({rank["num_microbatches"] for rank in found}) == 1
    assert len({rank["size"] for rank in found}) == 1
    own = [sum(map(len, batches)) for batches in ranks]
    assert [rank["rows"] for rank in found] == [(each, sum(own)) for each in own]
    return found


@pytest.mark.parametrize(
    ("kind", "case"),
    mostly_in_sweeps(
        KINDS, CASES, quick=[("ddp", "several batches"), ("fsdp", "no rows on one rank")]
    ),
)
def test_gradients_are_those_of_all_rows_at_once(world2: World, kind: str, case: str) -> None:
    # Under FSDP no rank can look by itself whether padding may be cut.
    declared: bool | str = True if kind == "fsdp" else "auto"
    for size in (24, 500, None, "auto"):
        found = require_same(world2, kind, CASES[case], size=size, declared=declared, steps=2)
        assert not any(rank["warned"] for rank in found)


@pytest.mark.parametrize(
    ("kind", "fits"),
    mostly_in_sweeps(
        KINDS, [(20, None), (None, 12), (18, 12)], quick=[("ddp", (None, 12)), ("fsdp", (18, 12))]
    ),
)
def test_one_rank_out_of_memory_lets_all_take_less(
    world2: World, kind: str, fits: tuple[int | None, int | None]
) -> None:
    ranks = [[LONG], [[*SHORT, 7, 12]]]
    declared: bool | str = True if kind == "fsdp" else "auto"
    found = require_same(world2, kind, ranks, size="auto", declared=declared, fits=fits, steps=3)
    [ooms] = {rank["ooms"] for rank in found}
    assert ooms >= 1
    for rank, limit in zip(found, fits, strict=True):
        assert limit is None or all(rows * length <= limit for rows, length in rank["ran"])


def test_a_rank_that_sees_padding_decides_for_all(world2: World) -> None:
    """The other one has nothing padded, and would cut from its second batch on."""
    ranks: list[Lengths] = [[[6, 6, 6]], [LONG]]
    first, second = require_same(world2, "ddp", ranks, sees_padding=True, steps=2)
    assert not first["warned"]
    [message] = second["warned"]
    assert "computes something else without padding" in message
    assert {length for _, length in second["ran"]} == {17}


def test_where_no_rank_can_look_padding_stays_and_is_named(world2: World) -> None:
    ranks: list[Lengths] = [[LONG], [SHORT]]
    found = require_same(world2, "fsdp", ranks, padded=20, steps=2)
    for rank in found:
        assert {length for _, length in rank["ran"]} == {20}
        [message] = rank["warned"]
        assert "communicates with other ranks" in message
        assert "cut_padding=True" in message
    found = require_same(world2, "fsdp", ranks, padded=20, declared=True)
    assert not any(rank["warned"] for rank in found)
    assert all(length < 20 for rank in found for _, length in rank["ran"])


@pytest.mark.parametrize(
    ("kind", "size"), mostly_in_sweeps(KINDS, [20, "auto"], quick=[("ddp", "auto"), ("fsdp", 20)])
)
def test_evaluations_and_predictions_keep_the_order_of_rows(
    world2: World, kind: str, size: Any
) -> None:
    cases: list[list[Lengths]] = [[[LONG], [SHORT]], [[LONG], [[]]], [[[6, 6, 6]], [LONG]]]
    for ranks in cases:
        for own, rank in zip(ranks, world2.run(by_cost.evaluate, kind, ranks, size), strict=True):
            if own == [[]]:
                assert rank["loss"] is None
                continue
            whole = by_cost.expected([own])[0]
            assert float((rank["loss"] - whole).abs()) <= 1e-9
            assert rank["worst"] <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_cannot_be_sorted_on_one_rank_ends_the_step_of_all(
    world2: World, kind: str
) -> None:
    first, second = world2.run(by_cost.fail, kind)
    assert second[0] == "BatchError"
    assert "'x_lengths' looks like the lengths" in second[1]
    assert first[0] == "PeerFailedError"
    assert "x_lengths" in first[1]
