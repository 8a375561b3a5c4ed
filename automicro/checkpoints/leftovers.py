"""Temporary folders: named after the process that fills them, cleared away once it is gone."""

import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from automicro.checkpoints import files

logger = logging.getLogger(__name__)

PREFIX = ".tmp-"

# Two machines may share a disk, so a process number alone says nothing. A folder of another
# machine, or of a number that was given to another process since, is taken for dead by its age.
_SECONDS_TO_LIVE = 24 * 3600
_in_flight: set[str] = set()


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Make a folder that is gone after the block, unless it was renamed.

    Args:
        parent: in which it is made.

    Raises:
        OSError: it could not be made.
    """
    with _named_as_in_flight() as name:
        try:
            files.make_folder(parent / name)
            yield parent / name
        finally:
            # What cannot be removed now is left to the next save.
            with suppress(OSError):
                if (parent / name).exists():
                    files.remove_folder(parent / name)


def remove(path: Path) -> None:
    """Remove a folder so that at no moment it can be taken for a complete one.

    Args:
        path: of the folder.

    Raises:
        OSError: it could not be renamed, or not removed.
    """
    with _named_as_in_flight() as name:
        trash = path.parent / name
        files.replace(path, trash)
        files.remove_folder(trash)


def clear(parent: Path) -> None:
    """Remove the temporary folders of processes that are gone.

    Args:
        parent: of the folders.

    Raises:
        OSError: one could not be removed.
    """
    for path in sorted(parent.glob(f"{PREFIX}*")):
        if not _is_alive(path):
            logger.info("removing %s, left by a save that did not end", path)
            with suppress(FileNotFoundError):  # Another process was quicker.
                files.remove_folder(path)


@contextmanager
def _named_as_in_flight() -> Iterator[str]:
    name = f"{PREFIX}{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    _in_flight.add(name)
    try:
        yield name
    finally:
        _in_flight.discard(name)


def _host() -> str:
    return "".join(c if c.isalnum() else "_" for c in socket.gethostname())


def _is_alive(path: Path) -> bool:
    if path.name in _in_flight:
        return True
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:  # Another process was quicker.
        return True
    host, _, rest = path.name.removeprefix(PREFIX).partition("-")
    number = rest.partition("-")[0]
    if host != _host() or not number.isdigit():
        return age < _SECONDS_TO_LIVE
    if int(number) == os.getpid():  # Not in flight: its removal failed.
        return False
    return _runs(int(number)) and age < _SECONDS_TO_LIVE


def _runs(number: int) -> bool:
    if os.name == "nt":  # There, asking by a signal would end the process.
        return True
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # It belongs to somebody else.
        return True
    return True
