"""Metrics are rolled back after a failed attempt and independent of the cut."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import (
    CatMetric,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    MinMetric,
    R2Score,
    SumMetric,
    wrappers,
)
from torchmetrics import classification as of_classes
from torchmetrics import image as of_images
from torchmetrics import regression as of_numbers
from torchmetrics.functional.classification import binary_accuracy

from automicro import Evaluator, Halving, MetricWarning, Microbatcher, Trainer
from automicro.batch.layout import BatchLayout
from automicro.features import UpdateMetric
from automicro.step.metrics import MetricGuard, Readings, flatten_metrics
from automicro.torch_private import function_modes
from automicro.transaction.rng import RandomState
from tests.acceptance.torchmetrics_families import INPUTS, NAMED, N, numbers
from tests.outside import Unreached
from tests.sweeps import mostly_in_sweeps

ROWS = 12


class Identity(nn.Module):
    """An identity model that runs out of memory at given calls."""

    calls = Unreached()

    def __init__(self, *fails_at: int) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))
        self.fails_at = fails_at
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls in self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x + 0 * self.zero


def mean(outputs: Tensor, targets: Any) -> Tensor:
    return outputs.float().mean()


def cut_in(size: Any, model: nn.Module | None = None, **options: Any) -> Microbatcher:
    given: dict[str, Any] = {"loss_fn": mean, "probe": False, **options}
    return Microbatcher(
        model or Identity(), microbatch_size=size, eval_microbatch_size=size, **given
    )


# ---------------------------------------------------------------- state of metrics


class ListMetric:
    """Count in an attribute, and append rows to a list."""

    def __init__(self) -> None:
        self.rows, self.classes = 0, list[int]()

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.rows += len(targets)
        self.classes.extend(targets.tolist())

    def compute(self) -> Any:
        return self.rows, self.classes


COUNTED: dict[str, Callable[[], Any]] = {
    "sums of torchmetrics": MeanSquaredError,
    "a list of torchmetrics": CatMetric,
    "a collection": lambda: MetricCollection([MeanSquaredError(), R2Score()]),
    "an own one": ListMetric,
}


@pytest.mark.parametrize("call", ["evaluate", "backward"])
@pytest.mark.parametrize("kind", COUNTED)
def test_metric_is_rolled_back_after_failed_attempt(kind: str, call: str) -> None:
    batches = [(torch.randn(ROWS), torch.randint(3, (ROWS,)).float()) for _ in range(3)]
    disturbed, clean = COUNTED[kind](), COUNTED[kind]()
    policy = Halving(initial=4, refine=False)
    update = UpdateMetric(lambda metric, outputs, batch: metric.update(outputs))
    features = [update] if kind == "a list of torchmetrics" else []
    once = cut_in(policy, Identity(3, 11), features=features)
    results = [getattr(once, call)(batch, {"it": disturbed}) for batch in batches]
    assert sum(result.ooms for result in results) == 2
    for result, batch in zip(results, batches, strict=True):
        plain = cut_in(result.microbatch_size, features=features)
        getattr(plain, call)(batch, {"it": clean})
    torch.testing.assert_close(disturbed.compute(), clean.compute(), rtol=0, atol=0)


class ClassCounter:
    """Count in a class attribute."""

    total: ClassVar[int] = 0

    @classmethod
    def update(cls, outputs: Tensor, targets: Tensor) -> None:
        cls.total += len(targets)


def test_class_attribute_metric_is_rolled_back() -> None:
    ClassCounter.total = 0
    microbatcher = cut_in(Halving(initial=4, refine=False), Identity(3))
    batch = torch.randn(ROWS), torch.zeros(ROWS)
    assert microbatcher.evaluate(batch, ClassCounter).ooms == 1
    assert ClassCounter.total == ROWS


class Writes:
    def __init__(self, path: Path) -> None:
        self.inner = {"file": path.open("w")}

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.inner["file"].write("row\n")


def test_uncopyable_metric_raises_before_first_attempt(tmp_path: Path) -> None:
    metric, model = Writes(tmp_path / "rows"), Identity()
    microbatcher = cut_in("auto", model)
    try:
        with pytest.raises(TypeError, match=r"inner\['file'\] \(of type TextIOWrapper\) cannot be"):
            microbatcher.evaluate((torch.randn(4), torch.zeros(4)), metric)
        assert model.calls == 0
    finally:
        metric.inner["file"].close()


# ---------------------------------------------------------------- compute groups


def thresholds() -> MetricCollection:
    return MetricCollection(
        {"low": of_classes.BinaryAccuracy(0.5), "high": of_classes.BinaryAccuracy(0.9)}
    )


def uninformative_first_row() -> tuple[Tensor, Tensor]:
    x = torch.rand(16)
    x[0] = 0.99
    return x, (torch.rand(16) < x).long()


@pytest.mark.parametrize("call", ["evaluate", "backward"])
@pytest.mark.parametrize("size", mostly_in_sweeps([1, 3], quick=[1]))
@pytest.mark.parametrize(
    "wrap",
    [
        lambda c: c,
        lambda c: c.clone(prefix="val/"),
        lambda c: MetricCollection({"inner": c, "more": of_classes.BinaryAccuracy(0.2)}),
        lambda c: {"them": c},
        lambda c: [c],
    ],
    ids=["plain", "cloned", "nested", "in a mapping", "in a list"],
)
def test_compute_groups_are_formed_by_whole_batch(wrap: Any, size: int, call: str) -> None:
    x, y = uninformative_first_row()
    disturbed, clean = wrap(thresholds()), wrap(thresholds())
    for metrics in (disturbed, clean):
        named = {"it": metrics[0]} if isinstance(metrics, list) else metrics
        rows = 16 if metrics is clean else size
        for batch in [(x, y), (x.flip(0), y)]:
            getattr(cut_in(rows), call)(batch, named)
    found = [flatten_metrics(each) for each in (disturbed, clean)]
    for mine, theirs in zip(*found, strict=True):
        assert mine.compute() == theirs.compute()


def test_trainer_evaluators_form_compute_groups_by_whole_batches() -> None:
    x, y = uninformative_first_row()
    plain = thresholds()
    plain.update(x, y)
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


# ---------------------------------------------------------------- metrics that count updates


def split_value(metric: Any, batch: Any, size: int = 7) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cut_in(size).evaluate(batch, metric)
        value = metric.compute()
    named = [str(each.message) for each in caught if each.category is MetricWarning]
    return value, named


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("call", ["evaluate", "backward"])
def test_metrics_that_depend_on_cut_warn_once(name: str, call: str) -> None:
    make, given, words = NAMED[name]
    mb, metric, batch = cut_in(7), make(), INPUTS[given]()
    with pytest.warns(MetricWarning, match=words) as caught:
        _ = [getattr(mb, call)(batch, metric) for _ in range(2)]
    assert len([each for each in caught if each.category is MetricWarning]) == 1


@pytest.mark.parametrize("name", NAMED)
def test_metrics_that_depend_on_cut_accept_whole_batches(name: str) -> None:
    make, given, _ = NAMED[name]
    assert split_value(make(), INPUTS[given](), size=N)[1] == []


class OwnAccuracy:
    """An unknown metric that calls a function of torchmetrics."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.rows = 0.0

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.right += round(float(binary_accuracy(preds, target)) * len(preds))
        self.rows += len(preds)

    def compute(self) -> float:
        return self.right / self.rows


@pytest.mark.parametrize(
    ("given", "make"),
    [
        ("binary", of_classes.BinaryAccuracy),  # probabilities
        ("logits", lambda: of_classes.BinaryAccuracy(threshold=0.4)),  # -3, -2.9 … here
        ("logits", lambda: OwnAccuracy()),  # checked in the first microbatches only
        ("logits of classes", lambda: of_classes.MulticlassAccuracy(4)),  # counts the largest only
    ],
)
def test_metrics_that_read_slices_consistently_give_no_warning(given: str, make: Any) -> None:
    x, y = INPUTS[given]()
    batch = (-x, y) if given == "logits" else (x, y)
    metric = make()
    metric.update(*batch)
    value, named = split_value(make(), batch)
    assert (value, named) == (metric.compute(), [])


def test_device_readings_are_compared_one_batch_later() -> None:
    """On a device torchmetrics computes both branches and selects without synchronizing."""
    code = "def read(x): return torch.where(((x < 0) | (x > 1)).any(), x.sigmoid(), x)"
    package = {"torch": torch, "__name__": "torchmetrics.of_a_device"}
    exec(code, package)
    read: Any = package["read"]
    readings = Readings()
    for number in (0.5, 0.7, 2.0):
        assert not readings.differ
        with readings:
            read(torch.tensor([number]))
    assert readings.differ


@pytest.mark.parametrize(
    ("make", "given", "asks"),
    [
        (of_classes.BinaryAccuracy, "logits", True),
        (lambda: of_classes.MulticlassAUROC(4), "logits of classes", True),
        (lambda: of_classes.MulticlassAccuracy(4), "logits of classes", False),
        (MeanSquaredError, "numbers", False),
    ],
)
def test_only_metrics_that_inspect_values_stay_monitored(make: Any, given: str, asks: bool) -> None:
    guard = MetricGuard(lambda *_: None, BatchLayout(), lambda: RandomState([]), is_callers=False)
    metric, batch = make(), INPUTS[given]()
    for _ in range(5):
        guard.expect(is_split=True)
        before = function_modes()
        with guard.reading(metric, "it"):
            watched = function_modes() > before
            metric.update(*batch)
    assert watched is asks


@pytest.mark.parametrize(
    "make",
    [
        lambda: wrappers.MinMaxMetric(MeanSquaredError()),
        lambda: wrappers.MultioutputWrapper(R2Score(), 3),
        lambda: wrappers.ClasswiseWrapper(of_classes.MulticlassAccuracy(4, average=None)),
        lambda: of_images.StructuralSimilarityIndexMeasure(data_range=1.0),
        of_numbers.PearsonCorrCoef,
    ],
)
def test_exact_wrappers_give_no_warning(make: Any) -> None:
    metric, plain = make(), make()
    name = type(metric).__name__
    given = {"MultioutputWrapper": "columns", "ClasswiseWrapper": "classes"}.get(name, "numbers")
    batch = INPUTS["images" if "Structural" in name else given]()
    plain.update(*batch)
    value, named = split_value(metric, batch)
    assert named == []
    torch.testing.assert_close(numbers(value), numbers(plain.compute()), rtol=1e-4, atol=1e-6)


class MeanOfMeans:
    """A mean of batch means, as many training scripts compute it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.updates = 0.0, 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.total += float((outputs - targets).abs().mean())
        self.updates += 1

    def compute(self) -> float:
        return self.total / max(self.updates, 1)


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"a": m, "b": MeanSquaredError()}])
def test_custom_metric_that_counts_updates_warns(size: int, wrap: Any) -> None:
    metric, batch = MeanOfMeans(), INPUTS["numbers"]()
    with pytest.warns(MetricWarning, match=r"MeanOfMeans counts \d rows as .* in two"):
        cut_in(size).evaluate(batch, wrap(metric))
    assert metric.updates == -(-N // size)  # the checks leave no trace


OF_AN_UPDATE: dict[str, Callable[[Tensor], Any]] = {
    "rows": lambda outputs: outputs,
    "mean": lambda outputs: outputs.mean(),
    "a number": lambda outputs: torch.mean(outputs.flatten()).item(),
    "loss": lambda outputs: nn.functional.mse_loss(outputs, torch.zeros_like(outputs)),
    "sum": lambda outputs: outputs.sum(),
    "how many": lambda outputs: float(len(outputs)),
    "largest": lambda outputs: outputs.max(),
    "sum of a loss": lambda outputs: nn.functional.mse_loss(
        outputs, torch.zeros_like(outputs), reduction="sum"
    ),
    "a mean of sums": lambda outputs: torch.stack([outputs.sum(), outputs.sum()]).mean(),
}


@pytest.mark.parametrize(
    "kind",
    mostly_in_sweeps([MeanMetric, SumMetric, MaxMetric, MinMetric], quick=[SumMetric, MaxMetric]),
)
@pytest.mark.parametrize("what", OF_AN_UPDATE)
def test_update_function_warns_only_if_cut_changes_value(what: str, kind: Any) -> None:
    number, batch, values = OF_AN_UPDATE[what], INPUTS["numbers"](), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (8, N):
            metric = kind()
            update = UpdateMetric(lambda metric, outputs, batch: metric.update(number(outputs)))
            cut_in(size, features=[update]).evaluate(batch, metric)
            values.append(float(metric.compute()))
    named = [each for each in caught if f"{kind.__name__} counts 8 rows as" in str(each.message)]
    assert bool(named) is (values[0] != pytest.approx(values[1], rel=1e-5))


def parts(**extra: Callable[[Tensor], Tensor]) -> Callable[[Any, Any], dict[str, Tensor]]:
    def forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        outputs = model(batch[0])
        loss = nn.functional.mse_loss(outputs, batch[1])
        return {"error": loss, **{name: make(outputs) for name, make in extra.items()}}

    return forward


def test_metric_returned_among_losses_warns_once() -> None:
    forward = parts(level=lambda outputs: outputs.detach().abs().mean())
    mb = Microbatcher(nn.Linear(3, 3), forward=forward)
    batch = torch.randn(4, 3), torch.randn(4, 3)
    with pytest.warns(MetricWarning, match=r"'level' needs no gradient.*'loss': total") as caught:
        results = [mb.backward(batch) for _ in range(2)]
    assert len(caught) == 1
    assert results[0].losses.keys() == {"error", "level"}
