"""The loss of many batches, as if they were one."""

import math
from collections.abc import Mapping

from torch import Tensor

from automicro.weighting.averages import Weight


class LossMean:
    """Gathers the losses of batches, each with what it was divided by.

    A mean of means would depend on how the data was cut into batches. Sums add up.

    Example:
        >>> import torch
        >>> mean = LossMean()
        >>> mean.add(torch.tensor(1.0), {}, {"": 3})
        >>> mean.add(torch.tensor(5.0), {}, {"": 1})
        >>> mean.compute()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._gathered: dict[str, list[tuple[float, float | None]]] = {}

    def add(
        self,
        loss: Tensor,
        losses: Mapping[str, Tensor],
        denominators: Mapping[str, Weight | None],
    ) -> None:
        """Take one batch's loss, its parts by name, and what they were divided by.

        Args:
            loss: the total.
            losses: its parts.
            denominators: by the name of the loss, or one for all under ``""``; None for a sum.
        """
        if "" in denominators:
            denominator = _number(denominators[""])
            self._take("loss", loss, denominator)
            for name, part in losses.items():
                self._take(f"loss/{name}", part, denominator)
        else:
            for name, part in losses.items():
                self._take(f"loss/{name}", part, _number(denominators[name]))

    def merge(self, other: "LossMean") -> None:
        """Take all that another one gathered, such as another rank's.

        >>> import torch
        >>> mine, others = LossMean(), LossMean()
        >>> mine.add(torch.tensor(1.0), {}, {"": 3})
        >>> others.add(torch.tensor(5.0), {}, {"": 1})
        >>> mine.merge(others)
        >>> mine.compute()
        {'loss': 2.0}
        """
        for name, values in other._gathered.items():
            self._gathered.setdefault(name, []).extend(values)

    def compute(self) -> dict[str, float]:
        """``"loss"``, and each part as ``"loss/name"``; empty where there were none."""
        means = {name: _mean(values) for name, values in self._gathered.items()}
        if means and "loss" not in means:
            # As in training, a part of which nothing counts is no part of the sum.
            parts = [means[name] for name, values in self._gathered.items() if _counts(values)]
            means = {"loss": math.fsum(parts) if parts else math.nan} | means
        return means

    def _take(self, name: str, loss: Tensor, denominator: float | None) -> None:
        self._gathered.setdefault(name, []).append((loss.item(), denominator))


def _number(denominator: Weight | None) -> float | None:
    return denominator.item() if isinstance(denominator, Tensor) else denominator


def _counts(values: list[tuple[float, float | None]]) -> bool:
    return any(denominator is None or denominator > 0 for _, denominator in values)


def _mean(values: list[tuple[float, float | None]]) -> float:
    if any(denominator is None for _, denominator in values):
        return math.fsum(loss for loss, _ in values)
    # A batch in which nothing counts has a loss that says nothing: it may be NaN.
    counted = [(loss, denominator) for loss, denominator in values if denominator]
    if not counted:
        return math.nan
    total = math.fsum(denominator for _, denominator in counted)
    return math.fsum(loss * denominator for loss, denominator in counted) / total
