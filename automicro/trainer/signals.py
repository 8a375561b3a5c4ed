"""An orderly end of a run after Ctrl-C or SIGTERM."""

import contextlib
import contextvars
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from automicro.errors import Stopped, add_note, remember
from automicro.ranks.interface import Ranks

SIGTERM_EXIT_CODE = 128 + signal.SIGTERM
_is_end_told = contextvars.ContextVar("is_end_told", default=False)
_ONE_SIGNAL_SECONDS = 1.0

_NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_AGAIN: dict[int, str] = {
    signal.SIGINT: "press again to stop at once",
    signal.SIGTERM: "a second one stops at once",
}


class Interruption:
    """The signal that asked a run to end, if any."""

    def __init__(self) -> None:
        self._first: int | None = None

    @property
    def name(self) -> str | None:
        """Name of the first signal, ``"Ctrl-C"`` or ``"SIGTERM"``; None before any."""
        return None if self._first is None else _NAMES[self._first]

    def take_note(self, number: int) -> None:
        """Record a signal; only the first one counts.

        >>> interruption = Interruption()
        >>> interruption.take_note(signal.SIGTERM)
        >>> interruption.take_note(signal.SIGINT)
        >>> interruption.name
        'SIGTERM'
        """
        if self._first is None:
            self._first = number

    def take_note_of_peers(self, ranks: Ranks) -> None:
        """Record the signals of other ranks; all ranks must call this."""
        asked = ranks.add_up([float(self._first == number) for number in _NAMES])
        for number, count in zip(_NAMES, asked, strict=True):
            if count > 0:
                self.take_note(number)

    def raise_if_interrupted(
        self,
        *,
        where: str,
        checkpoint: Path | str | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """End the program as the signal would have, after the orderly end of the run."""
        if self._first is None:
            return
        saved = None if checkpoint is None else str(checkpoint)
        end = Stopped(by=str(self.name), where=where, checkpoint=saved)
        if not is_end_told():
            say(str(end))
        error = _ending(self._first)
        add_note(error, f"automicro: {end}")
        remember(error, stopped=end, is_told=True)  # all ranks have agreed to stop
        raise error


@contextlib.contextmanager
def end_told_here() -> Iterator[None]:
    """Report the interruption in the block's caller, so that progress output does not.

    >>> with end_told_here():
    ...     is_end_told()
    True
    """
    token = _is_end_told.set(True)
    try:
        yield
    finally:
        _is_end_told.reset(token)


def is_end_told() -> bool:
    """Whether a caller reports how a run was stopped."""
    return _is_end_told.get()


def say_on_stderr(line: str) -> None:
    """Write a line to stderr from a signal handler, even during another write."""
    # A handler can run in the middle of a write, and a buffered stream is not reentrant. If stderr
    # was replaced, as in a notebook, the replacement is used.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if sys.stderr is sys.__stderr__ and sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"{line}\n".encode())
        elif sys.stderr is not None:
            sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def catching_signals(
    *, saves: bool = False, has_peers: bool = False, say: Callable[[str], None] = say_on_stderr
) -> Iterator[Interruption]:
    """Record the first Ctrl-C or SIGTERM, and stop the run at the second one.

    >>> with catching_signals(say=lambda line: None) as interruption:
    ...     signal.raise_signal(signal.SIGTERM)
    >>> interruption.name
    'SIGTERM'
    """
    # The caller's own handlers are called, too, and restored afterwards. Signals that are ignored
    # or handled outside of Python are left alone. Only the main thread can have handlers. Worker
    # processes that are forked in the block ignore Ctrl-C, so that the batch can be finished.
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    owner, came_at = os.getpid(), dict[int, float]()
    known: dict[int, Any] = {number: signal.getsignal(number) for number in _AGAIN}
    before = {n: each for n, each in known.items() if each not in (None, signal.SIG_IGN)}

    def take_note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            # A terminal sends Ctrl-C to all processes, but the parent ends its workers itself.
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if number in came_at:
            # A launcher of several ranks passes on what the terminal has sent already.
            if has_peers and time.monotonic() - came_at[number] < _ONE_SIGNAL_SECONDS:
                return
            raise _ending(number)
        came_at[number] = time.monotonic()
        interruption.take_note(number)
        then = "saving" if saves else "stopping"
        say(f"{_NAMES[number]}: finishing this batch, then {then}; {_AGAIN[number]}")
        if callable(before[number]) and before[number] is not signal.default_int_handler:
            before[number](number, frame)

    for number in before:
        signal.signal(number, take_note)
    try:
        yield interruption
    finally:
        for number, each in before.items():
            # A handler that other code has installed in the block stays.
            if signal.getsignal(number) is take_note:
                signal.signal(number, each)


def _ending(number: int) -> BaseException:
    """Return the exception that ends a program after a signal."""
    return SystemExit(SIGTERM_EXIT_CODE) if number == signal.SIGTERM else KeyboardInterrupt()
