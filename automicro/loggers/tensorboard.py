"""Values for TensorBoard."""

import importlib.util
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automicro.loggers.lines import AppendFile, to_json
from automicro.loggers.logger import not_started

_PREFIX = "events.out.tfevents."


class TensorBoardLogger:
    """Writes event files that ``tensorboard --logdir FOLDER`` shows.

    Values are scalars under their own names, of 32 bits, as TensorBoard keeps them. What is run
    is the text ``run``. Each `start` begins a file of its own; on a resume it tells TensorBoard
    to leave out what earlier files hold of later steps.

    Events are written where they are logged, each whole or not at all: torch's ``SummaryWriter``
    hands them to a thread, which ends for good when a write fails, and is missing after a fork.

    Args:
        folder: of the run; made where there is none.

    Raises:
        ImportError: the package tensorboard is not installed.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> logger = TensorBoardLogger(folder)
        >>> logger.start({"seed": 0})
        >>> logger.log({"train/loss": 0.5}, step=1)
        >>> logger.close()
        >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        >>> [event.value for event in EventAccumulator(folder).Reload().Scalars("train/loss")]
        [0.5]
    """

    def __init__(self, folder: str | Path) -> None:
        # Said now: while training it would be one more logger that fails.
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoardLogger needs the package tensorboard, which is not installed: "
                "pip install tensorboard"
            )
        self._folder = Path(folder)
        self._file: AppendFile | None = None

    def __repr__(self) -> str:
        return f"TensorBoardLogger({str(self._folder)!r})"

    def start(self, run: Mapping[str, Any], *, resume_step: int | None = None) -> None:
        """Begin an event file.

        Raises:
            OSError: the file cannot be made or written.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import text

        self.close()
        self._file = AppendFile(_next_path(self._folder), is_new=True)
        self._write(file_version="brain.Event:2")
        if resume_step is not None:
            # Readers drop what earlier files hold from this step on.
            start = SessionLog(status=SessionLog.START)
            self._write(step=resume_step + 1, session_log=start)
        shown = json.dumps(to_json(run), indent=2, ensure_ascii=False)
        # Four spaces are code in Markdown.
        block = "\n".join("    " + line for line in shown.splitlines())
        summary = text("run", block)  # type: ignore[no-untyped-call]
        self._write(step=resume_step or 0, summary=summary)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        """Write the values as one event.

        Raises:
            OSError: it cannot be written; the file is as it was.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = [Summary.Value(tag=name, simple_value=each) for name, each in values.items()]
        self._write(step=step, summary=Summary(value=scalars))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
            RecordWriter,
        )

        if self._file is None:
            raise not_started(self)
        event = Event(wall_time=time.time(), **content)
        RecordWriter(self._file).write(event.SerializeToString())


def _next_path(folder: Path) -> Path:
    """A path that sorts after all event files there: readers read them in that order."""
    files = folder.glob(f"{_PREFIX}*")
    taken = [path.name.removeprefix(_PREFIX).partition(".")[0] for path in files]
    last = max((int(each) for each in taken if each.isdecimal()), default=0)
    seconds = max(int(time.time()), last + 1)
    return folder / f"{_PREFIX}{seconds:010d}.{socket.gethostname()}.{os.getpid()}"
