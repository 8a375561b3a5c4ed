"""A logger whose failures stop nothing."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from automicro.errors import describe_error
from automicro.loggers.base import Logger

MOST_FAILURES = 3  # in a row

_log = logging.getLogger(__name__)


class GuardedLogger:
    """Passes calls on to a logger, and turns its exceptions into words.

    The first of several failures in a row gives a message, the others none. After
    `MOST_FAILURES` in a row the logger is switched off until the next `start`. One that could
    not start is started again with the next values.

    Args:
        logger: the logger.

    Example:
        >>> class Broken:
        ...     def start(self, run, *, resume_step): ...
        ...     def log(self, values, *, step):
        ...         raise ConnectionError("the server is gone")
        ...     def close(self): ...
        >>> guarded = GuardedLogger(Broken())
        >>> guarded.start({}, resume_step=None)
        >>> guarded.log({"train/loss": 0.5}, step=7)
        'Broken could not log step 7 (ConnectionError: the server is gone): ...'
        >>> guarded.log({"train/loss": 0.4}, step=8)
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._name = _name_of(logger)
        self._begin: Callable[[], None] | None = None  # what is left to do before logging
        self._failures = 0  # in a row

    def start(self, run: Mapping[str, Any], *, resume_step: int | None) -> str | None:
        """Start the logger; return what to say of a failure."""
        self._failures = 0
        self._begin = lambda: self._logger.start(run, resume_step=resume_step)
        return self._attempt("start", self._begin_if_needed)

    def log(self, values: Mapping[str, float], *, step: int) -> str | None:
        """Log values unless the logger is switched off; return what to say of a failure."""
        if self._failures >= MOST_FAILURES:
            return None

        def log() -> None:
            self._begin_if_needed()
            self._logger.log(values, step=step)

        before = self._failures
        message = self._attempt(f"log step {step}", log)
        if self._failures >= MOST_FAILURES:
            _log.warning(
                "%s is switched off: it failed %d times in a row, at last at step %d",
                self._name,
                self._failures,
                step,
            )
        elif before and not self._failures:
            _log.info("%s works again at step %d, after %d failures", self._name, step, before)
        return message

    def close(self) -> str | None:
        """Close the logger, even one that is switched off; return what to say of a failure."""
        return self._attempt("close", self._logger.close)

    def _begin_if_needed(self) -> None:
        if self._begin is not None:
            self._begin()
            self._begin = None

    def _attempt(self, what: str, call: Callable[[], None]) -> str | None:
        try:
            call()
        # Whatever it is: no trouble of a logger may cost the run that it watches.
        except Exception as error:
            self._failures += 1
            if self._failures > 1:
                return None
            described = describe_error(error)
            return f"{self._name} could not {what} ({described}): {_consequence(what)}"
        self._failures = 0
        return None


def _consequence(what: str) -> str:
    if what == "close":
        return (
            "the run is over and not harmed, but the last values may be missing from this logger; "
            "make sure that it can write"
        )
    return (
        "the run goes on, without these values in this logger. It is tried again with the next "
        f"ones, and switched off after {MOST_FAILURES} failures in a row; make sure that it can "
        "write (space on the disk, rights, a server that answers)"
    )


def _name_of(logger: object) -> str:
    # The default of object says an address, which helps nobody.
    has_own = type(logger).__repr__ is not object.__repr__
    return repr(logger) if has_own else type(logger).__name__
