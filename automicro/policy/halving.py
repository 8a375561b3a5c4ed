"""The policy behind "auto": halve what fails, then look for the fewest microbatches that fit."""

import logging
import math
from typing import Any

from automicro.policy.frontier import (
    CAUTIOUS_ERROR,
    ERROR,
    ROUNDING,
    Failed,
    Frontier,
    MeasuredPeak,
    Peaks,
)
from automicro.policy.pacing import Outlier, Patience, Thrash
from automicro.policy.policy import (
    Outcome,
    Policy,
    cut_size,
    require_cost,
    require_kind,
    require_rows,
    require_size,
)

logger = logging.getLogger(__name__)

# Sizes that grow by no more than this share are no news.
GROWTH = 0.02

FLAGS = ("_trusts_prediction", "_has_probed", "_may_double", "_has_failed")
# What a state replaces; the rest are settings, and those of the run count.
LEARNED = (
    "_start",
    "_frontier",
    "_peaks",
    "_patience",
    "_outlier",
    "_thrash",
    "_ceiling",
    "_room",
    "_is_outlier",
    *FLAGS,
)


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
        self._initial = None if initial is None else require_size(initial, name="initial")
        self._refine = refine
        self._grow = grow
        self._max = (
            None
            if max_microbatch_size is None
            else require_size(max_microbatch_size, name="max_microbatch_size")
        )
        self.multiple_of = require_size(multiple_of, name="multiple_of")
        if not 0 <= margin < 1:
            raise ValueError(
                f"margin is {margin}, but it is the share of the capacity to leave free: give a "
                f"number from 0 to below 1, such as 0.05"
            )
        if self._max is not None and self._max < self.multiple_of:
            raise ValueError(
                f"max_microbatch_size={self._max} is below multiple_of={self.multiple_of}: no "
                f"size can be both; raise the one or lower the other"
            )
        self._margin = margin
        self._start: tuple[int, float | None] | None = (
            None if self._initial is None else (self._initial, None)
        )
        self._frontier = Frontier()
        self._peaks = Peaks()
        self._patience = Patience()
        self._outlier = Outlier()
        self._is_outlier = False  # whether the batch that is running is one
        self._thrash = Thrash()
        # Rows that may be tried next within a batch that ran out of memory; None between batches.
        self._ceiling: int | None = None
        # Bytes that the last attempt could have for its rows; None where they were not measured.
        self._room: int | None = None
        # Until a trial fails, a trial goes right to the size that is predicted.
        self._trusts_prediction = True
        self._has_probed = False
        # Whether a failure was forgotten that nothing explains: then sizes double.
        self._may_double = False
        self._has_failed = False
        # What was decided last, by what it was asked of; None where something was learned since.
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
        return self._thrash.compares

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
        if cost is not None:
            require_cost(cost)
        self._decided = None
        self._start = (require_size(rows, name="rows"), cost)
        return True

    def take_rehearsal(self) -> None:
        """Try no larger sizes: go on with what went through, also at the cost of longer rows.

        >>> policy = Halving()
        >>> policy.take_rehearsal()
        >>> policy.propose(64)
        64
        """
        self._decided = None
        self._patience.take_rehearsal()

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        """Return the largest slice of the coarsest cut that should fit.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        require_rows(num_rows)
        return self._decide(num_rows, require_cost(cost))[0]

    @property
    def wants_to_measure(self) -> bool:
        """Whether a batch to come might be cut smaller only to measure it, if it may be."""
        return self._refine and not self._has_probed and self._frontier.knows_a_fit

    def is_measuring(self, num_rows: int, cost: float | None = None) -> bool:
        """Whether what it proposes for a batch is smaller than fits, and only there to measure.

        Raises:
            ValueError: if the batch has no rows, or the cost is not positive.
        """
        if not self.wants_to_measure:
            return False
        require_rows(num_rows)
        return self._decide(num_rows, require_cost(cost))[1]

    def record(self, outcome: Outcome) -> None:
        """Learn from an attempt: what fits, what fails, and what it took."""
        cost = require_cost(outcome.cost)
        self.grown_from = None
        if outcome.capacity_bytes is not None:
            capacity = int(outcome.capacity_bytes * (1 - self._margin))
            self._room = capacity - (outcome.resident_bytes or 0)
        if outcome.fits:
            self._record_fit(outcome, cost)
        else:
            self._record_failure(outcome, cost)
        is_whole = outcome.fits and outcome.microbatch_size == outcome.num_rows
        if not is_whole or outcome.alloc_retries is not None:
            self._decided = None  # else the same batch goes whole again

    def _decide(self, num_rows: int, cost: float) -> tuple[int, bool]:
        """Return the size to propose, and whether it is only there to measure its peak."""
        asked = num_rows, cost, self._room, self.may_measure
        if self._decided is None or self._decided[0] != asked:
            self._decided = asked, self._decide_anew(num_rows, cost)
        return self._decided[1]

    def _decide_anew(self, num_rows: int, cost: float) -> tuple[int, bool]:
        if self._ceiling is not None:
            return self._cut(num_rows, cost, self._ceiling), False
        known = self._known_rows(num_rows, cost)
        size = self._cut(num_rows, cost, known)
        may_try = self._patience.may_grow and not self._patience.is_rehearsed
        if size == num_rows or not self._frontier.knows_a_fit or not may_try:
            return size, False
        fails = self._frontier.rows_that_fail(cost)
        most: float = num_rows if fails is None else fails - 1
        is_cautious = self._patience.is_cautious
        predicted = self._predicted_rows(cost, error=CAUTIOUS_ERROR if is_cautious else ERROR)
        if predicted is not None:
            # Trials that halve the bracket fail no more often than its logarithm.
            halfway = math.inf
            if not self._trusts_prediction:
                halfway = self._frontier.rows_halfway(cost) + ROUNDING
            larger = self._cut(num_rows, cost, min(predicted, most, halfway))
            if larger > size:
                return larger, False
            # The next cut is nearest to what was measured: there the prediction needs no reserve.
            following = self._following(num_rows, size)
            exact = predicted if is_cautious else self._predicted_rows(cost, error=0.0)
            assert exact is not None
            # Batches of other costs or rows may have no cut within the lower half of a bracket.
            bound = most if self._patience.is_calm else min(most, halfway)
            if following <= min(exact, bound) and self._cut(num_rows, cost, following) > size:
                return following, False
            if self._cut(num_rows, cost, most) > size and self._lacks_a_chord(cost):
                smaller = self._cut(num_rows, cost, -(-size // 2))
                if self.may_measure and self.multiple_of <= smaller < size:
                    return smaller, True
                # Nothing smaller to measure; one trial of twice as many if nothing is against it.
                if fails is None and not self._thrash.is_pressed:
                    return max(size, self._cut(num_rows, cost, 2 * size)), False
                if not self.may_measure:
                    halfway = min(most, self._frontier.rows_halfway(cost) + ROUNDING)
                    return max(size, self._cut(num_rows, cost, halfway)), False
        elif self._may_double:
            return max(size, self._cut(num_rows, cost, min(most, 2 * known))), False
        return size, False

    def _cut(self, num_rows: int, cost: float, most_rows: float) -> int:
        """Return the size of the coarsest cut within all limits."""
        most = min(num_rows, most_rows)
        if self._max is not None:
            most = min(most, self._max)
        if self._thrash.most_elements is not None:
            most = min(most, self._thrash.most_elements / cost + ROUNDING)
        outlying = self._outlier.most_rows(num_rows, cost, self._patience.batches)
        if outlying is not None:
            most = min(most, outlying)
        return cut_size(num_rows, max(1, int(most)), multiple_of=self.multiple_of)

    def _known_rows(self, num_rows: int, cost: float) -> int:
        """Return how many rows to use where no peak predicts that more have room."""
        start = self._starting_rows(num_rows, cost)
        is_rehearsed = self._patience.is_rehearsed
        fits = self._frontier.rows_that_fit(cost, only_down=is_rehearsed)
        fails = self._frontier.rows_that_fail(cost)
        if fits is None:
            return start if fails is None else min(start, -(-fails // 2))
        if is_rehearsed:
            predicted = None if self._has_failed else self._predicted_rows(cost)
            has_room = predicted is None or predicted >= num_rows
            return max(start, fits) if has_room and not self._has_failed else fits
        if fails is None and self._predicted_rows(cost) is None and not self._has_failed:
            return max(start, fits)
        return fits

    def _starting_rows(self, num_rows: int, cost: float) -> int:
        """Return the rows to start from, the whole batch if nothing else was said."""
        if self._start is None:
            return num_rows
        rows, per_row = self._start
        return rows if per_row is None else max(1, int(rows * per_row / cost + ROUNDING))

    def _following(self, num_rows: int, size: int) -> int:
        """Return the next larger size: of one microbatch less."""
        count = -(-num_rows // size)
        return cut_size(num_rows, -(-num_rows // (count - 1)), multiple_of=self.multiple_of)

    def _predicted_rows(self, cost: float, *, error: float = ERROR) -> float | None:
        """Return how many rows should have room; None where sizes are not refined."""
        if not self._refine or self._room is None:
            return None
        return self._peaks.most_rows(cost=cost, room=self._room, error=error)

    def _lacks_a_chord(self, cost: float) -> bool:
        """Whether a smaller microbatch would tell more than the one that was measured.

        With one peak, what rows need cannot be told from what every size needs (gradients,
        workspaces), and larger sizes seem not to fit. One batch in more microbatches is enough,
        and cannot fail.
        """
        return not self._has_probed and not self._peaks.has_chord(cost)

    def _record_fit(self, outcome: Outcome, cost: float) -> None:
        rows = outcome.microbatch_size
        if self._ceiling is None:
            self._note_growth(rows, cost)
            self._has_probed = self._has_probed or self._decide(outcome.num_rows, cost)[1]
        self._ceiling = None
        self._patience.fitted()
        if self._is_outlier:
            self._outlier.note(
                num_rows=outcome.num_rows, fitted=rows, cost=cost, batch=self._patience.batches
            )
            self._is_outlier = False
        fell = False
        if outcome.peak_bytes is not None:
            need = max(0, outcome.peak_bytes - (outcome.resident_bytes or 0))
            fell = self._peaks.learn(MeasuredPeak(rows=rows, cost=cost, need=need))
        if self._grow and self._frontier.knows_a_failure:
            self._frontier.lift_contradicted(rows=rows, cost=cost)
            self._lift(fell=fell)
        fails = self._frontier.rows_that_fail(cost)
        if fails is None or rows < fails:
            self._frontier.fitted(rows=rows, cost=cost)
        # On a device without a caching allocator, a simulated one above all, seconds say nothing of
        # the real one, and no clock decides.
        if outcome.seconds is not None and outcome.alloc_retries is not None:
            smaller = self._cut(outcome.num_rows, cost, rows - 1) if rows > 1 else rows
            is_smallest = smaller >= rows or smaller < self.multiple_of
            self._thrash.observe(
                seconds=outcome.seconds / (outcome.num_rows * cost),
                elements=rows * cost,
                retries=outcome.alloc_retries,
                smaller=None if is_smallest else smaller * cost,
                is_limited=self._has_failed or self._start is not None,
            )

    def _note_growth(self, rows: int, cost: float) -> None:
        if not (self._has_failed or self._start is not None):
            return
        known = self._frontier.rows_that_fit(cost)
        if known is not None and rows > known * (1 + GROWTH):
            self.grown_from = known

    def _lift(self, *, fell: bool) -> None:
        """Forget failures that need not repeat."""
        if self._patience.is_rehearsed:
            return
        has_room = self._frontier.lift_all() if fell else self._frontier.lift_explained(self._room)
        oldest = self._patience.batches - self._patience.retry
        is_old = self._frontier.lift_unexplained(before=oldest)
        if is_old:
            self._patience.retried()
            self._may_double = True
        if has_room or is_old:
            self._patience.lifted()
            self._trusts_prediction = True
            self._thrash.forget()

    def _record_failure(self, outcome: Outcome, cost: float) -> None:
        rows, need = outcome.microbatch_size, None
        if outcome.peak_bytes is not None:
            need = outcome.peak_bytes - (outcome.resident_bytes or 0)
        failed = Failed(
            rows=rows, cost=cost, need=need, room=self._room, batch=self._patience.batches
        )
        proven = self._frontier.proven_rows(cost)
        if not failed.is_explained and proven is not None and outcome.num_rows < proven:
            self._is_outlier = True
            self._ceiling = -(-rows // 2)
            return
        is_beyond = not self._trusts_prediction and rows > ROUNDING + self._frontier.rows_halfway(
            cost
        )
        regressed = self._frontier.failed(failed)
        self._patience.failed(rows=outcome.num_rows, regressed=regressed, is_beyond=is_beyond)
        self._has_failed = True
        self._may_double = False
        if regressed:
            self._peaks.forget()
            self._has_probed = False
            self._thrash.forget()
        proven = None if regressed else self._frontier.proven_rows(cost)
        half = min(-(-rows // 2), self._starting_rows(rows, cost))
        if proven is None:
            self._ceiling = half
        else:
            self._trusts_prediction = False
            # Where peaks are measured, later trials narrow a bracket however wide.
            self._ceiling = max(proven, half) if self._predicted_rows(cost) is None else proven
        if self._ceiling < self.multiple_of <= rows:
            logger.warning(
                "%d rows do not fit: going on with sizes that are not multiples of multiple_of=%d",
                rows,
                self.multiple_of,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return everything learned; ``limit`` are rows, None while every batch went whole."""
        return {
            "kind": "Halving",
            "limit": self._limit(),
            "learned": {
                "start": None if self._start is None else list(self._start),
                "frontier": self._frontier.state_dict(),
                "peaks": self._peaks.state_dict(),
                "patience": self._patience.state_dict(),
                "outlier": [*self._outlier.state_dict(), self._is_outlier],
                "thrash": self._thrash.state_dict(),
                "ceiling": self._ceiling,
                "room": self._room,
                "flags": [getattr(self, name) for name in FLAGS],
            },
        }

    def _limit(self) -> int | None:
        if self._ceiling is not None:
            return self._ceiling
        if self._has_failed:
            return self._frontier.most_rows()
        return None if self._start is None else self._start[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was learned.

        Raises:
            ValueError: if another kind of policy wrote the state, or it is damaged. Nothing has
                changed then.
        """
        require_kind(state, self)
        fresh = Halving()
        try:
            fresh._load(state["learned"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"the state of a Halving policy is damaged ({error!r}): give what its "
                f"state_dict() returned, or leave it out"
            ) from error
        for name in LEARNED:
            setattr(self, name, getattr(fresh, name))
        self._decided = None

    def _load(self, learned: dict[str, Any]) -> None:
        start = learned["start"]
        self._start = None if start is None else (int(start[0]), start[1])
        self._frontier = Frontier.from_state(learned["frontier"])
        self._peaks = Peaks.from_state(learned["peaks"])
        self._patience = Patience.from_state(learned["patience"])
        *outlier, is_outlier = learned["outlier"]
        self._outlier, self._is_outlier = Outlier.from_state(outlier), bool(is_outlier)
        self._thrash = Thrash.from_state(learned["thrash"])
        self._ceiling, self._room = learned["ceiling"], learned["room"]
        for name, flag in zip(FLAGS, learned["flags"], strict=True):
            setattr(self, name, bool(flag))
