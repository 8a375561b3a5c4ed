"""How long a run may take: ``"2h30m"``, ``"45m"``, ``"1:30:00"``."""

import re
import time
from collections.abc import Callable
from datetime import timedelta

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PARTS = re.compile(
    r"(?:(?P<d>[0-9]+)\s*d)?\s*(?:(?P<h>[0-9]+)\s*h)?\s*(?:(?P<m>[0-9]+)\s*m)?\s*"
    r"(?:(?P<s>[0-9]+)\s*s)?"
)
_CLOCK = re.compile(r"(?:([0-9]+)-)?([0-9]+):([0-5][0-9]):([0-5][0-9])")
_HOW = "write it like '2h30m', '45m', '90s', '1d' or '1:30:00' (hours, minutes, seconds)"


def parse_time(text: str | timedelta) -> float:
    """Seconds, read from days, hours, minutes and seconds, or from a clock's H:MM:SS.

    ``"1-12:00:00"`` is a day and twelve hours, as batch systems write it.

    Args:
        text: what to read; a `datetime.timedelta` stands for itself.

    Raises:
        TypeError: it is a bare number, or anything else that is not text.
        ValueError: the text is no time, or none at all.

    Example:
        >>> parse_time("2h30m"), parse_time("90s"), parse_time("1:30:00")
        (9000.0, 90.0, 5400.0)
    """
    if isinstance(text, timedelta):
        seconds = text.total_seconds()
    elif isinstance(text, int | float) and not isinstance(text, bool):
        raise TypeError(
            f"a time of {text} has no unit: say '{text:g}s' (seconds), '{text:g}m' (minutes) or "
            f"'{text:g}h' (hours)"
        )
    elif not isinstance(text, str):
        raise TypeError(f"{text!r} is no time: {_HOW}")
    else:
        seconds = _read(text)
    if seconds <= 0:
        raise ValueError(f"a time of '{text}' ends before it begins: give at least '1s'")
    return float(seconds)


def _read(text: str) -> int:
    stripped = text.strip().lower()
    clock = _CLOCK.fullmatch(stripped)
    if clock is not None:
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        return 86400 * days + 3600 * hours + 60 * minutes + seconds
    parts = _PARTS.fullmatch(stripped)
    if parts is None or not stripped:
        raise ValueError(f"{text!r} is no time: {_why(stripped)}{_HOW}")
    return sum(int(parts[unit] or 0) * seconds for unit, seconds in _SECONDS.items())


def _why(text: str) -> str:
    if text.isdecimal():
        return "it has no unit; "
    if re.fullmatch(r"[0-9]+:[0-9]+", text):
        return "two numbers may be hours and minutes, or minutes and seconds; "
    if re.search(r"[0-9]\.[0-9]", text):
        return "its numbers must be whole, so half an hour is '30m'; "
    return ""


class TimeLimit:
    """Says when the time is over that a run may take.

    It counts from its construction: what went before, in another process or in an earlier call of
    `fit`, does not count, because a batch system gives each job a time of its own.

    Args:
        seconds: how long; None for as long as it takes.
        clock: what time it is, in seconds.

    Example:
        >>> limit = TimeLimit(10.0, clock=iter([0.0, 4.0, 10.0]).__next__)
        >>> limit.is_over, limit.is_over
        (False, True)
        >>> TimeLimit(None).is_over
        False
    """

    def __init__(
        self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._start = 0.0 if seconds is None else clock()

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._seconds is not None and self._clock() - self._start >= self._seconds
