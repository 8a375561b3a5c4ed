"""The policy behind "auto": halve sizes that fail, then find the fewest microbatches that fit.

A point records the rows and the cost per row of a microbatch that fitted or failed. If one fitted,
others with no more rows and no higher cost also fit. If one failed, others with no fewer rows and
no lower cost also fail. Points of similar cost are compared by rows × cost. Peak memory is a
maximum of linear functions of rows × cost, so it is convex. Extending a chord through two measured
points therefore never overestimates the peak. Bytes exclude memory that is resident at every size.
"""

import dataclasses
import logging
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from automicro.errors import removed
from automicro.policy.policy import (
    Outcome,
    Policy,
    canonical_size,
    require_cost,
    require_rows,
    require_size,
)

logger = logging.getLogger(__name__)

GROWTH = 0.02  # relative growth up to which a larger size does not count as new
# Costs within this factor are similar. For attention, whose memory grows with the square of the
# length, a prediction is then wrong by at most this factor.
ALIKE = 1.5
Key = tuple[int, int | None]
Chord = tuple["Point | None", "Point | None"]

ROUNDING = 1e-9  # 3 rows at a cost that was divided and multiplied might come out as 2.9999
CLASSES, BUCKETS, MOST_POINTS = 4, 8, 64  # cost classes and buckets per doubling; points in all
# The second point of a chord has at most this share of the first point's elements, because the
# slope between closer points mostly reflects the allocator's rounding.
CHORD = 0.75
# Margin for prediction errors, as a share of the bytes that a larger size adds.
ERROR = 0.05
NOISE = 0.05  # relative spread of the peak of one microbatch: rounding and fragmentation
# Batches to wait after a failure of a size that had fitted, and before a failure without a measured
# explanation is retried. Both double.
FIRST_WAIT, FIRST_RETRY = 16, 256
# Trials of a smaller size to save time: batches in a trial and in the baseline before it, how many
# baseline batches must show allocator retries, batches until the next trial after one that did not
# pay, and the share of the time that a trial must stay below.
TRIAL, SIGNS, FIRST_PAUSE, FASTER = 3, 2, 32, 0.95


@dataclass(kw_only=True, slots=True)
class Point:
    """A microbatch that fitted or failed."""

    rows: int
    cost: float
    need: int | None = None  # bytes that it took, or that a failed one needed at least
    room: int | None = None  # bytes that were available to a failed one
    until: int | None = None  # the batch from which a failure is tried again
    within: int | None = None  # it applies to batches of at most this many rows; None for all

    @property
    def elements(self) -> float:
        """Rows × cost."""
        return self.rows * self.cost

    @property
    def is_explained(self) -> bool:
        """Whether it needed more than was available, so it would fail again in the same room."""
        return self.need is not None and self.room is not None and self.need > self.room

    def is_part_of(self, other: "Point") -> bool:
        """Whether the other has at least as many rows and as high a cost."""
        return self.rows <= other.rows and self.cost <= other.cost

    def holds_for(self, num_rows: int) -> bool:
        """Whether it applies to batches of this many rows."""
        return self.within is None or num_rows <= self.within

    def is_alike(self, cost: float) -> bool:
        """Whether rows × cost can be compared with rows at another cost."""
        return self.cost <= cost * ALIKE and cost <= self.cost * ALIKE

    def has_room_in(self, room: int | None) -> bool:
        """Whether the device now has the bytes that were missing at the failure."""
        if room is None or self.need is None or self.room is None:
            return False
        return room >= self.need and room > self.room


@dataclass
class Pressure:
    """Tries one more microbatch if the allocator has to retry in batch after batch.

    >>> pressure = Pressure()
    >>> pressure = Pressure()
    >>> for _ in range(3):
    ...     pressure.observe(seconds=2.0, elements=8.0, retries=1, smaller=4.0)
    >>> pressure.most
    4.0
    >>> for _ in range(3):
    ...     pressure.observe(seconds=1.0, elements=4.0, retries=0, smaller=2.0)
    >>> pressure.most  # kept
    4.0
    """

    # Retries alone prove nothing: the smaller size runs for three batches, and is kept only if they
    # are faster than the three batches before them.
    most: float | None = None  # current limit on the rows × cost of a microbatch; None if none
    kept: float | None = None
    elements: float = 0.0  # in a microbatch of the last batch
    pressed: bool = False  # whether the allocator had to retry in the last batch
    signs: list[bool] = field(default_factory=list)  # `pressed` of the latest batches
    before: list[float] = field(default_factory=list)  # seconds at this size, without the first
    trial: list[float] | None = None
    pause: int = FIRST_PAUSE
    ignored: int = 0

    @property
    def compares(self) -> bool:
        """Whether the seconds of the next attempt will be compared."""
        if self.trial is not None:
            return True
        return not self.ignored and (self.pressed or any(self.signs))

    def observe(
        self, *, seconds: float, elements: float, retries: int, smaller: float | None
    ) -> None:
        """Record an attempt that fitted."""
        is_timed, self.pressed = self.compares, retries > 0
        if self.most is not None and self.trial is not None:
            if elements <= self.most * (1 + ROUNDING):
                self.trial.append(seconds)
                if len(self.trial) == TRIAL:
                    self._decide(elements)
        elif elements != self.elements:
            self.elements, self.before, self.signs = elements, [], []
        elif self.ignored:
            self.ignored -= 1
        else:
            if is_timed:
                self.before = [*self.before[1 - TRIAL :], seconds]
            self.signs = [*self.signs[1 - TRIAL :], self.pressed]
            if smaller is not None and self.before and sum(self.signs) >= SIGNS:
                self.most, self.trial, self.signs = smaller, [], []

    def _decide(self, elements: float) -> None:
        assert self.trial is not None
        # Compared with the fastest batch before, so that one disturbed step decides nothing.
        if statistics.median(self.trial) < FASTER * min(self.before):
            self.kept, self.elements, self.before = self.most, elements, self.trial
        else:
            self.most, self.ignored, self.pause = self.kept, self.pause, 2 * self.pause
        self.trial, self.signs = None, []

    def forget(self) -> None:
        """Lift the limit, because memory has changed; batches to ignore stay ignored."""
        self.most = self.kept = self.trial = None
        self.before, self.signs = [], []


@dataclass
class Learned:
    """The state that changes with outcomes."""

    start: list[Any] | None = None  # rows, and the cost per row; None for a whole batch
    # By cost class: the fits, one per bucket of elements, and the failures.
    fits: dict[Key, Point] = field(default_factory=dict)
    failures: dict[Key, Point] = field(default_factory=dict)
    ceiling: int | None = None  # rows to try next in a batch that ran out of memory
    room: int | None = None  # bytes that were available to the last attempt
    has_probed: bool = False  # whether a smaller size was measured
    has_failed: bool = False
    is_rehearsed: bool = False
    batches: int = 0
    wait: int = 0  # batches without trials after a failure, once available memory has changed
    quiet_until: int = 0
    retry: int = FIRST_RETRY
    aside: int = FIRST_WAIT  # batches until a failure of a small batch is retried
    pressure: Pressure = field(default_factory=Pressure)


@removed(grow="Pass refine=False for sizes that only shrink")
class Halving(Policy):
    """Try the whole batch first and halve it until it fits, then find the fewest microbatches.

    - *Halve*: a size that fails within a batch is halved. If it was a trial, the policy returns to
      the size that is known to fit. At one row there is nothing smaller to propose.
    - *Refine*: later batches try fewer microbatches if the measured peaks predict that they fit.
      Trials halve the bracket between sizes that fit and sizes that failed. There are at most
      ``log2(rows) + 2`` failures in all while memory and the cost of rows stay the same. Without
      measured peaks and a capacity there are no trials.
    - Sizes are learned per cost of a row, so a batch of long rows does not slow down batches of
      short rows. A small batch that fails without a measured reason does not slow down larger
      batches that had fitted. One batch might be cut smaller than necessary, to separate the memory
      that rows need from the memory that every size needs.
    - *Grow*: a size that failed is tried again when the device reports the memory that was missing,
      when peaks have fallen, or, if nothing explains the failure, after many batches. The wait
      doubles with each new failure.
    - If the allocator has to retry in batch after batch, one more microbatch is used, provided that
      three batches show it to be faster.

    ``Halving(refine=False)`` only halves, as Composer does, but into balanced slices.

    Args:
        initial: rows to start from instead of the whole batch.
        refine: whether to try larger sizes than halving found.
        max_microbatch_size: upper limit on the rows of a microbatch.
        multiple_of: propose multiples of this number if the batch has more rows. If that many rows
            do not fit, smaller sizes are used, with a warning in the log.

    Attributes:
        grown_from: rows previously known to fit, if the last attempt was the first to fit with more
            rows after a failure or a suggestion; otherwise None.

    Raises:
        TypeError: if a number of rows is not an int.
        ValueError: if a number of rows is below 1, or ``max_microbatch_size`` is smaller than
            ``multiple_of``.

    >>> policy = Halving()
    >>> policy.propose(10)
    10
    >>> policy.record(Outcome(num_rows=10, microbatch_size=10, fits=False))
    >>> policy.propose(10), policy.propose(12), policy.propose(3)
    (5, 4, 3)
    """

    def __init__(
        self,
        *,
        initial: int | None = None,
        refine: bool = True,
        max_microbatch_size: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        for name, rows in (("initial", initial), ("max_microbatch_size", max_microbatch_size)):
            if rows is not None:
                require_size(rows, name=name)
        self.multiple_of = require_size(multiple_of, name="multiple_of")
        if max_microbatch_size is not None and max_microbatch_size < self.multiple_of:
            raise ValueError(
                f"max_microbatch_size={max_microbatch_size} is below multiple_of={multiple_of}, "
                "so no size is allowed. Raise max_microbatch_size, or lower multiple_of"
            )
        self._initial, self._refine, self._max = initial, refine, max_microbatch_size
        self._learned = Learned(start=None if initial is None else [int(initial), None])
        # The last question and decision; None if something was learned since.
        self._decided: tuple[tuple[Any, ...], tuple[int, bool]] | None = None

    def __repr__(self) -> str:
        others = {"refine": self._refine, "max_microbatch_size": self._max}
        others["multiple_of"] = self.multiple_of
        usual = {"refine": True, "max_microbatch_size": None, "multiple_of": 1}
        told = [f"{name}={value}" for name, value in others.items() if value != usual[name]]
        return f"Halving({', '.join([f'initial={self._initial}', *told])})"

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt will be compared, so they must be accurate."""
        return self._learned.pressure.compares

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found. A wrong suggestion does no harm.

        Raises:
            TypeError: if the rows are not an int.
            ValueError: if the rows are below 1, or the cost is not positive.

        >>> policy = Halving()
        >>> policy.suggest(16, cost=128)
        True
        >>> policy.propose(64, cost=128), policy.propose(64, cost=256)
        (16, 8)
        """
        require_cost(cost)
        self._learned.start, self._decided = [require_size(rows, name="rows"), cost], None
        return True

    def take_rehearsal(self) -> None:
        """Stop trying larger sizes: use only sizes that fitted, also at the cost of longer rows.

        >>> policy = Halving()
        >>> policy.take_rehearsal()
        >>> policy.propose(64)
        64
        """
        self._learned.is_rehearsed, self._decided = True, None

    @property
    def wants_to_measure(self) -> bool:
        """Whether a future batch might be cut smaller only to measure it, if allowed."""
        return self._refine and not self._learned.has_probed and bool(self._learned.fits)

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether the proposal for a batch is smaller than necessary, only to measure its peak.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        require_rows(num_rows)
        return self.wants_to_measure and self._decide(num_rows, require_cost(cost))[1]

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the largest slice of the coarsest cut that should fit.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        require_rows(num_rows)
        return self._decide(num_rows, require_cost(cost))[0]

    def _decide(self, num_rows: int, cost: float) -> tuple[int, bool]:
        """Return the size to propose, and whether its only purpose is to measure a peak."""
        asked = num_rows, cost, self.may_measure, self._learned.room
        if self._decided is None or self._decided[0] != asked:
            self._decided = asked, self._decide_anew(num_rows, cost)
        return self._decided[1]

    def _decide_anew(self, num_rows: int, cost: float) -> tuple[int, bool]:
        known = self._learned
        if known.ceiling is not None:
            return self._cut(num_rows, cost, known.ceiling), False
        fits, fails = self._bracket(num_rows, cost)
        chord = self._chord(cost)
        predicted = self._predicted_rows(chord, cost)
        size = self._cut(num_rows, cost, self._known_rows(num_rows, cost, fits, fails, predicted))
        is_quiet = known.is_rehearsed or known.batches < known.quiet_until
        if size == num_rows or not known.fits or is_quiet:
            return size, False
        most = math.ceil(fails - ROUNDING) - 1 if fails < math.inf else num_rows
        # Halving the bracket limits the number of failures to its logarithm.
        halfway = (fits + fails) / 2 + ROUNDING
        if predicted is None:
            # Without peaks, larger sizes are tried again once no failure is left on record.
            doubles = fails == math.inf and known.retry > FIRST_RETRY
            return max(size, self._cut(num_rows, cost, size * (1 + doubles))), False
        if (larger := self._cut(num_rows, cost, min(predicted, most, halfway))) > size:
            return larger, False
        # The next cut is closest to the measurements, so its prediction needs no margin.
        count = -(-num_rows // size)
        following = cut_size(num_rows, -(-num_rows // (count - 1)), multiple_of=self.multiple_of)
        exact = self._predicted_rows(chord, cost, error=0.0) or 0.0
        if following <= min(exact, most) and self._cut(num_rows, cost, following) > size:
            return following, False
        # A single peak does not separate what rows need from what every size needs.
        if known.has_probed or chord[1] is not None or self._cut(num_rows, cost, most) <= size:
            return size, False
        smaller = self._cut(num_rows, cost, -(-size // 2))
        if self.may_measure and self.multiple_of <= smaller < size:
            return smaller, True
        # If there is nothing smaller to measure, a larger size shows what rows need.
        has_space = fails == math.inf and not known.pressure.pressed
        if has_space or not self.may_measure:
            size = max(size, self._cut(num_rows, cost, min(2 * size, most, halfway)))
        return size, False

    def _cut(self, num_rows: int, cost: float, most_rows: float) -> int:
        """Return the size of the coarsest cut within all limits."""
        most = min(num_rows, most_rows, math.inf if self._max is None else self._max)
        if self._learned.pressure.most is not None:
            most = min(most, self._learned.pressure.most / cost + ROUNDING)
        return cut_size(num_rows, max(1, int(most)), multiple_of=self.multiple_of)

    def _bracket(self, num_rows: int, cost: float) -> tuple[float, float]:
        """Return the most rows that fitted and the fewest that failed (0 and inf if unknown)."""
        known, fails, fits = self._learned, math.inf, 0.0
        for each in known.failures.values():
            if each.holds_for(num_rows) and (each.is_alike(cost) or each.cost < cost):
                fails = min(fails, each.elements if each.is_alike(cost) else each.rows * cost)
        # Scaling down from a higher cost is safe, because memory grows at least with the cost.
        # Scaling up might fail, so it starts from the nearest cost only.
        lowest = cost if known.is_rehearsed else cost / ALIKE
        above = [each for each in known.fits.values() if each.cost >= lowest]
        if not above and known.fits:
            above = [max(known.fits.values(), key=lambda each: each.cost)]
        for each in above:
            if each.elements < fails:
                fits = max(fits, each.elements)
            elif each.cost >= cost and each.rows * cost < fails:
                fits = max(fits, each.rows * cost)
        return fits / cost, fails / cost

    def _known_rows(
        self, num_rows: int, cost: float, fits: float, fails: float, predicted: float | None
    ) -> float:
        """Return the rows to use if no peak predicts room for more."""
        known, start = self._learned, num_rows
        if known.start is not None:
            rows, per_row = known.start
            start = rows if per_row is None else max(1, int(rows * per_row / cost + ROUNDING))
        if not fits:
            return start if fails == math.inf else min(start, math.ceil(fails / 2 - ROUNDING))
        rows = max(1, int(fits + ROUNDING))
        has_room = known.is_rehearsed and predicted is not None and predicted >= num_rows
        is_open = not known.has_failed and fails == math.inf
        return max(start, rows) if is_open and (predicted is None or has_room) else rows

    def _predicted_rows(self, chord: Chord, cost: float, *, error: float = ERROR) -> float | None:
        """Return the rows predicted to fit, with an error margin, or None if unknown."""
        room, (last, before) = self._learned.room, chord
        if not self._refine or room is None or last is None or last.need is None:
            return None
        if last.need > room:
            return 0.0
        elements, need = (0.0, 0) if before is None else (before.elements, before.need or 0)
        slope = (last.need - need) / (last.elements - elements) * (1 + error)
        return math.inf if slope <= 0 else (last.elements + (room - last.need) / slope) / cost

    def _chord(self, cost: float) -> Chord:
        """Return the largest measured point, and the largest one well below it."""
        measured = [each for each in self._learned.fits.values() if each.need is not None]
        alike = [each for each in measured if each.is_alike(cost)] or measured
        # If points of similar cost form no chord, points of all costs are compared.
        for points in (alike, measured):
            last = _largest(points)
            below = [each for each in points if last and each.elements <= CHORD * last.elements]
            if below:
                return last, _largest(below)
        return _largest(alike), None

    def record(self, outcome: Outcome) -> None:
        """Learn from an attempt whether a size fits, and the memory and time it took."""
        cost, held = require_cost(outcome.cost), outcome.resident_bytes or 0
        if outcome.capacity_bytes is not None:
            self._learned.room = outcome.capacity_bytes - held
        point = Point(rows=outcome.microbatch_size, cost=cost)
        if outcome.peak_bytes is not None:
            point.need = max(0, outcome.peak_bytes - held)
        self.grown_from = None
        if outcome.fits:
            self._record_fit(outcome, point)
        else:
            self._record_failure(outcome.num_rows, point)
        is_whole = outcome.fits and outcome.microbatch_size == outcome.num_rows
        if not is_whole or outcome.alloc_retries is not None:  # else the same decision still holds
            self._decided = None

    def _record_fit(self, outcome: Outcome, point: Point) -> None:
        known, rows, cost = self._learned, point.rows, point.cost
        if known.ceiling is None:
            if known.has_failed or known.start is not None:
                # Read before this point is added.
                before = int(self._bracket(outcome.num_rows, cost)[0] + ROUNDING)
                self.grown_from = before if 0 < before * (1 + GROWTH) < rows else None
            if self.wants_to_measure:
                known.has_probed = self._decide(outcome.num_rows, cost)[1]
        known.ceiling = None
        known.batches += 1
        fell = self._fell(point)
        if self._refine and known.failures:
            self._lift(outcome.num_rows, point, fell=fell)
        key = _bucket(point)
        larger = known.fits.get(key)
        is_smaller = larger is not None and point.elements < larger.elements
        if larger is None or not is_smaller or (larger.need is None and point.need is not None):
            larger = point
        _keep(known.fits, key, larger)
        # Without a real allocator, seconds say nothing about the device.
        if outcome.seconds is not None and outcome.alloc_retries is not None:
            smaller = self._cut(outcome.num_rows, cost, rows - 1)
            known.pressure.observe(
                seconds=outcome.seconds / (outcome.num_rows * cost),
                elements=point.elements,
                retries=outcome.alloc_retries,
                smaller=smaller * cost if self.multiple_of <= smaller < rows else None,
            )

    def _fell(self, point: Point) -> bool:
        """Discard peaks that a new point shows to be outdated; return whether peaks have fallen."""
        fell = False
        for each in self._learned.fits.values():
            if each.need is None or point.need is None:
                continue
            if each.is_part_of(point) and each.need * (1 - NOISE) > point.need:
                fell, each.need = True, None
            elif point.is_part_of(each) and each.need < point.need * (1 - NOISE):
                each.need = None
        return fell

    def _lift(self, num_rows: int, fitted: Point, *, fell: bool) -> None:
        """Forget failures that might not repeat."""
        known, is_news = self._learned, False
        for key, each in list(known.failures.items()):
            is_over = each.until is not None and each.until <= known.batches
            has_room = each.within is None and (fell or each.has_room_in(known.room))
            if each.is_part_of(fitted) and each.holds_for(num_rows):
                del known.failures[key]
            elif not known.is_rehearsed and (has_room or is_over):
                del known.failures[key]
                is_news |= each.within is None
                if not has_room and each.within is None:
                    known.retry *= 2
        if is_news:
            known.wait = max(known.wait, FIRST_WAIT // 2)
            known.pressure.forget()

    def _record_failure(self, num_rows: int, point: Point) -> None:
        known, rows, cost = self._learned, point.rows, point.cost
        point.room = known.room
        proven = max((each.rows for each in known.fits.values() if each.cost >= cost), default=0)
        half = -(-rows // 2)
        if not point.is_explained and num_rows < proven:
            # The batch is smaller than one that fitted, so this applies only to similar batches.
            known.aside *= 1 if known.ceiling else 2
            point.within, point.until = num_rows, known.batches + known.aside // 2
            known.ceiling = half
        else:
            # An explained failure is retried when there is room, any other after a wait.
            point.until = None if point.is_explained else known.batches + known.retry
            known.has_failed = True
            known.ceiling = self._after_failure(point, half, proven)
        key = _class(cost), point.within
        if key not in known.failures or point.elements <= known.failures[key].elements:
            _keep(known.failures, key, point)
        if known.ceiling < self.multiple_of <= rows:
            logger.warning(
                "automicro: %d rows do not fit: sizes are no longer multiples of multiple_of=%d",
                rows,
                self.multiple_of,
            )

    def _after_failure(self, point: Point, half: int, proven: int) -> int:
        """Return the rows to try next in this batch, and forget what the failure disproves."""
        known = self._learned
        regressed = any(point.is_part_of(each) for each in known.fits.values())
        if regressed or known.wait:  # memory is changing: each failure doubles the wait
            known.wait = max(FIRST_WAIT, 2 * known.wait)
            known.quiet_until = max(known.quiet_until, known.batches + known.wait)
        if regressed:  # less memory than before: only sizes up to half are still trusted
            known.fits = {
                key: dataclasses.replace(each, need=None)
                for key, each in known.fits.items()
                if each.elements <= point.elements / 2
            }
            known.has_probed, proven = False, 0
            known.pressure.forget()
        if known.start is not None and known.start[1] is None:
            half = min(half, known.start[0])
        # With measured peaks, later trials can narrow a bracket of any width.
        is_measured = self._predicted_rows(self._chord(point.cost), point.cost) is not None
        return proven if proven and is_measured else max(proven, half)

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned."""
        learned = dataclasses.asdict(self._learned)
        # As lists, because JSON does not allow tuples as keys.
        learned |= {name: list(learned[name].values()) for name in ("fits", "failures")}
        return {"kind": type(self).__name__, "learned": learned}

    def _load(self, state: dict[str, Any]) -> None:
        told = dict(state["learned"])
        if told.keys() != Learned.__dataclass_fields__.keys():
            raise KeyError(*told.keys() ^ Learned.__dataclass_fields__.keys())
        fits, failures = ([Point(**each) for each in told[name]] for name in ("fits", "failures"))
        told["fits"] = {_bucket(each): each for each in fits}
        told["failures"] = {(_class(each.cost), each.within): each for each in failures}
        self._learned = Learned(**told | {"pressure": Pressure(**told["pressure"])})
        self._decided = None


def _largest(points: Iterable[Point]) -> Point | None:
    return max(points, key=lambda each: each.elements, default=None)


def _bucket(point: Point) -> Key:
    return _class(point.cost), math.floor(BUCKETS * math.log2(point.elements))


def _class(cost: float) -> int:
    return round(CLASSES * math.log2(cost))


def _keep(points: dict[Key, Point], key: Key, point: Point) -> None:
    """Add a point in last place, and drop the oldest if there are too many."""
    # Removed first, because a key that is assigned again keeps its old place.
    points.pop(key, None)
    points[key] = point
    if len(points) > MOST_POINTS:
        del points[next(iter(points))]


def cut_size(num_rows: int, most_rows: int, *, multiple_of: int = 1) -> int:
    """Return the largest slice of the coarsest cut into slices of at most ``most_rows``.

    With ``multiple_of``, all slices but the last are multiples of it if that many rows are allowed.

    >>> cut_size(100, 40), cut_size(100, 40, multiple_of=8), cut_size(100, 5, multiple_of=8)
    (34, 40, 5)
    >>> cut_size(6, 40, multiple_of=8)
    6
    """
    most_rows = min(most_rows, num_rows)
    # A multiple rounded down to nothing cannot train, so below one unit the cut is balanced.
    if num_rows <= multiple_of or most_rows < multiple_of:
        return canonical_size(num_rows, most_rows)
    if most_rows == num_rows:
        return num_rows
    size = canonical_size(num_rows, most_rows // multiple_of * multiple_of)
    return min(num_rows, -(-size // multiple_of) * multiple_of)
