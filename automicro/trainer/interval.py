"""What happens every so often."""

from automicro.duration import Duration
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

    def catch_up(self, state: LoopState) -> None:
        """Take all that is done for handled, as in a run that is taken up again."""
        self.is_due(state)

    def is_due(self, state: LoopState) -> bool:
        """Whether a multiple was reached since this was last asked. Asked after every batch."""
        if self._every is None:
            return False
        passed = state.done(self._every.unit) // self._every.value
        is_due = passed > self._passed
        self._passed = passed
        return is_due
