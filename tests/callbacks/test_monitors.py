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
EVALUATED: dict[str, Any] = {"eval_dataloader": make_loader(), "eval_interval": "2ba"}


@pytest.mark.parametrize(
    ("scores", "options", "evaluations"),
    [
        ([3, 2, 2.5, 2, 1, 1, 1, 1], {}, 4),
        ([3, 2, 2.5, 1, 1.5, 1], {}, 6),
        ([NAN, NAN, 1], {}, 2),
        ([NAN, 1, NAN, NAN, 1], {}, 4),
        ([3, 2, 1, 4], {"mode": "max"}, 3),
        ([3, 2.6, 2.4, 2.0], {"min_delta": 0.5}, 4),
        ([3, 2.9, 2.8, 2.7], {"min_delta": 0.5}, 3),
    ],
)
def test_early_stopping_ends_training_without_improvement(
    scores: list[float], options: dict[str, Any], evaluations: int
) -> None:
    trainer = trainer_with(
        Scores(scores),
        EarlyStopping("score", patience=2, **options),
        eval_dataloader=make_loader(rows=16),
        eval_interval="1ba",
        max_duration=f"{len(scores)}ba",
    )
    trainer.fit()
    assert trainer.state.batch == evaluations


@pytest.mark.parametrize(
    ("monitor", "patience", "batches"),
    [("eval/loss", 1, 4), ("train/loss", 3, 4), ("train/accuracy", 1, 8)],
)
def test_early_stopping_monitors_values_when_they_are_known(
    monitor: str, patience: int, batches: int
) -> None:
    mode = "max" if "accuracy" in monitor else "min"
    stopping = EarlyStopping(monitor, mode=mode, patience=patience, min_delta=100.0)
    accuracy = {"accuracy": MulticlassAccuracy(CLASSES, average="micro")}
    trainer = trainer_with(stopping, metrics=accuracy, max_duration="4ep", **EVALUATED)
    trainer.fit()
    assert trainer.state.batch == batches
    if monitor == "eval/loss":  # an evaluation after the run does not count
        best = stopping.best
        trainer.eval(make_loader(rows=1, batch_size=1))
        assert (stopping.best, stopping.without_better) == (best, 1)


def two_losses(model: Any, batch: Any) -> Any:
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return {"language": loss, "balance": loss * 0.1}


ACCURACY: dict[str, Any] = {"metrics": {"accuracy": MulticlassAccuracy(CLASSES)}, **EVALUATED}
NAMED = {"loss_fn": None, "forward": two_losses, "loss_average": "samples", **EVALUATED}


@pytest.mark.parametrize(
    ("monitor", "options", "message", "batches"),
    [
        (
            "eval/acuracy",
            ACCURACY,
            r"'eval/acuracy' to monitor \(did you mean 'eval/accuracy'\?\); the names are: "
            "eval/loss, eval/accuracy\n",
            0,
        ),
        ("eval/loss", {}, "there is no evaluation in training: pass eval_data", 0),
        (
            "eval/loss",
            {**EVALUATED, "eval_dataloader": {"seen": make_loader()}},
            r"'eval/loss' .*; the names are: eval/seen/loss\n",
            0,
        ),
        ("eval/loss/languag", NAMED, r"did you mean 'eval/loss/language'\?\); the names are: ", 2),
        ("train/los", {}, r"'train/los' to monitor.*; the names are: .*train/loss", 4),
    ],
)
def test_unknown_monitor_name_is_error_as_early_as_possible(
    monitor: str, options: dict[str, Any], message: str, batches: int
) -> None:
    trainer = trainer_with(EarlyStopping(monitor), **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit()
    assert trainer.state.batch == batches


class StubRun:
    """The attributes of a run that EarlyStopping reads."""

    values: Mapping[str, float] = {}
    evaluations = ("a", "b")
    expected = ExpectedValues(evaluations={"": [], "a": [], "b": [], "c": []})


def test_early_stopping_waits_for_its_own_evaluation_and_resumes() -> None:
    stopping, resumed = EarlyStopping("eval/b/loss", patience=2), EarlyStopping(patience=2)
    run: Any = StubRun()
    stopping.fit_start(run)
    for _ in range(2):
        stopping.eval_end(run, {"eval/a/loss": 1.0})
        stopping.eval_end(run, {"eval/b/loss": 2.0})
    assert (stopping.best, stopping.without_better) == (2.0, 1)
    resumed.load_state_dict(stopping.state_dict())
    assert (resumed.best, resumed.without_better) == (2.0, 1)
    unknown = EarlyStopping("eval/c/loss")
    unknown.fit_start(run)
    with pytest.raises(ValueError, match="the names are: eval/a/loss"):
        unknown.eval_end(run, {"eval/a/loss": 1.0})


def test_logged_learning_rate_is_that_of_step() -> None:
    logged = Logged()
    trainer_with(logged, scheduler=schedule).fit()
    assert [values["train/lr"] for values in logged.values] == [0.01, 0.01, 0.01, 0.005]
    model: Any = make_model()
    others = [*model[3].parameters(), *model[5].parameters()]
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": others}]
    trainer_with(logged, model=model, optimizer=torch.optim.SGD(groups, lr=0.25)).fit()
    values = logged.values[-1]
    assert (values["train/lr/0"], values["train/lr/1"]) == (0.5, 0.25)


class Clock(Callback):
    """A clock that loading, computing and evaluating advance by the given seconds."""

    def __init__(self, loading: float, computing: float, slower: float, evaluating: float) -> None:
        self.now, self.loading, self.computing = 0.0, loading, computing
        self.slower, self.evaluating = slower, evaluating

    def __call__(self) -> float:
        return self.now

    def transform(self, run: Run, batch: Any) -> Any:
        self.now += self.loading
        return batch

    def backward_end(self, run: Run, microbatch: Any) -> None:
        self.now += self.computing + self.slower * run.state.batch

    def eval_batch_start(self, run: Run, batch: Any) -> None:
        self.now += self.evaluating


def test_speed_separates_waiting_from_computing_and_excludes_evaluation() -> None:
    clock, logged = Clock(3, 1, 0, 100), Logged()
    monitor = SpeedMonitor(window="3ba", clock=clock)
    often = {**EVALUATED, "eval_interval": "1ba", "max_duration": "2ep"}
    trainer_with(clock, monitor, logged, **often).fit()
    for values in logged.values:
        found = {name: value for name, value in values.items() if name.startswith("speed/")}
        assert found == pytest.approx(
            {
                "speed/samples_per_second": 4,
                "speed/batches_per_second": 0.25,
                "speed/waiting_seconds": 3,
                "speed/computing_seconds": 1,
                "speed/waiting_share": 0.75,
            }
        )


def test_speed_is_measured_over_window() -> None:
    clock, logged = Clock(0, 1, 1, 0), Logged()
    tokens = CountData(tokens=lambda batch: 8 * len(batch[0]))
    trainer_with(clock, SpeedMonitor(window="32sp", clock=clock), logged, features=[tokens]).fit()
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
    trainer_with(SpeedMonitor(), MemoryMonitor(), uncounted, model=watched).fit()
    assert not any(name.startswith("memory/") for name in uncounted.values[-1])
    trainer_with(model=plain).fit()
    assert_equal(copy_of(watched), copy_of(plain))  # monitors do not change training
