"""A logger that takes down the config, too."""

from collections.abc import Mapping
from typing import Any

from automicro.loggers import Logger


class ConfiguredLogger:
    """Hands everything on to a logger, with the config among what is run.

    Args:
        logger: the logger.
        config: every key, in plain values.

    >>> from automicro.loggers import ConsoleLogger
    >>> logger = ConfiguredLogger(ConsoleLogger(), {"seed": 0})
    >>> logger.start({}, resume_step=None)
    >>> logger.log({"train/loss": 0.5}, step=1)
    step 1: train/loss 0.5
    """

    def __init__(self, logger: Logger, config: Mapping[str, Any]) -> None:
        self._logger = logger
        self._config = config

    def __repr__(self) -> str:
        return repr(self._logger)

    def start(self, run: Mapping[str, Any], *, resume_step: int | None) -> None:
        """Begin, with the config."""
        self._logger.start({**run, "config": self._config}, resume_step=resume_step)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Take down values."""
        self._logger.log(values, step=step)

    def close(self) -> None:
        """Write what is still held."""
        self._logger.close()
