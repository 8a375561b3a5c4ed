"""Several loggers as one that never fails."""

from collections.abc import Iterable, Mapping
from typing import Any

from automicro.errors import LoggerWarning
from automicro.loggers.base import Logger
from automicro.loggers.guarding import GuardedLogger
from automicro.loggers.lightning import LightningInterface
from automicro.loggers.values import plain_values
from automicro.warn import warn


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
        >>> from automicro.loggers import ConsoleLogger
        >>> group = LoggerGroup([ConsoleLogger()])
        >>> group.start({"seed": 0})
        >>> group.log({"train/loss": 0.5}, step=1)
        step 1: train/loss 0.5
        >>> group.close()
    """

    def __init__(self, loggers: Iterable[Logger] = ()) -> None:
        self._loggers = [GuardedLogger(logger) for logger in _checked(loggers)]
        self._refused: set[str] = set()

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
        _tell([logger.start(run, resume_step=resume_step) for logger in self._loggers])

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
        plain, refused = plain_values(values)
        messages: list[str | None] = [
            f"{name!r} is not logged, here and later in this run: {problem}; log one number "
            "under a name such as 'my/value'"
            for name, problem in refused.items()
            if name not in self._refused
        ]
        self._refused.update(refused)
        if plain:
            messages += [logger.log(dict(plain), step=step) for logger in self._loggers]
        _tell(messages)

    def close(self) -> None:
        """Close every logger."""
        _tell([logger.close() for logger in self._loggers])


def _tell(messages: Iterable[str | None]) -> None:
    # After all loggers were called: a filter may turn the warning into an error.
    for message in messages:
        if message is not None:
            warn(message, LoggerWarning)


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
        if not isinstance(logger, Logger) and isinstance(logger, LightningInterface):
            raise TypeError(
                f"loggers[{index}] is a {type(logger).__name__} of Lightning; say "
                f"LightningLogger({type(logger).__name__}(…), 'runs/first'), with a folder for "
                "where the run stands"
            )
        if not isinstance(logger, Logger):
            raise TypeError(
                f"loggers[{index}] is {logger!r}, which lacks start, log or close; {remedy}"
            )
    return each
