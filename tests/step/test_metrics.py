"""Metrics are rolled back after a failed attempt and independent of the cut."""

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanSquaredError,
    MetricCollection,
    R2Score,
    SumMetric,
    wrappers,
)
from torchmetrics import classification as of_classes
from torchmetrics.functional.classification import binary_accuracy

from automicro import Evaluator, Halving, MetricWarning, Microbatcher, Trainer
from automicro.batch.layout import BatchLayout
from automicro.features import UpdateMetric
from automicro.step.metrics import MetricGuard, Readings, flatten_metrics
from automicro.torch_private import function_modes
from automicro.transaction.rng import RandomState
from tests.acceptance.torchmetrics_families import INPUTS, NAMED, N, numbers
from tests.outside import Unreached

ROWS = 12


class Identity(nn.Module):
    calls = Unreached()

    def __init__(self, *fails_at: int) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))
        self.fails_at, self.calls = fails_at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls in self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x + 0 * self.zero


def mean(outputs, targets):
    return outputs.float().mean()


def cut_in(size: Any, model: Any = None, update: Any = None) -> Microbatcher:
    return Microbatcher(
        model or Identity(),
        microbatch_size=size,
        eval_microbatch_size=size,
        loss_fn=mean,
        probe=False,
        features=[UpdateMetric(update)] if update else (),
    )


# State of metrics


class ListMetric:
    """Count in attributes of the class and the object, and append rows to a list."""

    total: ClassVar[int] = 0

    def __init__(self):
        self.rows, self.classes = 0, list[int]()
        type(self).total = 0

    def update(self, outputs, targets):
        self.rows += len(targets)
        type(self).total += len(targets)
        self.classes.extend(targets.tolist())

    def compute(self):
        return self.rows, self.total, self.classes


COUNTED: dict[str, Callable[[], Any]] = {
    "a list of torchmetrics": CatMetric,
    "a collection": lambda: MetricCollection([MeanSquaredError(), R2Score()]),
    "an own one": ListMetric,
}


@pytest.mark.parametrize("call", ["evaluate", "backward"])
@pytest.mark.parametrize("kind", COUNTED)
def test_metric_is_rolled_back_after_failed_attempt(kind, call):
    batches = [(torch.randn(ROWS), torch.randint(3, (ROWS,)).float()) for _ in range(3)]
    update = (lambda metric, outputs, _: metric.update(outputs)) if "list of" in kind else None
    disturbed = COUNTED[kind]()
    once = cut_in(Halving(initial=4, refine=False), Identity(3, 11), update)
    results = [getattr(once, call)(batch, {"it": disturbed}) for batch in batches]
    assert sum(result.ooms for result in results) == 2
    found, clean = disturbed.compute(), COUNTED[kind]()
    for result, batch in zip(results, batches, strict=True):
        getattr(cut_in(result.microbatch_size, update=update), call)(batch, {"it": clean})
    torch.testing.assert_close(found, clean.compute(), rtol=0, atol=0)


class Writes:
    def __init__(self, path):
        self.inner = {"file": path.open("w")}

    def update(self, outputs, targets):
        self.inner["file"].write("row\n")


def test_uncopyable_metric_raises_before_first_attempt(tmp_path):
    metric, model = Writes(tmp_path / "rows"), Identity()
    try:
        with pytest.raises(TypeError, match=r"inner\['file'\] \(of type TextIOWrapper\) cannot be"):
            cut_in("auto", model).evaluate((torch.randn(4), torch.zeros(4)), metric)
        assert model.calls == 0
    finally:
        metric.inner["file"].close()


# Compute groups


def thresholds() -> MetricCollection:
    return MetricCollection(
        {"low": of_classes.BinaryAccuracy(0.5), "high": of_classes.BinaryAccuracy(0.9)}
    )


def uninformative_first_row():
    x = torch.rand(16)
    x[0] = 0.99
    return x, (torch.rand(16) < x).long()


WRAPS: dict[str, Any] = {
    "plain": lambda c: c,
    "cloned": lambda c: c.clone(prefix="val/"),
    "nested": lambda c: MetricCollection({"inner": c, "more": of_classes.BinaryAccuracy(0.2)}),
    "in a mapping": lambda c: {"them": c},
}


@pytest.mark.parametrize("call", ["evaluate", "backward"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_compute_groups_are_formed_by_whole_batch(wrap, call):
    x, y = uninformative_first_row()
    values = []
    for rows in (1, 16):
        metrics = WRAPS[wrap](thresholds())
        for batch in [(x, y), (x.flip(0), y)]:
            getattr(cut_in(rows), call)(batch, metrics)
        values.append([each.compute() for each in flatten_metrics(metrics)])
    assert values[0] == values[1]


def test_trainer_evaluators_form_compute_groups_by_whole_batches():
    x, y = uninformative_first_row()
    (plain := thresholds()).update(x, y)
    values = Trainer(
        Identity(),
        eval_dataloader={
            "one": Evaluator(dataloader=[(x, y)], metrics=thresholds(), microbatch_size=1),
            "two": [(x, y)],
        },
        loss_fn=mean,
        metrics=thresholds(),
        eval_microbatch_size=1,
        progress=False,
        device="cpu",
    ).eval()
    for name, value in plain.compute().items():
        assert values[f"one/{name}"] == values[f"two/{name}"] == value.item()


# Metrics that depend on the cut


def split_value(metric: Any, batch: Any, size: int = 7, **options: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cut_in(size, **options).evaluate(batch, metric)
        value = metric.compute()
    return value, [str(each.message) for each in caught if each.category is MetricWarning]


@pytest.mark.parametrize("name", NAMED)
def test_metrics_that_depend_on_cut_warn_once_unless_batch_is_whole(name):
    make, given, words = NAMED[name]
    for call in ("evaluate", "backward"):
        mb, metric, batch = cut_in(7), make(), INPUTS[given]()
        with pytest.warns(MetricWarning, match=words) as caught:
            _ = [getattr(mb, call)(batch, metric) for _ in range(2)]
        assert len([each for each in caught if each.category is MetricWarning]) == 1
    assert split_value(make(), INPUTS[given](), size=N)[1] == []


class MeanOfMeans:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.updates = 0.0, 0

    def update(self, outputs, targets):
        self.total += float((outputs - targets).abs().mean())
        self.updates += 1

    def compute(self):
        return self.total / max(self.updates, 1)


class OwnAccuracy(MeanOfMeans):
    def update(self, preds, target):
        self.total += round(float(binary_accuracy(preds, target)) * len(preds))
        self.updates += len(preds)


@pytest.mark.parametrize(
    ("given", "make"),
    [
        ("binary", of_classes.BinaryAccuracy),  # probabilities
        ("-logits", lambda: of_classes.BinaryAccuracy(threshold=0.4)),  # -3, -2.9 … here
        ("-logits", OwnAccuracy),  # checked in the first microbatches only
        ("logits of classes", lambda: of_classes.MulticlassAccuracy(4)),  # counts the largest only
        ("numbers", lambda: wrappers.MinMaxMetric(MeanSquaredError())),
    ],
)
def test_metrics_that_read_slices_consistently_give_no_warning(given, make):
    x, y = INPUTS[given.removeprefix("-")]()
    batch = (-x, y) if given.startswith("-") else (x, y)
    (plain := make()).update(*batch)
    value, named = split_value(make(), batch)
    assert named == []
    torch.testing.assert_close(numbers(value), numbers(plain.compute()), rtol=1e-4, atol=1e-6)


def test_device_readings_are_compared_one_batch_later():
    """On a device torchmetrics computes both branches and selects without synchronizing."""
    code = "def read(x): return torch.where(((x < 0) | (x > 1)).any(), x.sigmoid(), x)"
    package: Any = {"torch": torch, "__name__": "torchmetrics.of_a_device"}
    exec(code, package)
    readings = Readings()
    for number in (0.5, 0.7, 2.0):
        assert not readings.differ
        with readings:
            package["read"](torch.tensor([number]))
    assert readings.differ


@pytest.mark.parametrize(
    ("make", "given", "asks"),
    [
        (of_classes.BinaryAccuracy, "logits", True),
        (lambda: of_classes.MulticlassAUROC(4), "logits of classes", True),
        (lambda: of_classes.MulticlassAccuracy(4), "logits of classes", False),
    ],
)
def test_only_metrics_that_inspect_values_stay_monitored(make, given, asks):
    guard = MetricGuard(lambda *_: None, BatchLayout(), lambda: RandomState([]), is_callers=False)
    metric, batch = make(), INPUTS[given]()
    for _ in range(5):
        guard.expect(is_split=True)
        before = function_modes()
        with guard.reading(metric, "it"):
            watched = function_modes() > before
            metric.update(*batch)
    assert watched is asks


@pytest.mark.parametrize("size", [3, 7])
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"a": m, "b": MeanSquaredError()}])
def test_custom_metric_that_counts_updates_warns(size, wrap):
    metric, batch = MeanOfMeans(), INPUTS["numbers"]()
    with pytest.warns(MetricWarning, match=r"MeanOfMeans counts \d rows as .* in two"):
        cut_in(size).evaluate(batch, wrap(metric))
    assert metric.updates == -(-N // size)  # the checks leave no trace


def squares(outputs, reduction="mean"):
    return nn.functional.mse_loss(outputs, torch.zeros_like(outputs), reduction=reduction)


OF_AN_UPDATE: dict[str, Callable[[Any], Any]] = {
    "rows": lambda outputs: outputs,
    "a number": lambda outputs: torch.mean(outputs.flatten()).item(),
    "loss": squares,
    "sum": lambda outputs: outputs.sum(),
    "how many": lambda outputs: float(len(outputs)),
    "largest": lambda outputs: outputs.max(),
    "sum of a loss": lambda outputs: squares(outputs, "sum"),
    "a mean of sums": lambda outputs: torch.stack([outputs.sum(), outputs.sum()]).mean(),
}


@pytest.mark.parametrize("kind", [SumMetric, MaxMetric])
@pytest.mark.parametrize("what", OF_AN_UPDATE)
def test_update_function_warns_only_if_cut_changes_value(what, kind):
    update = lambda metric, outputs, batch: metric.update(OF_AN_UPDATE[what](outputs))  # noqa: E731
    batch = INPUTS["numbers"]()
    (split, named), (whole, _) = (
        split_value(kind(), batch, size, update=update) for size in (8, N)
    )
    is_named = any(f"{kind.__name__} counts 8 rows as" in each for each in named)
    assert is_named is (float(split) != pytest.approx(float(whole), rel=1e-5))


def test_metric_returned_among_losses_warns_once():
    def forward(model, batch):
        outputs = model(batch[0])
        return {"error": squares(outputs - batch[1]), "level": outputs.detach().abs().mean()}

    microbatcher = Microbatcher(nn.Linear(3, 3), forward=forward)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.warns(MetricWarning, match=r"'level' needs no gradient.*'loss': total") as caught:
        results = [microbatcher.backward(batch) for _ in range(2)]
    assert len(caught) == 1
    assert results[0].losses.keys() == {"error", "level"}
