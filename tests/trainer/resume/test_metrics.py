"""Metrics go on counting where a checkpoint left them, by their names."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
    MulticlassPrecision,
)
from torchmetrics.wrappers import Running

from automicro.errors import CheckpointError, CheckpointWarning
from automicro.trainer.metrics import MetricSet
from tests.trainer.resume.runs import check_resumes, linear, trainer
from tests.trainer.runs import CLASSES, make_loader


def accuracy() -> Metric:
    return MulticlassAccuracy(CLASSES)


class OwnMetric:
    """Counts in all kinds of attributes, and has no state_dict."""

    def __init__(self) -> None:
        self.threshold = 0.5
        self.reset()

    def reset(self) -> None:
        self.rows = 0
        self.sums = np.zeros(2)
        self.seen: Counter[int] = Counter()
        self.by_class: defaultdict[int, list[float]] = defaultdict(list)
        self.largest = torch.zeros(())

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        values = outputs.detach().amax(1)
        self.rows += len(outputs)
        self.sums += [values.sum().item(), 1.0]
        self.seen.update(targets.tolist())
        for target, value in zip(targets.tolist(), values.tolist(), strict=True):
            self.by_class[target].append(value)
        self.largest = torch.maximum(self.largest, values.max())

    def compute(self) -> dict[str, float]:
        return {
            "rows": self.rows,
            "sum": self.sums[0],
            "first": self.seen[0],
            "mean": sum(self.by_class[1]) / len(self.by_class[1]),
            "largest": self.largest.item(),
        }


METRICS: dict[str, Callable[[], Any]] = {
    "min and max": lambda: {"accuracy": MinMaxMetric(accuracy())},
    "running": lambda: {"accuracy": Running(accuracy(), window=2)},
    "collection": lambda: MetricCollection([accuracy(), MulticlassPrecision(CLASSES)]),
    "lists": lambda: {"auroc": MulticlassAUROC(CLASSES)},
    "own": lambda: {"own": OwnMetric()},
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("running", "collection") else pytest.mark.sweep)
        for kind in METRICS
    ],
)
def test_metrics_end_as_in_the_undisturbed_run(kind: str, tmp_path: Path) -> None:
    check_resumes(
        linear,
        tmp_path,
        options=lambda: {
            "metrics": METRICS[kind](),
            "microbatch_size": None,
            "eval_dataloader": make_loader(rows=32),
            "eval_interval": "1ba",
        },
    )


def filled(**sums: float) -> MetricSet:
    found = MetricSet({name: SumMetric() for name in sums}, torch.device("cpu"))
    for name, value in sums.items():
        found.metrics[name].update(torch.tensor(value))
    return found


def test_options_of_a_metric_are_those_given_now() -> None:
    device = torch.device("cpu")
    saved = MetricSet({"own": OwnMetric()}, device)
    saved.metrics["own"].update(torch.ones(2, 3), torch.tensor([0, 1]))
    changed = OwnMetric()
    changed.threshold = 0.7
    other = MetricSet({"own": changed}, device)
    other.load_state_dict(saved.state_dict())
    assert (other.metrics["own"].rows, other.metrics["own"].threshold) == (2, 0.7)


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "one more": (dict, lambda: {"mean": accuracy()}, r": mean\."),
    "another class": (
        lambda: {"it": accuracy()},
        lambda: {"it": MulticlassConfusionMatrix(CLASSES)},
        r": it \(there a MulticlassAccuracy\)",
    ),
    "another shape": (
        lambda: {"it": MulticlassAUROC(CLASSES, thresholds=5)},
        lambda: {"it": MulticlassAUROC(CLASSES, thresholds=7)},
        r": it \(its state confmat is a tensor of shape \(5, 3, 2, 2\)\)",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_within_an_epoch_other_metrics_are_refused_by_name(other: str, tmp_path: Path) -> None:
    saved, here, message = OTHERS[other]
    trainer(linear(), tmp_path, metrics=saved() or None, max_duration="2ba").fit()
    model = linear()
    with pytest.raises(CheckpointError, match=message):
        trainer(model, tmp_path, metrics=here()).fit()
    assert torch.equal(model.weight, linear().weight)


@pytest.mark.parametrize("other", OTHERS)
def test_at_the_end_of_an_epoch_metrics_may_be_others(other: str, tmp_path: Path) -> None:
    saved, here, _ = OTHERS[other]
    trainer(linear(), tmp_path, metrics=saved() or None, max_duration="3ba").fit()
    assert trainer(linear(), tmp_path, metrics=here(), max_duration="6ba").fit().steps == 6


def test_counts_of_a_metric_that_is_gone_are_dropped_with_a_warning(tmp_path: Path) -> None:
    trainer(linear(), tmp_path, metrics={"a": accuracy()}, max_duration="2ba").fit()
    with pytest.warns(CheckpointWarning, match="counts of the metrics a, but this run does not"):
        summary = trainer(linear(), tmp_path).fit()
    assert summary.steps == 5


class Window(OwnMetric):
    """Keeps what no checkpoint can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.last = deque([0.0], maxlen=3)


def test_a_metric_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    with pytest.warns(CheckpointWarning, match=r"hold last \(a deque\) of the metric Window"):
        trainer(linear(), tmp_path, metrics={"w": Window()}, max_duration="2ba").fit()
