"""The loop over epochs, batches, evaluations and checkpoints, with interruptions and resumes."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import SumMetric

from automicro import CheckpointConfig, Evaluator
from automicro.callbacks import ExponentialMovingAverage
from automicro.checkpoints.store import CheckpointStore
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.features import UpdateMetric
from automicro.loggers import JSONLinesLogger
from tests.loggers.logged import read_json_lines
from tests.sweeps import mostly_in_sweeps
from tests.trainer.runs import assert_same, make_data, make_loader, make_model, make_trainer

# An epoch has four batches, with 16, 16, 16 and 2 rows.


class At(Callback):
    """Runs an action once at an event after some batches, and records rows and evaluations."""

    def __init__(self, event: str = "", batch: int = 0, action: Callable[[], Any] = print) -> None:
        self.rows: list[list[float]] = []
        self.evaluated: list[int] = []
        self.eval_batches = 0
        self._due = True
        self._batch = batch
        self._action = action
        self._event = event

    def _look(self, event: str, run: Run) -> None:
        if self._due and event == self._event and run.state.batch == self._batch:
            self._due = False
            self._action()

    def batch_start(self, run: Run, batch: Any) -> None:
        self.rows.append(batch[0][:, 0].tolist())
        self._look("batch_start", run)

    def batch_end(self, run: Run, result: Any) -> None:
        self._look("batch_end", run)

    def eval_batch_end(self, run: Run, result: Any) -> None:
        self.eval_batches += 1
        self._look("eval_batch_end", run)

    def eval_end(self, run: Run, values: Any) -> None:
        self.evaluated.append(run.state.batch)
        self._look("eval_end", run)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise RuntimeError("broken")


class Unknown(IterableDataset):
    """The same rows, without a known length."""

    def __iter__(self) -> Iterator[Any]:
        data = make_data()
        return (data[index] for index in range(50))


def steps_of(path: Path, name: str) -> list[int]:
    return [step for step, each, _ in read_json_lines(path) if each == name]


@pytest.mark.parametrize("callbacks", [[], [At()]])
def test_best_checkpoint_is_kept_with_and_without_callbacks(
    tmp_path: Path, callbacks: list[At]
) -> None:
    config = CheckpointConfig(folder=tmp_path, interval=None, keep_last=1, keep_best=1)
    trainer = make_trainer(
        make_model(),
        eval_dataloader=make_loader(),
        eval_interval="3ba",
        checkpoint=config,
        callbacks=callbacks,
        max_duration="2ep",
    )
    trainer.fit()
    best = CheckpointStore(tmp_path).best()
    assert best is not None
    assert best.metrics == {"eval/loss": trainer.eval()["loss"]}


def test_checkpoints_are_ranked_by_evaluations_of_their_weights(tmp_path: Path) -> None:
    class Spoil(Callback):
        def batch_end(self, run: Run, result: Any) -> None:
            if run.state.batch == 5:
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        parameter.mul_(-5)

        def eval_end(self, run: Run, values: Any) -> None:
            if not hasattr(self, "is_inside"):
                self.is_inside = True
                trainer.eval(make_loader(rows=4))  # logged under the same name

    each = {
        "quick": Evaluator(dataloader=make_loader(8), interval="1ba"),
        "full": Evaluator(dataloader=make_loader(), interval="3ba"),
    }
    trainer = make_trainer(
        make_model(),
        eval_dataloader=each,
        callbacks=[Spoil()],
        max_duration="7ba",
        checkpoint=CheckpointConfig(
            folder=tmp_path,
            interval="1ba",
            keep_last=None,
            keep_best=1,
            best_metric="eval/full/loss",
        ),
    )
    trainer.fit()
    store = CheckpointStore(tmp_path, best_metric="eval/full/loss")
    best = store.best()
    assert best is not None
    assert best.step == 3
    model = make_model()
    store.load(best, into={"modules": [model.state_dict()]})
    again = make_trainer(model).eval(make_loader())["loss"]
    assert best.metrics["eval/full/loss"] == pytest.approx(again)


def test_best_metric_saves_after_each_of_its_evaluations(tmp_path: Path) -> None:
    config = CheckpointConfig(folder=tmp_path, interval=None, keep_last=None, keep_best=1)
    evaluate = {"eval_dataloader": make_loader(), "eval_interval": "3ba"}
    make_trainer(make_model(), checkpoint=config, max_duration="7ba", **evaluate).fit()
    assert sorted(int(each.name.split("-")[-1]) for each in tmp_path.iterdir()) == [3, 6, 7]


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        (
            "eval/acuracy",
            {},
            r"did you mean 'eval/accuracy'\?.* give one such as eval/loss, eval/ac",
        ),
        ("train/loss", {}, "give one such as eval/loss, eval/accuracy$"),
        (
            "eval/loss",
            {"eval_interval": None},
            "there is no evaluation in training: pass eval_data",
        ),
    ],
)
def test_unavailable_best_metric_is_refused_before_training(
    tmp_path: Path, name: str, options: dict[str, Any], remedy: str
) -> None:
    config = CheckpointConfig(folder=tmp_path, keep_best=1, best_metric=name)
    given = {"eval_dataloader": make_loader(), "metrics": {"accuracy": SumMetric()}, **options}
    with pytest.raises(ValueError, match=rf"^checkpoint.best_metric='{name}'.*{remedy}"):
        make_trainer(make_model(), checkpoint=config, **given)


@pytest.mark.parametrize(
    ("duration", "every", "event"),
    [
        ("8ba", "2ba", "eval_batch_end"),
        ("2ep", "1ep", "batch_start"),
        pytest.param("8ba", "2ba", "batch_start", marks=pytest.mark.sweep),
        pytest.param("2ep", "1ep", "eval_batch_end", marks=pytest.mark.sweep),
        pytest.param("4ba", "3ba", "batch_start", marks=pytest.mark.sweep),
        pytest.param("4ba", "3ba", "eval_batch_end", marks=pytest.mark.sweep),
    ],
)
def test_interrupted_run_stops_evaluating_and_resumes_as_undisturbed(
    tmp_path: Path, event: str, duration: str, every: str
) -> None:
    def make(name: str, callback: At) -> Any:
        return make_trainer(
            make_model(dropout=0.2),
            make_loader(),
            eval_dataloader=DataLoader(make_data(), batch_size=5, shuffle=True),
            eval_interval=every,
            max_duration=duration,
            metrics={"sum": SumMetric()},
            features=[UpdateMetric(lambda metric, outputs, batch: metric.update(outputs.sum()))],
            loggers=[JSONLinesLogger(tmp_path / f"{name}.jsonl")],
            callbacks=[callback, ExponentialMovingAverage(decay=0.5, update_interval="1ep")],
            checkpoint=CheckpointConfig(folder=tmp_path / name),
            seed=1,
        )

    undisturbed = At()
    whole = make("whole", undisturbed)
    expected = whole.fit()
    at = undisturbed.evaluated[0]
    first = At(event, at - 1 if event == "batch_start" else at, interrupt)
    with pytest.raises(KeyboardInterrupt):
        make("cut", first).fit()
    assert first.eval_batches == (0 if event == "batch_start" else 1)
    assert first.evaluated == []
    second = At()
    rest = make("cut", second)
    summary = rest.fit()
    assert second.evaluated == undisturbed.evaluated
    assert summary.eval_metrics == expected.eval_metrics
    assert summary.train_metrics == expected.train_metrics
    assert summary.epochs == expected.epochs
    assert_same(rest._run.model, whole._run.model)
    for name in ("eval/loss", "train/loss", "train/sum"):
        assert steps_of(tmp_path / "cut.jsonl", name) == steps_of(tmp_path / "whole.jsonl", name)


@pytest.mark.parametrize("batch", [0, 2, 3])
@pytest.mark.parametrize("unknown", [False, True])
def test_pass_continues_after_ctrl_c(batch: int, unknown: bool) -> None:
    loader = DataLoader(Unknown(), batch_size=16) if unknown else make_loader()
    noting = At("batch_start", batch, interrupt)
    trainer = make_trainer(make_model(), loader, callbacks=[noting], max_duration="2ep")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    summary = trainer.fit()
    whole = At()
    make_trainer(make_model(), make_loader(), callbacks=[whole], max_duration="2ep").fit()
    assert noting.rows == whole.rows
    assert (summary.steps, summary.samples, summary.epochs) == (8, 100, 2)


AGAIN = r"epoch 1\. This epoch begins again, so 2 batches of it are repeated.* save checkpoints"


def test_epoch_restarts_after_error_with_warning() -> None:
    noting = At("batch_end", 2, fail)
    trainer = make_trainer(make_model(), callbacks=[noting])
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    with pytest.warns(UserWarning, match=AGAIN):
        assert trainer.fit().steps == 6
    assert noting.rows[2:] == [*noting.rows[:2], *noting.rows[4:]]


@pytest.mark.parametrize("event", ["batch_start", "batch_end", "eval_end"])
def test_nested_fit_in_callback_is_refused(event: str) -> None:
    trainer = make_trainer(
        make_model(),
        eval_dataloader=make_loader(),
        eval_interval="1ba",
        callbacks=[At(event, 1, lambda: trainer.fit())],
    )
    with pytest.raises(ValueError, match=r"is running, for example in a callback.* run\.stop"):
        trainer.fit()
    assert trainer.state.batch == 1


@pytest.mark.parametrize("every", mostly_in_sweeps(["1ba", "3ba", None], quick=["3ba"]))
def test_training_is_independent_of_eval_interval(every: str | None) -> None:
    models = []
    for interval in (every, "1ep"):
        torch.manual_seed(3)
        models.append(make_model(dropout=0.3))
        make_trainer(
            models[-1],
            DataLoader(make_data(), batch_size=16, shuffle=True),
            eval_dataloader=DataLoader(make_data(), batch_size=16, shuffle=True),
            eval_interval=interval,
            max_duration="2ep",
        ).fit()
    assert_same(*models)


def test_end_of_epoch_of_unknown_length_is_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for callback in (At("batch_start", 4, fail), At()):
        trainer = make_trainer(
            make_model(),
            DataLoader(Unknown(), batch_size=16),
            metrics={"sum": SumMetric()},
            features=[UpdateMetric(lambda metric, outputs, batch: metric.update(outputs.sum()))],
            eval_dataloader=make_loader(),
            loggers=[JSONLinesLogger(path)],
            callbacks=[callback],
            max_duration="2ep",
            checkpoint=CheckpointConfig(folder=tmp_path / "checkpoints", interval="1ba"),
        )
        if callback.rows or callback._event:
            with pytest.raises(RuntimeError, match="broken"):
                trainer.fit()
        else:
            trainer.fit()
    assert steps_of(path, "train/sum") == [4, 8]
    assert steps_of(path, "eval/loss") == [4, 8]


@pytest.mark.parametrize(
    ("duration", "rows", "label"), [("6ba", 50, "last epoch"), ("3ba", 48, "part of an epoch")]
)
def test_training_metrics_cover_last_complete_epoch(duration: str, rows: int, label: str) -> None:
    summary = make_trainer(
        make_model(),
        metrics={"rows": SumMetric()},
        features=[UpdateMetric(lambda metric, outputs, batch: metric.update(float(len(outputs))))],
        max_duration=duration,
    ).fit()
    assert summary.train_metrics == {"rows": rows}
    assert f"train rows ({label})" in str(summary)


def test_iterator_for_several_evaluations_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eval_dataloader is an iterator \(generator\).*DataLo"):
        make_trainer(
            make_model(), eval_dataloader=(each for each in make_loader()), max_duration="2ep"
        )
    once = make_trainer(make_model(), eval_dataloader=iter(list(make_loader())))
    assert "loss" in once.fit().eval_metrics


@pytest.mark.parametrize("at", [2, 4])
def test_failed_evaluation_is_repeated_before_training_continues(at: int) -> None:
    noting = At("eval_batch_end", at, fail)
    trainer = make_trainer(
        make_model(), eval_dataloader=make_loader(), eval_interval="2ba", callbacks=[noting]
    )
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    seen = list(noting.rows)
    with pytest.warns(UserWarning, match=AGAIN) if at == 2 else contextlib.nullcontext():
        trainer.fit()
    assert noting.evaluated[: at // 2] == [2, 4][: at // 2]
    assert len(seen) == at


def test_unsavable_state_is_found_before_training(tmp_path: Path) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"model": nn.Linear(1, 1)}

    trainer = make_trainer(
        make_model(), callbacks=[Odd()], checkpoint=CheckpointConfig(folder=tmp_path)
    )
    with pytest.raises(Exception, match="Odd"):
        trainer.fit()
    assert trainer.state.batch == 0
