"""Metrics of the search: each is updated with outputs and rows, once per row."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import Running

from tests.oracle.contents import CLASSES, IGNORED


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricKind:
    """Metric ingredient: a fresh metric, and its arguments from outputs and rows."""

    make: Callable[[], Any]
    update: Callable[[Any, Tensor, Any], None]
    read: Callable[[Any], Any] = lambda metric: metric.compute()
    counts_updates: bool = False


def classes(metric: Any, out: Tensor, rows: Any) -> None:
    metric.update(out.flatten(0, -2).float(), rows["y"].flatten())


def numbers(metric: Any, out: Tensor, rows: Any) -> None:
    metric.update(out.double().contiguous(), rows["t"].detach().double().contiguous())


def outputs(metric: Any, out: Tensor, rows: Any) -> None:
    metric.update(out.double().flatten(1).sum(1))


class RowsCounted(Metric):
    """Plain Python counter next to torchmetrics' states."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.rows = 0

    def update(self, values: Tensor) -> None:
        self.total += values.sum()
        self.rows += len(values)

    def compute(self) -> Tensor:
        return self.total / max(self.rows, 1)


class LastRows(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.last: collections.deque[float] = collections.deque(maxlen=4)

    def update(self, values: Tensor) -> None:
        self.last.extend(values.tolist())

    def compute(self) -> Tensor:
        return torch.tensor(list(self.last), dtype=torch.float64)


class ArraySums(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.sums = np.zeros(2)

    def update(self, values: Tensor) -> None:
        self.sums += (float(values.sum()), len(values))

    def compute(self) -> Tensor:
        return torch.tensor(self.sums)


class NotOfTorchmetrics:
    """Object with update, compute and reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: dict[str, list[float]] = {"values": []}

    def update(self, values: Tensor) -> None:
        self.seen["values"] += values.tolist()

    def compute(self) -> Tensor:
        return torch.tensor(self.seen["values"], dtype=torch.float64)


def _collection() -> MetricCollection:
    options: dict[str, Any] = {"num_classes": CLASSES, "average": "macro", "ignore_index": IGNORED}
    kinds = (MulticlassAccuracy, MulticlassPrecision, MulticlassF1Score)
    return MetricCollection([kind(**options) for kind in kinds])


def _accuracy(average: str) -> Any:
    return MulticlassAccuracy(CLASSES, average=average, ignore_index=IGNORED)  # type: ignore[arg-type]


METRICS = {
    "accuracy": MetricKind(make=lambda: _accuracy("micro"), update=classes),
    "macro accuracy": MetricKind(make=lambda: _accuracy("macro"), update=classes),
    "confusion": MetricKind(
        make=lambda: MulticlassConfusionMatrix(CLASSES, ignore_index=IGNORED), update=classes
    ),
    "a collection": MetricKind(make=_collection, update=classes),
    "squares": MetricKind(make=lambda: MeanSquaredError().set_dtype(torch.float64), update=numbers),
    "a list": MetricKind(make=CatMetric, update=outputs),
    "a mean": MetricKind(make=lambda: MeanMetric().set_dtype(torch.float64), update=outputs),
    "a counter": MetricKind(make=RowsCounted, update=outputs),
    "a deque": MetricKind(make=LastRows, update=outputs),
    "an array": MetricKind(make=ArraySums, update=outputs),
    "not of torchmetrics": MetricKind(make=NotOfTorchmetrics, update=outputs),
    "a running window": MetricKind(
        make=lambda: Running(MeanMetric().set_dtype(torch.float64), window=2),
        update=outputs,
        counts_updates=True,
    ),
}
