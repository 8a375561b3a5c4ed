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
from collections.abc import Iterable, Sequence
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
# Batches of a trial for the sake of time, and as many before it; of the last ones, how many show a
# sign; and batches without trials after one that did not pay. The smaller size is kept if it takes
# less than this share of the time, by so many times what the spread explains.
TRIAL, SIGNS, FIRST_PAUSE, FASTER, SPREADS = 3, 2, 32, 0.95, 2.5
MOST_TIMES = 16  # sizes whose seconds are kept


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
class Faster:
    """Tries a smaller size where there is a sign that it is faster; keeps it where it is.

    Signs are allocator retries in batch after batch, for which one microbatch more is tried; and
    that a smaller size took less time when it ran in passing: while halving, to measure what rows
    need, or before sizes grew. Of a sign alone nothing follows: the smaller size runs for three
    batches, which are compared with the three before them.

    >>> faster = Faster()
    >>> for _ in range(3):
    ...     faster.observe(seconds=2.0, elements=8.0, retries=1, smaller=4.0, is_limited=False)
    >>> faster.most
    4.0
    >>> for _ in range(3):
    ...     faster.observe(seconds=1.0, elements=4.0, retries=0, smaller=2.0, is_limited=False)
    >>> faster.most  # kept
    4.0
    """

    most: float | None = None  # rows × cost that a microbatch may have for now; None for any
    kept: float | None = None
    elements: float = 0.0  # of the last batch
    pressed: bool = False  # whether its allocator had to try again
    signs: list[bool] = field(default_factory=list)
    before: list[float] = field(default_factory=list)  # seconds at this size, but for the first
    trial: list[float] | None = None
    pause: int = FIRST_PAUSE
    ignored: int = 0
    watches: bool = False
    passing: list[list[Any]] = field(default_factory=list)  # elements, and their last seconds

    @property
    def compares(self) -> bool:
        """Whether the seconds of the next attempt are compared with others."""
        if self.trial is not None or self.watches:
            return True
        return not self.ignored and (self.pressed or any(self.signs))

    def observe(
        self,
        *,
        seconds: float,
        elements: float,
        retries: int,
        smaller: float | None,
        is_limited: bool,
    ) -> None:
        """Learn from an attempt that fitted."""
        is_timed, self.pressed = self.compares, retries > 0
        timed: list[float] = next((each for own, each in self.passing if own == elements), [])
        if is_timed:
            timed = [*timed[1 - TRIAL :], seconds]
            others = [each for each in self.passing if each[0] != elements]
            self.passing = [*others[1 - MOST_TIMES :], [elements, timed]]
        self.watches = is_limited and len(timed) < TRIAL
        if self.trial is not None:
            assert self.most is not None
            if elements <= self.most * (1 + ROUNDING):
                self.trial.append(seconds)
                if len(self.trial) == TRIAL:
                    self._decide(elements)
        elif elements != self.elements:
            self.elements, self.before, self.signs = elements, [], []
            self.watches = is_limited
        elif self.ignored:
            self.ignored -= 1
        else:
            if is_timed:
                self.before = [*self.before[1 - TRIAL :], seconds]
            self.watches |= is_limited and len(self.before) < TRIAL
            self.signs = [*self.signs[1 - TRIAL :], self.pressed]
            if not (sum(self.signs) >= SIGNS and self.before and smaller is not None):
                smaller = self._faster_in_passing() if len(self.before) == TRIAL else None
            if smaller is not None:
                self.most, self.trial, self.signs = smaller, [], []

    def _faster_in_passing(self) -> float | None:
        """The smaller size that took least, if that was less than now; None for none."""
        known = {own: statistics.median(timed) for own, timed in self.passing}
        bound = FASTER * statistics.median(self.before)
        known = {own: took for own, took in known.items() if own < self.elements and took < bound}
        return min(known, key=lambda own: known[own], default=None)

    def _decide(self, elements: float) -> None:
        assert self.trial is not None
        if _is_faster(self.trial, self.before):
            self.kept, self.elements, self.before = self.most, elements, self.trial
        else:
            self.most, self.ignored, self.pause = self.kept, self.pause, 2 * self.pause
        self.trial, self.signs = None, []

    def forget(self) -> None:
        """Lift the limit: memory is not what it was. What was ignored stays so."""
        self.most = self.kept = self.trial = None
        self.before, self.signs = [], []


def _is_faster(after: Sequence[float], before: Sequence[float]) -> bool:
    """Whether batches took less time, and by more than their spread explains.

    >>> _is_faster([1.0, 1.01, 3.0], [1.2, 1.21, 1.22])
    True
    >>> _is_faster([0.8, 1.0, 1.3], [0.9, 1.2, 1.4])
    False
    """
    gap = statistics.median(before) - statistics.median(after)
    # Of both together: three are too few to tell a spread, and one of them may be disturbed.
    deviations = [
        deviation
        for each in (after, before)
        for deviation in sorted(abs(one - statistics.median(each)) for one in each)[1:]
    ]
    spread = 1.4826 * statistics.median(deviations or [0.0])
    error = spread * math.sqrt(1 / len(after) + 1 / len(before))
    return gap > max((1 - FASTER) * statistics.median(before), SPREADS * error)


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
    may_double: bool = False  # a failure was forgotten that nothing explains
    has_failed: bool = False
    is_rehearsed: bool = False
    is_unsettled: bool = False  # memory changes: from now on each failure doubles the wait
    batches: int = 0
    trials: int = 0  # that failed since memory changed
    wait: int = 0
    quiet_until: int = 0
    retry: int = FIRST_RETRY
    aside: int = FIRST_WAIT  # until a failure of a small batch is tried again
    faster: Faster = field(default_factory=Faster)


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
    - A size at which the allocator had to try again, or that took longer than a smaller one did
      when it ran in passing, is given up for the smaller one if three batches show it to be faster.

    ``Halving(refine=False, grow=False)`` only halves, as Composer does, but in balanced slices.

    Args:
        initial: rows to start from instead of the whole batch.
        refine: whether to try fewer microbatches than halving found.
        grow: whether sizes that failed may be tried again.
        max_microbatch_size: never propose more rows than these.
        multiple_of: propose multiples of it, where the batch has more rows. If that many rows do
            not fit, smaller sizes are used all the same, with a warning in the log.
        margin: the share of the device's capacity that trials leave free.

    Attributes:
        may_measure: whether a batch may be cut smaller than fits only to measure what its rows
            need. A `Microbatcher` forbids it where layers average over rows; trials then halve
            what is left between what fits and what failed.
        grown_from: rows that had been known to fit, where the last attempt was the first that
            fitted with more, after a size had failed or was suggested; else None.

    Raises:
        TypeError: if a number of rows is not an int.
        ValueError: if a number of rows is below 1, the margin is not in [0, 1), or the largest
            size is smaller than what it must be a multiple of.

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
        grow: bool = True,
        max_microbatch_size: int | None = None,
        multiple_of: int = 1,
        margin: float = 0.0,
    ) -> None:
        for name, rows in (("initial", initial), ("max_microbatch_size", max_microbatch_size)):
            if rows is not None:
                require_size(rows, name=name)
        self.multiple_of = require_size(multiple_of, name="multiple_of")
        if not 0 <= margin < 1:
            raise ValueError(
                f"margin is {margin}, but it is the share of the capacity to leave free: give a "
                f"number from 0 to below 1, such as 0.05"
            )
        if max_microbatch_size is not None and max_microbatch_size < self.multiple_of:
            raise ValueError(
                f"max_microbatch_size={max_microbatch_size} is below multiple_of={multiple_of}: no "
                f"size can be both; raise the one or lower the other"
            )
        self._initial, self._max = initial, max_microbatch_size
        self._refine, self._grow, self._margin = refine, grow, margin
        self._learned = Learned(start=None if initial is None else [int(initial), None])
        # What was decided last, by what was asked; None where something was learned since.
        self._decided: tuple[tuple[Any, ...], tuple[int, bool]] | None = None

    def __repr__(self) -> str:
        options = {
            "refine": (self._refine, True),
            "grow": (self._grow, True),
            "max_microbatch_size": (self._max, None),
            "multiple_of": (self.multiple_of, 1),
            "margin": (self._margin, 0.0),
        }
        told = [f"{name}={value}" for name, (value, usual) in options.items() if value != usual]
        return f"Halving({', '.join([f'initial={self._initial}', *told])})"

    @property
    def compares_seconds(self) -> bool:
        """Whether the seconds of the next attempt are compared, so that they have to be right."""
        return self._learned.faster.compares

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
        rows, fails = self._bracket(num_rows, cost)
        size = self._cut(num_rows, cost, self._known_rows(num_rows, cost, rows, fails))
        is_quiet = known.is_rehearsed or known.batches < known.quiet_until
        if size == num_rows or not known.fits or is_quiet:
            return size, False
        most = math.ceil(fails - ROUNDING) - 1 if fails < math.inf else num_rows
        # Trials that halve the bracket fail no more often than its logarithm.
        halfway = (rows + fails) / 2 + ROUNDING
        chord = self._chord(cost)
        predicted = self._predicted_rows(chord, cost)
        if predicted is None:
            doubled = 2 * size if known.may_double else size
            return max(size, self._cut(num_rows, cost, min(most, doubled))), False
        trial = min(predicted, most, halfway)
        if (larger := self._cut(num_rows, cost, trial)) > size:
            return larger, False
        # The next cut is nearest to what was measured: there the prediction needs no reserve.
        count = -(-num_rows // size)
        following = cut_size(num_rows, -(-num_rows // (count - 1)), multiple_of=self.multiple_of)
        exact = self._predicted_rows(chord, cost, error=0.0) or 0.0
        # Where costs differ from batch to batch there is often none within the lower half of a
        # bracket; once as many trials have failed as its logarithm, that ends.
        bound = most if known.trials <= num_rows.bit_length() else min(most, halfway)
        if following <= min(exact, bound) and self._cut(num_rows, cost, following) > size:
            return following, False
        # With one peak, what rows need cannot be told from what every size needs.
        if known.has_probed or chord[1] is not None or self._cut(num_rows, cost, most) <= size:
            return size, False
        smaller = self._cut(num_rows, cost, -(-size // 2))
        if self.may_measure and self.multiple_of <= smaller < size:
            return smaller, True
        # Nothing smaller to measure: twice as many, if nothing is against it.
        more: float = size
        if fails == math.inf and not known.faster.pressed:
            more = 2 * size
        elif not self.may_measure:
            more = min(most, halfway)
        return max(size, self._cut(num_rows, cost, more)), False

    def _cut(self, num_rows: int, cost: float, most_rows: float) -> int:
        """Return the size of the coarsest cut within all limits."""
        most = min(num_rows, most_rows, math.inf if self._max is None else self._max)
        if self._learned.faster.most is not None:
            most = min(most, self._learned.faster.most / cost + ROUNDING)
        return cut_size(num_rows, max(1, int(most)), multiple_of=self.multiple_of)

    def _bracket(self, num_rows: int, cost: float) -> tuple[float, float]:
        """The most rows that fitted and the fewest that failed; 0 and infinity for not known."""
        known, fails, fits = self._learned, math.inf, 0.0
        for each in known.failures.values():
            if not each.holds_for(num_rows):
                continue
            if each.is_alike(cost):
                fails = min(fails, each.elements)
            elif each.cost < cost:
                fails = min(fails, each.rows * cost)
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

    def _known_rows(self, num_rows: int, cost: float, fits: float, fails: float) -> float:
        """Return how many rows to use where no peak predicts that more have room."""
        known, start = self._learned, self._starting_rows(num_rows, cost)
        if not fits:
            return start if fails == math.inf else min(start, math.ceil(fails / 2 - ROUNDING))
        rows = max(1, int(fits + ROUNDING))
        if known.has_failed or fails < math.inf:
            return rows
        predicted = self._predicted_rows(self._chord(cost), cost)
        has_room = known.is_rehearsed and predicted is not None and predicted >= num_rows
        return max(start, rows) if predicted is None or has_room else rows

    def _starting_rows(self, num_rows: int, cost: float) -> int:
        """Return the rows to start from, the whole batch if nothing else was said."""
        if self._learned.start is None:
            return num_rows
        rows, per_row = self._learned.start
        return rows if per_row is None else max(1, int(rows * per_row / cost + ROUNDING))

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
            self._learned.room = int(outcome.capacity_bytes * (1 - self._margin)) - held
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
        has_changed = known.has_failed or known.start is not None
        if known.ceiling is None:
            if has_changed:
                # Asked before this point is added.
                before = int(self._bracket(outcome.num_rows, cost)[0] + ROUNDING)
                self.grown_from = before if 0 < before * (1 + GROWTH) < rows else None
            if self.wants_to_measure:
                known.has_probed = self._decide(outcome.num_rows, cost)[1]
        known.ceiling = None
        known.batches += 1
        fell = self._fell(point)
        if self._grow and known.failures:
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
            self._learned.faster.observe(
                seconds=outcome.seconds / (outcome.num_rows * cost),
                elements=point.elements,
                retries=outcome.alloc_retries,
                smaller=smaller * cost if self.multiple_of <= smaller < rows else None,
                is_limited=has_changed,
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
        known, has_room, is_old = self._learned, False, False
        for key, each in list(known.failures.items()):
            is_over = each.until is not None and each.until <= known.batches
            is_for_all = each.within is None
            if each.is_part_of(fitted) and each.holds_for(num_rows):
                del known.failures[key]
            elif known.is_rehearsed:
                continue
            elif is_for_all and (fell or each.has_room_in(known.room)):
                has_room = True
                del known.failures[key]
            elif is_over:
                is_old |= is_for_all
                del known.failures[key]
        if is_old:
            known.retry, known.may_double = 2 * known.retry, True
        if has_room or is_old:
            known.is_unsettled, known.trials = True, 0
            self._learned.faster.forget()

    def _record_failure(self, num_rows: int, point: Point) -> None:
        known, rows, cost = self._learned, point.rows, point.cost
        point.room = known.room
        proven = max((each.rows for each in known.fits.values() if each.cost >= cost), default=None)
        if not point.is_explained and proven is not None and num_rows < proven:
            # The batch is smaller than what had fitted: it tells only of others like it.
            if known.ceiling is None:
                known.aside *= 2
            point.within, point.until = num_rows, known.batches + known.aside // 2
            _keep(known.failures, (_class(cost), num_rows), point)
            known.ceiling = -(-rows // 2)
            return
        regressed = any(point.is_part_of(each) for each in known.fits.values())
        # An explained failure waits for room, and any other for its time.
        point.until = None if point.is_explained else known.batches + known.retry
        smallest = known.failures.get((_class(cost), None))
        if smallest is None or point.elements <= smallest.elements:
            _keep(known.failures, (_class(cost), None), point)
        known.has_failed, known.may_double = True, False
        known.trials = 0 if regressed else known.trials + (proven is not None)
        known.is_unsettled |= regressed
        if known.is_unsettled:
            known.wait = max(FIRST_WAIT, 2 * known.wait)
            known.quiet_until = max(known.quiet_until, known.batches + known.wait)
        half = min(-(-rows // 2), self._starting_rows(rows, cost))
        if regressed:  # memory is not what it was: nothing larger than half is known
            for key, each in list(known.fits.items()):
                each.need = None
                if each.elements > point.elements / 2:
                    del known.fits[key]
            known.has_probed, proven = False, None
            self._learned.faster.forget()
        if proven is None:
            known.ceiling = half
        else:
            # Where peaks are measured, later trials narrow a bracket however wide.
            known.ceiling = (
                max(proven, half)
                if self._predicted_rows(self._chord(cost), cost) is None
                else proven
            )
        if known.ceiling < self.multiple_of <= rows:
            logger.warning(
                "automicro: %d rows do not fit: sizes are not multiples of multiple_of=%d now",
                rows,
                self.multiple_of,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned; ``limit`` are rows, None while every batch went whole."""
        known = self._learned
        limit = known.ceiling or (known.start and known.start[0])
        if known.ceiling is None and known.has_failed:
            limit = max((each.rows for each in known.fits.values()), default=None)
        return {
            "kind": "Halving",
            "limit": limit,
            "learned": dataclasses.asdict(known)
            | {
                # As lists: in JSON, no tuple can be a key.
                name: [dataclasses.asdict(each) for each in points.values()]
                for name, points in (("fits", known.fits), ("failures", known.failures))
            },
        }

    def _load(self, state: dict[str, Any]) -> None:
        told = dict(state["learned"])
        if told.keys() != Learned.__dataclass_fields__.keys():
            raise KeyError(*told.keys() ^ Learned.__dataclass_fields__.keys())
        fits = [Point(**each) for each in told["fits"]]
        failures = [Point(**each) for each in told["failures"]]
        told["fits"] = {_bucket(each): each for each in fits}
        told["failures"] = {(_class(each.cost), each.within): each for each in failures}
        self._learned = Learned(**told | {"faster": Faster(**told["faster"])})
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
