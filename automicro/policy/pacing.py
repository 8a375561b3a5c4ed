"""When sizes change for the sake of time: growing again, and leaving sizes that are slower.

Near the limit of a device the allocator frees its cache and asks again, which takes time. Smaller
microbatches mostly take time too (Composer's PR 1632 found them slower), so both are measured.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from automicro.policy.frontier import ROUNDING

# The first wait after a size that had fitted failed: long enough to see whether memory goes on
# growing, short enough for a run of a few hundred batches to recover.
FIRST_WAIT = 16
# A failure that nothing explains is tried again after this many batches, then after twice as
# many, so a run of a million batches spends twelve attempts on it.
FIRST_RETRY = 256
# Trials that do not halve their bracket need so many batches without a failure, then twice as
# many: most brackets are closed by then.
FIRST_CALM = 32
# And so many times as many where finding the size has taken all the failures that it may take.
CAUTIOUS_CALM = 4

_FOR_GOOD = 2**62  # batches

COUNTERS = (
    "batches",
    "wait",
    "retry",
    "_quiet_until",
    "_calm",
    "_last_failure",
    "_failures",
    "_cautious_until",
)


class Patience:
    """Counts batches, and says whether a size above the known ones may be tried.

    While memory stays as it is, nothing waits: trials are bounded by the bracket that they narrow.
    From the first sign that memory changes, each failed attempt doubles the wait. Growing needs a
    whole wait without a failure, so failures are logarithmic in the batches, whatever the device
    does.

    >>> patience = Patience()
    >>> patience.failed(rows=8, regressed=False)
    >>> patience.may_grow
    True
    >>> patience.failed(rows=8, regressed=True)
    >>> patience.may_grow, patience.wait
    (False, 16)
    """

    def __init__(self) -> None:
        self.batches = 0
        self.wait = 0
        self.retry = FIRST_RETRY
        self._quiet_until = 0
        self._is_unsettled = False
        self._calm = FIRST_CALM
        self._last_failure = 0
        self._failures = 0
        self._cautious_until = 0

    @property
    def is_calm(self) -> bool:
        """Whether the last failure is long ago."""
        calm = CAUTIOUS_CALM * self._calm if self.is_cautious else self._calm
        return self.batches - self._last_failure >= calm

    @property
    def is_cautious(self) -> bool:
        """Whether finding the size has taken all the failures that it may take."""
        return self.batches < self._cautious_until

    @property
    def is_rehearsed(self) -> bool:
        """Whether nothing larger is tried any more."""
        return self._cautious_until >= _FOR_GOOD

    @property
    def may_grow(self) -> bool:
        """Whether the wait is over."""
        return self.batches >= self._quiet_until

    def fitted(self) -> None:
        """Count a batch."""
        self.batches += 1

    def failed(self, *, rows: int, regressed: bool, is_beyond: bool = False) -> None:
        """Wait twice as long, if memory changes.

        Args:
            rows: of the batch; while memory stays as it is, finding its size takes at most
                ``log2(rows) + 2`` failures. Costs that differ in every batch could take more;
                from there on trials are cautious for as long as an unexplained failure is kept.
            regressed: whether what failed had fitted before.
            is_beyond: whether what failed was in the upper half of what was left to try.
        """
        self._last_failure = self.batches
        self._failures = 1 if regressed else self._failures + 1
        if self._failures >= rows.bit_length() + 1:
            self._cautious_until = max(self._cautious_until, self.batches + self.retry)
            self.retry *= 2
        if is_beyond:
            self._calm *= 2
        self._is_unsettled |= regressed
        if self._is_unsettled:
            self.wait = max(FIRST_WAIT, 2 * self.wait)
            self._quiet_until = max(self._quiet_until, self.batches + self.wait)

    def take_rehearsal(self) -> None:
        """Wait for good: whatever may fail has been tried before the run."""
        self._cautious_until = _FOR_GOOD

    def lifted(self) -> None:
        """A failure was forgotten: if it repeats, wait."""
        self._failures = 0
        self._is_unsettled = True

    def retried(self) -> None:
        """Double the age at which an unexplained failure is forgotten."""
        self.retry *= 2

    def state_dict(self) -> list[Any]:
        """Return all counters."""
        return [getattr(self, name) for name in COUNTERS] + [self._is_unsettled]

    @classmethod
    def from_state(cls, state: list[Any]) -> "Patience":
        """Return the patience that ``state_dict`` described."""
        patience = cls()
        *counters, patience._is_unsettled = state
        for name, value in zip(COUNTERS, counters, strict=True):
            setattr(patience, name, int(value))
        return patience


class Outlier:
    """A batch that ran out of memory where larger ones had fitted, so that it tells only of itself.

    The last few rows of an epoch fail now and then for what others do with the device. Full
    batches then go on as before; batches of no more rows keep to what fitted, for a while that
    doubles each time.

    >>> outlier = Outlier()
    >>> outlier.note(num_rows=2, fitted=1, cost=1.0, batch=4)
    >>> outlier.most_rows(num_rows=2, cost=1.0, batch=5), outlier.most_rows(16, 1.0, batch=5)
    (1, None)
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._fitted = 0.0  # rows × cost
        self._until = 0
        self._wait = FIRST_WAIT

    def note(self, *, num_rows: int, fitted: int, cost: float, batch: int) -> None:
        """Keep what fitted of such a batch.

        Args:
            num_rows: of the batch.
            fitted: rows of its microbatches in the end.
            cost: of a row.
            batch: its number.
        """
        self._num_rows, self._fitted = num_rows, fitted * cost
        self._until = batch + self._wait
        self._wait *= 2

    def most_rows(self, num_rows: int, cost: float, batch: int) -> int | None:
        """Return the most rows that a microbatch should have; None for any."""
        if num_rows > self._num_rows or batch >= self._until:
            return None
        return max(1, int(self._fitted / cost + ROUNDING))

    def state_dict(self) -> list[Any]:
        """Return all of it."""
        return [self._num_rows, self._fitted, self._until, self._wait]

    @classmethod
    def from_state(cls, state: list[Any]) -> "Outlier":
        """Return what ``state_dict`` described."""
        outlier = cls()
        num_rows, fitted, until, wait = state
        outlier._num_rows, outlier._fitted = int(num_rows), float(fitted)
        outlier._until, outlier._wait = int(until), int(wait)
        return outlier


# Batches at the smaller size, and at most as many before, that are compared. A median of three
# forgives one that was disturbed.
TRIAL = 3
# So many of the last TRIAL batches at one size have to have retries. The first batch at a size does
# not count: what is cached for another size is given back once, and is no sign of anything.
SIGNS = 2
# The smaller size is kept if it takes less than this share of the time, and if the difference is so
# many times what the spread of the batches explains.
FASTER = 0.95
SPREADS = 2.5
# The sign is ignored for so many batches after a trial that did not pay, then for twice as many.
FIRST_PAUSE = 32
# Sizes whose time is kept, the latest ones.
MOST_SIZES = 16


class Thrash:
    """Tries a smaller size where there is a sign that it is faster; keeps it where it is.

    Signs are allocator retries in batch after batch, for which one microbatch more is tried; and
    that a smaller size took less time when it ran in passing: while halving, to measure what rows
    need, or before sizes grew. Of a sign alone nothing follows: the smaller size runs for three
    batches, which are compared with the three before them.

    ``most_elements`` is the most rows × cost that a microbatch may have for now, None where
    nothing is limited.

    >>> thrash = Thrash()
    >>> for _ in range(3):
    ...     thrash.observe(seconds=2.0, elements=8.0, retries=1, smaller=4.0)
    >>> thrash.most_elements
    4.0
    >>> for _ in range(3):
    ...     thrash.observe(seconds=1.0, elements=4.0, retries=0, smaller=2.0)
    >>> thrash.most_elements  # kept
    4.0
    """

    def __init__(self) -> None:
        self.most_elements: float | None = None
        self.is_pressed = False  # whether the last attempt that fitted had retries
        self._kept: float | None = None
        self._elements = 0.0
        self._before: list[float] = []
        self._signs: list[bool] = []
        self._trial: list[float] | None = None
        self._pause = FIRST_PAUSE
        self._ignored = 0
        self._passing: dict[float, list[float]] = {}  # seconds by rows × cost
        self._is_watching = False

    @property
    def compares(self) -> bool:
        """Whether the seconds of the next attempt are compared with others."""
        if self._trial is not None or self._is_watching:
            return True
        return not self._ignored and (self.is_pressed or any(self._signs))

    def observe(
        self,
        *,
        seconds: float,
        elements: float,
        retries: int,
        smaller: float | None,
        is_limited: bool = False,
    ) -> None:
        """Learn from an attempt that fitted.

        Args:
            seconds: per row × cost of the whole batch; they count where this `compares`.
            elements: rows × cost of the microbatch.
            retries: of the allocator.
            smaller: rows × cost of the next smaller microbatch, None where there is none.
            is_limited: whether other sizes have run, or will: then each is timed in passing.
        """
        is_timed = self.compares
        self.is_pressed = retries > 0
        if is_timed:
            self._keep(elements, seconds)
        self._is_watching = is_limited and len(self._passing.get(elements, ())) < TRIAL
        if self._trial is not None:
            assert self.most_elements is not None
            if elements <= self.most_elements * (1 + 1e-9):
                self._trial.append(seconds)
                if len(self._trial) == TRIAL:
                    self._decide(elements)
            return
        if elements != self._elements:
            self._elements, self._before, self._signs = elements, [], []
            self._is_watching = is_limited
            return
        if self._ignored:
            self._ignored -= 1
            return
        if is_timed:
            self._before = [*self._before[1 - TRIAL :], seconds]
        self._is_watching |= is_limited and len(self._before) < TRIAL
        self._signs = [*self._signs[1 - TRIAL :], retries > 0]
        if sum(self._signs) >= SIGNS and self._before and smaller is not None:
            self._try(smaller)
        elif len(self._before) == TRIAL:
            self._try(self._faster_in_passing())

    def _keep(self, elements: float, seconds: float) -> None:
        timed = [*self._passing.pop(elements, [])[1 - TRIAL :], seconds]
        self._passing[elements] = timed
        if len(self._passing) > MOST_SIZES:
            del self._passing[next(iter(self._passing))]

    def _faster_in_passing(self) -> float | None:
        """The smaller size that took least, if that was less than now; None for none."""
        bound = FASTER * statistics.median(self._before)
        known = {
            elements: statistics.median(timed)
            for elements, timed in self._passing.items()
            if elements < self._elements and statistics.median(timed) < bound
        }
        return min(known, key=lambda elements: known[elements], default=None)

    def _try(self, elements: float | None) -> None:
        if elements is not None:
            self.most_elements, self._trial, self._signs = elements, [], []

    def _decide(self, elements: float) -> None:
        assert self._trial is not None
        if _is_faster(self._trial, self._before):
            self._kept, self._elements, self._before = self.most_elements, elements, self._trial
        else:
            self.most_elements = self._kept
            self._ignored, self._pause = self._pause, 2 * self._pause
        self._trial, self._signs = None, []

    def forget(self) -> None:
        """Lift the limit: memory is not what it was. What was ignored stays so."""
        self.most_elements = self._kept = self._trial = None
        self._before, self._signs = [], []

    def state_dict(self) -> dict[str, Any]:
        """Return all that was measured and decided."""
        return {
            "most_elements": self.most_elements,
            "kept": self._kept,
            "elements": self._elements,
            "before": list(self._before),
            "signs": list(self._signs),
            "trial": None if self._trial is None else list(self._trial),
            "pause": self._pause,
            "ignored": self._ignored,
            "pressed": self.is_pressed,
            "passing": [[elements, list(timed)] for elements, timed in self._passing.items()],
            "watching": self._is_watching,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Thrash":
        """Return what ``state_dict`` described."""
        thrash = cls()
        thrash.most_elements, thrash._kept = state["most_elements"], state["kept"]
        thrash._elements, thrash._before = state["elements"], list(state["before"])
        thrash._signs = list(state["signs"])
        thrash._trial = None if state["trial"] is None else list(state["trial"])
        thrash._pause, thrash._ignored = int(state["pause"]), int(state["ignored"])
        thrash.is_pressed = bool(state["pressed"])
        thrash._passing = {float(elements): list(timed) for elements, timed in state["passing"]}
        thrash._is_watching = bool(state["watching"])
        return thrash


def _is_faster(after: Sequence[float], before: Sequence[float]) -> bool:
    """Whether batches took less time, and by more than their spread explains.

    >>> _is_faster([1.0, 1.01, 3.0], [1.2, 1.21, 1.22])
    True
    >>> _is_faster([0.8, 1.0, 1.3], [0.9, 1.2, 1.4])
    False
    """
    medians = statistics.median(after), statistics.median(before)
    deviations = [
        abs(each - median)
        for seconds, median in zip((after, before), medians, strict=True)
        for each in sorted(seconds, key=lambda one: abs(one - median))[1:]  # not the median's own
    ]
    # Of both together: three are too few to tell a spread, and one of them may be disturbed.
    spread = statistics.median(deviations) if deviations else 0.0
    error = 1.4826 * spread * math.sqrt(1 / len(after) + 1 / len(before))
    return medians[1] - medians[0] > max((1 - FASTER) * medians[1], SPREADS * error)
