"""How fast training goes now."""

from collections import deque

from automicro.trainer.state import LoopState

WINDOW_SECONDS = 5.0


class RecentSpeed:
    """Rows per second of training over the last few seconds, or since the last time it was asked.

    An average since the start would hide for long that a smaller microbatch size, or another
    process, made training slower.

    >>> speed, state = RecentSpeed(), LoopState()
    >>> state.samples, state.train.seconds = 100, 10.0
    >>> speed.per_second(state)
    10.0
    >>> state.samples, state.train.seconds = 400, 20.0
    >>> speed.per_second(state)
    30.0
    """

    def __init__(self) -> None:
        self._marks = deque([(0.0, 0)])  # seconds of training, rows

    def per_second(self, state: LoopState) -> float:
        """The speed now. Evaluations do not count."""
        seconds, samples = state.train.seconds, state.samples
        while len(self._marks) > 1 and self._marks[1][0] <= seconds - WINDOW_SECONDS:
            self._marks.popleft()
        start, done = self._marks[0]
        self._marks.append((seconds, samples))
        return (samples - done) / (seconds - start) if seconds > start else 0.0
