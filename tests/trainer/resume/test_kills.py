"""Runs killed at drawn points and resumed end like undisturbed ones: `make torture-resume`."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import KILLED
from tests.trainer.resume.lives import live, warm_up
from tests.trainer.resume.subjects import Subject
from tests.trainer.resume.trials import KINDS, assert_same, check_logs, kill_and_resume

# The first kill of each run has this kind, and some runs are killed again.
SAMPLE = (
    *("write", "fsync", "rename", "optimizer step", "batch end"),
    *("line logged", "folder removed", "evaluation"),
)
TRIALS = 150
FIRST = int(os.environ.get("AUTOMICRO_SEED", "0"))


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    warm_up()


@pytest.mark.sweep
def test_killed_run_ends_like_undisturbed_run(tmp_path: Path) -> None:
    kills: list[str] = []
    for seed, kind in enumerate(SAMPLE, 101):
        kills += kill_and_resume(seed, tmp_path / str(seed), first_kind=kind)
    assert sum(kind in KINDS for kind in kills) >= 10  # some runs are killed again
    assert len({*kills} & {*KINDS}) >= len(SAMPLE)
    assert "cut short" in kills


@pytest.fixture(scope="module")
def kills() -> list[str]:
    return []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + TRIALS))
def test_more_killed_runs_end_like_undisturbed_ones(
    tmp_path: Path, kills: list[str], seed: int
) -> None:
    kills += kill_and_resume(seed, tmp_path, first_kind=KINDS[seed % len(KINDS)])


@pytest.mark.slow
def test_kills_were_many_and_of_every_kind(kills: list[str]) -> None:
    count = sum(kind in KINDS for kind in kills)
    assert count >= 200
    assert {*kills} == {*KINDS, "cut short"}
    print(f"\n{count} kills of {TRIALS} runs")


def test_comparison_detects_one_changed_bit() -> None:
    one = {"a": [torch.tensor([0.0]), 1.0]}
    assert_same(one, {"a": [torch.tensor([0.0]), 1.0]})
    for other in ({"a": [torch.tensor([-0.0]), 1.0]}, {"a": [torch.tensor([0.0]), 1.0 + 2e-16]}):
        with pytest.raises(AssertionError, match=r"\.a\."):
            assert_same(one, other)


@pytest.mark.sweep
def test_run_that_forgets_random_state_is_detected(tmp_path: Path, mocker: Any) -> None:
    mocker.patch("automicro.trainer.fit.restore_rng_state")
    mocker.patch("tests.trainer.resume.trials.draw", return_value=Subject(seed=5))
    with pytest.raises(AssertionError, match=r"\.|row"):
        kill_and_resume(5, tmp_path, first_kind="batch end")


# Until the first batch fits, a nested part shrinks and the level rises.
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
# Each of these once differed from the undisturbed run, except those with smaller parts.
FOUND: dict[str, tuple[Subject, tuple[str, int]]] = {
    "loader ends before its last, smaller group is trained": (
        Subject(seed=1, loader="stream", num_rows=70, accumulate_batches=3, interval="1ba"),
        ("batch start", 2),
    ),
    "last batch is saved, end of epoch not logged": (
        Subject(seed=2, num_rows=48, interval="3ba"),
        ("epoch start or end", 1),
    ),
    "stopped by a callback, killed after the last checkpoint": (
        Subject(seed=3, num_rows=160, stops_early=True),
        ("fit end", 0),
    ),
    "counts of an evaluation need memory": (
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
    "smaller parts, first batch": (SMALLER, ("batch start", 1)),
    "smaller parts, third batch": (SMALLER, ("batch end", 3)),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("subject", "at"), FOUND.values(), ids=FOUND)
def test_earlier_failures_stay_fixed(tmp_path: Path, subject: Subject, at: tuple[str, int]) -> None:
    undisturbed = live(subject, tmp_path / "undisturbed", name="only")
    assert live(subject, tmp_path / "killed", name="first", at=at).exit_code == KILLED
    assert_same(live(subject, tmp_path / "killed", name="second").ending, undisturbed.ending)
    check_logs(subject, tmp_path / "killed", tmp_path / "undisturbed")
    if subject.nested:
        parts = str(undisturbed.ending["parts"])
        assert "'level': 'recompute'" in parts
        assert "'nested': {'7': {" in parts
