"""Files of lines that each carry a step, cut where a run resumes."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

from automicro.loggers.append_file import AppendFile


def open_lines(
    path: Path, *, head: bytes, step_of: Callable[[bytes], int], resume_step: int | None
) -> AppendFile:
    """Open a file of lines to append to, without what a resumed run will log again.

    A last line without its end (the process died while it wrote) goes. On a resume, so do the
    lines at the end whose step is later, back to the first that is not: an earlier run in the
    same file stays.

    Args:
        path: of the file; made where there is none.
        head: how every such file begins; a whole line is written into an empty file. A file
            that begins otherwise is somebody else's.
        step_of: reads the step of a line.
        resume_step: the last step to keep; None to keep all lines.

    Raises:
        OSError: the file cannot be opened or cut.
        ValueError: the file is not one of these; it is left as it is.
    """
    file = AppendFile(path)
    try:
        size = os.fstat(file.fileno()).st_size
        if size:
            size = _kept_bytes(file, path, head, step_of, resume_step)
            file.cut(size)
        if not size and head.endswith(b"\n"):
            file.write(head)
    except BaseException:
        file.close()
        raise
    return file


def _kept_bytes(
    file: AppendFile,
    path: Path,
    head: bytes,
    step_of: Callable[[bytes], int],
    resume_step: int | None,
) -> int:
    # Mapped and read from its end: a log may be large, and only a few lines of it are read.
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if not head.startswith(content[: len(head)]):
            raise ValueError(
                f"{str(path)!r} begins with {content[: len(head)]!r} and not with {head!r}, so "
                "another program wrote it; it is left as it is: log to another path"
            )
        end = content.rfind(b"\n") + 1
        while end and resume_step is not None:
            start = content.rfind(b"\n", 0, end - 1) + 1
            line = content[start:end]
            try:
                step = step_of(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{str(path)!r} holds the line {line[:80]!r}, which has no step, so it cannot "
                    f"be cut after step {resume_step}; it is left as it is: remove the line, or "
                    "log to another path"
                ) from error
            if step <= resume_step:
                break
            end = start
        return end
