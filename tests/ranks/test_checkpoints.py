"""Checkpoints of several ranks: each rank writes its part; other world sizes can resume.

A failure on one rank during a save blocks no rank and loses no older checkpoint.
"""

import random
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
    written: dict[str, dict[str, list[str]]] = {}
    for kind in KINDS:
        world2.run(resume_run, kind, tmp_path / kind, 1)
        [path] = (tmp_path / kind).iterdir()
        tables = {"manifest.json", "tensors.pt", ".metadata", "state.pt", "state-of-rank-1.pt"}
        data = {"__0_0.distcp", "__1_0.distcp"}
        assert {each.name for each in path.iterdir()} == tables | data
        table = torch.load(path / "tensors.pt", weights_only=False)  # this test wrote it
        written[kind] = {index.fqn: [] for index in table.storage_data}
        for index, place in table.storage_data.items():
            written[kind][index.fqn].append(place.relative_path)
    first, second = "__0_0.distcp", "__1_0.distcp"
    for name in ("modules.0.first.weight", "optimizer.state.first.weight.exp_avg"):
        assert written["ddp"][name] == [first]
        assert written["fsdp"][name] == [first, second]
    for kind in KINDS:
        of_second = [name for name, files in written[kind].items() if files == [second]]
        assert "rank-1.rng.torch" in of_second
        assert all(name.startswith("rank-1.") for name in of_second)


def check_chain(worlds: list[tuple[str, World | None]], folder: Path) -> None:
    """Each world trains for one epoch, from the end of the previous world."""
    expected = alone(folder / "whole", 3 * len(worlds), averages=True)["end"]
    before: dict[str, Tensor] = {}
    for index, (kind, world) in enumerate(worlds):
        run = alone if world is None else world.run
        arguments: Any = (folder / "chain", 3 * (index + 1))
        arguments = arguments if world is None else (resume_run, kind, *arguments)
        results: Any = run(*arguments, averages=True)
        results = [results] if world is None else results
        for each in results:
            assert each["resumed_at"] == 3 * index
            assert each["warnings"] == []
            if before:
                loaded = each["after_resume"]
                assert [n for n in loaded if not torch.equal(loaded[n], before[n])] == []
                line = f"and resumed by {len(results)} rank"
                assert any(line in text for text in each["lines"])
            assert_same(each["end"], results[0]["end"])
        before = results[0]["end"]
    assert before.keys() == expected.keys()
    for name, value in before.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)


def test_other_world_sizes_and_wrappers_can_resume(
    world2: World, world3: World, tmp_path: Path
) -> None:
    kinds = [("fsdp", world3), ("ddp", world2), ("plain", None), ("fsdp", world2), ("ddp", world3)]
    check_chain(kinds, tmp_path)


@pytest.mark.slow
def test_four_ranks_resume_on_one_and_three_ranks(
    world2: World, world3: World, world4: World, tmp_path: Path
) -> None:
    kinds = [("hsdp", world4), ("fsdp", world2), ("plain", None), ("fsdp", world3)]
    check_chain([*kinds, ("fsdp", world4), ("ddp", world2), ("hsdp", world4)], tmp_path)


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


@pytest.mark.parametrize("kind", KINDS)
def test_full_disk_on_one_rank_keeps_older_checkpoint(
    world2: World, tmp_path: Path, kind: str
) -> None:
    assert check_full_disk(world2, tmp_path / "second", kind, (1,), 1)
    assert check_full_disk(world2, tmp_path / "first", kind, (0,), 4)
    assert check_full_disk(world2, tmp_path / "both", kind, (0, 1), 2)


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


def check_death(folder: Path, kind: str, rank: int, at: int, expected: list[dict[str, Any]]) -> int:
    """Kill a rank and let a new world finish as an undisturbed one; return where it resumed."""
    with world_of(2) as world:
        world.start(die_in_save, folder, kind, rank, at, **NOISY)
        results = world.results()
    assert isinstance(results[rank], EOFError), results[rank]
    assert results[1 - rank]["was"] == "PeerLostError", results[1 - rank]
    with world_of(2) as world:
        [found] = {step for step, _ in world.run(newest, folder)}
        resumed = world.run(resume_run, kind, folder, 4, **NOISY)
    assert not list(folder.glob(".tmp*"))
    for here, there in zip(resumed, expected, strict=True):
        assert here["resumed_at"] == found
        assert_same(here["end"], there["end"])
        assert_same(here["own"], there["own"])
    return int(found)


@pytest.mark.parametrize(
    ("kind", "rank", "at"),
    [("fsdp", 1, 2), pytest.param("ddp", 0, 14, marks=pytest.mark.slow)],
)
def test_rank_killed_in_save_loses_only_that_save(
    world2: World, tmp_path: Path, kind: str, rank: int, at: int
) -> None:
    expected = world2.run(resume_run, kind, tmp_path / "whole", 4, **NOISY)
    assert check_death(tmp_path / "killed", kind, rank, at, expected) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_rank_killed_at_any_point_loses_only_that_save(
    world2: World, tmp_path: Path, kind: str
) -> None:
    expected = world2.run(resume_run, kind, tmp_path / "whole", 4, **NOISY)
    counts = world2.run(count_points, tmp_path / "counted", kind, **NOISY)
    points = [(rank, at) for rank, count in enumerate(counts) for at in range(count)]
    found = [
        check_death(tmp_path / f"{rank}-{at}", kind, rank, at, expected)
        for rank, at in random.Random(7).sample(points, 8)
    ]
    assert set(found) <= {2, 3}
