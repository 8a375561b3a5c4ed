"""Exploring sizes in a run: it changes nothing but time, and says how far it is."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import (
    DeterminismWarning,
    Explore,
    Microbatcher,
    Trainer,
)
from automicro.checkpoints.store import CheckpointConfig
from automicro.checkpoints.writing import list_checkpoints
from automicro.features import Repeatable
from automicro.loggers import JSONLinesLogger
from automicro.policy.policy import Policy
from automicro.step.results import StepResult
from tests.trainer.runs import assert_same, make_loader, make_model, make_trainer


class Replay(Policy):
    """The sizes of another run, one after the other."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.done = 0

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return min(num_rows, self.sizes[self.done])

    def record(self, outcome: Any) -> None:
        self.done += 1


class Noting(Explore):
    """Explores, and keeps the sizes of all that fitted."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sizes: list[int] = []

    def record(self, outcome: Any) -> None:
        super().record(outcome)
        if outcome.fits:
            self.sizes.append(outcome.microbatch_size)


def train(model: nn.Module, policy: Policy, *, rows: int = 32, **options: Any) -> Trainer:
    torch.manual_seed(3)
    settings = {"max_duration": "30ba", "probe": False, **options}
    loader = make_loader(rows=4 * rows, batch_size=rows)
    trainer = make_trainer(model, loader, microbatch_size=policy, **settings)
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("dropout", "limit"),
    [
        (0.5, "200KiB"),
        pytest.param(0.5, None, marks=pytest.mark.sweep),
        pytest.param(0.0, None, marks=pytest.mark.sweep),
        pytest.param(0.0, "200KiB", marks=pytest.mark.sweep),
    ],
)
def test_a_run_that_explores_is_the_run_of_its_sizes(dropout: float, limit: str | None) -> None:
    """Bit for bit, whatever the sizes were, with random numbers in the forward, too."""
    policy, models = Noting(), [make_model(dropout=dropout) for _ in range(2)]
    explored = train(models[0], policy, rows=256, memory_limit=limit)
    assert len(set(policy.sizes)) > 1
    assert explored.state.train.ooms == 0 if limit is None else explored.state.train.ooms > 0
    again = train(models[1], Replay(policy.sizes), rows=256)
    assert_same(*models)
    assert again.state.loss == explored.state.loss


def test_an_evaluation_that_explores_gives_the_values_of_one_that_does_not() -> None:
    losses = []
    for size in ("explore", None):
        loader = make_loader(rows=640, batch_size=32)
        trainer = make_trainer(
            make_model(),
            make_loader(),
            eval_dataloader=loader,
            eval_microbatch_size=size,
            max_duration="3ba",
            eval_interval="1ba",
        )
        trainer.fit()
        losses.append(trainer.state.eval.metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_run_says_so_after_each_round_and_logs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(
        make_model(),
        Explore(max_steps=20),
        progress=True,
        loggers=[JSONLinesLogger(tmp_path / "log.jsonl")],
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if "explor" in line]
    assert lines[0].startswith("training on")
    rounds = lines[1:]
    assert all(line.startswith("train: exploring: ") for line in rounds[:-1])
    assert rounds[-1].startswith("train: explored for ")
    logged = [
        record
        for record in map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
        if "train/explore/confidence" in record
    ]
    assert len(logged) == len(rounds)
    last = logged[-1]
    assert f"{last['train/explore/microbatch_size']:.0f} row" in rounds[-1]
    assert f"confidence {last['train/explore/confidence']:.0f}" in rounds[-1]


def test_the_summary_tells_of_the_size_that_was_chosen_and_not_of_a_trial() -> None:
    policy = Explore(max_steps=12)
    # Long enough for it to end, however often it goes from one size to another.
    trainer = train(make_model(), policy, max_duration="60ba")
    assert trainer.state.train.cut is not None
    assert trainer.state.train.cut.microbatch_size == policy.propose(32)


def test_the_primitive_explores_and_tells_of_it() -> None:
    model = make_model()
    microbatcher = Microbatcher(
        model, loss_fn=nn.CrossEntropyLoss(), microbatch_size="explore", probe=False
    )
    results: list[StepResult] = []
    batch = next(iter(make_loader(rows=64, batch_size=64)))
    for _ in range(70):
        results.append(microbatcher.backward(tuple(batch)))
        model.zero_grad()
    told = [each.exploration for each in results if each.exploration is not None]
    assert told[-1].ended is not None
    assert results[-1].exploration is None
    assert not results[-1].is_measuring
    assert results[-1].microbatch_size == told[-1].microbatch_size
    assert any(each.is_measuring for each in results)


def test_a_run_that_is_resumed_goes_on_exploring(tmp_path: Path) -> None:
    """Taken up in the middle; what was measured before it stays, and the end is that of its sizes.

    Seconds differ each time, so sizes after the resume need not be those of the other run.
    """

    def checkpoint(folder: Path, resume: Any = "auto") -> CheckpointConfig:
        return CheckpointConfig(folder=folder, interval="1ba", keep_last=None, resume=resume)

    first = Noting()
    train(make_model(), first, checkpoint=checkpoint(tmp_path / "one"), max_duration="8ba")
    middle = list_checkpoints(tmp_path / "one")[0]
    second, model = Noting(), make_model()
    train(model, second, checkpoint=checkpoint(tmp_path / "two", middle), max_duration="30ba")
    assert len(first.sizes) + len(second.sizes) == 30
    told = second.state_dict()["progress"]
    assert told["steps"] > len(second.sizes) or second._progress.is_over
    other = make_model()
    train(other, Replay([*first.sizes, *second.sizes]))
    assert_same(model, other)


class Normed(nn.Module):
    """Averages over the rows of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs


def test_layers_that_average_over_rows_are_not_explored_unless_that_is_accepted() -> None:
    policy = Noting()
    train(Normed(), policy)
    assert set(policy.sizes) == {32}
    accepted = Noting()
    train(Normed(), accepted, batchnorm="ignore")
    assert len(set(accepted.sizes)) > 1


def test_a_seed_and_exploring_are_warned_of_and_deterministic_is_refused() -> None:
    with pytest.warns(DeterminismWarning, match=r"by the clock, so two runs with seed=1 may"):
        make_trainer(make_model(), seed=1, microbatch_size="explore")
    with pytest.raises(ValueError, match=r"deterministic=True .* give the size that it found"):
        make_trainer(make_model(), deterministic=True, eval_microbatch_size=Explore())
    with pytest.raises(ValueError, match=r"repeatable=True asks for the same each time; leave"):
        Microbatcher(make_model(), microbatch_size="explore", features=[Repeatable()])
