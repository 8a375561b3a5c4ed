"""Models written for Composer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from automicro import LossError, Microbatcher, Trainer
from automicro.trainer.metrics import model_metrics
from benchmarks.beside_composer import CASES, is_exact, table
from tests.trainer.runs import CLASSES, FEATURES, adam, assert_same, make_loader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations" / "composer.md"


class Classifier(nn.Module):
    """Like a ComposerClassifier, with metrics that a test provides."""

    def __init__(self, metrics: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        self.asked: list[bool] = []
        self._metrics = (metrics,)

    def forward(self, batch: Any) -> Tensor:
        outputs: Tensor = self.net(batch[0])
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        return F.cross_entropy(outputs, batch[1])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> Any:
        self.asked.append(is_train)
        return self._metrics[0]

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        metric.update(outputs, batch[1])


def accuracy() -> Metric:
    return MulticlassAccuracy(num_classes=CLASSES, average="micro")


def train_on(model: nn.Module, batches: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"optimizer": adam, "device": "cpu", "progress": False, "seed": 3}
    trainer = Trainer(model, batches or make_loader(), **{**settings, **options})
    trainer.fit()
    return trainer


def test_composer_model_trains_like_loss_function_and_recovers_from_oom() -> None:
    model, other = Classifier(), Classifier()
    train_on(model, max_duration="2ep")
    train_on(other.net, loss_fn=nn.CrossEntropyLoss(), max_duration="2ep")
    assert_same(model, other)
    model, other = Classifier(), Classifier()
    state = train_on(model, memory_limit="32KiB").state.train
    assert state.ooms > 0
    assert state.cut is not None
    train_on(other, microbatch_size=state.cut.microbatch_size)
    assert_same(model, other)


class Losing(Classifier):
    """Returns several losses in the form that a test provides."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self._form = form

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        rows = F.cross_entropy(outputs, batch[1], reduction="none")
        return self._form(rows, outputs.square().mean())


def total(fit: Any, size: Any) -> Any:
    return fit + size


# The result of loss(), made from a loss per row and another loss, and Composer's training loss.
FORMS: dict[str, tuple[Any, Any]] = {
    "only total": (
        lambda rows, size: {"total": rows.mean() + 3 * size, "fit": rows.mean(), "size": size},
        lambda fit, size: fit + 3 * size,
    ),
    "named, summed": (lambda rows, size: {"fit": rows.mean(), "size": size}, total),
    "tuple, summed": (lambda rows, size: (rows.mean(), size), total),
    "list of one": (lambda rows, size: [rows.mean()], lambda fit, size: fit),
    "shape [1]": (lambda rows, size: rows.mean()[None], lambda fit, size: fit),
    "one per row": (lambda rows, size: rows, lambda fit, size: fit),
    "some per row": (lambda rows, size: {"fit": rows, "size": size}, total),
}


@pytest.mark.parametrize(("given", "meant"), FORMS.values(), ids=FORMS)
def test_losses_are_read_as_in_composer(given: Any, meant: Any) -> None:
    model, other = Losing(given), Losing(lambda rows, size: meant(rows.mean(), size))
    train_on(model, microbatch_size=5)
    train_on(other, microbatch_size=5)
    assert_same(model, other)


@pytest.mark.parametrize(
    ("form", "names"),
    [("only total", {"fit", "size"}), ("tuple, summed", {"loss0", "loss1"})],
)
def test_loss_parts_are_reported(form: str, names: set[str]) -> None:
    given, meant = FORMS[form]
    result = Microbatcher(Losing(given), microbatch_size=10).backward(next(iter(make_loader())))
    assert set(result.losses) == names
    parts = map(float, result.losses.values())
    assert float(result.loss) == pytest.approx(meant(*parts), rel=1e-5)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda rows, size: {"loss": rows, "size": size}, "name the total 'total'"),
        (lambda rows, size: {"fit": 0.5}, "returned a float instead of a loss"),
        (lambda rows, size: [rows, None], "returned a NoneType instead of a loss"),
        (lambda rows, size: {}, r"Losing.loss returned no loss: \{\}"),
        (lambda rows, size: [], r"Losing.loss returned a list of length 0"),
    ],
)
def test_ambiguous_losses_are_refused(form: Any, message: str) -> None:
    with pytest.raises(LossError, match=message):
        Microbatcher(Losing(form)).backward(next(iter(make_loader())))


class Popping(Classifier):
    """Removes the targets from the batch in the forward, and shifts those of the metrics."""

    def __init__(self, metrics: Any) -> None:
        super().__init__(metrics)
        self.labels: Tensor | None = None
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch: Any) -> Tensor:
        self.fitted = batch.pop("labels")
        outputs: Tensor = self.dropout(self.net(batch["inputs"]))
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        assert "labels" not in batch  # the same batch object as in the forward
        return F.cross_entropy(outputs, self.fitted)

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        self.labels = batch["labels"]
        batch["labels"][:-1] = batch["labels"][1:].clone()  # in place, as language models do
        outputs = self(batch) if outputs is None else outputs
        batch.pop("labels", None)
        return {"best": outputs.argmax(1)}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        assert "labels" not in batch
        metric.update(outputs["best"], self.labels)


@pytest.mark.parametrize("size", [None, 5])
def test_training_metrics_change_neither_training_nor_batches(size: int | None) -> None:
    batches = [{"inputs": x, "labels": y} for x, y in make_loader()]
    expected = [each["labels"].clone() for each in batches]
    models = [Popping({"accuracy": accuracy()}), Popping({})]
    options: dict[str, Any] = {"microbatch_size": size, "eval_microbatch_size": size}
    for model in models:
        train_on(model, batches, eval_dataloader=batches, max_duration="2ep", **options)
    assert_same(*models)
    assert all(map(torch.equal, expected, (each["labels"] for each in batches)))


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({"accuracy": accuracy()}, ["accuracy"]),
        (accuracy(), ["MulticlassAccuracy"]),
        ([accuracy(), MulticlassF1Score(CLASSES)], ["MulticlassAccuracy", "MulticlassF1Score"]),
        (MetricCollection({"a": accuracy()}), ["a"]),
        (nn.ModuleDict({"a": accuracy()}), ["a"]),
        *[(None, []), ({}, []), ([], []), (MetricCollection({}), [])],
    ],
)
def test_model_metrics_are_found(metrics: Any, names: list[str]) -> None:
    model = Classifier(metrics)
    found = [model_metrics(model, is_train=is_train) for is_train in (True, False)]
    assert model.asked == [True, False]
    for each in found:
        assert list(each or []) == names
        assert (each is None) == (not names)
        assert all(isinstance(metric, Metric) for metric in (each or {}).values())


def test_docs_page_matches_measured_results() -> None:
    """Composer's own Trainer runs in a separate environment: `benchmarks/beside_composer.py`."""
    results = sorted((PAGE.parents[2] / "benchmarks" / "results").glob("*-beside-composer.json"))
    report = json.loads(results[-1].read_text(encoding="utf-8"))
    assert f"results/{results[-1].name}" in PAGE.read_text(encoding="utf-8")
    for name in CASES:
        assert f"| {name} |" in table(report)
        row = report["cases"][name]
        assert is_exact(row) != ("named" in row), name
