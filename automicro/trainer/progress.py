"""Showing how training goes: a live bar in a terminal, plain lines elsewhere, or nothing.

A line stays; a status is what is true now. In a terminal, and in a notebook, the status is one line
that is written over; elsewhere (a log file, CI, a terminal that cannot move its cursor) it is
printed now and then. What is being done says why nothing moves, where somebody waits and watches.
"""

import contextlib
import dataclasses
import html
import logging
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from automicro.trainer.status import Status

LIVE_SECONDS = 0.1
PLAIN_SECONDS = 5.0
NOTEBOOK_SECONDS = 0.5  # each goes through a kernel's connection
NOTEBOOK_COLUMNS = 140

_ATTEMPTS = logging.getLogger("automicro.attempts")


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

    def status(self, describe: Callable[[], Status | str]) -> None:
        """Say what is true now, if it is time to; otherwise nothing is described."""

    def doing(self, text: str) -> None:
        """Say what takes long, to whoever watches."""


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
    if console.is_jupyter and (show := _display_in_notebook()) is not None:
        return NotebookProgress(show)
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

    def status(self, describe: Callable[[], Status | str]) -> None:
        """Describe nothing."""

    def doing(self, text: str) -> None:
        """Show nothing."""


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

    def status(self, describe: Callable[[], Status | str]) -> None:
        """Print a line, if the last one is long enough ago."""
        if self._pace.is_due():
            self.line(str(describe()))

    def doing(self, text: str) -> None:
        """Print nothing: nobody watches a log, and it says what came of it."""


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
        self._retries = _Retries(self.doing)

    def __enter__(self) -> Self:
        self._live.start()
        _ATTEMPTS.addHandler(self._retries)
        return self

    def __exit__(self, *_: object) -> None:
        _ATTEMPTS.removeHandler(self._retries)
        self._live.stop()

    def line(self, text: str) -> None:
        """Print a line above the live one."""
        self._console.print(Text(text))

    def status(self, describe: Callable[[], Status | str]) -> None:
        """Write over the live line."""
        if self._pace.is_due():
            self._show(describe())

    def doing(self, text: str) -> None:
        """Write over the live line at once: what takes long is rare."""
        self._show(f"{text} …")

    def _show(self, status: Status | str) -> None:
        if isinstance(status, Status):
            options = self._console.options
            text = status.in_window(options.max_width, ascii_only=options.ascii_only)
        else:
            text = Text(status, no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)


class NotebookProgress:
    """Lines, and above them one that is written over, in the output of a notebook's cell.

    Args:
        show: ``show(html)`` puts something on display and gives what replaces it.
        clock: what time it is, in seconds.
    """

    def __init__(
        self,
        show: Callable[[str], Callable[[str], None]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show = show
        self._pace = Pace(NOTEBOOK_SECONDS, clock)
        self._update: Callable[[str], None] | None = None

    def __enter__(self) -> Self:
        self._update = self._show("")
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def line(self, text: str) -> None:
        """Print a line below."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def status(self, describe: Callable[[], Status | str]) -> None:
        """Write over the line above."""
        if self._pace.is_due():
            self._write(_html_of(describe()))

    def doing(self, text: str) -> None:
        """Write over the line above at once."""
        self._write(html.escape(f"{text} …"))

    def _write(self, text: str) -> None:
        if self._update is not None:
            self._update(text)


def _html_of(status: Status | str) -> str:
    if isinstance(status, str):
        return html.escape(status)
    bar = "" if status.share is None else f'<progress value="{status.share:.4f}"></progress> '
    words = dataclasses.replace(status, share=None).in_window(NOTEBOOK_COLUMNS)
    share = "" if status.share is None else f"{status.share:.0%} · "
    return bar + html.escape(share + words.plain)


def _display_in_notebook() -> Callable[[str], Callable[[str], None]] | None:
    """What shows HTML in a notebook; None where its library is not there."""
    try:
        from IPython.display import HTML, display
    except ImportError:
        return None

    def show(text: str) -> Callable[[str], None]:
        handle = display(HTML(text), display_id=True)
        return lambda new: None if handle is None else handle.update(HTML(new))

    return show


class _Retries(logging.Handler):
    """Says of each attempt that ran out of memory what is tried next."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Say it."""
        self._say(record.getMessage())


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
    handler = logging.NullHandler()
    _ATTEMPTS.addHandler(handler)
    try:
        yield
    finally:
        _ATTEMPTS.removeHandler(handler)
