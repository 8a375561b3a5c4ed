"""Values as lines on the console."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO


class ConsoleLogger:
    """Prints values as they are logged, each name at most every so many seconds.

    For those who want to see every value: the trainer's progress shows the main ones by itself.
    Names that seldom come, such as an evaluation's, are printed whenever they do.

    Args:
        interval_seconds: how long a name that was printed stays silent; 0 prints all values.
        file: where to print; None is stdout.
        clock: what time it is, in seconds.

    Raises:
        ValueError: the interval is negative.

    Example:
        >>> logger = ConsoleLogger(clock=iter([0.0, 1.0, 5.0]).__next__)
        >>> logger.start({})
        >>> logger.log({"train/loss": 0.5, "train/lr": 0.01}, step=1)
        step 1: train/loss 0.5, train/lr 0.01
        >>> logger.log({"train/loss": 0.25, "eval/loss": 0.75}, step=2)
        step 2: eval/loss 0.75
        >>> logger.log({"train/loss": 0.125}, step=3)
        step 3: train/loss 0.125
    """

    def __init__(
        self,
        *,
        interval_seconds: float = 5.0,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not interval_seconds >= 0:
            raise ValueError(
                f"interval_seconds={interval_seconds!r} is no interval: give seconds, or 0 to "
                "print every value"
            )
        self._interval_seconds = interval_seconds
        self._file = file
        self._clock = clock
        self._printed_at: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"ConsoleLogger(interval_seconds={self._interval_seconds!r})"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Print whatever comes next."""
        self._printed_at.clear()

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Print a line with the values that are due, or nothing."""
        now = self._clock()
        due = [name for name in values if self._is_due(name, now)]
        if not due:
            return
        text = ", ".join(f"{name} {values[name]:.6g}" for name in due)
        # Looked up each time: a live line of progress stands in for stdout while it is shown.
        file = self._file or sys.stdout
        file.write(f"step {step}: {text}\n")
        file.flush()
        self._printed_at.update(dict.fromkeys(due, now))

    def close(self) -> None:
        """Nothing is held back."""

    def _is_due(self, name: str, now: float) -> bool:
        last = self._printed_at.get(name)
        return last is None or now - last >= self._interval_seconds
