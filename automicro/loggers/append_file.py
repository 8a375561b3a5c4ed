"""A file that grows by whole records."""

import contextlib
import os
from io import FileIO
from pathlib import Path


class AppendFile:
    """Appends each record whole or not at all.

    Nothing is buffered: a record that was written outlasts the death of the process (not a loss
    of power: nothing is synced to the disk). A write that fails in the middle, because the disk
    is full or Ctrl-C came, is taken back, so that later records do not hang on half of one.

    Args:
        path: of the file; folders that are missing are made.
        is_new: refuse a file that exists.

    Raises:
        OSError: the file cannot be opened.

    Example:
        >>> file = AppendFile(Path(os.devnull))
        >>> file.write(b"a record")
        8
        >>> file.close()
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._raw = FileIO(path, "x" if is_new else "a+")
        self._torn_at: int | None = None

    def write(self, record: bytes) -> int:
        """Append a record.

        Returns:
            Its length in bytes.

        Raises:
            OSError: it could not be written; the file is as it was.
        """
        if self._torn_at is not None:
            self.cut(self._torn_at)
        end = self._raw.seek(0, os.SEEK_END)
        self._torn_at = end
        try:
            rest = memoryview(record)
            while rest:
                rest = rest[self._raw.write(rest) :]
        except BaseException:
            # If not even this goes, it is tried again before the next record.
            with contextlib.suppress(OSError):
                self.cut(end)
            raise
        self._torn_at = None
        return len(record)

    def cut(self, length: int) -> None:
        """Drop everything after so many bytes.

        Raises:
            OSError: the file cannot be cut.
        """
        self._raw.truncate(length)
        self._torn_at = None

    def fileno(self) -> int:
        """The operating system's number of the open file."""
        return self._raw.fileno()

    def flush(self) -> None:
        """Nothing is ever held back."""

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        self._raw.close()
