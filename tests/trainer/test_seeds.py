"""Runs with a seed repeat their numbers, regardless of earlier runs and of measured times."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from automicro import Callback, FitSummary, Halving, Outcome, Run, StepResult, Trainer
from automicro.cli import main
from automicro.features import RememberSizes, with_features
from automicro.remembered.cache import SizeCache
from automicro.step.feature import Attempt
from automicro.trainer.same_on_all_ranks import outline_options
from tests.trainer.runs import Rows

LIMIT = "256KiB"
SMALL = "170KiB"  # too small to tell from one peak how many rows fit
NO_LOSS = torch.tensor(0.0)
DIGITS = str(Path(__file__).resolve().parents[2] / "configs" / "digits.yaml")
ROWS = 700
BATCH = 256  # and 188 at the end of each epoch


class Notes(Callback):
    """Records losses, results and attempts of batches."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self.results: list[StepResult] = []
        self.attempts: list[Attempt] = []

    def attempt_start(self, run: Run, attempt: Attempt) -> None:
        if attempt.phase == "train":
            self.attempts.append(attempt)

    def batch_end(self, run: Run, result: StepResult) -> None:
        self.losses.append(run.state.loss)
        # Stored losses would use more memory with every batch.
        self.results.append(dataclasses.replace(result, loss=NO_LOSS))

    @property
    def sizes(self) -> list[int]:
        return [each.microbatch_size for each in self.results]


def script(
    *, averages: bool = True, frozen: bool = False, rows: int = ROWS, **options: Any
) -> tuple[Notes, FitSummary]:
    """Run a user's script, which creates everything from the same random numbers."""
    torch.manual_seed(0)
    batchnorm = [nn.BatchNorm1d(64), nn.Dropout(0.3)] if averages else []
    if frozen:
        batchnorm[0].eval()
    layers = [nn.Linear(12, 64), *batchnorm, nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3)]
    data = Rows(torch.randn(rows, 12), torch.randint(3, (rows,)))
    notes = Notes()
    given: dict[str, Any] = {
        "seed": 7,
        "max_duration": "6ep",
        "progress": False,
        "memory_limit": LIMIT,
    }
    trainer = Trainer(
        nn.Sequential(*layers),
        DataLoader(data, batch_size=BATCH, shuffle=True),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW,
        batchnorm="ignore",
        device="cpu",
        callbacks=[notes],
        **with_features({**given, **options}),
    )
    return notes, trainer.fit()


@pytest.mark.sweep
def test_sizes_are_remembered_with_seed_on_request() -> None:
    first, _ = script(features=[RememberSizes()], max_duration="3ep")
    again, _ = script(features=[RememberSizes()], max_duration="3ep")
    assert again.results[0].recalled_size == first.sizes[-2]
    assert again.losses != first.losses  # remembered sizes change the numbers


@pytest.mark.sweep
def test_sizes_are_remembered_without_seed() -> None:
    script(seed=None, max_duration="3ep")
    assert len(SizeCache().entries()) == 1
    assert script(seed=None, max_duration="1ba")[0].results[0].recalled_size is not None
    forgetful, _ = script(seed=None, max_duration="1ba", features=[RememberSizes(False)])
    assert forgetful.results[0].recalled_size is None


def test_remember_sizes_must_be_boolean() -> None:
    with pytest.raises(TypeError, match="remember_sizes is 'no'; pass True or False"):
        RememberSizes("no")  # type: ignore[arg-type]


def test_frozen_batchnorm_allows_one_measurement() -> None:
    notes, _ = script(frozen=True, rows=3 * BATCH, memory_limit=SMALL, max_duration="4ep")
    assert sum(each.is_measuring for each in notes.results) == 1


class Recording(Halving):
    """Records the outcomes it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome] = []

    def record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        super().record(outcome)


@pytest.mark.parametrize(
    ("options", "is_timed"),
    [({"seed": 7}, False), ({"seed": None}, True), ({"seed": None, "deterministic": True}, False)],
    ids=str,
)
def test_repeatable_runs_do_not_measure_time(options: dict[str, Any], is_timed: bool) -> None:
    policy = Recording()
    script(microbatch_size=policy, max_duration="1ep", **options)
    assert len(policy.outcomes) > 3
    assert {each.seconds is not None for each in policy.outcomes} == {is_timed}


def test_ranks_may_have_different_seeds_if_all_have_one() -> None:
    texts: Sequence[str] = [outline_options({"seed": seed})["seed"] for seed in (0, 3, None)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.sweep
def test_demo_reports_same_memory_events_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[list[str]] = []
    for _ in range(3):
        assert main(["train", DIGITS, "max_duration=2ep", "eval_interval=2ep"]) == 0
        lines = capsys.readouterr().out.splitlines()
        words = ("out of memory", "more fits", "OOMs", "final microbatch size", "earlier run")
        said.append([" ".join(each.split()) for each in lines if any(w in each for w in words)])
    assert said[0] == said[1] == said[2]
    assert said[0] == [
        "train: out of memory at microbatch size 512: continued with 64 rows (8 × 64 of 512; 3 "
        "attempts rolled back)",
        "train: more fits, microbatch size 64 → 86 rows (6 × up to 86 of 512)",
        "train: more fits, microbatch size 86 → 104 rows (4 × up to 104 of 413)",
        "eval: out of memory at microbatch size 360: continued with 180 rows (2 × 180 of 360; 1 "
        "attempt rolled back)",
        "OOMs survived 4 (3 in train, 1 in eval)",
        "final microbatch size 103 rows (5 × up to 103 of 512) in train, 180 in eval",
    ]
