"""What happens every so often."""

from automicro.duration import Duration, Unit
from automicro.events.state import LoopState


class Interval:
    """Says when something is due that happens every so many epochs, batches, samples or tokens.

    A batch is never cut to hit a number of samples: it is due after the batch that reaches it.

    >>> interval, state = Interval(Duration.parse("100sp")), LoopState()
    >>> due = []
    >>> for state.samples in (64, 128, 192, 256, 320):
    ...     due.append(interval.is_due(state))
    >>> due
    [False, True, False, True, True]
    """

    def __init__(self, every: Duration | None) -> None:
        self._every = every
        self._passed = 0

    @property
    def unit(self) -> Unit | None:
        """What it counts; None where nothing is ever due."""
        return None if self._every is None else self._every.unit

    def catch_up(self, state: LoopState, *, is_pending: bool = False) -> None:
        """Take all that is done for handled, as in a run that is taken up again.

        Args:
            state: where training stands.
            is_pending: whether the latest is not, and is to be due.
        """
        self._passed = self._count(state) - is_pending

    def is_pending(self, state: LoopState) -> bool:
        """Whether a multiple was reached that is not handled yet."""
        return self._every is not None and self._count(state) > self._passed

    def is_due(self, state: LoopState) -> bool:
        """Whether a multiple was reached since this was last asked. Asked after every batch."""
        is_due = self.is_pending(state)
        self.catch_up(state)
        return is_due

    def _count(self, state: LoopState) -> int:
        """How many multiples were reached."""
        return 0 if self._every is None else state.done(self._every.unit) // self._every.value
