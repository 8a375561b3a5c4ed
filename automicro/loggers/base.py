"""What a logger is told."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Logger(Protocol):
    """Takes down the numbers of a run.

    Write your own with these three methods. An exception in one of them becomes a warning and
    never stops the run, see `LoggerGroup`.

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
