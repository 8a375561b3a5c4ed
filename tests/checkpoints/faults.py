"""Faults wherever a checkpoint touches the disk: no space left, and the end of the process."""

import errno
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automicro import files

POINTS = ("make_folder", "open_new", "write", "sync", "replace", "remove_folder")
KILLED = 77


class Faults:
    """Counts the points, and lets something happen at one of them or from one on.

    Attributes:
        seen: the points passed since `arm`, by the name of their function.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._is_hit: Callable[[int], bool] = lambda _: False
        self._fault: Callable[[str, Callable, tuple], Any] = fail
        for name in POINTS:
            monkeypatch.setattr(files, name, self._wrapped(name, getattr(files, name)))

    def arm(self, is_hit: Callable[[int], bool], fault: Callable[[str, Callable, tuple], Any]):
        self.seen = []
        self._is_hit, self._fault = is_hit, fault

    def disarm(self) -> None:
        self.arm(lambda _: False, fail)

    def _wrapped(self, name: str, original: Callable) -> Callable:
        def point(*args: Any) -> Any:
            self.seen.append(name)
            if self._is_hit(len(self.seen) - 1):
                return self._fault(name, original, args)
            return original(*args)

        return point


def fail(name: str, original: Callable, args: tuple) -> Any:
    """The disk is full. Half of what was to be written found room."""
    if name == "write":
        original(args[0], memoryview(args[1])[: len(memoryview(args[1])) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill(name: str, original: Callable, args: tuple) -> Any:
    """The process ends, in the middle of what it does."""
    if name == "write":
        original(args[0], memoryview(args[1])[: len(memoryview(args[1])) // 2])
    if name == "remove_folder":
        for path in sorted(Path(args[0]).iterdir())[:2]:
            path.unlink()
    os._exit(KILLED)


def in_child(action: Callable[[], object], *, timeout_seconds: float = 60.0) -> int:
    """Run something in a forked process. Its exit code: 0, 1 after an exception, or `KILLED`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: forking with threads.
        number = os.fork()
    if number == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + timeout_seconds
    while time.monotonic() < end:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    raise TimeoutError("the forked process hangs")
