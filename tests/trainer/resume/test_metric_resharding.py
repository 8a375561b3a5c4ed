"""Metric counts of several ranks resume on another number of ranks, or fail with a reason."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision
from torchmetrics.regression import PearsonCorrCoef, R2Score

from automicro.errors import CheckpointError
from automicro.trainer.metrics import MetricSet

CPU = torch.device("cpu")


class Average(Metric):
    """Averages over ranks, which differs from the average over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")
        self.value: torch.Tensor

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


def counted(make: Any, parts: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the metric state of each rank."""
    states = []
    for part in parts:
        metrics = MetricSet(make(), CPU)
        for arguments in part:
            metrics.metrics.update(*arguments)
        states.append(metrics.state_dict())
    return states


def scores(*seeds: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(4, 3, generator=generator)
        found.append((logits, torch.randint(3, (4,), generator=generator)))
    return found


def numbers(*values: float) -> list[tuple[float]]:
    return [(each,) for each in values]


ADDITIVE: dict[str, tuple[Any, Any]] = {
    "sum": (SumMetric, numbers(1, 2, 3)),
    "highest": (MaxMetric, numbers(3, -1, 2)),
    "lowest": (MinMetric, numbers(3, -1, 2)),
    "joined": (CatMetric, numbers(1, 2, 3)),
    "confusion": (lambda: MulticlassAccuracy(3), scores(0, 1, 2)),
    "shapes": (
        lambda: R2Score(multioutput="raw_values"),
        [(torch.rand(3, 2), torch.rand(3, 2)) for _ in range(3)],
    ),
    "collection": (
        lambda: MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3)]),
        scores(0, 1, 2),
    ),
}


@pytest.mark.parametrize("name", ADDITIVE)
def test_first_rank_resumes_with_counts_of_all_ranks(name: str) -> None:
    make, updates = ADDITIVE[name]
    states = counted(make, [updates[:1], updates[1:2], []])
    first, other = MetricSet(make(), CPU), MetricSet(make(), CPU)
    first.load_state_dict(first.reshard(states, rank=0))
    other.load_state_dict(other.reshard(states, rank=1))
    first.metrics.update(*updates[2])
    whole = MetricSet(make(), CPU)
    for arguments in updates:
        whole.metrics.update(*arguments)
    assert first.compute() == pytest.approx(whole.compute())
    # The other rank adds nothing to states that torchmetrics reduces over ranks.
    again = MetricSet(make(), CPU)
    again.load_state_dict(again.reshard([first.state_dict(), other.state_dict()], rank=0))
    assert again.compute() == pytest.approx(whole.compute())


@pytest.mark.parametrize(
    ("make", "updates", "what"),
    [
        (Average, numbers(1, 2), "value that torchmetrics reduces over ranks by dim_zero_mean"),
        (FromTen, numbers(1, 2), "by dim_zero_sum from 10.0"),
        (
            PearsonCorrCoef,
            [(torch.rand(4), torch.rand(4)) for _ in range(2)],
            "reduces over ranks by None",
        ),
        (CountsAside, numbers(1, 2), "keeps rows outside of the states"),
    ],
)
def test_counts_that_cannot_be_merged_are_refused(make: Any, updates: Any, what: str) -> None:
    states = counted(lambda: {"mine": make()}, [])
    for update in updates:
        metrics = MetricSet({"mine": make()}, CPU)
        metrics.metrics["mine"].update(*update)
        states.append(metrics.state_dict())
    with pytest.raises(CheckpointError, match=rf"the metric mine \({make.__name__}\)") as caught:
        MetricSet({"mine": make()}, CPU).reshard(states, rank=0)
    assert what in str(caught.value)
    assert "Leave it out of the metrics of training" in str(caught.value)
