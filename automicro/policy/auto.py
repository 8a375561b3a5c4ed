"""The policy behind "auto": halve what fails, then find the fewest microbatches that fit.

Points of rows and cost of a row say what fitted and what failed. What fits also fits with fewer
rows or at a smaller cost; what failed fails with more of either. Where costs are alike, rows × cost
decides. The peak is a maximum of lines in rows × cost, so it is convex: a chord through two
measured points, drawn further, never lies above it. All bytes are above what every size holds.
"""

import dataclasses
import logging
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from automicro.policy.policy import (
    Outcome,
    Policy,
    cut_size,
    require_cost,
    require_rows,
    require_size,
)

logger = logging.getLogger(__name__)

GROWTH = 0.02  # sizes that grow by no more than this share are no news
# Costs within this factor are alike. Attention, whose memory grows with the square of the length,
# is then off by this at most.
ALIKE = 1.5
Key = tuple[int, int | None]
Chord = tuple["Point | None", "Point | None"]

ROUNDING = 1e-9  # 3 rows at a cost that was divided and multiplied may come out as 2.9999
CLASSES, BUCKETS, MOST_POINTS = 4, 8, 64  # of costs and of elements per doubling; in all
# The second point of a chord has at most this share of the first's elements: nearer ones tell the
# slope of the allocator's rounding.
CHORD = 0.75
# Of the bytes that a step upwards adds, this share more is taken for the prediction's error.
ERROR = 0.05
NOISE = 0.05  # by which peaks of the same microbatch differ: rounding and fragmentation
# Batches: of the first wait after a size that had fitted failed, and until a failure that nothing
# explains is tried again. Both double.
FIRST_WAIT, FIRST_RETRY = 16, 256
# Batches of a trial for the sake of time, and as many before it; how many of these show a sign;
# batches without trials after one that did not pay; and the share of the time that has to remain.
TRIAL, SIGNS, FIRST_PAUSE, FASTER = 3, 2, 32, 0.95


@dataclass(kw_only=True, slots=True)
class Point:
    """A microbatch that fitted or failed.

    ``need`` are the bytes that it took, or wanted at least; ``room`` those that a failed one could
    have; ``until`` the batch from which a failure is tried again; ``within`` the rows of batches
    that it holds for: None for all.
    """

    rows: int
    cost: float
    need: int | None = None
    room: int | None = None
    until: int | None = None
    within: int | None = None

    @property
    def elements(self) -> float:
        """Rows × cost."""
        return self.rows * self.cost

    @property
    def is_explained(self) -> bool:
        """Whether it wanted more than there was, so that it fails again in the same room."""
        return self.need is not None and self.room is not None and self.need > self.room

    def is_part_of(self, other: "Point") -> bool:
        """Whether the other has as much of everything."""
        return self.rows <= other.rows and self.cost <= other.cost

    def holds_for(self, num_rows: int) -> bool:
        """Whether it tells of batches of so many rows."""
        return self.within is None or num_rows <= self.within

    def is_alike(self, cost: float) -> bool:
        """Whether rows × cost can be compared with that of another cost."""
        return self.cost <= cost * ALIKE and cost <= self.cost * ALIKE

    def has_room_in(self, room: int | None) -> bool:
        """Whether the device can now give what was wanted, and could not then."""
        if room is None or self.need is None or self.room is None:
            return False
        return room >= self.need and room > self.room


@dataclass
class Pressure:
    """Tries one microbatch more where the allocator runs short in batch after batch.

    Of an allocator's retries alone nothing follows: the smaller size runs for three batches, and
    is kept where they are faster than the three before them.

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

    most: float | None = None  # rows × cost that a microbatch may have for now; None for any
    kept: float | None = None
    elements: float = 0.0  # of the last batch
    pressed: bool = False  # whether its allocator had to try again
    signs: list[bool] = field(default_factory=list)  # the same of the last ones
    before: list[float] = field(default_factory=list)  # seconds at this size, but for the first
    trial: list[float] | None = None
    pause: int = FIRST_PAUSE
    ignored: int = 0

    @property
    def compares(self) -> bool:
        """Whether the seconds of the next attempt are compared with others."""
        if self.trial is not None:
            return True
        return not self.ignored and (self.pressed or any(self.signs))

    def observe(
        self, *, seconds: float, elements: float, retries: int, smaller: float | None
    ) -> None:
        """Learn from an attempt that fitted."""
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
        # Against the fastest of those before, so that one disturbed step decides nothing.
        if statistics.median(self.trial) < FASTER * min(self.before):
            self.kept, self.elements, self.before = self.most, elements, self.trial
        else:
            self.most, self.ignored, self.pause = self.kept, self.pause, 2 * self.pause
        self.trial, self.signs = None, []

    def forget(self) -> None:
        """Lift the limit: memory is not what it was. What was ignored stays so."""
        self.most = self.kept = self.trial = None
        self.before, self.signs = [], []


@dataclass
class Learned:
    """All that changes with outcomes."""

    start: list[Any] | None = None  # rows, and the cost of one; None for a whole batch
    # By the class of the cost: what fitted, one for each bucket of elements; what failed.
    fits: dict[Key, Point] = field(default_factory=dict)
    failures: dict[Key, Point] = field(default_factory=dict)
    ceiling: int | None = None  # rows to try next in a batch that ran out of memory
    room: int | None = None  # bytes that the last attempt could have
    has_probed: bool = False  # a smaller size was measured
    has_failed: bool = False
    is_rehearsed: bool = False
    batches: int = 0
    wait: int = 0  # without trials after a failure, once memory was seen to change
    quiet_until: int = 0
    retry: int = FIRST_RETRY
    aside: int = FIRST_WAIT  # until a failure of a small batch is tried again
    pressure: Pressure = field(default_factory=Pressure)


class Halving(Policy):
    """Try the whole batch first; where it does not fit, half; then the fewest that fit.

    - A size that fails within a batch is halved, or, if it was a trial, given up for the size that
      is known to fit. At one row it stays at one row: there is nothing smaller to propose.
    - *Refine*: on later batches, fewer microbatches are tried where the measured peaks predict
      that they fit. Trials halve the bracket between what fits and what failed, so that all
      failures together are at most ``log2(rows) + 2`` while memory and the cost of rows stay as
      they are. Without measured peaks and a capacity there are no trials.
    - What was learned holds per cost of a row: a batch of long rows does not slow short ones. Nor
      does a small batch that fails for no reason that was measured slow larger ones that had
      fitted.
      To tell what rows need from what every size needs, one batch may be cut smaller than fits.
    - *Grow*: a size that failed is tried again when the device reports what it lacked, when peaks
      have fallen, or, where nothing explains the failure, after many batches. With each
      disappointment the wait doubles.
    - A size at which the allocator had to try again in batch after batch is given up for one
      microbatch more if three batches show that to be faster.

    ``Halving(refine=False)`` only halves, as Composer does, but in balanced slices.

    Args:
        initial: rows to start from instead of the whole batch.
        refine: whether to try larger sizes than halving found.
        max_microbatch_size: never propose more rows than these.
        multiple_of: propose multiples of it, where the batch has more rows. If that many rows do
            not fit, smaller sizes are used all the same, with a warning in the log.

    Attributes:
        may_measure: whether a batch may be cut smaller than fits only to measure what its rows
            need. A `Microbatcher` forbids it where layers average over rows; trials then halve
            what is left between what fits and what failed.
        grown_from: rows that had been known to fit, where the last attempt was the first that
            fitted with more, after a size had failed or was suggested; else None.

    Raises:
        TypeError: if a number of rows is not an int.
        ValueError: if a number of rows is below 1, or the largest size is smaller than what it
            must be a multiple of.

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
                f"max_microbatch_size={max_microbatch_size} is below multiple_of={multiple_of}: no "
                f"size can be both; raise the one or lower the other"
            )
        self._initial, self._refine, self._max = initial, refine, max_microbatch_size
        self._learned = Learned(start=None if initial is None else [int(initial), None])
        # What was decided last, by what was asked; None where something was learned since.
        self._decided: tuple[tuple[Any, ...], tuple[int, bool]] | None = None

    def __repr__(self) -> str:
        others = {"refine": self._refine, "max_microbatch_size": self._max}
        others["multiple_of"] = self.multiple_of
        usual = {"refine": True, "max_microbatch_size": None, "multiple_of": 1}
        told = [f"{name}={value}" for name, value in others.items() if value != usual[name]]
        return f"Halving({', '.join([f'initial={self._initial}', *told])})"

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt are compared, so that they have to be right."""
        return self._learned.pressure.compares

    def suggest(self, rows: int, cost: float | None = None, *, level: int = 0) -> bool:
        """Start from a size that an earlier run found; nothing is lost if it is wrong.

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
        """Try no larger sizes: go on with what went through, also at the cost of longer rows.

        >>> policy = Halving()
        >>> policy.take_rehearsal()
        >>> policy.propose(64)
        64
        """
        self._learned.is_rehearsed, self._decided = True, None

    @property
    def wants_to_measure(self) -> bool:
        """Whether a batch to come might be cut smaller only to measure it, if it may be."""
        return self._refine and not self._learned.has_probed and bool(self._learned.fits)

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether what it proposes for a batch is smaller than fits, and only there to measure.

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
        """Return the size to propose, and whether it is only there to measure its peak."""
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
        # Trials that halve the bracket fail no more often than its logarithm.
        halfway = (fits + fails) / 2 + ROUNDING
        if predicted is None:
            # Without peaks, larger sizes are tried again once nothing is known to be against them.
            doubles = fails == math.inf and known.retry > FIRST_RETRY
            return max(size, self._cut(num_rows, cost, size * (1 + doubles))), False
        if (larger := self._cut(num_rows, cost, min(predicted, most, halfway))) > size:
            return larger, False
        # The next cut is nearest to what was measured: there the prediction needs no reserve.
        count = -(-num_rows // size)
        following = cut_size(num_rows, -(-num_rows // (count - 1)), multiple_of=self.multiple_of)
        exact = self._predicted_rows(chord, cost, error=0.0) or 0.0
        if following <= min(exact, most) and self._cut(num_rows, cost, following) > size:
            return following, False
        # With one peak, what rows need cannot be told from what every size needs.
        if known.has_probed or chord[1] is not None or self._cut(num_rows, cost, most) <= size:
            return size, False
        smaller = self._cut(num_rows, cost, -(-size // 2))
        if self.may_measure and self.multiple_of <= smaller < size:
            return smaller, True
        # With nothing smaller to measure, a larger size shows what rows need.
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
        """The most rows that fitted and the fewest that failed; 0 and infinity for not known."""
        known, fails, fits = self._learned, math.inf, 0.0
        for each in known.failures.values():
            if each.holds_for(num_rows) and (each.is_alike(cost) or each.cost < cost):
                fails = min(fails, each.elements if each.is_alike(cost) else each.rows * cost)
        # Scaling by rows × cost is safe downwards from a higher cost, where memory grows at least
        # with the cost. Upwards it may fail, so it is done from the nearest cost only.
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
        """Return how many rows to use where no peak predicts that more have room."""
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
        """Return how many rows should have room, with the prediction's error; None if unknown."""
        room, (last, before) = self._learned.room, chord
        if not self._refine or room is None or last is None or last.need is None:
            return None
        if last.need > room:
            return 0.0
        elements, need = (0.0, 0) if before is None else (before.elements, before.need or 0)
        slope = (last.need - need) / (last.elements - elements) * (1 + error)
        return math.inf if slope <= 0 else (last.elements + (room - last.need) / slope) / cost

    def _chord(self, cost: float) -> Chord:
        """Return the largest measured point, and the largest that is well below it."""
        measured = [each for each in self._learned.fits.values() if each.need is not None]
        alike = [each for each in measured if each.is_alike(cost)] or measured
        # Where alike costs make no chord, rows × cost is compared with all others too.
        for points in (alike, measured):
            last = _largest(points)
            below = [each for each in points if last and each.elements <= CHORD * last.elements]
            if below:
                return last, _largest(below)
        return _largest(alike), None

    def record(self, outcome: Outcome) -> None:
        """Learn from an attempt: what fits, what fails, and what it took."""
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
        if not is_whole or outcome.alloc_retries is not None:  # else the same goes whole again
            self._decided = None

    def _record_fit(self, outcome: Outcome, point: Point) -> None:
        known, rows, cost = self._learned, point.rows, point.cost
        if known.ceiling is None:
            if known.has_failed or known.start is not None:
                # Asked before this point is added.
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
        # Only where there is a real allocator do seconds say anything of the device.
        if outcome.seconds is not None and outcome.alloc_retries is not None:
            smaller = self._cut(outcome.num_rows, cost, rows - 1)
            known.pressure.observe(
                seconds=outcome.seconds / (outcome.num_rows * cost),
                elements=point.elements,
                retries=outcome.alloc_retries,
                smaller=smaller * cost if self.multiple_of <= smaller < rows else None,
            )

    def _fell(self, point: Point) -> bool:
        """Forget peaks that a new one shows to be outdated; whether they have fallen."""
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
        """Forget failures that need not repeat."""
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
            # The batch is smaller than what had fitted: it tells only of others like it.
            known.aside *= 1 if known.ceiling else 2
            point.within, point.until = num_rows, known.batches + known.aside // 2
            known.ceiling = half
        else:
            # An explained failure waits for room, and any other for its time.
            point.until = None if point.is_explained else known.batches + known.retry
            known.has_failed = True
            known.ceiling = self._after_failure(point, half, proven)
        key = _class(cost), point.within
        if key not in known.failures or point.elements <= known.failures[key].elements:
            _keep(known.failures, key, point)
        if known.ceiling < self.multiple_of <= rows:
            logger.warning(
                "automicro: %d rows do not fit: sizes are not multiples of multiple_of=%d now",
                rows,
                self.multiple_of,
            )

    def _after_failure(self, point: Point, half: int, proven: int) -> int:
        """The rows to try next in this batch; what the failure disproves is forgotten."""
        known = self._learned
        regressed = any(point.is_part_of(each) for each in known.fits.values())
        if regressed or known.wait:  # memory changes: each failure doubles the wait
            known.wait = max(FIRST_WAIT, 2 * known.wait)
            known.quiet_until = max(known.quiet_until, known.batches + known.wait)
        if regressed:  # memory is not what it was: nothing larger than half is known
            known.fits = {
                key: dataclasses.replace(each, need=None)
                for key, each in known.fits.items()
                if each.elements <= point.elements / 2
            }
            known.has_probed, proven = False, 0
            known.pressure.forget()
        if known.start is not None and known.start[1] is None:
            half = min(half, known.start[0])
        # Where peaks are measured, later trials narrow a bracket however wide.
        is_measured = self._predicted_rows(self._chord(point.cost), point.cost) is not None
        return proven if proven and is_measured else max(proven, half)

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned; ``limit`` are rows, None while every batch went whole."""
        known = self._learned
        limit = known.ceiling or (known.start and known.start[0])
        if known.ceiling is None and known.has_failed:
            limit = max((each.rows for each in known.fits.values()), default=None)
        learned = dataclasses.asdict(known)
        # As lists: in JSON, no tuple can be a key.
        learned |= {name: list(learned[name].values()) for name in ("fits", "failures")}
        return {"kind": "Halving", "limit": limit, "learned": learned}

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
    """Put a point last, and drop the oldest where there are too many."""
    # First, because a key that is assigned to anew stays in its old place.
    points.pop(key, None)
    points[key] = point
    if len(points) > MOST_POINTS:
        del points[next(iter(points))]
