"""Warnings as a command line shows them: one line each, and each once."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import TextIO

from automicro.cli.places import shorten
from automicro.cli.results import warn
from automicro.cli.wording import as_yaml
from automicro.errors import AutomicroWarning


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Show warnings as ``automicro: warning: …`` meanwhile, those of others with their place.

    Which warnings are shown is left to the filters; one that was shown is not shown again.

    >>> with warnings.catch_warnings(), warnings_in_one_line():
    ...     warnings.simplefilter("default")
    ...     warnings.warn("mind the gap", AutomicroWarning)  # says it on stderr
    """
    shown: set[tuple[object, ...]] = set()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = " ".join(str(message).split())
        is_ours = issubclass(category, AutomicroWarning)
        # A line of torch's that warns of every shape anew says nothing new with the second.
        key = (category, text) if is_ours else (category, filename, lineno)
        if key in shown:
            return
        shown.add(key)
        if is_ours:
            warn(f"warning: {as_yaml(text)}")
        else:
            warn(f"warning: {category.__name__}: {text} ({shorten(filename)}:{lineno})")

    before = warnings.showwarning
    warnings.showwarning = show
    try:
        yield
    finally:
        # What was installed meanwhile stays.
        if warnings.showwarning is show:
            warnings.showwarning = before
