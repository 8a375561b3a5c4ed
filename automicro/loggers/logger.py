"""Interface of loggers, the values that they accept, and a group that never fails."""

import numbers
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from automicro.errors import LoggerWarning, describe_error, warn

MOST_FAILURES = 3  # in a row


@runtime_checkable
class Logger(Protocol):
    """Interface of objects that record the values of a run.

    Implement these three methods. An exception in one of them becomes a warning and never stops the
    run, see `LoggerGroup`.

    There is no ``flush``: logged values should survive the death of the process. A logger that
    buffers values writes them every few seconds, and in `close`.
    """

    def start(self, run: Mapping[str, Any], *, resume_step: int | None) -> None:
        """Start logging, once per fit, or continue after an earlier run.

        Args:
            run: description of the run: settings as text, numbers, lists and mappings.
            resume_step: number of optimization batches done by the resumed run, whose values of
                later steps will be logged again. None for a new run.
        """
        ...

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Record values by name.

        Args:
            values: numbers, including NaN and infinities. New names can appear at any time.
            step: number of optimization batches done. It never decreases within a run, and repeats:
                after the batch, and after an evaluation that follows.
        """
        ...

    def close(self) -> None:
        """Write all buffered values, and release files and threads.

        Called last, however the run ended, even if `start` failed, and possibly twice.
        """
        ...


RESERVED_NAMES = frozenset({"run", "step", "time"})
"""Names of a line's other fields, reserved."""


def _number(value: object) -> float | None:
    """Return a Python number, or None if the value is not a single number."""
    if isinstance(value, Tensor | np.ndarray):
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # several elements, or none
            return None
    # Booleans too, because JSON and CSV would write True as a word.
    if isinstance(value, numbers.Integral | np.bool_):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.splitlines() == [name] and name not in RESERVED_NAMES


class _GuardedLogger:
    """Logger whose exceptions are turned into messages.

    >>> class Broken:
    ...     def start(self, run, *, resume_step): ...
    ...     def log(self, values, *, step):
    ...         raise ConnectionError("the server is gone")
    ...     def close(self): ...
    ...     def __repr__(self):
    ...         return "Broken()"
    >>> guarded = _GuardedLogger(Broken())
    >>> guarded.attempt("log step 7", lambda: guarded.logger.log({"train/loss": 0.5}, step=7))
    'Broken() could not log step 7 (ConnectionError: the server is gone): ...'
    >>> guarded.attempt("log step 8", lambda: guarded.logger.log({"train/loss": 0.4}, step=8))
    """

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.begin: Callable[[], None] | None = None  # pending start, before any other call
        self.failures = 0  # in a row

    def attempt(self, what: str, work: Callable[[], None], *, is_last: bool = False) -> str | None:
        """Call ``work`` unless the logger is switched off (``is_last`` always calls it)."""
        before = self.failures
        if before >= MOST_FAILURES and not is_last:
            return None
        try:
            if self.begin is not None and not is_last:
                self.begin()
                self.begin = None
            work()
        # Any exception, because no failure of a logger may end the run.
        except Exception as error:
            self.failures += 1
            said = f"{self.logger!r} could not {what} ({describe_error(error)}): {_CONSEQUENCE}"
            return None if before else said
        self.failures = 0
        return None


_CONSEQUENCE = (
    "the run continues, but values may be missing in this logger. It is switched off after "
    f"{MOST_FAILURES} failures in a row; check the disk space, the rights and the server"
)


class LoggerGroup:
    """Forwards values to several loggers, and never stops the run.

    An exception in a logger becomes a `LoggerWarning`, once for several failures in a row; the
    other loggers still get their values. After three failures in a row, a logger is switched off
    until the next `start`. Ctrl-C and ``SystemExit`` are not caught.

    Args:
        loggers: loggers, in the order in which they are called.

    Raises:
        TypeError: an element is not a logger.

    Example:
        >>> import os
        >>> from automicro.loggers import JSONLinesLogger
        >>> group = LoggerGroup([JSONLinesLogger(os.devnull)])
        >>> group.start({"seed": 0})
        >>> group.log({"train/loss": 0.5}, step=1)
        >>> group.close()
    """

    def __init__(self, loggers: Iterable[Logger] = ()) -> None:
        self._loggers = [_GuardedLogger(logger) for logger in _checked(loggers)]
        self._refused: set[object] = set()

    def __len__(self) -> int:
        """Return the number of loggers. If it is 0, values need not be computed."""
        return len(self._loggers)

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Start every logger.

        Args:
            run: description of the run, in plain values.
            resume_step: number of optimization batches done by the resumed run, or None.
        """
        self._refused.clear()
        for each in self._loggers:
            each.failures = 0
            each.begin = partial(each.logger.start, run, resume_step=resume_step)
        _tell([each.attempt("start", lambda: None) for each in self._loggers])

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Log values to every logger.

        Args:
            values: numbers and tensors with one element, by name. Other values are omitted, with
                one warning per name. A name is one line of text; "run", "step" and "time" are
                reserved.
            step: number of optimization batches done.
        """
        if not self._loggers:
            return
        found = {name: _number(value) for name, value in values.items() if _is_name(name)}
        plain = {name: value for name, value in found.items() if value is not None}
        refused = [name for name in values if name not in plain and name not in self._refused]
        messages: list[str | None] = [
            f"{name!r} is not logged in this run: a name must be one line of text, other than "
            f"{', '.join(sorted(RESERVED_NAMES))}, and a value one number (this is a "
            f"{type(values[name]).__name__}). Log one number under a name such as 'my/value'"
            for name in refused
        ]
        self._refused.update(refused)
        if plain:
            messages += [
                each.attempt(f"log step {step}", partial(each.logger.log, dict(plain), step=step))
                for each in self._loggers
            ]
        _tell(messages)

    def close(self) -> None:
        """Close every logger."""
        _tell([each.attempt("close", each.logger.close, is_last=True) for each in self._loggers])


def _tell(messages: Iterable[str | None]) -> None:
    # After all loggers were called, because a filter might turn the warning into an error.
    for message in messages:
        if message is not None:
            warn(message, LoggerWarning)


def _checked(loggers: Iterable[Logger]) -> list[Logger]:
    remedy = "Pass a list of loggers, such as loggers=[JSONLinesLogger('log.jsonl')]"
    if isinstance(loggers, Logger) or not isinstance(loggers, Iterable):
        raise TypeError(f"loggers is {loggers!r} and not a list. {remedy}")
    listed = list(loggers)
    for each in listed:
        if isinstance(each, type) or not isinstance(each, Logger):
            raise TypeError(
                f"loggers holds {each!r}, which is not an object with the methods start, log and "
                f"close. {remedy}"
            )
    return listed
