"""What attempts have shown: which microbatches fitted, which failed, and what they took.

What fits also fits with fewer rows or at a smaller cost; what failed fails with more of either.
Where costs are alike, rows × cost decides. Costs differ from batch to batch, so points are kept
per class of costs: the largest that fitted, the smallest that failed.

The peak as a function of rows × cost is a maximum of lines, so it is convex: a chord through two
measured points, drawn further, never lies above it. One line through everything can be far off.
All bytes are above what every size holds, so that the model stays true when that changes.
"""

import dataclasses
import math
from typing import Any

# Four classes per doubling of the cost: within one, costs differ by a fifth at most. A range of
# 1 : 1000 has forty classes, which bounds what is kept.
CLASSES_PER_DOUBLING = 4
MOST_CLASSES = 64
# Costs within this factor are alike: there, the memory of rows × cost elements is taken for the
# same. Attention, whose memory grows with the square of the length, is then off by this at most.
ALIKE = 1.5
# 3 rows at a cost that was divided and multiplied may come out as 2.9999 rows.
ROUNDING = 1e-9


def are_alike(cost: float, other: float) -> bool:
    """Return whether rows × cost can be compared between two costs.

    >>> are_alike(1.0, 1.4), are_alike(1.0, 1.6)
    (True, False)
    """
    return cost <= other * ALIKE and other <= cost * ALIKE


def cost_class(cost: float) -> int:
    """Return the number of the class of costs that a cost lies in.

    >>> cost_class(1.0), cost_class(1.01), cost_class(2.0)
    (0, 0, 4)
    """
    return round(CLASSES_PER_DOUBLING * math.log2(cost))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A microbatch that fitted."""

    rows: int
    cost: float

    @property
    def elements(self) -> float:
        """Rows × cost."""
        return self.rows * self.cost


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A microbatch that did not fit.

    ``need`` are the bytes it wanted at least and ``room`` those it could have, both above what
    every size holds; None where they were not measured. ``batch`` counts when it was.
    """

    rows: int
    cost: float
    need: int | None
    room: int | None
    batch: int

    @property
    def elements(self) -> float:
        """Rows × cost."""
        return self.rows * self.cost

    @property
    def is_explained(self) -> bool:
        """Whether it wanted more than there was, so that it fails again in the same room."""
        return self.need is not None and self.room is not None and self.need > self.room

    def has_room_in(self, room: int | None) -> bool:
        """Whether the device can now give what was wanted, and could not then."""
        if room is None or self.need is None or self.room is None:
            return False
        return room >= self.need and room > self.room


class Frontier:
    """The largest microbatches that fitted and the smallest that failed.

    >>> frontier = Frontier()
    >>> frontier.fitted(rows=4, cost=1.0)
    >>> frontier.failed(Failed(rows=8, cost=1.0, need=None, room=None, batch=0))
    False
    >>> frontier.rows_that_fit(1.0), frontier.rows_that_fail(1.0), frontier.rows_that_fit(2.0)
    (4, 8, 2)
    """

    def __init__(self) -> None:
        self._fitted: dict[int, Fitted] = {}
        self._failed: dict[int, Failed] = {}

    @property
    def knows_a_fit(self) -> bool:
        """Whether anything is known to fit."""
        return bool(self._fitted)

    @property
    def knows_a_failure(self) -> bool:
        """Whether anything is known to fail."""
        return bool(self._failed)

    def fitted(self, *, rows: int, cost: float) -> None:
        """Keep what fitted."""
        point = Fitted(rows=rows, cost=cost)
        known = self._fitted.get(cost_class(cost))
        if known is None or known.elements <= point.elements:
            _keep(self._fitted, cost_class(cost), point)

    def failed(self, point: Failed) -> bool:
        """Keep what failed; return whether it contradicts what had fitted: a regression."""
        known = self._failed.get(cost_class(point.cost))
        if known is None or point.elements <= known.elements:
            _keep(self._failed, cost_class(point.cost), point)
        regressed = any(
            fit.rows >= point.rows and fit.cost >= point.cost for fit in self._fitted.values()
        )
        if regressed:
            # Memory is not what it was: the next size is half, and nothing larger is known.
            for key, fit in list(self._fitted.items()):
                if fit.elements > point.elements / 2:
                    del self._fitted[key]
        return regressed

    def proven_rows(self, cost: float) -> int | None:
        """Return the most rows that fitted at this cost or a higher one."""
        return max((fit.rows for fit in self._fitted.values() if fit.cost >= cost), default=None)

    def rows_that_fit(self, cost: float, *, only_down: bool = False) -> int | None:
        """Return the most rows that should fit at a cost; None if nothing fitted at any.

        Scaling by rows × cost is safe downwards from a higher cost, where memory grows at least
        with the cost. Upwards it may fail, so it is done from the nearest cost only.

        Args:
            cost: of a row.
            only_down: whether costs that are only alike do not count where there is a higher one.
        """
        if only_down:
            higher = [fit.elements for fit in self._fitted.values() if fit.cost >= cost]
            if higher:
                return max(1, int(max(higher) / cost + ROUNDING))
        elements = self._elements_that_fit(cost)
        return None if elements is None else max(1, int(elements / cost + ROUNDING))

    def rows_that_fail(self, cost: float) -> int | None:
        """Return the fewest rows known to fail at a cost, None if none are."""
        elements = self._elements_that_fail(cost)
        return None if elements is None else max(1, math.ceil(elements / cost - ROUNDING))

    def rows_halfway(self, cost: float) -> float:
        """Return the middle between what fits and what fails; infinite where nothing does."""
        fails, fits = self._elements_that_fail(cost), self._elements_that_fit(cost)
        return math.inf if fails is None else ((fits or 0.0) + fails) / 2 / cost

    def _elements_that_fit(self, cost: float) -> float | None:
        if not self._fitted:
            return None
        fits = [fit for fit in self._fitted.values() if fit.cost * ALIKE >= cost]
        if not fits:
            fits = [max(self._fitted.values(), key=lambda fit: fit.cost)]
        failing = self._elements_that_fail(cost)
        most = 0.0
        for fit in fits:
            if failing is None or fit.elements < failing:
                most = max(most, fit.elements)
            elif fit.cost >= cost and fit.rows * cost < failing:
                most = max(most, fit.rows * cost)
        return most

    def _elements_that_fail(self, cost: float) -> float | None:
        least: float | None = None
        for failed in self._failed.values():
            if are_alike(failed.cost, cost):
                elements = failed.elements
            elif failed.cost < cost:
                elements = failed.rows * cost
            else:
                continue
            least = elements if least is None else min(least, elements)
        return least

    def most_rows(self) -> int | None:
        """Return the most rows that fitted at any cost."""
        return max((fit.rows for fit in self._fitted.values()), default=None)

    def lift_contradicted(self, *, rows: int, cost: float) -> bool:
        """Forget failures of no more than what just fitted; return whether there were any."""
        return self._lift(
            [key for key, each in self._failed.items() if each.rows <= rows and each.cost <= cost]
        )

    def lift_explained(self, room: int | None) -> bool:
        """Forget failures for which there is room now; return whether there were any."""
        return self._lift([key for key, each in self._failed.items() if each.has_room_in(room)])

    def lift_unexplained(self, *, before: int) -> bool:
        """Forget failures that nothing explains and that are from before a batch."""
        return self._lift(
            [
                key
                for key, each in self._failed.items()
                if not each.is_explained and each.batch <= before
            ]
        )

    def lift_all(self) -> bool:
        """Forget all failures; return whether there were any."""
        return self._lift(list(self._failed))

    def _lift(self, keys: list[int]) -> bool:
        for key in keys:
            del self._failed[key]
        return bool(keys)

    def state_dict(self) -> dict[str, Any]:
        """Return the points as lists of numbers."""
        return {
            "fitted": [[fit.rows, fit.cost] for fit in self._fitted.values()],
            "failed": [
                [each.rows, each.cost, each.need, each.room, each.batch]
                for each in self._failed.values()
            ],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Frontier":
        """Return the frontier that ``state_dict`` described."""
        frontier = cls()
        for rows, cost in state["fitted"]:
            frontier._fitted[cost_class(cost)] = Fitted(rows=int(rows), cost=float(cost))
        for rows, cost, need, room, batch in state["failed"]:
            frontier._failed[cost_class(cost)] = Failed(
                rows=int(rows), cost=float(cost), need=need, room=room, batch=int(batch)
            )
        return frontier


def _keep(points: dict[int, Any], key: int, point: Fitted | Failed) -> None:
    """Put a point last, and drop the oldest where there are too many."""
    points.pop(key, None)
    points[key] = point
    if len(points) > MOST_CLASSES:
        del points[next(iter(points))]


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
class MeasuredPeak:
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
    >>> _ = peaks.learn(MeasuredPeak(rows=2, cost=1.0, need=300))
    >>> _ = peaks.learn(MeasuredPeak(rows=4, cost=1.0, need=500))
    >>> int(peaks.most_rows(cost=1.0, room=1000))
    8
    """

    def __init__(self) -> None:
        self._points: dict[tuple[int, int], MeasuredPeak] = {}

    def learn(self, point: MeasuredPeak) -> bool:
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

    def _chord(self, cost: float) -> tuple[MeasuredPeak, MeasuredPeak | None]:
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
            peaks.learn(MeasuredPeak(rows=int(rows), cost=float(cost), need=int(need)))
        return peaks
