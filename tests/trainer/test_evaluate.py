"""Evaluation: every row counted once, nothing left behind, a size of its own."""

from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score, MulticlassPrecision

from automicro import Halving, Microbatcher, SampleTooLargeError
from tests.models import CLASSES, ROWS, Memory, Mlp, numbers, pair, y


def on(model: nn.Module, **options: Any) -> Microbatcher:
    return Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), **{"probe": False, **options})


def collection() -> MetricCollection:
    """Metrics that share states in compute groups, and one that keeps lists."""
    return MetricCollection(
        {
            "precision": MulticlassPrecision(CLASSES),
            "f1": MulticlassF1Score(CLASSES),
            "auroc": MulticlassAUROC(CLASSES, thresholds=None),
        }
    )


def metrics_of_whole_batches(model: nn.Module, *batches: Any) -> dict[str, float]:
    whole = collection()
    with torch.no_grad():
        for inputs, targets in batches:
            whole.update(model(inputs), targets)
    return {name: float(value) for name, value in whole.compute().items()}


@pytest.mark.parametrize("fails", [(), (2,), (1, 4), (5, 6)])
@pytest.mark.filterwarnings("ignore:No positive samples:UserWarning")
@pytest.mark.filterwarnings("ignore:Average precision score:UserWarning")
@pytest.mark.parametrize("training", [False, True])
def test_metrics_count_every_row_once_whatever_failed(
    fails: tuple[int, ...], training: bool
) -> None:
    net = Mlp()
    batches = [pair(), (numbers(ROWS, 6, seed=5), y().flip(0))]
    expected = metrics_of_whole_batches(net, *batches)
    metrics = collection()
    microbatcher = on(
        Memory(net, fails=fails),
        microbatch_size=Halving(initial=4),
        eval_microbatch_size=Halving(initial=4),
    )
    run = microbatcher.backward if training else microbatcher.evaluate
    assert sum(run(each, metrics=metrics).ooms for each in batches) == len(fails)
    assert {k: float(v) for k, v in metrics.compute().items()} == pytest.approx(expected)
    auroc: Any = metrics["auroc"]
    assert sum(len(part) for part in auroc.preds) == 2 * ROWS


def test_modes_are_restored_after_a_failure_too() -> None:
    model = Memory(nn.Sequential(nn.Dropout(), Mlp()), most=0)
    with pytest.raises(SampleTooLargeError):
        on(model).evaluate(pair())
    assert all(module.training for module in model.modules())
