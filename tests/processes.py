"""Runs work in forked processes with a deadline, and ends them with their child processes."""

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

KILLED = -signal.SIGKILL


def start(work: Callable[[], object], *, log: Path) -> int:
    """Fork a process that does the work in a new session, and return its number.

    Args:
        work: the function to call; the exit code is 0, 1 after an exception, or SystemExit's.
        log: receives the output and the traceback.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads.
        number = os.fork()
    if number:
        return number
    code = 1
    try:
        os.setsid()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not the streams of pytest
        work()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def end(number: int, *, log: Path, timeout_seconds: float = 60.0) -> int:
    """Wait for a started process, end the rest of its session, and return its exit code.

    Raises:
        TimeoutError: the process had to be killed.
    """
    deadline = time.monotonic() + timeout_seconds
    is_late = False
    # WNOWAIT does not reap it, so its number still refers to its session.
    while os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        is_late = time.monotonic() > deadline
        if is_late:
            break
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(number, signal.SIGKILL)  # workers of a loader, which outlive their parent
    _, status = os.waitpid(number, 0)
    if is_late:
        raise TimeoutError(f"the forked process hangs:\n{log.read_text()}")
    return os.waitstatus_to_exitcode(status)
