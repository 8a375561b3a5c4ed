"""Remembered sizes for people, for programs and for docs."""

import datetime
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from automicro.memory import format_bytes
from automicro.size_cache import Entry

# Title, and whether the column holds numbers.
COLUMNS = (
    ("model", False),
    ("parameters", True),
    ("device", False),
    ("precision", False),
    ("phase", False),
    ("rows", True),
    ("microbatch size", True),
    ("count", True),
    ("peak", True),
    ("age", True),
)
# Wider than any table: a program that reads a pipe wants whole words and one line for each size.
PIPE_WIDTH = 10_000
UNKNOWN = "–"


def print_sizes(entries: Iterable[Entry], *, now: float) -> None:
    """Print a table: in a terminal with a frame and as wide as that, else one line for each size.

    Args:
        entries: in this order.
        now: seconds since 1970, from which ages count.

    >>> print_sizes([], now=0.0)
    model  parameters  device  precision  phase  rows  microbatch size  count  peak  age
    """
    console = Console()
    is_terminal = console.is_terminal
    table = Table(box=box.SIMPLE_HEAD if is_terminal else None, padding=(0, 2, 0, 0))
    for title, is_number in COLUMNS:
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for entry in entries:
        # Names are somebody's text, and no markup.
        table.add_row(*(Text(cell) for cell in _cells(entry, now=now)))
    if is_terminal:
        console.print(table)
        return
    wide = Console(width=PIPE_WIDTH)
    with wide.capture() as captured:
        wide.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def as_values(entry: Entry) -> dict[str, Any]:
    """Return a size as values for JSON, with the whole key that it was found for."""
    return {
        **entry.content()["size"],
        "num_microbatches": entry.num_microbatches,
        "written_at": entry.written_at,
        "file": str(entry.path),
        "key": entry.key.content(),
    }


def as_markdown(entries: Sequence[Entry]) -> str:
    """Return a table for docs, with when and with which versions it was measured.

    Args:
        entries: in this order.
    """
    head = ("model", "parameters", "device", "precision", "phase", "batch (rows)",
            "microbatch size (rows)", "microbatches", "peak memory")  # fmt: skip
    numbers = (False, True, False, False, False, True, True, True, True)
    lines = [_markdown_row(head), _markdown_row("--:" if each else "---" for each in numbers)]
    lines += [_markdown_row(_cells(entry, now=0.0)[:-1]) for entry in entries]
    if entries:
        versions = sorted({(e.key.automicro, e.key.torch) for e in entries})
        named = ", ".join(f"automicro {ours} on torch {theirs}" for ours, theirs in versions)
        first, last = (_date(each(e.written_at for e in entries)) for each in (min, max))
        when = first if first == last else f"{first} to {last}"
        lines += ["", f"Measured {when} with {named}."]
    return "\n".join([*lines, ""])


def format_count(number: int) -> str:
    """Write how many parameters a model has.

    >>> format_count(950), format_count(34_100), format_count(124_439_808), format_count(7 * 10**9)
    ('950', '34.1k', '124.4M', '7.0B')
    """
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)


def format_age(seconds: float) -> str:
    """Write an age in its largest unit. What lies in the future has none yet.

    >>> [format_age(seconds) for seconds in (-5, 59, 3600, 86400 * 30)]
    ['0s', '59s', '1h', '30d']
    """
    seconds = max(seconds, 0.0)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{int(seconds)}s"


def _cells(entry: Entry, *, now: float) -> list[str]:
    key, size = entry.key, entry.size
    memory = "" if key.memory_bytes is None else f", {format_bytes(key.memory_bytes)}"
    world = f" × {key.world_size}" if key.world_size > 1 else ""
    return [
        _one_line(key.model),
        format_count(key.parameters),
        _one_line(f"{key.device}{memory}{world}"),
        _one_line(key.precision + (", compiled" if key.compiled else "")),
        _one_line(key.phase),
        str(key.rows),
        str(size.microbatch_size),
        str(entry.num_microbatches),
        UNKNOWN if size.peak_bytes is None else format_bytes(size.peak_bytes),
        format_age(now - entry.written_at),
    ]


def _one_line(text: str) -> str:
    """A file may hold anything: control characters would steer the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date().isoformat()
