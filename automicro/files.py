"""Writing to disk: files that appear whole or not at all, and folders that survive a crash.

Checkpoints use only these functions to write, so a test can make any of them fail or end the
process.
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
    """Create a file and return its descriptor; fail if it exists."""
    return os.open(path, flags, 0o666)


def write(descriptor: int, data: "ReadableBuffer") -> int:
    """Write data to an open file and return the number of bytes written."""
    return os.write(descriptor, data)


def sync(descriptor: int) -> None:
    """Wait until an open file is on disk."""
    os.fsync(descriptor)


def replace(old: Path, new: Path) -> None:
    """Rename atomically."""
    os.replace(old, new)


def make_folder(path: Path) -> None:
    """Create a folder unless it exists."""
    path.mkdir(exist_ok=True)


def remove_folder(path: Path) -> None:
    """Remove a folder and its contents."""
    shutil.rmtree(path)


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on disk."""
    if os.name == "nt":  # Windows cannot open a folder, and journals names.
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder, and store names at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        make_folder(folder)
        sync_folder(folder.parent)


def write_whole(path: Path, write: Callable[[IO[bytes]], object], *, lasts: bool = False) -> None:
    """Write a file atomically, and durably with ``lasts``: readers see the old or the new content.

    >>> path = Path("notes.txt")
    >>> write_whole(path, lambda file: file.write(b"all of it"))
    >>> path.read_text()
    'all of it'
    >>> path.unlink()
    """
    # Next to the file, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("xb") as file:
            write(file)
            if lasts:
                # Content before name: otherwise a crash could leave the new name without its
                # content.
                file.flush()
                sync(file.fileno())
        replace(temporary, path)
    # Ctrl-C must not leave a temporary file behind, either.
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if lasts:
        # The new name is an entry of the folder, which must reach the disk separately.
        sync_folder(path.parent)
