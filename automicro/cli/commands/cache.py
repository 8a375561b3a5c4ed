"""List or clear the microbatch sizes that runs have found.

A run with microbatch_size=auto starts with the size that was found for the same model
on the same device. A wrong size costs an attempt or two, and is replaced.

Sizes are stored in $AUTOMICRO_CACHE (a folder, or a URL such as s3://bucket/automicro,
which a team can share), else in $XDG_CACHE_HOME/automicro, else in ~/.cache/automicro,
one small file each.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

from automicro.cli.output import to_json
from automicro.errors import ConfigError
from automicro.units import describe_count, format_bytes

if TYPE_CHECKING:
    from automicro.remembered.cache import RememberedSize

EXAMPLES = (
    "automicro cache",
    "automicro cache --clear",
    "automicro cache --json",
)
JSON = "print them as JSON"
TAKES_CONFIG = False

_SHORT = 50  # characters
_FILE_LETTERS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--clear", action="store_true", help="remove all sizes, damaged files included"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command, and return the exit code."""
    if arguments.json and arguments.clear:
        raise ConfigError("--json and --clear do not go together: give one of them")
    from automicro.remembered.cache import SizeCache

    cache = SizeCache()
    if arguments.clear:
        print(f"removed {_count(cache.clear())} from {cache.folder}")
        return 1 if cache.has_failed else 0
    sizes = cache.entries()
    if arguments.json:
        print(to_json([dataclasses.asdict(each) for each in sizes]))
    elif sizes:
        print(as_text(sizes))
        print(f"\n{_count(len(sizes))} in {cache.folder}")
    else:
        print(
            f"no size is remembered in {cache.folder}: runs with microbatch_size=auto write there"
        )
    return 0


def _count(number: int) -> str:
    return f"{number} size{'' if number == 1 else 's'}"


def as_text(sizes: Sequence[RememberedSize]) -> str:
    """Return a table with one line per size."""
    rows = [list(COLUMNS), *cells(sizes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def cells(sizes: Iterable[RememberedSize]) -> list[list[str]]:
    """Return the rows of the table."""
    # Files can contain control characters, which would affect the terminal.
    texts = [[str(cell(size)) for cell in COLUMNS.values()] for size in sizes]
    return [["".join(c if c.isprintable() else "?" for c in text) for text in row] for row in texts]


def _num_microbatches(size: RememberedSize) -> int:
    return -(-int(size.key["rows"]) // size.microbatch_size)


def _date(size: RememberedSize) -> str:
    return datetime.datetime.fromtimestamp(size.written_at, datetime.UTC).date().isoformat()


def _device(size: RememberedSize) -> str:
    memory, ranks = size.key["memory_bytes"], size.key["world_size"]
    text = size.key["device"] + ("" if memory is None else f", {format_bytes(memory)}")
    return f"{text} × {ranks}" if ranks > 1 else text


COLUMNS: Mapping[str, Callable[[RememberedSize], object]] = {
    "model": lambda size: size.key["model"],
    "parameters": lambda size: describe_count(size.key["parameters"]),
    "device": _device,
    "precision": lambda size: size.key["precision"] + ", compiled" * size.key["compiled"],
    "phase": lambda size: size.key["phase"],
    "batch (rows)": lambda size: size.key["rows"],
    "microbatch size (rows)": lambda size: size.microbatch_size,
    "microbatches": _num_microbatches,
    "peak memory": lambda size: "–" if size.peak_bytes is None else format_bytes(size.peak_bytes),
    "level": lambda size: size.level,
    "optimizer": lambda size: size.key["optimizer"] or "–",
    "one row": lambda size: shorten(", ".join(size.key["shapes"].values()), _SHORT),
    "written": _date,
    "file": lambda size: f"{size.file[:_FILE_LETTERS]}…",
}
