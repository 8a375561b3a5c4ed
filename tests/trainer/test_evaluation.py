"""Evaluations, predictions and their metrics, and the arguments of `fit` and `eval`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from automicro import (
    CheckpointConfig,
    DataLoaderError,
    Evaluator,
    LossError,
    MemoryBudget,
    Microbatcher,
)
from tests.trainer.runs import (
    CLASSES,
    FEATURES,
    ROWS,
    make_data,
    make_loader,
    make_model,
    make_trainer,
)


@pytest.mark.parametrize(
    ("interval", "duration", "evaluations"),
    [("1ep", "3ep", 3), ("2ep", "3ep", 2), ("2ba", "1ep", 2), ("3ba", "1ep", 2), (None, "3ep", 0)],
)
def test_evaluations_run_at_interval_and_at_end(
    interval: str | None, duration: str, evaluations: int
) -> None:
    passes = []

    class Counted(list):
        def __iter__(self) -> Iterator[Any]:
            passes.append(1)
            return super().__iter__()

    batches = Counted(make_loader())
    summary = make_trainer(
        make_model(), max_duration=duration, eval_dataloader=batches, eval_interval=interval
    ).fit()
    assert len(passes) == evaluations
    assert ("loss" in summary.eval_metrics) == (evaluations > 0)


def test_eval_returns_loss_and_metrics_of_all_data() -> None:
    model = make_model(dropout=0.5)
    trainer = make_trainer(
        model,
        metrics=MetricCollection(
            [MulticlassAccuracy(CLASSES, average="micro"), MulticlassPrecision(CLASSES)]
        ),
        eval_microbatch_size=3,
        eval_dataloader=make_loader(),
    )
    values = trainer.eval()
    inputs, targets = make_data()[:]
    model.eval()
    with torch.no_grad():
        outputs = model(inputs)
    expected = nn.functional.cross_entropy(outputs, targets).item()
    assert values["loss"] == pytest.approx(expected, rel=1e-6)
    accuracy = (outputs.argmax(1) == targets).double().mean().item()
    assert values["MulticlassAccuracy"] == pytest.approx(accuracy)
    assert {type(value) for value in values.values()} == {float}
    assert trainer.eval(make_loader(rows=10)) != values


def test_evaluation_loss_is_independent_of_batch_size() -> None:
    inputs, targets = make_data()[:]
    targets = targets.clone()
    targets[: ROWS // 2] = -100  # some batches have only ignored targets
    data = torch.utils.data.TensorDataset(inputs, targets)
    values = []
    for batch_size in (3, 7, ROWS):
        trainer = make_trainer(make_model(), eval_microbatch_size=2)
        values.append(trainer.eval(torch.utils.data.DataLoader(data, batch_size))["loss"])
    assert values[0] == pytest.approx(values[2], rel=1e-6)
    assert values[1] == pytest.approx(values[2], rel=1e-6)


def test_loss_parts_are_reported_by_name() -> None:
    def forward(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        outputs = model(batch[0])
        return {
            "fit": nn.functional.cross_entropy(outputs, batch[1]),
            "size": outputs.square().mean(),
        }

    trainer = make_trainer(make_model(), loss_fn=None, forward=forward, loss_average="samples")
    values = trainer.eval(make_loader())
    assert list(values) == ["loss", "loss/fit", "loss/size"]
    assert values["loss"] == pytest.approx(values["loss/fit"] + values["loss/size"])


def test_evaluation_without_loss_reports_metrics() -> None:
    class Composed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)

        def forward(self, batch: Any) -> Tensor:
            outputs: Tensor = self.linear(batch[0])
            return outputs

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(outputs, batch[1])

        def eval_forward(self, batch: Any) -> Tensor:
            return self(batch)  # type: ignore[no-any-return]

    trainer = make_trainer(
        Composed(),
        loss_fn=None,
        loss_average="samples",
        metrics=MulticlassAccuracy(CLASSES, average="micro"),
    )
    assert list(trainer.eval(make_loader())) == ["MulticlassAccuracy"]


def test_empty_eval_loader_is_refused_before_training() -> None:
    empty = DataLoader(make_data(5), batch_size=16, drop_last=True)
    trainer = make_trainer(make_model(), eval_dataloader={"seen": make_loader(), "new": empty})
    with pytest.raises(DataLoaderError, match=r"eval_dataloader\['new'\].* no batch from 5 rows"):
        trainer.fit()
    assert trainer.state.batch == 0
    never = Evaluator(dataloader=empty, interval=None)
    assert make_trainer(make_model(), eval_dataloader=never).fit().steps == 4


def test_uninitialized_layer_added_later_is_always_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES))
    trainer = make_trainer(model, eval_dataloader=make_loader())
    model.append(nn.LazyLinear(CLASSES))
    for call in (trainer.eval, trainer.eval, lambda: trainer.predict(make_loader()), trainer.fit):
        with pytest.raises(ValueError, match="Run the model once first"):
            call()


def test_several_loaders_without_names_are_refused() -> None:
    loaders = (DataLoader(make_data()), DataLoader(make_data()))
    with pytest.raises(TypeError, match=r"dataloader is a list of loaders, .* in a mapping"):
        make_trainer(make_model()).eval(list(loaders))
    with pytest.raises(TypeError, match=r"train_dataloader is a tuple of loaders, .*ConcatDataset"):
        make_trainer(make_model(), loaders)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("60sec", "limit in time, pass max_time="),
        ("1h", "limit in time, pass max_time="),
        (1, "has no unit: write '1ep'"),
    ],
)
def test_invalid_eval_interval_error_gives_hint(given: Any, hint: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"eval_interval=.*{hint}"):
        make_trainer(make_model(), eval_interval=given)


def test_first_fit_accepts_duration() -> None:
    trainer = make_trainer(make_model(), max_duration="1ep")
    assert trainer.fit(duration="2ep").epochs == 2


def test_run_with_checkpoints_refuses_duration_in_fit(tmp_path: Any) -> None:
    trainer = make_trainer(make_model(), checkpoint=CheckpointConfig(folder=tmp_path))
    with pytest.raises(ValueError, match=r"resumed from its .* Pass the whole max_duration"):
        trainer.fit(duration="1ep")


def test_invalid_fit_duration_is_refused() -> None:
    trainer = make_trainer(make_model())
    with pytest.raises(TypeError, match="duration=2 has no unit: write '2ep'"):
        trainer.fit(2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'0.5dur' is not a duration"):
        trainer.fit("0.5dur")


def test_eval_can_limit_batches() -> None:
    metrics = {"accuracy": MulticlassAccuracy(CLASSES)}
    trainer = make_trainer(make_model(), eval_dataloader=make_loader(), metrics=metrics)
    few = Evaluator(dataloader=make_loader(), max_batches=2)
    assert trainer.eval(few) == trainer.eval(list(make_loader())[:2])
    many = Evaluator(dataloader=make_loader(), max_batches=99)
    assert trainer.eval(many) == trainer.eval()
    with pytest.raises(TypeError, match=r"no argument max_batches\. Pass eval\(Evaluator\("):
        trainer.eval(max_batches=2)  # type: ignore[call-arg]


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        outputs: Tensor = model(inputs)
    model.train()
    return outputs


def test_prediction_recovers_from_out_of_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    batch = torch.randn(512, 64)
    expected = outputs_of(model, batch)
    with MemoryBudget("256KiB"):
        microbatcher = Microbatcher(model, loss_fn=nn.CrossEntropyLoss())
        outputs = microbatcher.predict(batch)
        size = microbatcher.eval_microbatch_size
    assert size is not None
    assert size < 512
    torch.testing.assert_close(outputs, expected)


def test_prediction_with_shuffling_loader_is_refused() -> None:
    trainer = make_trainer(make_model())
    for options in ({"shuffle": True}, {"sampler": torch.utils.data.SubsetRandomSampler([1, 2])}):
        with pytest.raises(ValueError, match=r"in an unknown order. Pass a loader with shuf"):
            trainer.predict(DataLoader(make_data(), batch_size=4, **options))


def test_prediction_needs_batches_and_outputs() -> None:
    with pytest.raises(DataLoaderError, match="gave no batch"):
        make_trainer(make_model()).predict([])
    only_loss = make_trainer(
        make_model(),
        loss_fn=None,
        forward=lambda model, batch: model(batch[0]).mean(),
        loss_average="samples",
    )
    with pytest.raises(LossError, match="predictions need outputs; return") as raised:
        only_loss.predict(make_loader())
    assert raised.value.__notes__ == ["automicro: in prediction, batch 1"]
