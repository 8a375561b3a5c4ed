"""Logger of JSON lines, to a file that is truncated when a run resumes."""

import contextlib
import json
import math
import mmap
import os
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from automicro.loggers.logger import RESERVED_NAMES, not_started


class AppendFile:
    """File that appends each record completely or not at all.

    Nothing is buffered, so a written record survives the death of the process (but not a power
    failure, because nothing is synced to disk). If a write fails halfway, because the disk is full
    or Ctrl-C was pressed, it is undone, so that later records do not follow half of one.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._raw = FileIO(path, "x" if is_new else "a+")
        self._torn_at: int | None = None

    def write(self, record: bytes) -> int:
        """Append a record. If that fails, the file is left unchanged."""
        if self._torn_at is not None:
            self.cut(self._torn_at)
        end = self._raw.seek(0, os.SEEK_END)
        # Set before the first byte, because Ctrl-C might come at any line.
        self._torn_at = end
        try:
            rest = memoryview(record)
            while rest:
                # An unbuffered write might write only a part if the disk is nearly full.
                rest = rest[self._raw.write(rest) :]
        except BaseException:
            # If this fails too, it is repeated before the next record.
            with contextlib.suppress(OSError):
                self.cut(end)
            raise
        self._torn_at = None
        return len(record)

    def cut(self, length: int) -> None:
        """Truncate the file to a length in bytes."""
        self._raw.truncate(length)
        self._torn_at = None

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._raw.fileno()

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        self._raw.close()


_HEAD = b'{"step":'  # start of each line


def _kept_bytes(file: AppendFile, path: Path, resume_step: int | None) -> int:
    """Return the length of the lines that a run resumed after a step will not log again."""
    # Mapped and read from its end, because a log might be large and only a few lines are needed.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        # A file shorter than its head had its first write torn.
        if not _HEAD.startswith(content[: len(_HEAD)]):
            raise ValueError(
                f"{str(path)!r} begins with {content[: len(_HEAD)]!r} and not with {_HEAD!r}, so "
                "another program wrote it; it is left as it is: log to another path"
            )
        # A last line without a line break was torn by a kill.
        end = content.rfind(b"\n") + 1
        while end and resume_step is not None:
            start = content.rfind(b"\n", 0, end - 1) + 1
            line = content[start:end]
            try:
                step = int(json.loads(line)["step"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{str(path)!r} holds the line {line[:80]!r}, which has no step, so it cannot "
                    f"be cut after step {resume_step}; it is left as it is: remove the line, or "
                    "log to another path"
                ) from error
            # Steps ascend, so all lines before this one are kept.
            if step <= resume_step:
                break
            end = start
        return end


class FileLogger:
    """Base of loggers with a file that is open from `start` to `close`."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: AppendFile | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"

    @property
    def _opened(self) -> AppendFile:
        if self._file is None:
            raise not_started(self)
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JSONLinesLogger(FileLogger):
    """Writes one JSON object per line: the step, the time, and the values by name.

    The first line of a run has the description of the run under ``"run"`` instead of values. Each
    line is in the file when `log` returns. An existing file is appended to; when a run resumes,
    later steps are first removed from it.

    JSON has no NaN and no infinities, so they are written as the strings ``"NaN"``, ``"Infinity"``
    and ``"-Infinity"``. ``float()`` reads these, and protocol buffers use the same in JSON.

    Args:
        path: path of the file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
        >>> logger = JSONLinesLogger(path)
        >>> logger.start({"seed": 0})
        >>> logger.log({"train/loss": 0.5, "train/grad_norm": float("inf")}, step=1)
        >>> logger.close()
        >>> for line in path.read_text().splitlines():
        ...     print(line)
        {"step": 0, "time": ..., "run": {"seed": 0}}
        {"step": 1, "time": ..., "train/loss": 0.5, "train/grad_norm": "Infinity"}
    """

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Open the file, and remove lines after the step to resume from.

        Raises:
            OSError: the file cannot be opened or written.
            ValueError: the file was written by another program.
        """
        self.close()
        file = AppendFile(self._path)
        try:
            if os.fstat(file.fileno()).st_size:
                file.cut(_kept_bytes(file, self._path, resume_step))
        except BaseException:
            file.close()
            raise
        self._file = file
        self._write({"run": run}, resume_step or 0)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write a line.

        Raises:
            OSError: the line cannot be written; the file is left unchanged.
            ValueError: a value has the name of another field of the line.
        """
        taken = sorted(RESERVED_NAMES & values.keys())
        if taken:
            raise ValueError(
                f"a value cannot be called {taken[0]!r}, which has a meaning of its own in a line "
                f"of {self!r}: give it a name such as 'my/{taken[0]}'"
            )
        self._write(values, step)

    def _write(self, content: Mapping[str, Any], step: int) -> None:
        line = {"step": step, "time": round(time.time(), 3), **content}
        text = json.dumps(json_values(line), ensure_ascii=False, allow_nan=False)
        # A lone surrogate cannot be encoded; JSON has an escape for it.
        self._opened.write(text.encode(errors="backslashreplace") + b"\n")


def json_values(value: Any) -> Any:
    """Return a value in which anything that JSON lacks is text, including keys.

    >>> json_values({"lr": (0.1, float("nan")), 3: Path("data")})
    {'lr': [0.1, 'NaN'], '3': 'data'}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_values(each) for each in value]
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
