"""Values as rows of a table."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automicro.loggers.append_file import AppendFile
from automicro.loggers.resumable_lines import open_lines
from automicro.loggers.values import not_started

_COLUMNS = ("step", "name", "value")
_HEAD = (",".join(_COLUMNS) + "\n").encode()


class CSVLogger:
    """Writes one row per value, with the columns ``step,name,value``.

    A column for each name would have to be known before the first row: metrics come with the
    first epoch and evaluations later still. With rows for names nothing is ever rewritten, and
    one line makes columns of them: ``pandas.read_csv(path).pivot_table(index="step",
    columns="name", values="value")``.

    Each row is in the file when `log` returns, the rows of one call all or none. A file that
    exists is appended to; on a resume it is cut first. What is run is not in it.

    Args:
        path: of the file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "log.csv"
        >>> logger = CSVLogger(path)
        >>> logger.start({})
        >>> logger.log({"train/loss": 0.5, "train/microbatch_size": 16}, step=1)
        >>> logger.close()
        >>> print(path.read_text(), end="")
        step,name,value
        1,train/loss,0.5
        1,train/microbatch_size,16
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: AppendFile | None = None

    def __repr__(self) -> str:
        return f"CSVLogger({str(self._path)!r})"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Open the file, and cut it after the step to resume from.

        Raises:
            OSError: the file cannot be opened or written.
            ValueError: the file holds something else.
        """
        self.close()
        self._file = open_lines(self._path, head=_HEAD, step_of=_step_of, resume_step=resume_step)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write a row for each value.

        Raises:
            OSError: the rows cannot be written; the file is as it was.
        """
        if self._file is None:
            raise not_started(self)
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows((step, name, value) for name, value in values.items())
        self._file.write(text.getvalue().encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _step_of(line: bytes) -> int:
    return 0 if line == _HEAD else int(line.partition(b",")[0])
