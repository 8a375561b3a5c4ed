"""The interface of loggers, the values that can be logged, and a group that never fails."""

import math
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
    """Takes down the numbers of a run.

    Write your own with these three methods. An exception in one of them becomes a warning and
    never stops the run, see `LoggerGroup`.

    One that can show pictures has a fourth, ``show(name, picture, *, step)``, where the picture is
    a figure of matplotlib; others are not asked.

    There is no ``flush``: what was logged should survive the death of the process. A logger that
    buffers writes what it holds every few seconds, and in `close`.
    """

    def start(self, run: Mapping[str, Any], *, resume_step: int | None) -> None:
        """Begin, once per fit, or go on where an earlier run stopped.

        Args:
            run: what is run: settings, as text, numbers, lists and mappings.
            resume_step: the optimization batches done by the run that is resumed; what it logged
                at later steps will be logged again. None for a run that begins anew.
        """
        ...

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Take down values by name.

        Args:
            values: numbers, NaN and infinite ones too. New names may appear at any time.
            step: optimization batches done. It never decreases within a run, and comes more than
                once: after the batch, and after the evaluation that follows it.
        """
        ...

    def close(self) -> None:
        """Write what is still held, and let go of files and threads.

        Comes last, however the run ended, also after a `start` that failed, and perhaps twice.
        """
        ...


RESERVED_NAMES = frozenset({"run", "step", "time"})
"""Names of a line's other fields, which no value can have."""


def not_started(logger: object) -> RuntimeError:
    """The error of a logger that was not started, or was closed."""
    return RuntimeError(f"{logger!r} is not open: call start({{}}) before log(…)")


def _number(value: object) -> float | None:
    """A Python number; None for what is no number, or several."""
    if isinstance(value, Tensor | np.ndarray):
        has_value = not (isinstance(value, Tensor) and value.is_meta)
        if math.prod(value.shape) != 1 or not has_value:
            return None
        value = value.item()
    # True is an int that JSON and CSV would write as a word.
    if isinstance(value, numbers.Integral | np.bool_):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.splitlines() == [name] and name not in RESERVED_NAMES


class _GuardedLogger:
    """Passes calls on to a logger, and turns its exceptions into words.

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
        self.begin: Callable[[], None] | None = None  # what is left to do before anything else
        self.failures = 0  # in a row

    def attempt(self, what: str, work: Callable[[], None], *, is_last: bool = False) -> str | None:
        """Do something, unless the logger is switched off; return what to say of a failure.

        Args:
            what: is done, in words.
            work: does it.
            is_last: whether it is to be done in any case, also of a logger that never started.
        """
        before = self.failures
        if before >= MOST_FAILURES and not is_last:
            return None
        try:
            if self.begin is not None and not is_last:
                self.begin()
                self.begin = None
            work()
        # Whatever it is: no trouble of a logger may cost the run that it watches.
        except Exception as error:
            self.failures += 1
            said = f"{self.logger!r} could not {what} ({describe_error(error)}): {_CONSEQUENCE}"
            return None if before else said
        self.failures = 0
        return None


_CONSEQUENCE = (
    "the run goes on, and values may be missing in this logger. It is tried again with the next "
    f"ones, and switched off after {MOST_FAILURES} failures in a row; make sure that it can write "
    "(space on the disk, rights, a server that answers)"
)


class LoggerGroup:
    """Hands everything on to several loggers, and never stops the run that it watches.

    An exception of a logger becomes a `LoggerWarning`, once for failures in a row; the other
    loggers get their values all the same. After three failures in a row a logger is switched off
    until the next `start`. Ctrl-C and ``SystemExit`` pass through.

    Args:
        loggers: the loggers, in the order in which they are called.

    Raises:
        TypeError: something among them is no logger.

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
        """How many loggers there are: values for none need not be computed."""
        return len(self._loggers)

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Start every logger.

        Args:
            run: what is run, in plain values.
            resume_step: the optimization batches done by the run that is resumed, or None.
        """
        self._refused.clear()
        for each in self._loggers:
            each.failures = 0
            each.begin = partial(each.logger.start, run, resume_step=resume_step)
        _tell([each.attempt("start", lambda: None) for each in self._loggers])

    def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Log values to every logger.

        Args:
            values: numbers and tensors of one element, by name. What is neither is left out, with
                one warning per name. A name is one line of text; "run", "step" and "time" are
                taken.
            step: optimization batches done.
        """
        if not self._loggers:
            return
        found = {name: _number(value) for name, value in values.items() if _is_name(name)}
        plain = {name: value for name, value in found.items() if value is not None}
        refused = [name for name in values if name not in plain and name not in self._refused]
        messages: list[str | None] = [
            f"{name!r} is not logged, here and later in this run: a name is one line of text, "
            f"other than {', '.join(sorted(RESERVED_NAMES))}, and its value one number (this is a "
            f"{type(values[name]).__name__}); log one number under a name such as 'my/value'"
            for name in refused
        ]
        self._refused.update(refused)
        if plain:
            messages += [
                each.attempt(f"log step {step}", partial(each.logger.log, dict(plain), step=step))
                for each in self._loggers
            ]
        _tell(messages)

    def show(self, name: str, picture: Any, *, step: int) -> None:
        """Show a picture in every logger that can.

        Args:
            name: under which it stands.
            picture: a figure of matplotlib, such as those of `automicro.tools.pictures`.
            step: optimization batches done.
        """
        showing = [(each, getattr(each.logger, "show", None)) for each in self._loggers]
        _tell(
            [
                each.attempt(f"show {name!r}", partial(show, name, picture, step=step))
                for each, show in showing
                if show is not None
            ]
        )

    def close(self) -> None:
        """Close every logger."""
        _tell([each.attempt("close", each.logger.close, is_last=True) for each in self._loggers])


def _tell(messages: Iterable[str | None]) -> None:
    # After all loggers were called: a filter may turn the warning into an error.
    for message in messages:
        if message is not None:
            warn(message, LoggerWarning)


_METHODS = ("start", "log", "close")


def _checked(loggers: Iterable[Logger]) -> list[Logger]:
    remedy = "pass a list of loggers, such as loggers=[JSONLinesLogger('log.jsonl')]"
    if isinstance(loggers, Logger) or not isinstance(loggers, Iterable):
        raise TypeError(f"loggers is {loggers!r} and not a list; {remedy}")
    each = list(loggers)
    for index, logger in enumerate(each):
        if isinstance(logger, type):
            raise TypeError(
                f"loggers[{index}] is the class {logger.__name__}; say {logger.__name__}(…)"
            )
        if missing := [name for name in _METHODS if not callable(getattr(logger, name, None))]:
            raise TypeError(
                f"loggers[{index}] is {logger!r}, which has no {' and no '.join(missing)}; give an "
                f"object with the methods {', '.join(_METHODS)} of automicro.loggers.Logger"
            )
    return each
