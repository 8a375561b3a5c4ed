"""Logger of JSON lines, to a file that is truncated when a run resumes."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automicro.loggers.logger import RESERVED_NAMES
from automicro.showing import json_values


class AppendFile:
    """File that appends each record completely or not at all.

    Nothing is buffered, so a written record survives the death of the process (but not a power
    failure, because nothing is synced to disk). What a failed write has left, because the disk is
    full or Ctrl-C was pressed, is cut off before the next record and when the file is closed.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._raw = open(path, "ab", buffering=0)  # noqa: SIM115
        self._end = os.fstat(self._raw.fileno()).st_size  # end of the last complete record
        self._is_torn = False

    def write(self, record: bytes) -> int:
        """Append a record. If that fails, the file is left unchanged."""
        self.cut(self._end)
        # Set before the first byte, because Ctrl-C might come at any line.
        self._is_torn = True
        rest = memoryview(record)
        while rest:
            # An unbuffered write might write only a part if the disk is nearly full.
            rest = rest[self._raw.write(rest) :]
        self._end += len(record)
        self._is_torn = False
        return len(record)

    def cut(self, length: int) -> None:
        """Truncate the file to a length in bytes."""
        # Devices such as /dev/null cannot be truncated.
        if self._is_torn or length < self._end:
            self._raw.truncate(length)
            self._end, self._is_torn = length, False

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        if not self._raw.closed:
            self.cut(self._end)
            self._raw.close()


_HEAD = b'{"step":'  # start of each line


def _kept_bytes(path: Path, resume_step: int | None) -> int:
    """Return the length of the lines that a run resumed after a step will not log again."""
    content = path.read_bytes()
    # A file shorter than its head had its first write torn.
    if not _HEAD.startswith(content[: len(_HEAD)]):
        raise ValueError(
            f"{str(path)!r} begins with {content[: len(_HEAD)]!r} instead of {_HEAD!r}, so another "
            "program wrote it. Log to another path"
        )
    # A last line without a line break was torn by a kill.
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    try:
        # Steps ascend, so all lines before the first one kept are kept, too.
        while lines and resume_step is not None and json.loads(lines[-1])["step"] > resume_step:
            lines.pop()
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(path)!r} holds the line {lines[-1][:80]!r} without a step, so it cannot be cut "
            f"after step {resume_step}. Remove the line, or log to another path"
        ) from error
    return sum(map(len, lines))


class OpenLogger:
    """Base of loggers with a file or a run that is open from `start` to `close`."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._open: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._path)!r})"

    @property
    def _opened(self) -> Any:
        if self._open is None:
            raise RuntimeError(f"{self!r} is not open. Call start({{}}) before log(…)")
        return self._open

    def close(self) -> None:
        """Write what is left, and close the file or end the run. Closing twice does nothing."""
        is_open, self._open = self._open, None
        if is_open is not None:
            self._end(is_open)

    def _end(self, file: Any) -> None:
        file.close()


class JSONLinesLogger(OpenLogger):
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
        # Checked before the file is opened, so that a file of another program is never changed.
        kept = _kept_bytes(self._path, resume_step) if self._path.is_file() else 0
        self._open = AppendFile(self._path)
        self._open.cut(kept)
        self._write({"run": run}, resume_step or 0)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write a line.

        Raises:
            OSError: the line cannot be written; the file is left unchanged.
            ValueError: a value has the name of another field of the line.
        """
        if taken := sorted(RESERVED_NAMES & values.keys()):
            raise ValueError(
                f"a value cannot be called {taken[0]!r}, which has another meaning in each line. "
                f"Give it a name such as 'my/{taken[0]}'"
            )
        self._write(values, step)

    def _write(self, content: Mapping[str, Any], step: int) -> None:
        line = {"step": step, "time": round(time.time(), 3), **content}
        text = json.dumps(json_values(line), ensure_ascii=False, allow_nan=False)
        # A lone surrogate cannot be encoded; JSON has an escape for it.
        self._opened.write(text.encode(errors="backslashreplace") + b"\n")
