"""Writing to disk: files that appear whole or not at all, folders that survive a crash.

Everything that a checkpoint does to the disk goes through the functions here, so a test can make
any of them fail, or end the process in it.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def open_new(path: str, flags: int) -> int:
    """Open a file that does not exist; its descriptor."""
    return os.open(path, flags, 0o666)


def write(descriptor: int, data: "ReadableBuffer") -> int:
    """Write some of the data to an open file; how many bytes."""
    return os.write(descriptor, data)


def sync(descriptor: int) -> None:
    """Wait until an open file is on the disk."""
    os.fsync(descriptor)


def replace(old: Path, new: Path) -> None:
    """Rename, in one step, never seen half done."""
    os.replace(old, new)


def make_folder(path: Path) -> None:
    """Make a folder, if it does not exist."""
    path.mkdir(exist_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder with all in it."""
    shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    if os.name == "nt":  # Windows cannot open a folder, and keeps names in its journal.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    except OSError as error:
        # Some network file systems do not know it for a folder, and keep names at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> None:
    """Make a folder and those above it where they do not exist, and keep them over a crash."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        make_folder(folder)
        sync_folder(folder.parent)


def write_whole(path: Path, write: Callable[[IO[bytes]], object], *, lasts: bool = False) -> None:
    """Write a file in one step: readers see the old one or the new one, whole.

    Args:
        path: of the file, in a folder that exists.
        write: writes what it is to hold into an open file.
        lasts: wait until it is on the disk, so that no crash takes it.

    Raises:
        OSError: it cannot be written. The old one stays.

    Example:
        >>> path = Path("notes.txt")
        >>> write_whole(path, lambda file: file.write(b"all of it"))
        >>> path.read_text()
        'all of it'
        >>> path.unlink()
    """
    # Beside the file: only within one file system does a rename take one step.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("xb") as file:
            write(file)
            if lasts:
                # The content before the name: else a crash could leave the new name without its
                # content.
                file.flush()
                sync(file.fileno())
        replace(temporary, path)
    # Ctrl-C leaves no temporary file behind, either.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if lasts:
        # The new name is an entry of the folder, which has to reach the disk by itself.
        sync_folder(path.parent)
