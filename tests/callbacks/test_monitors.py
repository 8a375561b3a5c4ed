"""Callbacks stop training early and log the learning rate, speed and memory."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from automicro.callbacks import EarlyStopping, MemoryMonitor, SpeedMonitor
from automicro.events.callback import Callback
from automicro.events.run import ExpectedValues, Run
from automicro.features import CountData
from tests.callbacks.runs import Logged, assert_equal, copy_of, trainer_with
from tests.trainer.runs import CLASSES, make_loader, make_model, schedule


class Scores(Callback):
    """Logs the next of the given scores before each evaluation."""

    def __init__(self, scores: list[float]) -> None:
        self._scores = iter(scores)

    def eval_start(self, run: Run) -> None:
        run.log({"score": next(self._scores)})


NAN = float("nan")
SMALLER: dict[str, Any] = {"patience": 2}
MUCH_SMALLER: dict[str, Any] = {"patience": 2, "min_delta": 0.5}


@pytest.mark.parametrize(
    ("scores", "options", "evaluations"),
    [
        ([3, 2, 2.5, 2, 1, 1, 1, 1], SMALLER, 4),
        ([3, 2, 2.5, 1, 1.5, 1], SMALLER, 6),
        ([NAN, NAN, 1], SMALLER, 2),
        ([NAN, 1, NAN, NAN, 1], SMALLER, 4),
        ([3, 2, 1, 4], {"patience": 2, "mode": "max"}, 3),
        ([3, 2.9, 2.8, 2.7], MUCH_SMALLER, 3),
        ([3, 2.6, 2.4, 2.0], MUCH_SMALLER, 4),
    ],
)
def test_early_stopping_ends_training_without_improvement(
    scores: list[float], options: dict[str, Any], evaluations: int
) -> None:
    trainer = trainer_with(
        Scores(scores),
        EarlyStopping("score", **options),
        eval_dataloader=make_loader(rows=16),
        eval_interval="1ba",
        max_duration=f"{len(scores)}ba",
    )
    trainer.fit()
    assert trainer.state.batch == evaluations


def test_early_stopping_monitors_evaluation_loss() -> None:
    stopping = EarlyStopping("eval/loss", patience=1, min_delta=100.0)
    trainer = trainer_with(
        stopping, eval_dataloader=make_loader(), eval_interval="2ba", max_duration="4ep"
    )
    trainer.fit()
    assert trainer.state.batch == 4
    best = stopping.best
    trainer.eval(make_loader(rows=1, batch_size=1))
    assert (stopping.best, stopping.without_better) == (best, 1)


def test_early_stopping_checks_training_loss_each_batch() -> None:
    stopping = EarlyStopping("train/loss", patience=3, min_delta=100.0)
    trainer = trainer_with(stopping, max_duration="4ep")
    trainer.fit()
    assert trainer.state.batch == 4


def test_early_stopping_checks_training_metric_each_epoch() -> None:
    trainer = trainer_with(
        EarlyStopping("train/accuracy", mode="max", patience=1, min_delta=1.0),
        metrics={"accuracy": MulticlassAccuracy(CLASSES, average="micro")},
        max_duration="5ep",
    )
    trainer.fit()
    assert trainer.state.epoch == 2


def test_unknown_monitor_name_is_error_before_training() -> None:
    evaluated: dict[str, Any] = {"eval_dataloader": make_loader(), "eval_interval": "2ba"}
    accuracy: dict[str, Any] = {"accuracy": MulticlassAccuracy(CLASSES)}
    trainer = trainer_with(EarlyStopping("eval/acuracy"), metrics=accuracy, **evaluated)
    with pytest.raises(
        ValueError,
        match=r"'eval/acuracy' to monitor \(did you mean 'eval/accuracy'\?\); the names are: "
        "eval/loss, eval/accuracy\n",
    ):
        trainer.fit()
    assert trainer.state.batch == 0
    trainer = trainer_with(EarlyStopping("eval/loss"))
    with pytest.raises(ValueError, match="there is no evaluation in training: pass eval_data"):
        trainer.fit()
    named: dict[str, Any] = {"eval_dataloader": {"seen": make_loader()}, "eval_interval": "2ba"}
    with pytest.raises(ValueError, match=r"'eval/loss' .*; the names are: eval/seen/loss\n"):
        trainer_with(EarlyStopping("eval/loss"), **named).fit()


def two_losses(model: Any, batch: Any) -> Any:
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return {"language": loss, "balance": loss * 0.1}


def test_unknown_named_loss_is_error_at_first_evaluation() -> None:
    evaluated: dict[str, Any] = {"eval_dataloader": make_loader(), "eval_interval": "2ba"}
    own: dict[str, Any] = {"loss_fn": None, "forward": two_losses, "loss_average": "samples"}
    trainer = trainer_with(EarlyStopping("eval/loss/languag"), **evaluated, **own)
    with pytest.raises(ValueError, match=r"did you mean 'eval/loss/language'\?\); the names are: "):
        trainer.fit()
    assert trainer.state.batch == 2
    trainer_with(EarlyStopping("eval/loss/language"), **evaluated, **own).fit()


def test_unknown_training_name_is_error_after_epoch() -> None:
    trainer = trainer_with(EarlyStopping("train/los"))
    with pytest.raises(ValueError, match=r"'train/los' to monitor.*; the names are: .*train/loss"):
        trainer.fit()


def test_early_stopping_waits_for_its_own_evaluation() -> None:
    stopping = EarlyStopping("eval/b/loss", patience=2)
    run: Any = StubRun()
    stopping.fit_start(run)
    for _ in range(2):
        stopping.eval_end(run, {"eval/a/loss": 1.0})
        stopping.eval_end(run, {"eval/b/loss": 2.0})
    assert (stopping.best, stopping.without_better) == (2.0, 1)
    unknown = EarlyStopping("eval/c/loss")
    unknown.fit_start(run)
    with pytest.raises(ValueError, match="the names are: eval/a/loss"):
        unknown.eval_end(run, {"eval/a/loss": 1.0})


class StubRun:
    """The attributes of a run that EarlyStopping reads."""

    values: Mapping[str, float] = {}
    evaluations = ("a", "b")
    expected = ExpectedValues(evaluations={"": [], "a": [], "b": [], "c": []})


def test_early_stopping_resumes_from_state_dict() -> None:
    first, second = EarlyStopping(patience=2), EarlyStopping(patience=2)
    run: Any = StubRun()
    first.fit_start(run)
    first.eval_end(run, {"eval/loss": 1.0})
    first.eval_end(run, {"eval/loss": 2.0})
    second.load_state_dict(first.state_dict())
    assert (second.best, second.without_better) == (1.0, 1)


def test_logged_learning_rate_is_that_of_step() -> None:
    logged = Logged()
    trainer_with(logged, scheduler=schedule).fit()
    assert [values["train/lr"] for values in logged.values] == [0.01, 0.01, 0.01, 0.005]


def test_each_parameter_group_logs_its_learning_rate() -> None:
    model: Any = make_model()
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.5},
            {"params": [*model[3].parameters(), *model[5].parameters()]},
        ],
        lr=0.25,
    )
    logged = Logged()
    trainer_with(logged, model=model, optimizer=optimizer).fit()
    values = logged.values[-1]
    assert (values["train/lr/0"], values["train/lr/1"]) == (0.5, 0.25)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_speed_separates_waiting_from_computing_and_excludes_evaluation() -> None:
    clock = Clock()

    class Passing(Callback):
        """Advances the clock by 3 s per load, 1 s per batch and 100 s per evaluation."""

        def transform(self, run: Run, batch: Any) -> Any:
            clock.now += 3
            return batch

        def backward_end(self, run: Run, microbatch: Any) -> None:
            clock.now += 1

        def eval_batch_start(self, run: Run, batch: Any) -> None:
            clock.now += 100

    logged = Logged()
    trainer_with(
        Passing(),
        SpeedMonitor(window="3ba", clock=clock),
        logged,
        eval_dataloader=make_loader(rows=16),
        eval_interval="1ba",
        max_duration="2ep",
    ).fit()
    for values in logged.values:
        assert values["speed/samples_per_second"] == pytest.approx(4)
        assert values["speed/batches_per_second"] == pytest.approx(0.25)
        assert values["speed/waiting_seconds"] == pytest.approx(3)
        assert values["speed/computing_seconds"] == pytest.approx(1)
        assert values["speed/waiting_share"] == pytest.approx(0.75)
        assert "speed/tokens_per_second" not in values


def test_speed_is_measured_over_window() -> None:
    clock = Clock()

    class Slower(Callback):
        """Each batch takes a second longer than the one before."""

        def backward_end(self, run: Run, microbatch: Any) -> None:
            clock.now += run.state.batch + 1

    logged = Logged()
    trainer_with(
        Slower(),
        SpeedMonitor(window="32sp", clock=clock),
        logged,
        features=[CountData(tokens=lambda batch: 8 * len(batch[0]))],
    ).fit()
    speeds = [values["speed/samples_per_second"] for values in logged.values]
    assert speeds == pytest.approx([16 / 1, 32 / 3, 32 / 5, 32 / 7])
    assert logged.values[-1]["speed/tokens_per_second"] == pytest.approx(256 / 7)


def test_memory_is_logged_only_if_counted() -> None:
    logged = Logged()
    loader = make_loader(rows=300, batch_size=256)
    summary = trainer_with(
        MemoryMonitor(), logged, train_dataloader=loader, memory_limit="200KiB"
    ).fit()
    last = logged.values[-1]
    assert summary.train_ooms == last["memory/ooms"] > 0
    assert 0 < last["memory/allocated_bytes"] < last["memory/peak_bytes"] <= 200 * 1024
    assert last["memory/peak_bytes"] == summary.peak_memory_bytes
    uncounted, watched, plain = Logged(), make_model(), make_model()
    monitors = [SpeedMonitor(), MemoryMonitor()]
    trainer_with(*monitors, uncounted, model=watched).fit()
    assert not any(name.startswith("memory/") for name in uncounted.values[-1])
    trainer_with(model=plain).fit()
    assert_equal(copy_of(watched), copy_of(plain))  # monitors do not change training
