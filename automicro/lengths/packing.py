"""Rows of varying length, packed into slices: the least time, within a budget.

A slice is padded to its longest row, so it costs its number of rows times the cost of the longest.
Rows that are sorted by cost and cut into neighbours leave nothing to gain by another grouping. Of
all such cuts `pack` finds the best: dynamic programming over where a slice begins, in which a
later beginning that is better once stays better, so that one queue of beginnings is enough
(Galil and Park, "Dynamic programming with convexity, concavity and sparsity", 1992). Pure Python
and numpy: the same costs lead to the same slices everywhere.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Combine = Callable[[Array], Array]
"""The cost of a row from its lengths: from ``(..., lengths)`` to ``(...)``."""

# Rows of several lengths are compared with all beginnings; beyond so many, with these.
_MOST_BEGINNINGS = 2048


def pack(costs: Sequence[float], budget: float, *, overhead: float = 0.0) -> list[int]:
    """The rows of each slice, where ``overhead · slices + padded costs`` are least.

    A row that costs more than the budget is alone in its slice. Takes O(n) after the sorting.

    Args:
        costs: of each row, sorted, the highest first.
        budget: the most that a slice may cost: its rows times the cost of its first.
        overhead: what a slice costs whatever it holds, in the unit of the costs.

    Raises:
        ValueError: the costs are not sorted.

    >>> pack([8, 8, 3, 2, 2], 16), pack([8, 8, 3, 2, 2], 16, overhead=10)
    ([2, 1, 2], [2, 3])
    >>> pack([40, 2, 1], 16)
    [1, 1, 1]
    """
    values = [float(cost) for cost in costs]
    if any(map(float.__lt__, values, values[1:])):
        raise ValueError("rows are packed from the costliest to the cheapest: sort them first")
    num_rows = len(values)
    # Slices up to row i, and one of the rows from there to x, cost
    # least[i] + overhead + (x - i) · costs[i].
    least = [0.0] * (num_rows + 1)
    begins = [0] * (num_rows + 1)
    # Each beginning with the first end for which it is the best.
    queue: deque[tuple[int, int]] = deque()
    for end in range(1, num_rows + 1):
        new = end - 1
        while queue and queue[-1][1] >= end:
            first = _better_from(new, queue[-1][0], values, least, budget)
            if first > queue[-1][1]:
                break
            queue.pop()
        if not queue:
            queue.append((new, end))
        else:
            first = int(max(_better_from(new, queue[-1][0], values, least, budget), end))
            if first <= num_rows:
                queue.append((new, first))
        while len(queue) > 1 and queue[1][1] <= end:
            queue.popleft()
        begin = queue[0][0]
        least[end] = least[begin] + overhead + (end - begin) * values[begin]
        begins[end] = begin
    return _slices(begins)


def _better_from(new: int, old: int, costs: list[float], least: list[float], budget: float) -> int:
    """The first end for which a later beginning is better, at the latest where the old one ends."""
    too_long = old + _most_rows(costs[old], budget) + 1
    slope = costs[old] - costs[new]
    ahead = (least[new] - new * costs[new]) - (least[old] - old * costs[old])
    if slope > 0:
        return min(too_long, math.floor(ahead / slope) + 1)  # of equals, the fewer slices
    return 0 if ahead < 0 else too_long


def _most_rows(cost: float, budget: float) -> int:
    return max(1, int(budget / cost))


def pack_lengths(
    lengths: Array, combine: Combine, budget: float, *, overhead: float = 0.0
) -> list[int]:
    """The same for rows of several lengths, each of which a slice pads to its longest.

    The order of the rows is kept, so the result is the best for this order; another may be better.

    Args:
        lengths: of each row, as (rows, lengths).
        combine: the cost of a row from its lengths.
        budget: the most that a slice may cost.
        overhead: of a slice.

    >>> frames_and_labels = np.array([[8, 1], [7, 3], [2, 9], [2, 2]])
    >>> pack_lengths(frames_and_labels, lambda each: each.prod(-1), 48, overhead=20)
    [2, 2]
    """
    num_rows = len(lengths)
    least = np.zeros(num_rows + 1)
    begins = [0] * (num_rows + 1)
    longest = np.zeros_like(lengths)  # of the slices that begin at each row, so far
    for end in range(1, num_rows + 1):
        since = max(0, end - _MOST_BEGINNINGS)
        longest[since:end] = np.maximum(longest[since:end], lengths[end - 1])
        padded = (end - np.arange(since, end)) * combine(longest[since:end])
        total = least[since:end] + overhead + padded
        total[:-1][padded[:-1] > budget] = np.inf
        best = int(total.argmin())
        least[end], begins[end] = total[best], since + best
    return _slices(begins)


def _slices(begins: list[int]) -> list[int]:
    end, sizes = len(begins) - 1, []
    while end:
        sizes.append(end - begins[end])
        end = begins[end]
    return sizes[::-1]


def without_lonely_rows(sizes: Sequence[int]) -> list[int]:
    """The same slices, with none of one row: it goes into the slice before it, of longer rows.

    >>> without_lonely_rows([1, 1, 4, 1]), without_lonely_rows([1])
    ([2, 5], [1])
    """
    found: list[int] = []
    for size in sizes:
        if found and 1 in (size, found[-1]):
            found[-1] += size
        else:
            found.append(size)
    return found


# Steps that are left out, because they compile, and look for kernels and memory.
_COLD = 2
# Steps after which the overhead is taken from what was measured, and no clock is needed any more.
_ENOUGH = 8
_MOST = 64
# How much of the spread of the slices' number the padded cost may not explain.
_APART = 0.01


class Overhead:
    """What a slice costs whatever it holds, fitted from the seconds of steps.

    A step takes ``seconds = slope · (overhead · slices + padded cost)``, by least squares over
    the steps that were measured. Until they tell, it is the cost of an average row.

    >>> overhead = Overhead()
    >>> for slices, padded in [(1, 900)] * 2 + [(4, 900), (8, 700), (2, 1000), (6, 800)] * 2:
    ...     overhead.record(seconds=1e-3 * (50 * slices + padded), slices=slices, padded=padded)
    >>> round(overhead.of(average=128.0), 6)
    50.0
    """

    def __init__(self) -> None:
        self._steps = 0
        self._sums = [0.0] * 5  # slices², slices · padded, padded², seconds · slices, … · padded
        self._fitted: float | None = None

    @property
    def wants_seconds(self) -> bool:
        """Whether more steps should be measured for it."""
        return self._steps < _MOST

    def of(self, average: float) -> float:
        """In the unit of costs.

        Args:
            average: cost of a row of the batch.
        """
        return average if self._fitted is None else self._fitted

    def record(self, *, seconds: float, slices: int, padded: float) -> None:
        """Learn from a step.

        Args:
            seconds: that it took.
            slices: that it ran.
            padded: cost of them all.
        """
        self._steps += 1
        if self._steps <= _COLD or self._steps > _MOST:
            return
        terms = slices**2, slices * padded, padded**2, seconds * slices, seconds * padded
        self._sums = [total + term for total, term in zip(self._sums, terms, strict=True)]
        if self._steps < _ENOUGH:
            return
        a, b, c, d, e = self._sums
        determinant = a * c - b * b
        if determinant <= _APART * a * c:
            return  # all steps were alike
        per_slice, per_cost = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        if per_cost > 0:
            self._fitted = max(0.0, per_slice / per_cost)

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain values."""
        return {"steps": self._steps, "sums": list(self._sums), "fitted": self._fitted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._steps, self._fitted = int(state["steps"]), state["fitted"]
        self._sums = [float(each) for each in state["sums"]]
