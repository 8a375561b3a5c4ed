"""What is true now: as a line for a log, and as a bar with the words that a window has room for."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

# Windows of at least so many columns, and the columns of their bar.
BARS = ((100, 24), (60, 12), (40, 6))
# Of ANSI's colours those that can be read on light and on dark; the rest has the window's own.
DONE_STYLE = "green"
SEPARATOR = " · "


@dataclass(frozen=True, kw_only=True)
class Status:
    """What is true now.

    Attributes:
        line: for a log, in full.
        parts: for a window, the most important first; what has no room is left out.
        share: done of the whole, from 0 to 1; None where nobody knows.
        seconds_left: until the whole is done; None where nobody knows yet.

    >>> status = Status(line="batch 3/12", parts=["loss 0.5", "9 samples/s"], share=0.25)
    >>> str(status), status.in_window(40, ascii_only=True).plain
    ('batch 3/12', '#-----  25% - loss 0.5 - 9 samples/s')
    >>> status.in_window(24).plain
    '25% · loss 0.5'
    """

    line: str
    parts: Sequence[str]
    share: float | None = None
    seconds_left: float | None = None

    def __str__(self) -> str:
        return self.line

    def in_window(self, columns: int, *, ascii_only: bool = False) -> Text:
        """In one line of a window, trimmed from the right.

        Args:
            columns: of the window.
            ascii_only: whether it can show nothing else.
        """
        text, words = Text(no_wrap=True, overflow="ellipsis"), list(self.parts)
        if self.seconds_left is not None:
            words.insert(0, f"{describe_seconds(self.seconds_left)} left")
        if self.share is not None:
            width = next((bar for least, bar in BARS if columns >= least), 0)
            if width:
                text.append_text(_bar(self.share, width, ascii_only=ascii_only))
            words.insert(0, f"{' ' if width else ''}{self.share:{'>4' if width else ''}.0%}")
        separator = " - " if ascii_only else SEPARATOR
        for number, word in enumerate(words):
            more = (separator if number else "") + word
            # A window's last column stays free: some break the line once it is written to.
            if number and text.cell_len + cell_len(more) >= columns:
                break
            text.append(more)
        return text


def _bar(share: float, width: int, *, ascii_only: bool) -> Text:
    done = min(width, max(0, math.floor(share * width + 1e-9)))
    full, rest = ("#", "-") if ascii_only else ("━", "╌")  # told apart without colours, too
    return Text.assemble((full * done, DONE_STYLE), rest * (width - done))


def describe_seconds(seconds: float) -> str:
    """A time as a clock shows it.

    >>> describe_seconds(7.4), describe_seconds(754), describe_seconds(90061)
    ('0:07', '12:34', '1d 1:01:01')
    """
    whole = max(0, round(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, last = divmod(rest, 60)
    if not (days or hours):
        return f"{minutes}:{last:02}"
    return f"{f'{days}d ' if days else ''}{hours}:{minutes:02}:{last:02}"


class TimeLeft:
    """How long the rest takes, from what was done since it was first asked.

    The first answer is None: what came before, such as finding a size, tells nothing of the rest.

    Args:
        clock: what time it is, in seconds.

    >>> left = TimeLeft(clock=iter([0.0, 10.0]).__next__)
    >>> left.at(0.2), left.at(0.4)
    (None, 30.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start: tuple[float, float] | None = None

    def at(self, share: float | None) -> float | None:
        """Seconds until all is done.

        Args:
            share: that is done.
        """
        if share is None:
            return None
        now = self._clock()
        if self._start is None or share < self._start[1]:
            self._start = now, share
        began, done_then = self._start
        if share <= done_then:
            return None
        return (now - began) / (share - done_then) * max(0.0, 1.0 - share)
