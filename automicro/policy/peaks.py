"""A model of the measured peaks: how many rows the device has room for.

The peak as a function of rows × cost is a maximum of lines, so it is convex: a chord through two
measured points, drawn further, never lies above it. One line through everything can be far off.
All bytes are above what every size holds, so that the model stays true when that changes.
"""

import dataclasses
import math
from typing import Any

from automicro.policy.frontier import are_alike, cost_class

# The second point of a chord has at most this share of the first's elements: nearer ones tell the
# slope of the allocator's rounding.
CHORD = 0.75
# Of the bytes that a step upwards adds, this share more is taken for the prediction's error. It
# shrinks with the step, so it holds no size back by more than one microbatch.
ERROR = 0.05
# Where no more failures may be risked: as if rows needed twice what the chord says.
CAUTIOUS_ERROR = 1.0
# By less than this share two peaks of the same microbatch differ by rounding and fragmentation.
NOISE = 0.05
# Points per doubling of elements, and in all.
POINTS_PER_DOUBLING = 8
MOST_POINTS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The bytes that a microbatch needed above what every size holds."""

    rows: int
    cost: float
    need: int

    @property
    def elements(self) -> float:
        """Rows × cost."""
        return self.rows * self.cost


class Peaks:
    """What was measured, and what it says of larger microbatches.

    >>> peaks = Peaks()
    >>> _ = peaks.learn(Measured(rows=2, cost=1.0, need=300))
    >>> _ = peaks.learn(Measured(rows=4, cost=1.0, need=500))
    >>> int(peaks.most_rows(cost=1.0, room=1000))
    8
    """

    def __init__(self) -> None:
        self._points: dict[tuple[int, int], Measured] = {}

    def learn(self, point: Measured) -> bool:
        """Keep a peak, drop those it shows to be outdated; return whether peaks have fallen."""
        fell = False
        for key, old in list(self._points.items()):
            more = old.rows >= point.rows and old.cost >= point.cost
            less = old.rows <= point.rows and old.cost <= point.cost
            if less and old.need * (1 - NOISE) > point.need:
                fell = True
            elif not (more and old.need < point.need * (1 - NOISE)):
                continue
            del self._points[key]
        key = (
            math.floor(POINTS_PER_DOUBLING * math.log2(point.elements)),
            cost_class(point.cost),
        )
        self._points.pop(key, None)
        self._points[key] = point
        if len(self._points) > MOST_POINTS:
            del self._points[next(iter(self._points))]
        return fell

    def forget(self) -> None:
        """Drop everything: memory is not what it was."""
        self._points.clear()

    def most_rows(self, *, cost: float, room: float, error: float = ERROR) -> float | None:
        """Return how many rows have room at a cost, with the prediction's error; None if unknown.

        That may be infinite: rows that need no memory.
        """
        if not self._points:
            return None
        last, before = self._chord(cost)
        elements, need = (0.0, 0) if before is None else (before.elements, before.need)
        slope = (last.need - need) / (last.elements - elements)
        if last.need > room:
            return 0.0
        if slope <= 0:
            return math.inf
        return (last.elements + (room - last.need) / (slope * (1 + error))) / cost

    def has_chord(self, cost: float) -> bool:
        """Whether two points tell what rows need from what every size needs."""
        return bool(self._points) and self._chord(cost)[1] is not None

    def _chord(self, cost: float) -> tuple[Measured, Measured | None]:
        """Return the largest point, and the largest that is well below it."""
        everything = list(self._points.values())
        alike = [point for point in everything if are_alike(point.cost, cost)] or everything
        # Where alike costs make no chord, rows × cost is compared with all others too.
        for points in (alike, everything):
            last = max(points, key=lambda point: point.elements)
            below = [point for point in points if point.elements <= CHORD * last.elements]
            if below:
                return last, max(below, key=lambda point: point.elements)
        return max(alike, key=lambda point: point.elements), None

    def state_dict(self) -> list[list[float]]:
        """Return the points as lists of numbers, the oldest first."""
        return [[point.rows, point.cost, point.need] for point in self._points.values()]

    @classmethod
    def from_state(cls, state: list[Any]) -> "Peaks":
        """Return the model that ``state_dict`` described."""
        peaks = cls()
        for rows, cost, need in state:
            peaks.learn(Measured(rows=int(rows), cost=float(cost), need=int(need)))
        return peaks
