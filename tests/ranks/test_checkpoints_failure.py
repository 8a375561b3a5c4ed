"""What goes wrong on one rank of a save: no rank waits, none loses an older checkpoint."""

import random
from pathlib import Path
from typing import Any

import pytest

from automicro.errors import DamagedCheckpointError
from tests.ranks.checkpoint_runs import (
    count_points,
    die_in_save,
    fail_together,
    fill_disk,
    go_on,
    newest,
    raise_in_gather,
)
from tests.ranks.test_checkpoints import assert_same
from tests.ranks.world import World, world_of

pytestmark = pytest.mark.sweep

KINDS = ["ddp", "fsdp"]


def check_full_disk(
    world: World, folder: Path, kind: str, ranks: tuple[int, ...], at: int, **options: Any
) -> bool:
    """Whether the save failed. The one after it did not, and nothing is left behind."""
    results = world.run(fill_disk, folder, kind, ranks, at, **options)
    [(before, after)] = {each["steps"] for each in results}
    is_failed = bool(before == 2)
    assert after == 4
    [names] = {tuple(each["names"]) for each in results}
    assert not [name for name in names if name.startswith(".tmp")]
    for each in results:
        told = [text for text in each["warnings"] if "No space left" in text]
        if is_failed:
            assert len(told) == 1
            assert "older ones are as they were" in told[0]
    if is_failed and ranks == (1,):
        assert "rank 1: No space left" in results[0]["warnings"][0]
    return is_failed


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_on_one_rank_makes_all_keep_the_older_checkpoint(
    world2: World, tmp_path: Path, kind: str
) -> None:
    assert check_full_disk(world2, tmp_path / "second", kind, (1,), 1)
    assert check_full_disk(world2, tmp_path / "first", kind, (0,), 4)
    assert check_full_disk(world2, tmp_path / "both", kind, (0, 1), 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_at_any_point_of_any_rank_costs_no_checkpoint(
    world2: World, tmp_path: Path, kind: str
) -> None:
    counts = world2.run(count_points, tmp_path / "counted", kind)
    failed = 0
    for rank, count in enumerate(counts):
        for at in range(count):
            folder = tmp_path / f"{rank}-{at}"
            failed += check_full_disk(world2, folder, kind, (rank,), at)
    # All but the points that come after the new name is on the disk.
    assert failed >= sum(counts) - 4


def test_a_state_that_one_rank_cannot_gather_ends_all_and_names_it(
    world2: World, tmp_path: Path
) -> None:
    first, second = world2.run(raise_in_gather, tmp_path, "ddp")
    assert first["text"].startswith("CheckpointError: rank 1: ")
    assert second["text"].startswith("CheckpointError: the scheduler is")
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_all_ranks_raise_the_worst_of_what_any_of_them_found(world2: World) -> None:
    full, damaged = OSError(28, "No space left"), DamagedCheckpointError("weights.bin was changed")
    assert world2.run(fail_together, [None, full]) == [
        "OSError: [Errno 28] rank 1: No space left",
        "OSError: [Errno 28] No space left",
    ]
    first, second = world2.run(fail_together, [full, damaged])
    assert first == "DamagedCheckpointError: rank 1: weights.bin was changed"
    assert second == "DamagedCheckpointError: weights.bin was changed"
    first, second = world2.run(fail_together, [KeyError("w"), full])
    assert first == "KeyError: 'w'"
    assert second.startswith("CheckpointError: rank 0: KeyError: 'w'\nAll ranks stop")
    assert world2.run(fail_together, [None, None]) == ["", ""]


def check_death(
    folder: Path, kind: str, rank: int, at: int, expected: list[dict[str, Any]], **options: Any
) -> int:
    """A rank is killed, the other ends, and a new world ends as if nothing had been; from where."""
    with world_of(2) as world:
        world.start(die_in_save, folder, kind, (rank,), at, **options)
        results = world.results()
    assert isinstance(results[rank], EOFError), results[rank]
    assert results[1 - rank]["was"] == "PeerLostError", results[1 - rank]
    with world_of(2) as world:
        found = {step for step, _ in world.run(newest, folder)}
        resumed = world.run(go_on, kind, folder, 4, **options)
    assert len(found) == 1
    assert not list(folder.glob(".tmp*"))
    for here, there in zip(resumed, expected, strict=True):
        assert {here["resumed_at"]} == found
        assert_same(here["end"], there["end"])
        assert_same(here["own"], there["own"])
    return int(found.pop())


@pytest.mark.parametrize(
    ("kind", "rank", "at"),
    [("fsdp", 1, 2), pytest.param("ddp", 0, 14, marks=pytest.mark.slow)],
)
def test_a_rank_killed_in_a_save_costs_nothing_but_that_save(
    world2: World, tmp_path: Path, kind: str, rank: int, at: int
) -> None:
    options = {"noisy": True}
    expected = world2.run(go_on, kind, tmp_path / "whole", 4, **options)
    assert check_death(tmp_path / "killed", kind, rank, at, expected, **options) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_killed_at_any_point_of_a_save_costs_nothing_but_that_save(
    world2: World, tmp_path: Path, kind: str
) -> None:
    options = {"noisy": True}
    expected = world2.run(go_on, kind, tmp_path / "whole", 4, **options)
    counts = world2.run(count_points, tmp_path / "counted", kind, **options)
    points = [(rank, at) for rank, count in enumerate(counts) for at in range(count)]
    found = [
        check_death(tmp_path / f"{rank}-{at}", kind, rank, at, expected, **options)
        for rank, at in random.Random(7).sample(points, 8)
    ]
    assert set(found) <= {2, 3}
