"""The loss of many batches, as if they were one."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from automicro.scalars import read_scalars
from automicro.weighting.averages import Weight

_MOST_UNREAD = 100


class LossMean:
    """Gathers the losses of batches, each with what it was divided by.

    A mean of means would depend on how the data was cut into batches. Sums add up. What lies on a
    device is read late, a hundred batches at once.

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
        self._unread: list[tuple[str, Tensor, Weight | None]] = []

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
            of_all = denominators[""]
            self._unread.append(("loss", loss, of_all))
            self._unread += [(f"loss/{name}", part, of_all) for name, part in losses.items()]
        else:
            for name, part in losses.items():
                self._unread.append((f"loss/{name}", part, denominators[name]))
        if len(self._unread) >= _MOST_UNREAD:
            self._read()

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
        self._read()
        other._read()
        for name, values in other._gathered.items():
            self._gathered.setdefault(name, []).extend(values)

    def __getstate__(self) -> dict[str, Any]:
        self._read()
        return vars(self)

    def compute(self) -> dict[str, float]:
        """``"loss"``, and each part as ``"loss/name"``; empty where there were none."""
        self._read()
        means = {name: _mean(values) for name, values in self._gathered.items()}
        if means and "loss" not in means:
            # As in training, a part of which nothing counts is no part of the sum.
            parts = [means[name] for name, values in self._gathered.items() if _counts(values)]
            means = {"loss": math.fsum(parts) if parts else math.nan} | means
        return means

    def _read(self) -> None:
        """Read what is still where it was computed, all at once."""
        unread, self._unread = self._unread, []
        losses = read_scalars([loss for _, loss, _ in unread])
        counts = iter(read_scalars([n for _, _, n in unread if isinstance(n, Tensor)]))
        for (name, _, count), loss in zip(unread, losses, strict=True):
            denominator = next(counts) if isinstance(count, Tensor) else count
            self._gathered.setdefault(name, []).append((loss, denominator))


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
