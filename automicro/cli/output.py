"""Output for programs and for people, and notices of long work. One rank prints.

Nothing here imports torch where there is one process.
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from automicro.trainer.processes import Process

_ERASE = "\r\x1b[2K"


def to_json(values: Any, *, indent: int | None = None) -> str:
    """Return values, or a dataclass, as JSON. What is NaN or infinite becomes null.

    >>> to_json({"loss": float("nan"), "steps": 3})
    '{"loss": null, "steps": 3}'
    """
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        values = dataclasses.asdict(values)
    # Python would write NaN and Infinity, which other readers of JSON refuse.
    return json.dumps(_finite(values), indent=indent, allow_nan=False, default=str)


@contextlib.contextmanager
def results_alone(wanted: bool) -> Iterator[TextIO]:
    """Keep stdout for the results: meanwhile everything else goes to stderr.

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

    with contextlib.suppress(OSError, ValueError):  # closed
        sys.stdout.flush()  # behind a pipe, what was printed before comes before
    # As Text, because Rich reads [brackets] in a plain string as markup.
    line = Text.assemble(("automicro:", style), f" {text}")
    Console(stderr=True).print(line, soft_wrap=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def saying(doing: str, *, is_wanted: bool = True) -> Iterator[None]:
    """Say in a terminal what is being done until it is done. Of several processes one speaks.

    >>> with saying("importing torch"):  # of a test, stderr is no terminal
    ...     pass
    """
    can_erase = sys.stderr.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    # By the variable of torchrun: whatever else tells the rank imports torch.
    if not (is_wanted and can_erase) or os.environ.get("RANK", "0") != "0":
        yield
        return
    # The cursor goes back, so that whatever is printed meanwhile writes over the line. A stream
    # that cannot write "…" is no reason not to train.
    with contextlib.suppress(OSError, ValueError):
        print(f"automicro: {doing} …", end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(_ERASE, end="", file=sys.stderr, flush=True)


def has_peers() -> bool:
    """Tell whether this is one of several processes.

    >>> has_peers()
    False
    """
    return not _is_surely_alone() and _place().world_size > 1


def is_first() -> bool:
    """Tell whether this is the process that speaks for all.

    >>> is_first()
    True
    """
    return _is_surely_alone() or _place().is_first


def _place() -> "Process":
    # Imports torch.
    from automicro.trainer.processes import place_for_output

    return place_for_output()


def _is_surely_alone() -> bool:
    # Variables, or a process group that the user's code has made.
    is_announced = "WORLD_SIZE" in os.environ or "RANK" in os.environ
    return not is_announced and "torch.distributed" not in sys.modules
