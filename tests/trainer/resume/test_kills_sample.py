"""A sample of the kills in `make torture-resume`, and checks that they would find mistakes."""

from pathlib import Path

import pytest
import torch

from tests.processes import KILLED
from tests.trainer.resume.lives import live, warm_up
from tests.trainer.resume.subjects import Subject
from tests.trainer.resume.trials import assert_same, check_logs, kill_and_resume

pytestmark = pytest.mark.sweep

# The first kill of each run has this kind, and some runs are killed again.
SAMPLE = {
    101: "write",
    102: "fsync",
    103: "rename",
    104: "optimizer step",
    105: "batch end",
    106: "line logged",
    107: "folder removed",
    108: "evaluation",
}
FEWEST_KILLS = 10


def test_killed_run_ends_like_undisturbed_run(tmp_path: Path) -> None:
    warm_up()
    kills = [
        kill
        for seed, kind in SAMPLE.items()
        for kill in kill_and_resume(seed, tmp_path / str(seed), first_kind=kind)
    ]
    assert len(kills) >= FEWEST_KILLS
    assert len({kill.kind for kill in kills}) >= len(SAMPLE)


def test_comparison_detects_one_changed_bit() -> None:
    one = {"a": [torch.tensor([0.0]), 1.0]}
    assert_same(one, {"a": [torch.tensor([0.0]), 1.0]})
    for other in ({"a": [torch.tensor([-0.0]), 1.0]}, {"a": [torch.tensor([0.0]), 1.0 + 2e-16]}):
        with pytest.raises(AssertionError, match=r"\.a\."):
            assert_same(one, other)


def test_run_that_forgets_random_state_is_detected(tmp_path: Path, mocker) -> None:
    mocker.patch("automicro.trainer.fit.restore_rng_state")
    mocker.patch("tests.trainer.resume.trials.draw", return_value=Subject(seed=5))
    with pytest.raises(AssertionError, match=r"\.|row"):
        kill_and_resume(5, tmp_path, first_kind="batch end")


# Each of these runs once differed from the undisturbed run.
FOUND = {
    # The last group of batches is smaller, so the loader ends before this group is trained.
    "end of stream": (
        Subject(seed=1, loader="stream", num_rows=70, accumulate_batches=3, interval="1ba"),
        ("batch start", 2),
    ),
    # The last batch is saved, but the end of the epoch is not logged yet.
    "end of epoch": (
        Subject(seed=2, num_rows=48, interval="3ba"),
        ("epoch start or end", 1),
    ),
    # A callback asked to stop, and the kill comes after the last checkpoint.
    "stopped by a callback": (Subject(seed=3, num_rows=160, stops_early=True), ("fit end", 0)),
    # Counts of an evaluation need memory that the training after it then lacks.
    "small device": (
        Subject(
            seed=4,
            num_rows=70,
            accumulate_batches=2,
            interval="3ba",
            memory_limit="60KiB",
            optimizer="SGD",
        ),
        ("batch start", 3),
    ),
}


@pytest.mark.parametrize("found", FOUND)
def test_earlier_failures_stay_fixed(tmp_path: Path, found: str) -> None:
    warm_up()
    subject, at = FOUND[found]
    undisturbed = live(subject, tmp_path / "undisturbed", name="only")
    assert live(subject, tmp_path / "killed", name="first", at=at).exit_code == KILLED
    assert_same(live(subject, tmp_path / "killed", name="second").ending, undisturbed.ending)
    check_logs(subject, tmp_path / "killed", tmp_path / "undisturbed")


# Before the first batch fits, the part has to shrink and the level has to rise.
SMALLER = Subject(
    seed=5,
    num_rows=64,
    max_duration="6ba",
    interval="1ba",
    optimizer="SGD",
    memory_limit="372KiB",
    when_too_large=("recompute", "offload"),
    nested=True,
)


@pytest.mark.parametrize("at", [("batch start", 1), ("optimizer step", 2), ("batch end", 3)])
def test_levels_and_nested_sizes_are_restored(tmp_path: Path, at: tuple[str, int]) -> None:
    warm_up()
    undisturbed = live(SMALLER, tmp_path / "undisturbed", name="only")
    assert live(SMALLER, tmp_path / "killed", name="first", at=at).exit_code == KILLED
    assert_same(live(SMALLER, tmp_path / "killed", name="second").ending, undisturbed.ending)
    parts = str(undisturbed.ending["parts"])
    assert "'level': 'recompute'" in parts
    assert "'nested': {'7': {" in parts
