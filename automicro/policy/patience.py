"""When sizes may grow again: a wait that doubles with each disappointment."""

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
            self._cautious_until = self.batches + self.retry
            self.retry *= 2
        if is_beyond:
            self._calm *= 2
        self._is_unsettled |= regressed
        if self._is_unsettled:
            self.wait = max(FIRST_WAIT, 2 * self.wait)
            self._quiet_until = max(self._quiet_until, self.batches + self.wait)

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
