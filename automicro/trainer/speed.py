"""How fast training goes now."""

from collections import deque
from dataclasses import dataclass

from automicro.events.state import LoopState

WINDOW_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Rows and tokens per second; None where tokens cannot be counted."""

    samples: float = 0.0
    tokens: float | None = None

    def __str__(self) -> str:
        tokens = "" if self.tokens is None else f" · {self.tokens:,.0f} tokens/s"
        return f"{self.samples:,.0f} samples/s{tokens}"


class RecentSpeed:
    """The speed of training over the last few seconds, or since the last time it was asked.

    An average since the start would hide for long that a smaller microbatch size, or another
    process, made training slower.

    >>> recent, state = RecentSpeed(), LoopState()
    >>> state.samples, state.train.seconds = 100, 10.0
    >>> str(recent.now(state))
    '10 samples/s'
    >>> state.samples, state.tokens, state.train.seconds = 400, 8000, 20.0
    >>> str(recent.now(state))
    '30 samples/s · 800 tokens/s'
    """

    def __init__(self) -> None:
        self._marks = deque([(0.0, 0, 0)])  # seconds of training, rows, tokens

    def now(self, state: LoopState) -> Speed:
        """The speed now. Evaluations do not count."""
        seconds = state.train.seconds
        while len(self._marks) > 1 and self._marks[1][0] <= seconds - WINDOW_SECONDS:
            self._marks.popleft()
        start, samples, tokens = self._marks[0]
        self._marks.append((seconds, state.samples, state.tokens or 0))
        if seconds <= start:
            return Speed()
        return Speed(
            samples=(state.samples - samples) / (seconds - start),
            tokens=None if state.tokens is None else (state.tokens - tokens) / (seconds - start),
        )
