"""Naming what takes long before a command can say anything of its own, such as importing torch."""

import contextlib
import os
import sys
from collections.abc import Iterator

_ERASE = "\r\x1b[2K"


@contextlib.contextmanager
def saying(doing: str, *, in_logs: bool = False, is_silent: bool = False) -> Iterator[None]:
    """Say on stderr what is being done, at once: imports let no other thread speak meanwhile.

    In a terminal the line goes when it is done. Of several processes one speaks.

    Args:
        doing: what takes long.
        in_logs: whether to say it in a line where stderr is no terminal, too.
        is_silent: whether to say nothing.

    >>> with saying("importing torch"):  # of a test, stderr is no terminal
    ...     pass
    """
    # By the variable of torchrun: whatever else tells the rank imports torch.
    if is_silent or os.environ.get("RANK", "0") != "0":
        yield
        return
    if not _can_erase():
        if in_logs:
            _write(f"automicro: {doing} …\n")
        yield
        return
    _write(f"automicro: {doing} …\r")
    try:
        yield
    finally:
        _write(_ERASE)


def importing(
    inputs: list[str], *, in_logs: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Say that torch is imported, unless it is already, or ``progress=false`` is asked for."""
    is_silent = "torch" in sys.modules or "progress=false" in inputs
    return saying("importing torch", in_logs=in_logs, is_silent=is_silent)


def _can_erase() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", "")


def _write(text: str) -> None:
    # A stream that is closed, or cannot write "…", is no reason not to train.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
