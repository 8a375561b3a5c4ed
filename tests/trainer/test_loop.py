"""The loop over epochs, batches, evaluations and checkpoints, with interruptions and resumes."""

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from automicro import CheckpointConfig, Evaluator, LossError
from automicro.callbacks import ExponentialMovingAverage
from automicro.checkpoints.store import CheckpointStore
from automicro.data import LengthBatchSampler
from automicro.events.callback import Callback
from automicro.events.run import Run
from automicro.features import CountData, UpdateMetric
from automicro.loggers import JSONLinesLogger
from tests.loggers.logged import read_json_lines
from tests.trainer.runs import (
    CLASSES,
    ROWS,
    adam,
    assert_same,
    make_data,
    make_loader,
    make_model,
    make_trainer,
)

# An epoch has four batches, with 16, 16, 16 and 2 rows.


class At(Callback):
    """Runs an action once at an event after some batches, and records rows and evaluations."""

    def __init__(self, event: str = "", batch: int = 0, action: Callable[[], Any] = print) -> None:
        self.rows: list[list[float]] = []
        self.evaluated: list[int] = []
        self.eval_batches = 0
        self._due, self._batch, self._action, self._event = True, batch, action, event

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


def interrupt_twice() -> None:
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


def fail() -> None:
    raise RuntimeError("broken")


class Unknown(IterableDataset):
    """The same rows, without a known length."""

    def __iter__(self) -> Iterator[Any]:
        data = make_data()
        return (data[index] for index in range(ROWS))


summing: dict[str, Any] = {
    "metrics": {"sum": SumMetric()},
    "features": [UpdateMetric(lambda metric, outputs, batch: metric.update(outputs.sum()))],
}


def steps_of(path: Path, name: str) -> list[int]:
    return [step for step, each, _ in read_json_lines(path) if each == name]


# Evaluations


@pytest.mark.parametrize(
    ("interval", "duration", "evaluations"),
    [("2ep", "3ep", 2), ("2ba", "1ep", 2), ("3ba", "1ep", 2), (None, "3ep", 0)],
)
def test_evaluations_run_at_interval_and_at_end(
    interval: str | None, duration: str, evaluations: int
) -> None:
    at = At()
    options: dict[str, Any] = {"eval_dataloader": make_loader(), "eval_interval": interval}
    summary = make_trainer(make_model(), max_duration=duration, callbacks=[at], **options).fit()
    assert len(at.evaluated) == evaluations
    assert ("loss" in summary.eval_metrics) == (evaluations > 0)


def test_evaluation_returns_loss_and_metrics_of_all_data() -> None:
    model = make_model(dropout=0.5)
    inputs, targets = make_data()[:]
    targets[: ROWS // 2] = -100  # some batches have only ignored targets
    ignored: dict[str, Any] = {"num_classes": CLASSES, "ignore_index": -100}
    trainer = make_trainer(
        model,
        metrics=MetricCollection(
            [MulticlassAccuracy(average="micro", **ignored), MulticlassPrecision(**ignored)]
        ),
        eval_microbatch_size=3,
        eval_dataloader=make_loader(),
    )
    model.eval()
    outputs = model(inputs).detach()
    accuracy = (outputs.argmax(1) == targets)[ROWS // 2 :].double().mean().item()
    for batch_size in (3, 16, ROWS):
        values = trainer.eval(DataLoader(TensorDataset(inputs, targets), batch_size))
        expected = nn.functional.cross_entropy(outputs, targets).item()
        assert values["loss"] == pytest.approx(expected, rel=1e-6)
        assert values["MulticlassAccuracy"] == pytest.approx(accuracy)
        assert {type(value) for value in values.values()} == {float}
    few = Evaluator(dataloader=make_loader(), max_batches=2)
    assert trainer.eval(few) == trainer.eval(list(make_loader())[:2])
    many = Evaluator(dataloader=make_loader(), max_batches=99)
    assert trainer.eval(many) == trainer.eval() != trainer.eval(few)
    once = make_trainer(make_model(), eval_dataloader=iter(list(make_loader())))
    assert "loss" in once.fit().eval_metrics


def test_loss_parts_are_reported_by_name() -> None:
    def forward(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        outputs = model(batch[0])
        fit = nn.functional.cross_entropy(outputs, batch[1])
        return {"fit": fit, "size": outputs.square().mean()}

    trainer = make_trainer(make_model(), loss_fn=None, forward=forward, loss_average="samples")
    values = trainer.eval(make_loader())
    assert list(values) == ["loss", "loss/fit", "loss/size"]
    assert values["loss"] == pytest.approx(values["loss/fit"] + values["loss/size"])


def test_prediction_needs_outputs() -> None:
    forward = lambda model, batch: model(batch[0]).mean()  # noqa: E731
    only_loss = make_trainer(make_model(), loss_fn=None, forward=forward, loss_average="samples")
    with pytest.raises(LossError, match="predictions need outputs; return") as raised:
        only_loss.predict(make_loader())
    assert raised.value.__notes__ == ["automicro: in prediction, batch 1"]


def test_training_is_independent_of_evaluations_and_earlier_random_numbers() -> None:
    models: list[Any] = []
    for interval, seed in (("1ba", 5), ("3ba", 5), (None, 5), (None, 6)):
        torch.rand(len(models) + 1)
        models.append(make_model(dropout=0.3))
        loader, other = (DataLoader(make_data(), 16, shuffle=True) for _ in range(2))
        options: dict[str, Any] = {"eval_dataloader": other, "eval_interval": interval}
        make_trainer(models[-1], loader, seed=seed, max_duration="2ep", **options).fit()
    assert_same(models[0], models[1])
    assert_same(models[0], models[2])
    assert not torch.equal(models[0][0].weight, models[3][0].weight)


@pytest.mark.parametrize(
    ("duration", "rows", "label"), [("6ba", 50, "last epoch"), ("3ba", 48, "part of an epoch")]
)
def test_training_metrics_cover_last_complete_epoch(duration: str, rows: int, label: str) -> None:
    count = UpdateMetric(lambda metric, outputs, batch: metric.update(float(len(outputs))))
    options: dict[str, Any] = {"metrics": {"rows": SumMetric()}, "features": [count]}
    summary = make_trainer(make_model(), max_duration=duration, **options).fit()
    assert summary.train_metrics == {"rows": rows}
    assert f"train rows ({label})" in str(summary)


# Best checkpoints


@pytest.mark.parametrize("callbacks", [[], [At()]])
def test_best_metric_saves_after_each_of_its_evaluations(tmp_path: Path, callbacks: Any) -> None:
    config = CheckpointConfig(folder=tmp_path, interval=None, keep_last=None, keep_best=1)
    trainer = make_trainer(
        make_model(),
        eval_dataloader=make_loader(),
        eval_interval="3ba",
        checkpoint=config,
        callbacks=callbacks,
        max_duration="7ba",
    )
    trainer.fit()
    assert sorted(int(each.name.split("-")[-1]) for each in tmp_path.iterdir()) == [3, 6, 7]
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

    best_metric = "eval/full/loss"
    config = CheckpointConfig(
        folder=tmp_path, interval="1ba", keep_last=None, keep_best=1, best_metric=best_metric
    )
    trainer = make_trainer(
        make_model(),
        eval_dataloader={
            "quick": Evaluator(dataloader=make_loader(8), interval="1ba"),
            "full": Evaluator(dataloader=make_loader(), interval="3ba"),
        },
        callbacks=[Spoil()],
        max_duration="7ba",
        checkpoint=config,
    )
    trainer.fit()
    store = CheckpointStore(tmp_path, best_metric=best_metric)
    best = store.best()
    assert best is not None
    assert best.step == 3
    model = make_model()
    store.load(best, into={"modules": [model.state_dict()]})
    again = make_trainer(model).eval(make_loader())["loss"]
    assert best.metrics[best_metric] == pytest.approx(again)


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("eval/acuracy", {}, r"did you mean 'eval/accuracy'\?.* give one such as eval/loss, eval"),
        ("train/loss", {}, "give one such as eval/loss, eval/accuracy$"),
        ("eval/loss", {"eval_interval": None}, "there is no evaluation in training: pass eval_d"),
    ],
)
def test_unavailable_best_metric_is_refused_before_training(
    tmp_path: Path, name: str, options: dict[str, Any], remedy: str
) -> None:
    config = CheckpointConfig(folder=tmp_path, keep_best=1, best_metric=name)
    given = {"eval_dataloader": make_loader(), "metrics": {"accuracy": SumMetric()}, **options}
    with pytest.raises(ValueError, match=rf"^checkpoint.best_metric='{name}'.*{remedy}"):
        make_trainer(make_model(), checkpoint=config, **given)


# Interruptions


@pytest.mark.parametrize(
    ("duration", "every", "event", "action", "error"),
    [
        ("8ba", "2ba", "eval_batch_end", interrupt, KeyboardInterrupt),
        ("2ep", "1ep", "batch_start", interrupt_twice, SystemExit),
        pytest.param(
            *("2ep", "1ep", "batch_start", interrupt, KeyboardInterrupt), marks=pytest.mark.sweep
        ),
        pytest.param(
            *("4ba", "3ba", "eval_batch_end", interrupt, KeyboardInterrupt),
            marks=pytest.mark.sweep,
        ),
    ],
)
def test_interrupted_run_stops_evaluating_and_resumes_as_undisturbed(
    tmp_path: Path, duration: str, every: str, event: str, action: Any, error: Any
) -> None:
    def make(name: str, callback: At) -> Any:
        return make_trainer(
            make_model(dropout=0.2),
            make_loader(),
            eval_dataloader=DataLoader(make_data(), batch_size=5, shuffle=True),
            eval_interval=every,
            max_duration=duration,
            loggers=[JSONLinesLogger(tmp_path / f"{name}.jsonl")],
            callbacks=[callback, ExponentialMovingAverage(decay=0.5, update_interval="1ep")],
            checkpoint=CheckpointConfig(folder=tmp_path / name, interval="1ba"),
            seed=1,
            **summing,
        )

    undisturbed = At()
    whole = make("whole", undisturbed)
    expected = whole.fit()
    at = undisturbed.evaluated[0]
    first = At(event, at - 1 if event == "batch_start" else at, action)
    cut = make("cut", first)
    with pytest.raises(error):
        cut.fit()
    # The first signal finishes the batch, and the second one stops at once.
    assert cut.state.batch == at - (action is interrupt_twice)
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


@pytest.mark.parametrize("batch", [0, 3])
@pytest.mark.parametrize("unknown", [False, True])
def test_pass_continues_after_ctrl_c(batch: int, unknown: bool) -> None:
    loader = DataLoader(Unknown(), batch_size=16) if unknown else make_loader()
    noting, whole = At("batch_start", batch, interrupt), At()
    trainer = make_trainer(make_model(), loader, callbacks=[noting], max_duration="2ep")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    summary = trainer.fit()
    make_trainer(make_model(), callbacks=[whole], max_duration="2ep").fit()
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


def test_gradients_left_by_interruption_are_not_used() -> None:
    undisturbed, model = make_model(), make_model()
    make_trainer(undisturbed).fit()
    interruptions = [KeyboardInterrupt()]

    def stop(*_: Any) -> None:
        if interruptions:
            raise interruptions.pop()

    optimizer = adam(model.parameters())
    optimizer.register_step_pre_hook(stop)
    trainer = make_trainer(model, optimizer=optimizer)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert model[0].weight.grad is not None
    trainer.fit()
    assert_same(model, undisturbed)


@pytest.mark.parametrize("event", ["batch_start", "eval_end"])
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


def test_end_of_epoch_of_unknown_length_is_logged_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for callback in (At("batch_start", 4, fail), At()):
        trainer = make_trainer(
            make_model(),
            DataLoader(Unknown(), batch_size=16),
            eval_dataloader=make_loader(),
            loggers=[JSONLinesLogger(path)],
            callbacks=[callback],
            max_duration="2ep",
            checkpoint=CheckpointConfig(folder=tmp_path / "checkpoints", interval="1ba"),
            **summing,
        )
        with contextlib.suppress(RuntimeError):
            trainer.fit()
    assert steps_of(path, "train/sum") == [4, 8]
    assert steps_of(path, "eval/loss") == [4, 8]


@pytest.mark.parametrize("at", [2, 4])
def test_failed_evaluation_is_repeated_before_training_continues(at: int) -> None:
    noting = At("eval_batch_end", at, fail)
    options: dict[str, Any] = {"eval_dataloader": make_loader(), "eval_interval": "2ba"}
    trainer = make_trainer(make_model(), callbacks=[noting], **options)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    assert len(noting.rows) == at
    with pytest.warns(UserWarning, match=AGAIN) if at == 2 else contextlib.nullcontext():
        trainer.fit()
    assert noting.evaluated[: at // 2] == [2, 4][: at // 2]


# Seconds of data


SECONDS = [1.0 + 7 * row % 11 / 2 for row in range(ROWS)]  # 1 s to 6 s


def by_seconds(**options: Any) -> DataLoader[Any]:
    """Return batches of up to 20 seconds, or those of other options."""
    given = {"mode": "duration", "batch_length": 20.0, "unit": "seconds", **options}
    return DataLoader(
        make_data(), batch_sampler=LengthBatchSampler(make_data(), lengths=SECONDS, **given)
    )


def test_seconds_are_those_of_sampler_or_callable() -> None:
    assert make_trainer(make_model(), by_seconds()).fit().data_seconds == sum(SECONDS)
    count = CountData(seconds=lambda batch: 10.0 * len(batch[0]))
    trainer = make_trainer(make_model(), features=[count], max_duration="200sec")
    assert trainer.fit().data_seconds == 10.0 * trainer.state.samples == 320.0
    for wrong in ("1", -1.0):
        count = CountData(seconds=partial(lambda wrong, batch: wrong, wrong))
        with pytest.raises((TypeError, ValueError), match="count_seconds gave"):
            make_trainer(make_model(), features=[count]).fit()


def test_size_selects_fewest_batches_that_reach_it() -> None:
    fixed = by_seconds(mode="fixed", batch_length=None, batch_size=4)
    for size, rows in {"10sp": 12, "11sp": 12, "12sp": 16}.items():
        summary = make_trainer(make_model(), fixed, accumulate_batches=size).fit()
        assert summary.global_batch.most_rows == rows
    loader = by_seconds()
    average = sum(SECONDS) / len(loader)
    for seconds, batches in {int(3 * average): 3, int(3 * average) + 1: 4}.items():
        summary = make_trainer(make_model(), loader, accumulate_batches=f"{seconds}sec").fit()
        assert summary.steps == -(-len(loader) // batches)
    summary = make_trainer(make_model(), loader, accumulate_batches="3ba").fit()
    assert summary.global_batch.accumulation > 2


def test_first_line_and_summary_report_average_batch(capsys: pytest.CaptureFixture[str]) -> None:
    loader = by_seconds(second_lengths=[5] * ROWS, second_unit="tokens")
    make_trainer(make_model(), loader, accumulate_batches="1min", progress=True).fit()
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.startswith("training on"))
    assert "accumulate_batches 4 (reaches '1min')" in first
    rows, seconds = ROWS / len(loader), sum(SECONDS) / len(loader)
    assert f"average batch {rows:.2g} rows, {5 * rows:.2g} tokens, {seconds:.1f} s per dev" in first
    assert "per device × 1 device × 4 accumulated = " in first
    assert f"\ndata                     {sum(SECONDS) / 60:.1f} min\n" in out
    assert re.search(r"\nglobal batch .* on average [\d.]+ rows, [\d.]+ s per device", out)
