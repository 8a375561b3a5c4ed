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
from automicro.trainer.metrics import MetricSet, model_metrics
from benchmarks.beside_composer import CASES, is_exact, table
from tests.sweeps import mostly_in_sweeps
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
        inputs, _ = batch
        outputs: Tensor = self.net(inputs)
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        _, targets = batch
        return F.cross_entropy(outputs, targets)

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> Any:
        self.asked.append(is_train)
        return self._metrics[0]

    def update_metric(self, batch: Any, outputs: Tensor, metric: Metric) -> None:
        _, targets = batch
        metric.update(outputs, targets)


def accuracy() -> Metric:
    return MulticlassAccuracy(num_classes=CLASSES, average="micro")


def train_on(model: nn.Module, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"optimizer": adam, "device": "cpu", "progress": False}
    return Trainer(model, make_loader(), **{**settings, **options})


def test_composer_model_trains_like_loss_function() -> None:
    model = Classifier()
    train_on(model, max_duration="2ep").fit()
    other = Classifier()
    train_on(other.net, loss_fn=nn.CrossEntropyLoss(), max_duration="2ep").fit()
    assert_same(model, other)


def test_composer_model_recovers_from_out_of_memory() -> None:
    model = Classifier()
    summary = train_on(model, memory_limit="32KiB").fit()
    assert summary.train_ooms > 0
    other = Classifier()
    train_on(other, microbatch_size=summary.microbatch_size).fit()
    assert_same(model, other)


class Losing(Classifier):
    """Returns several losses in the form that a test provides."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self._form = form

    def loss(self, outputs: Tensor, batch: Any) -> Any:
        rows = F.cross_entropy(outputs, batch[1], reduction="none")
        return self._form(rows, outputs.square().mean())


FORMS: dict[str, tuple[Any, Any]] = {
    # The result of loss(), made from a loss per row and another loss, and Composer's training loss.
    "only total": (
        lambda rows, size: {"total": rows.mean() + 3 * size, "fit": rows.mean(), "size": size},
        lambda fit, size: fit + 3 * size,
    ),
    "named, summed": (
        lambda rows, size: {"fit": rows.mean(), "size": size},
        lambda fit, size: fit + size,
    ),
    "tuple, summed": (lambda rows, size: (rows.mean(), size), lambda fit, size: fit + size),
    "list of one": (lambda rows, size: [rows.mean()], lambda fit, size: fit),
    "shape [1]": (lambda rows, size: rows.mean()[None], lambda fit, size: fit),
    "one per row": (lambda rows, size: rows, lambda fit, size: fit),
    "some per row": (
        lambda rows, size: {"fit": rows, "size": size},
        lambda fit, size: fit + size,
    ),
}


@pytest.mark.parametrize("size", mostly_in_sweeps([None, 5], quick=[5]))
@pytest.mark.parametrize("form", FORMS)
def test_losses_are_read_as_in_composer(form: str, size: int | None) -> None:
    given, meant = FORMS[form]
    model = Losing(given)
    train_on(model, microbatch_size=size).fit()
    other = Losing(lambda rows, size: meant(rows.mean(), size))
    train_on(other, microbatch_size=size).fit()
    assert_same(model, other)


@pytest.mark.parametrize(
    ("form", "names"),
    [("only total", {"fit", "size"}), ("tuple, summed", {"loss0", "loss1"})],
)
def test_loss_parts_are_reported(form: str, names: set[str]) -> None:
    batch = next(iter(make_loader()))
    given, meant = FORMS[form]
    result = Microbatcher(Losing(given), microbatch_size=10).backward(batch)
    assert set(result.losses) == names
    parts = {name: float(part) for name, part in result.losses.items()}
    assert float(result.loss) == pytest.approx(meant(*parts.values()), rel=1e-5)


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
    """Removes the targets from the batch in the forward and for the metrics."""

    def __init__(self) -> None:
        super().__init__({"accuracy": accuracy()})
        self.seen: list[tuple[Any, bool, bool, bool]] = []
        self.labels: Tensor | None = None
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch: Any) -> Tensor:
        self.fitted = batch.pop("labels")
        outputs: Tensor = self.dropout(self.net(batch["inputs"]))
        return outputs

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        assert "labels" not in batch  # the same batch object as in the forward
        return F.cross_entropy(outputs, self.fitted)

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        modes = (outputs is not None, self.training, torch.is_grad_enabled())
        self.labels = batch["labels"]
        outputs = self(batch) if outputs is None else outputs
        batch.pop("labels", None)
        self.seen.append((len(outputs), *modes))
        return {"best": outputs.argmax(1)}

    def update_metric(self, batch: Any, outputs: Any, metric: Metric) -> None:
        assert "labels" not in batch
        metric.update(outputs["best"], self.labels)


class Shifting(Classifier):
    """Shifts the targets in place for the metrics, as language models do."""

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        outputs = super().eval_forward(batch, outputs)
        batch[1][:-1] = batch[1][1:].clone()
        return outputs


@pytest.mark.parametrize("size", [None, 5])
def test_eval_forward_cannot_modify_loader_batches(size: int | None) -> None:
    batches = list(make_loader())
    expected = [targets.clone() for _, targets in batches]
    model = Shifting({"accuracy": accuracy()})
    settings: dict[str, Any] = {"microbatch_size": size, "eval_microbatch_size": size}
    trainer = Trainer(
        model,
        batches,
        eval_dataloader=batches,
        optimizer=adam,
        max_duration="2ep",
        device="cpu",
        progress=False,
        **settings,
    )
    trainer.fit()
    assert all(map(torch.equal, expected, (targets for _, targets in batches)))


def test_training_metrics_do_not_change_training() -> None:
    def train(metrics: Any) -> nn.Module:
        model = Popping()
        model._metrics = (metrics,)
        batches = [{"inputs": x, "labels": y} for x, y in make_loader()]
        Trainer(model, batches, optimizer=adam, device="cpu", progress=False, seed=3).fit()
        return model

    assert_same(train({"accuracy": accuracy()}), train({}))


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        ({"accuracy": accuracy()}, ["accuracy"]),
        (accuracy(), ["MulticlassAccuracy"]),
        ([accuracy(), MulticlassF1Score(CLASSES)], ["MulticlassAccuracy", "MulticlassF1Score"]),
        (MetricCollection({"a": accuracy()}), ["a"]),
        (nn.ModuleDict({"a": accuracy()}), ["a"]),
    ],
    ids=["mapping", "metric", "list", "collection", "modules"],
)
@pytest.mark.parametrize("is_train", [True, False])
def test_model_metrics_are_found(metrics: Any, names: list[str], is_train: bool) -> None:
    model = Classifier(metrics)
    found = model_metrics(model, is_train=is_train)
    assert found is not None
    assert list(found) == names
    assert all(isinstance(metric, Metric) for metric in found.values())
    assert model.asked == [is_train]


@pytest.mark.parametrize("metrics", [None, {}, [], MetricCollection({})])
def test_model_without_metrics_has_none(metrics: Any) -> None:
    assert model_metrics(Classifier(metrics), is_train=True) is None


def test_invalid_metric_is_refused() -> None:
    with pytest.raises(TypeError, match=r"3 \(of type int\) is not a metric"):
        MetricSet(model_metrics(Classifier(3), is_train=True), torch.device("cpu"))


def test_docs_page_matches_measured_results() -> None:
    """Composer's own Trainer runs in a separate environment: `benchmarks/beside_composer.py`."""
    page = PAGE.read_text(encoding="utf-8")
    results = sorted((PAGE.parents[2] / "benchmarks" / "results").glob("*-beside-composer.json"))
    report = json.loads(results[-1].read_text(encoding="utf-8"))
    assert all(f"| {name} |" in table(report) for name in CASES)
    assert f"results/{results[-1].name}" in page
    for name in CASES:
        row = report["cases"][name]
        assert is_exact(row) != ("named" in row), name
