"""Data as Composer's users hand them over: DataSpec, Evaluator, several in a list, its Time."""

from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import automicro
from automicro import Trainer
from automicro.trainer.composer import MatchingMetrics, read_evaluations
from automicro.trainer.evaluators import INHERITED
from automicro.units import Duration, read_duration
from tests.trainer.composer_classes import DataSpec, Evaluator, Time, every
from tests.trainer.runs import (
    CLASSES,
    ROWS,
    assert_same,
    make_data,
    make_loader,
    make_model,
    make_trainer,
)

METRICS = {"Accuracy": MulticlassAccuracy(CLASSES), "F1": MulticlassF1Score(CLASSES)}


def test_a_data_spec_trains_as_its_loader() -> None:
    one, other = make_model(), make_model()
    make_trainer(one, DataSpec(make_loader()), eval_dataloader=DataSpec(make_loader())).fit()
    make_trainer(other, make_loader(), eval_dataloader=make_loader()).fit()
    assert_same(one, other)


def test_a_data_spec_counts_the_tokens() -> None:
    spec = DataSpec(make_loader(), get_num_tokens_in_batch=lambda batch: 7 * len(batch[0]))
    trainer = make_trainer(make_model(), spec, max_duration=f"{7 * ROWS}tok")
    trainer.fit()
    assert (trainer.state.tokens, trainer.state.samples) == (7 * ROWS, ROWS)
    own = make_trainer(make_model(), spec, count_tokens=lambda batch: 1, max_duration="2tok")
    own.fit()
    assert own.state.tokens == own.state.batch == 2


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        ("batch_transforms", "collate_fn"),
        ("microbatch_transforms", "in the model's forward"),
        ("split_batch", "batch_layout="),
        ("get_num_samples_in_batch", "batch_layout="),
    ],
)
@pytest.mark.parametrize("argument", ["train_dataloader", "eval_dataloader"])
def test_functions_of_a_data_spec_that_nobody_would_call_are_refused(
    argument: str, function: str, remedy: str
) -> None:
    spec = DataSpec(make_loader(), **{function: lambda *given: given})
    message = rf"(?s){argument} is a DataSpec .* Pass its dataloader.*for {function}: .*{remedy}"
    loaders: dict[str, Any] = {"train_dataloader": make_loader(), argument: spec}
    with pytest.raises(ValueError, match=message):
        Trainer(make_model(), loss_fn=nn.CrossEntropyLoss(), device="cpu", **loaders)


def test_evaluators_are_taken_over_with_all_that_they_say() -> None:
    loader = make_loader()
    given = [
        Evaluator(label="plain", dataloader=loader, eval_interval=every(2, "ep")),
        Evaluator(
            label="first",
            dataloader=DataSpec(loader),
            metric_names=["acc"],
            subset_num_batches=2,
            eval_interval=every(0, "ep"),
            device_eval_microbatch_size=5,
        ),
        Evaluator(
            label="auto",
            dataloader=loader,
            subset_num_batches=-1,
            device_eval_microbatch_size="auto",
        ),
    ]
    ours = read_evaluations("eval_dataloader", given)
    assert ours == {
        "plain": automicro.Evaluator(dataloader=loader, interval=Duration.parse("2ep")),
        "first": automicro.Evaluator(
            dataloader=loader,
            metrics=MatchingMetrics(["acc"]),
            microbatch_size=5,
            max_batches=2,
            interval=None,
        ),
        "auto": automicro.Evaluator(dataloader=loader, microbatch_size="auto"),
    }
    assert ours["plain"].microbatch_size == INHERITED


def test_they_evaluate_what_they_name() -> None:
    given = (
        Evaluator(label="all", dataloader=make_loader()),
        Evaluator(
            label="some", dataloader=make_loader(), metric_names=["acc"], subset_num_batches=1
        ),
    )
    trainer = make_trainer(make_model(), eval_dataloader=given, metrics=METRICS)
    assert set(trainer.eval()) == {
        "all/loss",
        "all/Accuracy",
        "all/F1",
        "some/loss",
        "some/Accuracy",
    }
    assert set(trainer.eval(given[1])) == {"some/loss", "some/Accuracy"}


def test_a_metric_that_is_nowhere_is_refused_by_name() -> None:
    given = Evaluator(label="all", dataloader=make_loader(), metric_names=["AUROC"])
    with pytest.raises(
        ValueError, match=r"names the metric 'AUROC', and there is 'Accuracy', 'F1'"
    ):
        make_trainer(make_model(), eval_dataloader=given, metrics=METRICS)


def test_an_interval_that_is_a_function_is_refused_by_name() -> None:
    given = Evaluator(label="x", dataloader=[1], eval_interval=lambda state, event: True)
    with pytest.raises(ValueError, match=r"eval_dataloader\['x'\] is an Evaluator .*Trainer.eval"):
        make_trainer(make_model(), eval_dataloader=given)


def test_two_of_one_label_are_refused() -> None:
    given = [Evaluator(label="x", dataloader=[1]), Evaluator(label="x", dataloader=[2])]
    with pytest.raises(ValueError, match=r"of the labels \['x', 'x'\]; give each one of its own"):
        make_trainer(make_model(), eval_dataloader=given)


@pytest.mark.parametrize(
    "kind", [DataLoader, DataSpec, lambda data: automicro.Evaluator(dataloader=data)]
)
def test_several_loaders_without_names_are_refused_at_once(kind: Any) -> None:
    loaders = (kind(make_data()), kind(make_data()))
    with pytest.raises(TypeError, match=r"eval_dataloader is a tuple of 2, and not of batches: .*"
                       "; name them in a mapping"):  # fmt: skip
        make_trainer(make_model(), eval_dataloader=loaders)
    with pytest.raises(TypeError, match=r"dataloader is a list of 2, .*; name them in a mapping"):
        make_trainer(make_model()).eval(list(loaders))
    with pytest.raises(TypeError, match=r"train_dataloader is a tuple of 2, .*ConcatDataset"):
        make_trainer(make_model(), loaders)


def test_arguments_of_a_data_spec_are_no_loader() -> None:
    with pytest.raises(TypeError, match=r"is a dict with the keys \['dataloader'\]"):
        make_trainer(make_model(), {"dataloader": make_loader()})


@pytest.mark.parametrize(
    ("value", "unit", "expected"), [(2, "ep", "2ep"), (500, "ba", "500ba"), (10, "tok", "10tok")]
)
def test_a_time_of_composers_is_a_duration(value: int, unit: str, expected: str) -> None:
    assert str(Duration.parse(Time(value, unit))) == expected  # type: ignore[arg-type]
    assert str(read_duration("max_duration", Time(value, unit))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("0.5dur", r"of a share of the training, 0.5, give the number"),
        (Time(0.25, "dur"), r"of a share of the training, 0.25, give the number"),
        ("60sec", "a limit in time is max_time="),
        ("1h", "a limit in time is max_time="),
        (1, "has no unit; say '1ep'"),
    ],
)
def test_what_counts_otherwise_is_answered(given: Any, hint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"eval_interval=.*{hint}"):
        make_trainer(make_model(), eval_interval=given)
