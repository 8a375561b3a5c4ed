"""Output for programs and people, and notices of long work. Only one rank prints.

Nothing here imports torch in a single process.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

from automicro.showing import json_values

if TYPE_CHECKING:
    from automicro.trainer.processes import Process


def to_json(values: Any, *, indent: int | None = None) -> str:
    """Return values or a dataclass as JSON, with null for NaN and infinities.

    >>> to_json({"loss": float("nan"), "steps": 3})
    '{"loss": null, "steps": 3}'
    """
    # Python would write NaN and Infinity, which other JSON parsers refuse.
    return json.dumps(json_values(values, lambda constant: None), indent=indent)


@contextlib.contextmanager
def results_alone(wanted: bool) -> Iterator[TextIO]:
    """Reserve stdout for results; inside the block, everything else goes to stderr."""
    results = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if wanted else contextlib.nullcontext():
        yield results


@contextlib.contextmanager
def one_rank_speaks() -> Iterator[None]:
    """Discard the stdout of all ranks but the first, because they would repeat its output."""
    if is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def warn(text: str) -> None:
    """Print a notice to stderr, on one rank."""
    if is_first():
        _say(text, "bold magenta")


def complain(text: str) -> None:
    """Print an error to stderr."""
    _say(text, "bold red")


def _say(text: str, style: str) -> None:
    from rich.console import Console
    from rich.text import Text

    with contextlib.suppress(OSError, ValueError):  # closed
        sys.stdout.flush()  # keeps the order of earlier output in a pipe
    # As Text, because Rich reads [brackets] in a plain string as markup.
    line = Text.assemble(("automicro:", style), f" {text}")
    Console(stderr=True).print(line, soft_wrap=True)


def has_peers() -> bool:
    """Return whether this is one of several processes."""
    return not _is_surely_alone() and _place().world_size > 1


def is_first() -> bool:
    """Return whether this process prints for all."""
    return _is_surely_alone() or _place().is_first


def _place() -> "Process":
    # This imports torch.
    from automicro.trainer.processes import place_for_output

    return place_for_output()


def _is_surely_alone() -> bool:
    # Several processes have these variables, or a process group that user code created.
    is_announced = "WORLD_SIZE" in os.environ or "RANK" in os.environ
    return not is_announced and "torch.distributed" not in sys.modules
