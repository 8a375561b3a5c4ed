"""Remembered sizes for people, for programs and for docs."""

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from automicro.cli.size_cells import (
    besides,
    device_cell,
    format_count,
    one_row,
    parameter_counts,
    precision_cell,
)
from automicro.remembered.entry import Entry
from automicro.units import format_bytes

# Title, and whether the column holds numbers.
COLUMNS = {
    "model": False,
    "params": True,
    "one row": False,
    "device": False,
    "phase": False,
    "microbatches": True,
    "peak": True,
    "age": True,
}
# Wider than any table: a program that reads a pipe wants whole words and one line for each size.
PIPE_WIDTH = 10_000
UNKNOWN = "–"


def print_sizes(entries: Iterable[Entry], *, now: float) -> None:
    """Print a table: in a terminal with a frame and as wide as that, else one line for each size.

    Args:
        entries: in this order.
        now: seconds since 1970, from which ages count.

    >>> print_sizes([], now=0.0)
    model  params  one row  device  phase  microbatches  peak  age
    """
    columns = _columns(list(entries), now=now)
    console = Console()
    if console.is_terminal:
        table = _table(columns, box.SIMPLE_HEAD)
        anyhow_wide = console.options.update(max_width=PIPE_WIDTH)
        if console.measure(table, options=anyhow_wide).maximum > console.width:
            broken = {title: list(map(_in_lines, cells)) for title, cells in columns.items()}
            table = _table(broken, box.SIMPLE_HEAD)
        console.print(table)
        return
    wide = Console(width=PIPE_WIDTH)
    with wide.capture() as captured:
        wide.print(_table(columns, None))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _table(columns: Mapping[str, Sequence[str]], frame: box.Box | None) -> Table:
    gap = 2 if frame is None else 1  # a frame brings one of its own
    table = Table(box=frame, padding=(0, gap, 0, 0))
    for title in columns:
        # Words give way, numbers do not.
        is_number = COLUMNS[title]
        justify: JustifyMethod = "right" if is_number else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=is_number)
    for line in zip(*columns.values(), strict=True):
        # Names are somebody's text, and no markup.
        table.add_row(*map(Text, line))
    return table


def _in_lines(text: str) -> str:
    """A text in shorter lines, broken where it means something and not in the middle of a word."""
    return re.sub(r"(?<=,) | (?=[(])|(?<=[+]) ", "\n", text)


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
    lines += [_markdown_row(_markdown_cells(entry)) for entry in entries]
    if entries:
        versions = sorted({(e.key.automicro, e.key.torch) for e in entries})
        named = ", ".join(f"automicro {ours} on torch {theirs}" for ours, theirs in versions)
        first, last = (_date(each(e.written_at for e in entries)) for each in (min, max))
        when = first if first == last else f"{first} to {last}"
        lines += ["", f"Measured {when} with {named}."]
    return "\n".join([*lines, ""])


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


def _columns(entries: Sequence[Entry], *, now: float) -> dict[str, list[str]]:
    """The cells of each column; behind the model what else tells lines that are alike apart."""
    keys = [entry.key for entry in entries]
    columns = {
        "model": [key.model for key in keys],
        "params": parameter_counts(entries),
        "one row": [one_row(key.shapes) for key in keys],
        "device": list(map(device_cell, keys)),
        "phase": [f"{key.phase}, {precision_cell(key)}" for key in keys],
    }
    rows = [str(key.rows) for key in keys]
    more = besides(entries, list(zip(*columns.values(), rows, strict=True)))
    columns["model"] = [
        f"{key.model} ({each})" if each else key.model for key, each in zip(keys, more, strict=True)
    ]
    columns |= {
        "microbatches": [
            f"{each.num_microbatches} × {each.size.microbatch_size} of {each.key.rows}"
            for each in entries
        ],
        "peak": list(map(_peak, entries)),
        "age": [format_age(now - each.written_at) for each in entries],
    }
    return {title: list(map(_one_line, cells)) for title, cells in columns.items()}


def _markdown_cells(entry: Entry) -> list[str]:
    key, size = entry.key, entry.size
    return [
        _one_line(key.model),
        format_count(key.parameters),
        _one_line(device_cell(key)),
        _one_line(precision_cell(key)),
        _one_line(key.phase),
        str(key.rows),
        str(size.microbatch_size),
        str(entry.num_microbatches),
        _peak(entry),
    ]


def _peak(entry: Entry) -> str:
    peak = entry.size.peak_bytes
    return UNKNOWN if peak is None else format_bytes(peak)


def _one_line(text: str) -> str:
    """A file may hold anything: control characters would steer the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _markdown_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date().isoformat()
