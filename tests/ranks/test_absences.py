"""A rank that is not like the others is named, soon, and keeps nobody waiting."""

from typing import Any

import pytest

from tests.ranks import absences
from tests.ranks.world import World
from tests.sweeps import mostly_in_sweeps


@pytest.mark.parametrize("where", ["fit_with_an_error", "forward_with_an_error"])
@pytest.mark.parametrize("name", absences.ERRORS)
def test_an_error_with_any_text_is_told(world2: World, name: str, where: str) -> None:
    ends = world2.run(getattr(absences, where), name)
    assert [end["kind"] for end in ends] == [
        "PeerFailedError",
        type(absences.ERRORS[name]).__name__,
    ]
    said = {
        "a lone surrogate": r"rank 1: ValueError: cannot decode caf\udce9.jpg",
        "text that raises": "rank 1: UnreadableError: <its text cannot be read>",
        "a long one": "rank 1: ValueError: éééé",
    }
    assert said[name] in ends[0]["text"]


@pytest.mark.parametrize(
    "again", mostly_in_sweeps([False, True], quick=[False]), ids=["first", "again"]
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("Microbatcher", {"batchnorm": "no"}),
        ("Microbatcher", {"precision": "fp16"}),
        ("Trainer", {"max_duration": "no"}),
        ("Trainer", {"max_time": "no"}),
    ],
    ids=str,
)
def test_a_constructor_that_fails_keeps_nobody_waiting(
    world2: World, what: str, options: dict[str, Any], rank: int, again: bool
) -> None:
    ends = world2.run(absences.construct, what, options, rank=rank, again=again)
    failed, other = ends[rank], ends[1 - rank]
    assert failed["kind"] == "ValueError"
    assert other["kind"] == "PeerFailedError"
    assert f"rank {rank}: ValueError: " in other["text"]
    assert [end["then"] for end in ends] == ["", ""], "they go on"
    assert max(end["seconds"] for end in ends) < 20


@pytest.mark.parametrize("change", ["add", "replace", "thaw"])
def test_a_layer_that_comes_into_ddp_later_is_refused(world2: World, change: str) -> None:
    for end in world2.run(absences.change_inside, "ddp", change):
        assert end["kind"] == "ValueError"
        assert "after DistributedDataParallel was put around it" in end["text"]


@pytest.mark.parametrize("change", ["add", "replace"])
def test_a_layer_that_comes_into_a_sharded_model_later_is_refused(
    world2: World, change: str
) -> None:
    for end in world2.run(absences.change_inside, "fsdp", change):
        assert end["kind"] == "ValueError"
        assert "after fully_shard was applied to it" in end["text"]


def test_a_shard_may_be_thawed(world2: World) -> None:
    assert [end["kind"] for end in world2.run(absences.change_inside, "fsdp", "thaw")] == ["", ""]


@pytest.mark.parametrize("size", ["auto", 2, None])
def test_a_healthy_rank_says_on_which_one_a_row_does_not_fit(world2: World, size: Any) -> None:
    ends = world2.run(absences.too_large, size)
    assert ends[0]["kind"] == "SampleTooLargeError"
    assert "rank 1" in ends[0]["text"]


@pytest.mark.parametrize(
    ("order", "options"),
    mostly_in_sweeps(
        ["before", "after", "twice", "in inference"],
        [{}, {"find_unused_parameters": True}],
        quick=[("before", {}), ("twice", {"find_unused_parameters": True})],
    ),
    ids=str,
)
def test_a_forward_without_gradients_beside_one_with_them(
    world2: World, order: str, options: dict[str, Any]
) -> None:
    for size in (4, 2, 1):
        assert max(world2.run(absences.without_gradients, order, options, size)) < 1e-6


@pytest.mark.parametrize(
    "sizes",
    mostly_in_sweeps(
        [[2, 2, 1], [1, 2, 2], [1, 1, 1], [3, 3, 3], [2, 2, 2]], quick=[[1, 2, 2], [3, 3, 3]]
    ),
    ids=str,
)
def test_nodes_of_any_sizes_meet(world3: World, sizes: list[int]) -> None:
    assert world3.run(absences.on_nodes, sizes) == [12] * 3


def test_evaluating_on_one_rank_alone_is_named(world2: World) -> None:
    for end in world2.run(absences.evaluate_alone):
        assert end["kind"] == "DesyncError"
        assert "beginning to evaluate a batch" in end["text"]
        assert "beginning to train on a batch" in end["text"]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_between_agreement_and_attempt_keeps_nobody_waiting(
    world2: World, rank: int
) -> None:
    ends = world2.run(absences.fail_after_agreement, rank)
    assert ends[rank]["kind"] == "ValueError"
    assert ends[1 - rank]["kind"] == "PeerFailedError"
    assert f"rank {rank}: ValueError: no unit" in ends[1 - rank]["text"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_keeps_outputs_and_state_of_its_own_rows(world2: World, kind: str) -> None:
    first, second = world2.run(absences.carried_and_kept, kind)
    assert [(rows, carried) for rows, _, carried in first] == [(5, 5)] * 3
    assert [(rows, carried) for rows, _, carried in second] == [(3, 3)] * 2
    assert max(difference for _, difference, _ in [*first, *second]) < 1e-12
