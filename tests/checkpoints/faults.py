"""Faults at each point where a checkpoint touches the disk: a full disk, and a killed process."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from automicro import files
from tests.processes import end, start

POINTS = ("make_folder", "open_new", "write", "sync", "replace", "remove_folder")


class Faults:
    """Records the disk operations and injects a fault at selected ones."""

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


def half(name: str, original: Callable, args: tuple) -> None:
    """Do half of an operation that can be done partially."""
    if name == "write":
        data = memoryview(args[1])
        original(args[0], data[: len(data) // 2])
    if name == "remove_folder":
        for path in sorted(Path(args[0]).iterdir())[:2]:
            path.unlink()


def fail(name: str, original: Callable, args: tuple) -> Any:
    """Fail as on a full disk, after half of the data was written."""
    if name == "write":
        half(name, original, args)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kill(name: str, original: Callable, args: tuple) -> Any:
    """Kill the process in the middle of an operation."""
    half(name, original, args)
    die()


def die() -> None:
    """End this process as a power failure would: no cleanup code runs."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def in_child(action: Callable[[], object]) -> int:
    """Run an action in a forked process and return its exit code."""
    log = Path(os.devnull)
    return end(start(action, log=log), log=log)
