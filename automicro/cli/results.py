"""What a command found, for programs and for people."""

import contextlib
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from automicro.cli.peers import is_first

_KEY_OR_COMMENT = re.compile(r"(?m)^[ -]*(?P<key>[\w.-]+:)(?=\s)|(?:^|(?<=\s))#.*$")


def to_json(values: Any, *, indent: int | None = None) -> str:
    """Return values, or a dataclass, as JSON. What is NaN or infinite becomes null.

    >>> to_json({"loss": float("nan"), "steps": 3})
    '{"loss": null, "steps": 3}'
    """
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = dataclasses.asdict(values)
    return json.dumps(_finite(values), indent=indent, allow_nan=False, default=str)


@contextlib.contextmanager
def results_alone(wanted: bool) -> Iterator[TextIO]:
    """Keep stdout for the results: meanwhile everything else goes to stderr.

    Args:
        wanted: whether to; where not, nothing changes.

    >>> with results_alone(True) as results:
    ...     print("progress")  # on stderr
    ...     print("{}", file=results)
    {}
    """
    results = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield results


@contextlib.contextmanager
def one_rank_speaks() -> Iterator[None]:
    """Keep stdout for rank 0 of several processes, whose output would be that of all."""
    if is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def print_yaml(text: str) -> None:
    r"""Print YAML, in a terminal with bold keys, which can be read on light and on dark.

    >>> print_yaml("seed: 0\n")
    seed: 0
    """
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        from rich.text import Text

        shown = Text(text)
        for found in _KEY_OR_COMMENT.finditer(text):
            shown.stylize("bold" if found["key"] else "dim", *found.span())
        console.print(shown, soft_wrap=True, end="")
    else:
        sys.stdout.write(text)


def warn(text: str) -> None:
    """Say on stderr what is to be known and is no mistake. Of several processes one speaks."""
    if is_first():
        _say(text, "bold magenta")


def complain(text: str) -> None:
    """Say on stderr what went wrong."""
    _say(text, "bold red")


def _say(text: str, style: str) -> None:
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble(("automicro:", style), f" {text}")
    Console(stderr=True).print(line, soft_wrap=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
