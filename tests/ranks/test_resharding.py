"""Runs that go on within an epoch at another number of ranks, also right before its last batch."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from automicro import CheckpointError
from tests.ranks import resharding_runs as runs
from tests.ranks.test_trainer import differ
from tests.ranks.world import RaisedError, World, world_of
from tests.ranks.wrapping import furthest

pytestmark = pytest.mark.sweep

ROWS = 3 * runs.PER_BATCH + 1  # one row in the last batch
KINDS = ["ddp", "fsdp"]


def merged(results: list[dict[str, Any]]) -> dict[int, list[int]]:
    """The rows of all ranks, by the number of the batch."""
    batches = {batch for result in results for batch in result["rows"]}
    return {
        batch: sorted(row for result in results for row in result["rows"].get(batch, []))
        for batch in sorted(batches)
    }


def check_chain(worlds: list[World], folder: Path, sampler: str, **options: Any) -> None:
    """Each world trains on one batch more than the one before, and the last until the end."""
    rows = options.pop("rows", ROWS)
    expected = worlds[0].run(runs.train_on, None, "2ep", rows, sampler, **options)
    seen: dict[int, list[int]] = {}
    losses: dict[int, float] = {}
    for number, world in enumerate(worlds, start=1):
        until = "2ep" if number == len(worlds) else f"{number}ba"
        results = world.run(runs.train_on, folder, until, rows, sampler, **options)
        assert not seen.keys() & merged(results).keys()
        seen |= merged(results)
        losses |= results[0]["losses"]
    assert seen == merged(expected)
    assert losses == pytest.approx(expected[0]["losses"], abs=1e-9)
    assert differ(results, expected[0]) < 1e-9
    for result in results:
        assert result["metrics"] == pytest.approx(expected[0]["metrics"], abs=1e-6)
        assert result["state"] == expected[0]["state"]


@pytest.mark.parametrize(
    ("kind", "sampler"), [("ddp", "shuffled"), ("fsdp", "shuffled by a generator")]
)
def test_each_row_is_trained_on_once_whatever_the_number_of_ranks(
    world2: World, world3: World, tmp_path: Path, kind: str, sampler: str
) -> None:
    # The last world goes on right before the batch of one row.
    check_chain([world2, world3, world2, world3], tmp_path, sampler, parallel=kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", runs.SAMPLERS)
def test_from_and_to_one_rank_and_four(
    world1: World,
    world2: World,
    world3: World,
    world4: World,
    tmp_path: Path,
    kind: str,
    sampler: str,
) -> None:
    # Three rows in the last batch: all but one of four ranks have one.
    options = {"rows": 5 * runs.PER_BATCH + 3, "parallel": kind}
    worlds = [world4, world1, world3, world2, world4, world3]
    check_chain(worlds, tmp_path / "all", sampler, **options)
    worlds = [world1, world4, world2]
    check_chain(worlds, tmp_path / "dropped", sampler, drop_last=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_several_batches_that_count_as_one_are_those_that_they_were(
    world2: World, world3: World, tmp_path: Path, kind: str
) -> None:
    options = {"rows": 7 * runs.PER_BATCH + 1, "accumulate_batches": 2, "parallel": kind}
    check_chain([world2, world3, world2, world3], tmp_path, "shuffled", **options)


@pytest.mark.parametrize(
    ("kind", "mode"), [("ddp", "duration"), ("fsdp", "fixed"), ("ddp", "1D-bucketing-dyn")]
)
def test_batches_by_length_are_those_that_they_were(
    world1: World, world2: World, tmp_path: Path, kind: str, mode: str
) -> None:
    # Buckets are dealt to as many ranks as began the epoch.
    is_dealt = mode == "1D-bucketing-dyn"
    worlds = [world2, world1] if is_dealt else [world2, world1, world2, world1]
    last = "1ep" if is_dealt else "2ep"
    expected = worlds[0].run(runs.train_planned, None, "2ep", mode, parallel=kind)
    seen: dict[int, list[int]] = {}
    for number, world in enumerate(worlds, start=1):
        until = last if number == len(worlds) else f"{number}ba"
        results = world.run(runs.train_planned, tmp_path, until, mode, parallel=kind)
        seen |= merged(results)
    first = {batch: rows for batch, rows in merged(expected).items() if batch in seen}
    assert seen == first
    rows = sorted(itertools.chain.from_iterable(seen.values()))
    assert rows == sorted(list(range(61)) * (1 + (last == "2ep")))
    if last == "2ep":
        assert differ(results, expected[0]) < 1e-9
        assert results[0]["state"] == expected[0]["state"]


def test_other_optimization_batches_by_length_are_refused(
    world2: World, world3: World, tmp_path: Path
) -> None:
    world2.run(runs.train_planned, tmp_path, "1ba", "duration")
    arguments = (runs.train_planned, tmp_path, "2ep", "duration")
    for _, error in world3.ends(*arguments, accumulate_batches=1):
        assert "made of 2 batches of train_dataloader (ranks × accumulate_batches)" in error
        assert "2 are not a multiple of 3 ranks" in error


def test_another_batch_over_all_ranks_is_refused_and_nothing_is_changed(
    world2: World, world3: World, tmp_path: Path
) -> None:
    options = {"parallel": "ddp"}
    world2.run(runs.train_on, tmp_path, "1ba", ROWS, "shuffled", **options)
    arguments = (runs.train_on, tmp_path, "2ep", ROWS, "shuffled")
    for kind, error in world3.ends(*arguments, per_batch=18, **options):
        assert kind == "CheckpointError"
        assert error.startswith("2 ranks saved it after 1 batches")
        assert "entries_per_step=12 (here 18); pass the same data" in error
        assert "go on with 2 ranks, or from a checkpoint of the end of an epoch" in error
    results = world3.run(runs.train_on, tmp_path, "2ep", ROWS, "shuffled", **options)
    assert results[0]["state"] == (8, 2, 2 * ROWS)


def test_one_process_that_draws_an_order_of_its_own_is_refused(
    world2: World, tmp_path: Path
) -> None:
    state = torch.get_rng_state()
    here = {"parallel": None, "seed": None}
    world2.run(runs.train_on, tmp_path / "two", "1ba", ROWS, "shuffled")
    with pytest.raises(CheckpointError, match="pass parallel='ddp' in one process, too"):
        runs.train_on(tmp_path / "two", "2ep", ROWS, "shuffled", **here)
    runs.train_on(tmp_path / "one", "1ba", ROWS, "shuffled", **here)
    torch.set_rng_state(state)
    for _, error in world2.ends(runs.train_on, tmp_path / "one", "2ep", ROWS, "shuffled"):
        assert "pass parallel='ddp' in one process, too" in error


def test_whole_batches_of_the_caller_are_refused(
    world2: World, world3: World, tmp_path: Path
) -> None:
    world2.run(runs.train_batch_sampled, tmp_path, "1ba")
    for _, error in world3.ends(runs.train_batch_sampled, tmp_path, "2ep"):
        assert "let the DataLoader cut batches of " in error


# Fewer rows than ranks before a rank has had any


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_row_is_trained_on_by_two_ranks(world2: World, kind: str) -> None:
    metrics = ("accuracy", "logits")
    arguments: Any = (None, "2ep", 1, "in order")
    first, second = world2.run(runs.train_on, *arguments, parallel=kind, metrics=metrics)
    assert (first["rows"], second["rows"]) == ({0: [0], 1: [0]}, {})
    alone = runs.train_on(*arguments, parallel=None, seed=None, metrics=metrics)
    for result in (first, second):
        assert result["losses"] == pytest.approx(alone["losses"], abs=1e-9)
        assert result["metrics"] == pytest.approx(alone["metrics"], abs=1e-6)
        assert result["state"] == (2, 2, 2)
    assert differ([first, second], alone) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_row_is_evaluated_by_two_ranks(world2: World, kind: str) -> None:
    first, second = world2.run(runs.evaluate_few, 1, kind)
    assert first == second
    assert first["loss"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [[5, 0], [0, 5]])
def test_rows_are_lent_once_and_cost_settled_steps_nothing(
    world2: World, kind: str, rows: list[int]
) -> None:
    results = world2.run(runs.step_on, kind, rows, limit="64MiB")
    [_, settled] = world2.run(runs.step_on, kind, [3, 2], limit="64MiB")[0][0]
    _, expected = runs.step_on("plain", [5])
    for votes, gradients in results:
        assert votes[1] == settled
        assert furthest(gradients, expected) < 1e-9


def test_rows_that_cannot_be_sent_end_all_ranks_with_the_reason() -> None:
    with world_of(2) as world:
        world.start(runs.step_on, "ddp", [0, 5], sendable=False)
        other, owner = world.results()
    assert isinstance(other, RaisedError)
    assert isinstance(owner, RaisedError)
    assert (other.kind, owner.kind) == ("PeerFailedError", "BatchError")
    assert "another rank has no rows, and those of rank 1" in owner.text
    assert "stays here" in other.text
