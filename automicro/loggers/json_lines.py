"""Values as lines of JSON."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automicro.loggers.append_file import AppendFile
from automicro.loggers.resumable_lines import open_lines
from automicro.loggers.values import RESERVED_NAMES, not_started

_HEAD = b'{"step":'


class JSONLinesLogger:
    """Writes one JSON object per line: the step, the time, and the values by name.

    The first line of a run has what is run under ``"run"`` instead of values. Each line is in the
    file when `log` returns. A file that exists is appended to; on a resume it is cut first.

    JSON has no NaN and no infinities: they are the texts ``"NaN"``, ``"Infinity"`` and
    ``"-Infinity"``, as in the JSON of protocol buffers, which ``float()`` reads.

    Args:
        path: of the file.

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

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: AppendFile | None = None

    def __repr__(self) -> str:
        return f"JSONLinesLogger({str(self._path)!r})"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Open the file, and cut it after the step to resume from.

        Raises:
            OSError: the file cannot be opened or written.
            ValueError: the file holds something else.
        """
        self.close()
        self._file = open_lines(self._path, head=_HEAD, step_of=_step_of, resume_step=resume_step)
        self._write({"run": run}, resume_step or 0)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write a line.

        Raises:
            OSError: the line cannot be written; the file is as it was.
            ValueError: a value is called as something else in a line is.
        """
        taken = sorted(RESERVED_NAMES & values.keys())
        if taken:
            raise ValueError(
                f"a value cannot be called {taken[0]!r}, which has a meaning of its own in a line "
                f"of {self!r}: give it a name such as 'my/{taken[0]}'"
            )
        self._write(values, step)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, content: Mapping[str, Any], step: int) -> None:
        if self._file is None:
            raise not_started(self)
        line = {"step": step, "time": round(time.time(), 3), **content}
        text = json.dumps(to_json(line), ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair cannot be encoded; its escape is the JSON for it.
        self._file.write(text.encode(errors="backslashreplace") + b"\n")


def to_json(value: Any) -> Any:
    """A value with only what JSON has: other things as text, keys too.

    >>> to_json({"lr": (0.1, float("nan")), 3: Path("data")})
    {'lr': [0.1, 'NaN'], '3': 'data'}
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(each) for each in value]
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _step_of(line: bytes) -> int:
    return int(json.loads(line)["step"])
