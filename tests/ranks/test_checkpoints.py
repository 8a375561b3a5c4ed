"""Checkpoints of several ranks: each rank writes its part; other world sizes can resume.

A failure on one rank during a save blocks no rank and loses no older checkpoint.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from automicro.checkpoints.reading import load_checkpoint
from automicro.errors import DamagedCheckpointError
from tests.ranks.checkpoint_runs import (
    count_points,
    die_in_save,
    error_of,
    fail_together,
    fill_disk,
    newest,
    raise_in_gather,
    resume_run,
)
from tests.ranks.world import World, world_of

pytestmark = pytest.mark.sweep

KINDS = ["ddp", "fsdp"]
NOISY = {"noisy": True}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def alone(folder: Path, until: int, **options: Any) -> dict[str, Any]:
    state = torch.get_rng_state()
    try:
        return resume_run("plain", folder, until, **options)
    finally:
        torch.set_rng_state(state)


@pytest.mark.parametrize("kind", KINDS)
def test_same_world_resumes_bit_for_bit(world2: World, tmp_path: Path, kind: str) -> None:
    options = {"noisy": True, "averages": kind == "ddp"}
    expected = world2.run(resume_run, kind, tmp_path / "whole", 7, **options)
    world2.run(resume_run, kind, tmp_path / "cut", 4, **options)
    resumed = world2.run(resume_run, kind, tmp_path / "cut", 7, **options)
    for here, there in zip(resumed, expected, strict=True):
        assert here["resumed_at"] == 4
        assert here["warnings"] == []
        assert_same(here["end"], there["end"])
        assert_same(here["own"], there["own"])
    # Each rank has its own random numbers and statistics.
    mine, others = (each["own"] for each in resumed)
    assert not torch.equal(mine["rng"], others["rng"])
    assert not torch.equal(mine["norm.running_mean"], others["norm.running_mean"])


def test_ranks_divide_writing_between_them(world2: World, tmp_path: Path) -> None:
    both = ["__0_0.distcp", "__1_0.distcp"]
    for kind in KINDS:
        world2.run(resume_run, kind, tmp_path / kind, 1)
        [path] = (tmp_path / kind).iterdir()
        tables = {"manifest.json", "tensors.pt", ".metadata", "state.pt", "state-of-rank-1.pt"}
        assert {each.name for each in path.iterdir()} == tables | {*both}
        table = torch.load(path / "tensors.pt", weights_only=False)  # this test wrote it
        written: dict[str, list[str]] = {index.fqn: [] for index in table.storage_data}
        for index, place in table.storage_data.items():
            written[index.fqn].append(place.relative_path)
        for name in ("modules.0.first.weight", "optimizer.state.first.weight.exp_avg"):
            assert written[name] == (both[:1] if kind == "ddp" else both)
        of_second = [name for name, files in written.items() if files == both[1:]]
        assert "rank-1.rng.torch" in of_second
        assert all(name.startswith("rank-1.") for name in of_second)


@pytest.mark.parametrize(
    "kinds",
    [
        [("fsdp", 3), ("ddp", 2), ("plain", 1), ("fsdp", 2), ("ddp", 3)],
        pytest.param(
            [("hsdp", 4), ("fsdp", 2), ("plain", 1), ("fsdp", 3), ("fsdp", 4), ("hsdp", 4)],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_world_sizes_and_wrappers_can_resume(
    worlds: Callable[[int], World], tmp_path: Path, kinds: list[tuple[str, int]]
) -> None:
    """Each world trains for one epoch, from the end of the previous world."""
    expected = alone(tmp_path / "whole", 3 * len(kinds), averages=True)["end"]
    before: dict[str, Tensor] = {}
    for index, (kind, size) in enumerate(kinds):
        given: Any = (tmp_path / "chain", 3 * (index + 1))
        if size == 1:
            results = [alone(*given, averages=True)]
        else:
            results = worlds(size).run(resume_run, kind, *given, averages=True)
        for each in results:
            assert each["resumed_at"] == 3 * index
            assert each["warnings"] == []
            if before:
                assert_same(each["after_resume"], {n: before[n] for n in each["after_resume"]})
                assert any(f"and resumed by {size} rank" in text for text in each["lines"])
            assert_same(each["end"], results[0]["end"])
        before = results[0]["end"]
    assert before.keys() == expected.keys()
    for name, value in before.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def test_larger_world_draws_distinct_random_numbers_per_rank(
    world2: World, world3: World, tmp_path: Path
) -> None:
    world2.run(resume_run, "ddp", tmp_path, 3)
    states = [each["own"]["rng"] for each in world3.run(resume_run, "ddp", tmp_path, 6)]
    assert len({bytes(state.tolist()) for state in states}) == 3


def test_damaged_file_makes_all_ranks_load_previous_checkpoint(
    world2: World, tmp_path: Path
) -> None:
    for kind in KINDS:
        folder = tmp_path / kind
        world2.run(resume_run, kind, folder, 3)
        for file in sorted(max(folder.iterdir()).iterdir()):
            whole = file.read_bytes()
            content = bytearray(whole)
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
            found = world2.run(newest, folder)
            file.write_bytes(whole)
            assert [step for step, _ in found] == [2, 2], file.name
            assert file.name in found[0][1][0]
            assert found[1][1] == []
        assert [step for step, _ in world2.run(newest, folder)] == [3, 3]


def test_all_ranks_raise_without_intact_checkpoint(world2: World, tmp_path: Path) -> None:
    world2.run(resume_run, "ddp", tmp_path, 1)
    (next(tmp_path.iterdir()) / "state-of-rank-1.pt").unlink()
    for error in world2.run(error_of, "ddp", tmp_path, 2):
        assert "all 1 checkpoints" in error
        assert "state-of-rank-1.pt" in error


def test_one_process_reads_weights_of_all_ranks(world2: World, tmp_path: Path) -> None:
    end = world2.run(resume_run, "fsdp", tmp_path, 2)[0]["end"]
    weights = load_checkpoint(tmp_path).state["modules"][0]
    assert_same(dict(weights), {name: end[name] for name in weights})


# Full disks


def check_full_disk(world: World, folder: Path, kind: str, ranks: tuple[int, ...], at: int) -> bool:
    """Return whether the save failed. The next one must succeed and leave no temporary files."""
    results = world.run(fill_disk, folder, kind, ranks, at)
    [(before, after)] = {each["steps"] for each in results}
    is_failed = bool(before == 2)
    assert after == 4
    [names] = {tuple(each["names"]) for each in results}
    assert not [name for name in names if name.startswith(".tmp")]
    for each in results:
        told = [text for text in each["warnings"] if "No space left" in text]
        if is_failed:
            assert len(told) == 1
            assert "older ones are unchanged" in told[0]
    if is_failed and ranks == (1,):
        assert "rank 1: No space left" in results[0]["warnings"][0]
    return is_failed


def test_full_disk_on_one_rank_keeps_older_checkpoint(world2: World, tmp_path: Path) -> None:
    for kind, ranks, at in (("fsdp", (1,), 1), ("ddp", (0,), 4), ("ddp", (0, 1), 2)):
        assert check_full_disk(world2, tmp_path / f"{ranks}", kind, ranks, at)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_full_disk_at_any_point_loses_no_checkpoint(
    world2: World, tmp_path: Path, kind: str
) -> None:
    counts = world2.run(count_points, tmp_path / "counted", kind)
    failed = 0
    for rank, count in enumerate(counts):
        for at in range(count):
            failed += check_full_disk(world2, tmp_path / f"{rank}-{at}", kind, (rank,), at)
    # All points fail the save, except those after the new name is on disk.
    assert failed >= sum(counts) - 4


def test_failed_gather_on_one_rank_is_named_on_all(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(raise_in_gather, tmp_path, "ddp")
    assert first.startswith("CheckpointError: rank 1: ")
    assert second.startswith("CheckpointError: the scheduler is")
    assert not tmp_path.exists() or not list(tmp_path.iterdir())


def test_all_ranks_raise_worst_error_of_any_rank(world2: World) -> None:
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


# Killed ranks


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("fsdp", [(1, 2)]),
        pytest.param("fsdp", None, marks=pytest.mark.slow),
        pytest.param("ddp", None, marks=pytest.mark.slow),
    ],
)
def test_rank_killed_in_save_loses_only_that_save(
    world2: World, tmp_path: Path, kind: str, points: list[tuple[int, int]] | None
) -> None:
    """A new world finishes as an undisturbed one."""
    expected = world2.run(resume_run, kind, tmp_path / "whole", 4, **NOISY)
    if points is None:
        counts = world2.run(count_points, tmp_path / "counted", kind, **NOISY)
        every = [(rank, at) for rank, count in enumerate(counts) for at in range(count)]
        points = random.Random(7).sample(every, 8)
    for rank, at in points:
        folder = tmp_path / f"{rank}-{at}"
        with world_of(2) as world:
            world.start(die_in_save, folder, kind, rank, at, **NOISY)
            results = world.results()
        assert isinstance(results[rank], EOFError), results[rank]
        assert results[1 - rank]["was"] == "PeerLostError", results[1 - rank]
        with world_of(2) as world:
            [found] = {step for step, _ in world.run(newest, folder)}
            resumed = world.run(resume_run, kind, folder, 4, **NOISY)
        assert found in (2, 3)
        assert not list(folder.glob(".tmp*"))
        for here, there in zip(resumed, expected, strict=True):
            assert here["resumed_at"] == found
            assert_same(here["end"], there["end"])
            assert_same(here["own"], there["own"])
