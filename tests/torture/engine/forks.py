"""Work in a fork of this process, which starts from its state and leaves it unchanged."""

import contextlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_THREADS = Path("/proc/self/task")


def can_fork() -> bool:
    """Return whether a fork of this process can run: with a single thread, no lock is held."""
    return hasattr(os, "fork") and _THREADS.is_dir() and len(list(_THREADS.iterdir())) == 1


def in_fork(work: Callable[[], T]) -> T:
    """Run work in a fork of this process and return its result, which must be picklable."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(work, writing)
    try:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        _, status = os.waitpid(child, 0)
    if not told:
        raise RuntimeError(f"a trial's process ended without a word, with status {status}")
    result, failure = pickle.loads(told)
    if failure is not None:
        raise RuntimeError(f"a trial failed in a process of its own:\n{failure}")
    given: T = result
    return given


def _run_child(work: Callable[[], T], writing: int) -> None:
    # Nothing of the parent may run again here: no handler, no flush, no cleanup.
    try:
        try:
            told = pickle.dumps((work(), None))
        except BaseException as error:
            told = pickle.dumps((None, "".join(traceback.format_exception(error))))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(told)
    finally:
        os._exit(0)
