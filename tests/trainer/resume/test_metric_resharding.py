"""Metric counts of several ranks resume on another number of ranks, or fail with a reason."""

from typing import Any

import pytest
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision
from torchmetrics.regression import PearsonCorrCoef, R2Score

from automicro.errors import CheckpointError
from automicro.trainer.metrics import MetricSet


class Average(Metric):
    """Averages over ranks, which differs from the average over rows."""

    value: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: float) -> None:
        self.value = torch.tensor(value)

    def compute(self) -> torch.Tensor:
        return self.value


class FromTen(Average):
    """A sum that does not start at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(10.0), dist_reduce_fx="sum")


class CountsAside(SumMetric):
    """Also counts in a plain attribute."""

    rows = 0

    def update(self, value: Any) -> None:
        self.rows += 1
        super().update(value)


def counted(make: Any, *updates: Any) -> MetricSet:
    metrics = MetricSet(make(), torch.device("cpu"))
    for arguments in updates:
        metrics.metrics.update(*arguments)
    return metrics


SCORES = [(torch.randn(4, 3), torch.randint(3, (4,))) for _ in range(3)]
NUMBERS = [(3.0,), (-1.0,), (2.0,)]
ADDITIVE: dict[str, tuple[Any, Any]] = {
    "sum": (SumMetric, NUMBERS),
    "highest": (MaxMetric, NUMBERS),
    "lowest": (MinMetric, NUMBERS),
    "joined": (CatMetric, NUMBERS),
    "shapes": (
        lambda: R2Score(multioutput="raw_values"),
        [(torch.rand(3, 2), torch.rand(3, 2)) for _ in range(3)],
    ),
    "collection": (
        lambda: MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3)]),
        SCORES,
    ),
}


@pytest.mark.parametrize(("make", "updates"), ADDITIVE.values(), ids=ADDITIVE)
def test_first_rank_resumes_with_counts_of_all_ranks(make: Any, updates: Any) -> None:
    parts: list[Any] = [updates[:1], updates[1:2], []]
    states = [counted(make, *part).state_dict() for part in parts]
    first, other = counted(make), counted(make)
    first.load_state_dict(first.reshard(states, rank=0))
    other.load_state_dict(other.reshard(states, rank=1))
    first.metrics.update(*updates[2])
    whole = counted(make, *updates)
    assert first.compute() == pytest.approx(whole.compute())
    # The other rank adds nothing to states that torchmetrics reduces over ranks.
    again = counted(make)
    again.load_state_dict(again.reshard([first.state_dict(), other.state_dict()], rank=0))
    assert again.compute() == pytest.approx(whole.compute())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Average, "value that torchmetrics reduces over ranks by dim_zero_mean"),
        (FromTen, "by dim_zero_sum from 10.0"),
        (PearsonCorrCoef, "reduces over ranks by None"),
        (CountsAside, "keeps rows outside of the states"),
    ],
)
def test_counts_that_cannot_be_merged_are_refused(make: Any, what: str) -> None:
    update = [torch.rand(4)] * 2 if make is PearsonCorrCoef else [1.0]
    saved = counted(lambda: {"mine": make()})
    saved.metrics["mine"].update(*update)
    states = [saved.state_dict()] * 2
    with pytest.raises(CheckpointError, match=rf"the metric mine \({make.__name__}\)") as caught:
        counted(lambda: {"mine": make()}).reshard(states, rank=0)
    assert what in str(caught.value)
    assert "Leave it out of the metrics of training" in str(caught.value)
