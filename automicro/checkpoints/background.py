"""One piece of work at a time, beside the training."""

import logging
import threading
from collections.abc import Callable

from automicro.errors import text_of

logger = logging.getLogger(__name__)


class Background:
    """Runs one piece of work in a thread. The process does not end before the work has.

    >>> background, done = Background(), []
    >>> background.start(lambda: done.append("written"))
    >>> background.finish() is None, done
    (True, ['written'])
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin a piece of work. The one before must have been finished."""
        assert self._thread is None, "the work before was not finished"
        # No daemon: Python waits for it at exit, so the last save of a script is not lost.
        self._thread = threading.Thread(target=self._run, args=(work,), name="automicro-checkpoint")
        self._thread.start()

    def finish(self) -> BaseException | None:
        """Wait for the work that was begun, if any. The error that ended it, told once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        return error

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            # Whoever asks gets it. It is logged for a process that ends without asking.
            logger.error("saving in the background failed: %s", text_of(error))
            self._error = error
