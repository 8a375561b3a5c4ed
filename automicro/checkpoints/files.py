"""Files that are on the disk when their call returns, with their size and checksum.

Everything that a checkpoint does to the disk goes through the functions here, so a test can make
any of them fail, or end the process in it.
"""

import errno
import io
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_BUFFER_BYTES = 1 << 20


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
    """Rename, in one step that nobody can see half done."""
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


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """What a file holds, in short.

    Attributes:
        size: in bytes.
        crc32: of all its bytes.
    """

    size: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> "FileSum":
        """Read a file from its beginning to its end.

        Raises:
            OSError: it cannot be read.
        """
        size = crc32 = 0
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            while count := file.readinto(buffer):
                size += count
                crc32 = zlib.crc32(buffer[:count], crc32)
        return cls(size=size, crc32=crc32)


class _SummedFile(io.FileIO):
    """A new file that sums up what is written into it.

    The first error is kept for the end, and what follows it goes nowhere: torch writes from C++,
    where an exception in the middle of an archive comes out as another, or ends the process.
    """

    def __init__(self, path: Path) -> None:
        # By a call at run time, for whoever replaced the function.
        super().__init__(path, "x", opener=lambda name, flags: open_new(name, flags))
        self.error: OSError | None = None
        self._crc32 = 0

    def write(self, data: "ReadableBuffer") -> int:
        view = memoryview(data).cast("B")
        if self.error is not None:
            return len(view)
        try:
            count = write(self.fileno(), view)
        except OSError as error:
            self.error = error
            return len(view)
        self._crc32 = zlib.crc32(view[:count], self._crc32)
        return count

    def sum(self) -> FileSum:
        return FileSum(size=self.tell(), crc32=self._crc32)


class NewFolder:
    """A folder that is being filled with files.

    Args:
        path: of the folder, which exists.

    Attributes:
        path: of the folder.
        sums: of the files written into it so far, by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file. At the end of the block it is on the disk and its sum is known.

        Args:
            name: of the file.

        Raises:
            OSError: it could not be written.
        """
        with _SummedFile(self.path / name) as raw:
            # Large blocks pass by the buffer, so they are not copied.
            stream = io.BufferedWriter(raw, _BUFFER_BYTES)
            try:
                yield stream
                stream.flush()
            except Exception as error:
                if raw.error is not None:
                    raise raw.error from error
                raise
            if raw.error is not None:
                raise raw.error
            sync(raw.fileno())
            self.sums[name] = raw.sum()

    def rename(self, old: str, new: str) -> None:
        """Give a file that was written another name.

        Raises:
            OSError: it could not be renamed.
        """
        replace(self.path / old, self.path / new)
        self.sums[new] = self.sums.pop(old)
