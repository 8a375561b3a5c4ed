"""Showing how training goes: one live line in a terminal, plain lines elsewhere, or nothing.

A line stays; a status is what is true now. In a terminal the status is one line that is written
over; elsewhere (a log file, CI) it is printed now and then.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 5.0


class Progress(Protocol):
    """Where the trainer says how it goes. Entered while it runs."""

    def __enter__(self) -> Self:
        """Begin to show."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave nothing behind but lines."""

    def line(self, text: str) -> None:
        """Say something that stays."""

    def status(self, describe: Callable[[], str]) -> None:
        """Say what is true now, if it is time to; otherwise nothing is described."""


def make_progress(enabled: bool, console: Console | None = None) -> Progress:
    """The way to show progress that suits where the output goes.

    Raises:
        TypeError: ``enabled`` is not True or False.

    >>> with make_progress(False) as progress:
    ...     progress.line("nobody reads this")
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"progress is {enabled!r}; pass True to show progress, or False")
    if not enabled:
        return SilentProgress()
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter:
        return LiveProgress(console)
    return PlainProgress(console)


class SilentProgress:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def line(self, text: str) -> None:
        """Show nothing."""

    def status(self, describe: Callable[[], str]) -> None:
        """Describe nothing."""


class PlainProgress:
    """Lines, with the status at most every few seconds.

    Args:
        console: where to write.
        clock: what time it is, in seconds.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._pace = Pace(PLAIN_SECONDS, clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def line(self, text: str) -> None:
        """Print a line."""
        # soft_wrap: a log is not 80 columns wide. No markup: "[4]" is not a style.
        self._console.print(Text(text), soft_wrap=True)

    def status(self, describe: Callable[[], str]) -> None:
        """Print a line, if the last one is long enough ago."""
        if self._pace.is_due():
            self.line(describe())


class LiveProgress:
    """Lines, and below them one that is written over.

    Args:
        console: a terminal.
        clock: what time it is, in seconds.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._pace = Pace(LIVE_SECONDS, clock)
        # Refreshed from here: a thread of its own would be one more thing to end after a failure.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def line(self, text: str) -> None:
        """Print a line above the live one."""
        self._console.print(Text(text))

    def status(self, describe: Callable[[], str]) -> None:
        """Write over the live line."""
        if self._pace.is_due():
            text = Text(describe(), no_wrap=True, overflow="ellipsis")
            self._live.update(text, refresh=True)


class Pace:
    """Says yes at once, then at most every so many seconds.

    >>> pace = Pace(5.0, iter([0.0, 4.0, 5.0, 6.0]).__next__)
    >>> [pace.is_due() for _ in range(4)]
    [True, False, True, False]
    """

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last: float | None = None

    def is_due(self) -> bool:
        """Whether it is time again."""
        now = self._clock()
        if self._last is not None and now - self._last < self._seconds:
            return False
        self._last = now
        return True


@contextlib.contextmanager
def recoveries_shown_here() -> Iterator[None]:
    """Keep Python's handler of last resort from writing each retry to stderr.

    The trainer shows recoveries itself. Handlers that the user configured still get them.
    """
    logger = logging.getLogger("automicro.attempts")
    handler = logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
