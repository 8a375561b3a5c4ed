"""Warnings that point at the caller's own line and are never lost."""

import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = Path(__file__).parent


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line that called into automicro.

    ``warnings.warn`` shows one text once per line of code in a process. Whoever calls this keeps
    count for an object of its own, so a second object with the same trouble is heard too.

    Args:
        message: what is wrong, with its remedy.
        category: a subclass of ``Warning``.

    Raises:
        Warning: filters turn the category into an error.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("default")
        ...     for _ in range(2):
        ...         warn("mind the gap", UserWarning)
        >>> len(caught)
        2
    """
    here = sys._getframe(1)
    frame: FrameType | None = here
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    frame = frame or here
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry={},
    )


def _is_ours(frame: FrameType) -> bool:
    return _PACKAGE in Path(frame.f_code.co_filename).parents
