"""The mean loss of an evaluation, over the rows of all its batches."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from automicro.loss.averages import Weight, read_numbers

_MOST_UNREAD = 100


class LossMean:
    """The mean loss of several batches, weighted by their denominators.

    Example:
        >>> import torch
        >>> mean = LossMean()
        >>> mean.add(torch.tensor(1.0), {}, {"": 3})
        >>> mean.add(torch.tensor(5.0), {}, {"": 1})
        >>> mean.compute()
        {'loss': 2.0}
    """

    # A mean of means would depend on the cut of the data into batches; weighted sums do not. Values
    # on a device are read late, a hundred batches at once.
    def __init__(self) -> None:
        self._gathered: list[tuple[str, float, float | None]] = []  # name, loss, denominator
        self._unread: list[tuple[str, Tensor, Weight | None]] = []

    def add(
        self,
        loss: Tensor,
        losses: Mapping[str, Tensor],
        denominators: Mapping[str, Weight | None],
    ) -> None:
        """Add one batch's loss, its parts by name, and their denominators."""
        is_one = "" in denominators
        if is_one:
            self._unread.append(("loss", loss, denominators[""]))
        for name, part in losses.items():
            self._unread.append((f"loss/{name}", part, denominators["" if is_one else name]))
        # Kept on the device until then, because each read waits for it.
        if len(self._unread) >= _MOST_UNREAD:
            self._read()

    def merge(self, other: "LossMean") -> None:
        """Add everything that another one has gathered, such as another rank's.

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
        self._gathered += other._gathered

    def __getstate__(self) -> dict[str, Any]:
        # Unread values may be on a device that the receiver of this state does not have.
        self._read()
        return vars(self)

    def compute(self) -> dict[str, float]:
        """Return ``"loss"``, and each part as ``"loss/name"``; empty if there were none."""
        self._read()
        gathered = defaultdict[str, list[tuple[float, float | None]]](list)
        for name, loss, count in self._gathered:
            gathered[name].append((loss, count))
        means = {name: _mean(values) for name, values in gathered.items()}
        if means and "loss" not in means:
            # As in training, a part without any count is left out of the sum.
            counted = [mean for mean in means.values() if mean is not None]
            means = {"loss": math.fsum(counted) if counted else None} | means
        return {name: math.nan if mean is None else mean for name, mean in means.items()}

    def _read(self) -> None:
        """Read all values that are still on a device at once."""
        unread, self._unread = self._unread, []
        values = read_numbers([value for _, *pair in unread for value in pair])
        names = [name for name, *_ in unread]
        self._gathered += zip(names, values[::2], values[1::2], strict=True)


def _mean(values: list[tuple[float, float | None]]) -> float | None:
    """Return the mean, or None if nothing counts, because the losses may then be NaN."""
    # Sums add up and have no denominator.
    if any(count is None for _, count in values):
        return math.fsum(loss for loss, _ in values)
    counted = [(loss, count) for loss, count in values if count]
    # fsum, because an evaluation may add up millions of losses.
    total = math.fsum(count for _, count in counted)
    return math.fsum(loss * count for loss, count in counted) / total if counted else None
