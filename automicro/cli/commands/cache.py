"""``automicro cache``: list the sizes that runs have found, and forget them."""

import argparse
import datetime
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automicro.cli.arguments import Command
from automicro.cli.output import to_json
from automicro.errors import ConfigError
from automicro.remembered.cache import SizeCache
from automicro.remembered.entry import Entry, RunKey
from automicro.remembered.remote import place_of
from automicro.units import format_bytes

if TYPE_CHECKING:
    from rich import box
    from rich.console import JustifyMethod
    from rich.table import Table

DESCRIPTION = """\
List the microbatch sizes that earlier runs have found, or clear them. A run with
microbatch_size=auto starts with the size that the same model found on the same
device; a wrong one costs an attempt or two, and is replaced.

They lie in $AUTOMICRO_CACHE (a folder, or a URL such as s3://bucket/automicro, that
a team shares), else in $AUTOMICRO_CACHE_DIR, else in $XDG_CACHE_HOME/automicro, else
in ~/.cache/automicro, one small file each.
"""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")
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
_DTYPES = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}
_DTYPE = re.compile(r"\b(bfloat|float|uint|int|complex)(?=\d)")
_MOST_SHAPES = 3
_HASH_LETTERS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--clear", action="store_true", help="remove the sizes, damaged files included"
    )
    parser.add_argument("--model", metavar="NAME", help="only those of a model's class")
    parser.add_argument("--older-than", metavar="AGE", help="only those older, such as 12h or 30d")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.add_argument("--markdown", action="store_true", help="print them as a table for docs")
    parser.add_argument("--folder", metavar="FOLDER", help="of another cache, or its URL")


def run(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    forms = [name for name in ("json", "markdown", "clear") if getattr(arguments, name)]
    if len(forms) > 1:
        raise ConfigError(
            f"{' and '.join(f'--{name}' for name in forms)} do not go together: give one of them"
        )
    folder = None if arguments.folder is None else place_of(arguments.folder)
    if isinstance(folder, Path) and not folder.is_dir():
        raise ConfigError(f"--folder {folder} is no folder: give one that exists, or leave it out")
    now = time.time()
    which = choose_entries(older_than=arguments.older_than, model=arguments.model, now=now)
    cache = SizeCache(folder)
    if arguments.clear:
        return _clear(cache, which)
    entries = [entry for entry in cache.entries() if which is None or which(entry)]
    if arguments.json:
        print(to_json([as_values(entry) for entry in entries]))
    elif arguments.markdown:
        print(as_markdown(entries), end="")
    elif entries:
        print_sizes(entries, now=now)
        print(f"\n{_count(entries)} in {cache.folder}")
    elif which is None:
        print(
            f"no size is remembered in {cache.folder}: runs with microbatch_size=auto write there"
        )
    else:
        print(f"no such size is remembered in {cache.folder}: automicro cache lists all")
    return 0


def _clear(cache: SizeCache, which: Callable[[Entry], bool] | None) -> int:
    removed, kept = cache.clear(which)
    print(f"removed {_count(removed)} from {cache.folder}")
    return 1 if kept else 0


def _count(found: Sequence[object]) -> str:
    return f"{len(found)} size{'' if len(found) == 1 else 's'}"


def parse_age(text: str) -> float:
    """Read an age such as ``30d`` as seconds.

    Raises:
        ConfigError: it is something else.

    >>> parse_age("30d"), parse_age("1.5h")
    (2592000.0, 5400.0)
    """
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--older-than {text} is no age: give a number and one of s, m, h, d, w (weeks), such "
            f"as --older-than 30d"
        )
    return float(match[1]) * SECONDS[match[2]]


def choose_entries(
    *, older_than: str | None, model: str | None, now: float
) -> Callable[[Entry], bool] | None:
    """Return what tells whether a size is meant; None where all are.

    Args:
        older_than: an age, as `parse_age` reads it.
        model: the name of a class, whatever the case.
        now: seconds since 1970.

    Raises:
        ConfigError: the age cannot be read.

    >>> choose_entries(older_than=None, model=None, now=0.0) is None
    True
    """
    if older_than is None and model is None:
        return None
    until = None if older_than is None else now - parse_age(older_than)

    def is_meant(entry: Entry) -> bool:
        names = entry.key.model.lower().split(" + ")
        return (until is None or entry.written_at <= until) and (
            model is None or model.lower() in names
        )

    return is_meant


def print_sizes(entries: Iterable[Entry], *, now: float) -> None:
    """Print a table: in a terminal with a frame and as wide as that, else one line for each size.

    Args:
        entries: in this order.
        now: seconds since 1970, from which ages count.

    >>> print_sizes([], now=0.0)
    model  params  one row  device  phase  microbatches  peak  age
    """
    from rich import box
    from rich.console import Console

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


def _table(columns: Mapping[str, Sequence[str]], frame: "box.Box | None") -> "Table":
    from rich.table import Table
    from rich.text import Text

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
    lines = [_markdown_row(_MARKDOWN), _markdown_row(align for align, _ in _MARKDOWN.values())]
    for entry in entries:
        lines.append(_markdown_row(_one_line(cell(entry)) for _, cell in _MARKDOWN.values()))
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
            + ("" if each.size.level == "plain" else f", {each.size.level}")
            for each in entries
        ],
        "peak": list(map(_peak, entries)),
        "age": [format_age(now - each.written_at) for each in entries],
    }
    return {title: list(map(_one_line, cells)) for title, cells in columns.items()}


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


# What two sizes may differ in beyond the cells that every line has.
_BESIDES: Mapping[str, Callable[[RunKey], str]] = {
    "optimizer": lambda key: key.optimizer or "no optimizer",
    "shapes": lambda key: ", ".join(f"{name} {brief(each)}" for name, each in key.shapes.items()),
    "structure": lambda key: f"structure {key.structure[:_HASH_LETTERS]}",
    "torch": lambda key: f"torch {key.torch}",
    "automicro": lambda key: f"automicro {key.automicro}",
}


def brief(shape: str) -> str:
    """Write dtype and shape as people abbreviate them.

    >>> brief("float32[1, 28, 28]"), brief("int64[]"), brief("float32[2] or float32[3]")
    ('f32[1,28,28]', 'i64', 'f32[2] or f32[3]')
    """
    short = _DTYPE.sub(lambda found: _DTYPES[found[0]], shape)
    return short.replace(", ", ",").replace("[]", "")


def one_row(shapes: Mapping[str, str]) -> str:
    """What one row of a batch holds; tensors of one kind are counted.

    >>> one_row({"0": "float32[8]", "1": "int64[]"})
    'f32[8], i64'
    >>> one_row({"input_ids": "int64[128]", "labels": "int64[128]"})
    '2 × i64[128]'
    """
    counted = Counter(map(brief, shapes.values()))
    texts = [f"{count} × {each}" if count > 1 else each for each, count in counted.items()]
    more = len(texts) - _MOST_SHAPES
    return ", ".join([*texts[:_MOST_SHAPES], *([f"{more} more"] if more > 0 else [])])


def format_count(number: int) -> str:
    """Write how many parameters a model has.

    >>> format_count(950), format_count(34_100), format_count(124_439_808), format_count(7 * 10**9)
    ('950', '34.1k', '124.4M', '7.0B')
    """
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)


def parameter_counts(entries: Sequence[Entry]) -> list[str]:
    """Write the parameters of each model: in full where two would look alike and are not.

    Args:
        entries: of one table.
    """
    exact: dict[tuple[str, str], set[int]] = defaultdict(set)
    for each in entries:
        exact[each.key.model, format_count(each.key.parameters)].add(each.key.parameters)
    texts = []
    for each in entries:
        short = format_count(each.key.parameters)
        is_clear = len(exact[each.key.model, short]) == 1
        texts.append(short if is_clear else f"{each.key.parameters:,}")
    return texts


def device_cell(key: RunKey) -> str:
    """Device, its memory, and how many there are."""
    memory = "" if key.memory_bytes is None else f", {format_bytes(key.memory_bytes)}"
    world = f" × {key.world_size}" if key.world_size > 1 else ""
    return f"{key.device}{memory}{world}"


def precision_cell(key: RunKey) -> str:
    """Precision, and whether anything is compiled."""
    return key.precision + (", compiled" if key.compiled else "")


def besides(entries: Sequence[Entry], seen: Sequence[tuple[str, ...]]) -> list[str]:
    """What else tells each size from those whose cells are the same; empty where none are.

    Args:
        entries: of one table.
        seen: the cells that say for what each was found.
    """
    alike: dict[tuple[str, ...], list[RunKey]] = defaultdict(list)
    for entry, cells in zip(entries, seen, strict=True):
        alike[cells].append(entry.key)
    return [
        ", ".join(
            say(entry.key) for say in _BESIDES.values() if len(set(map(say, alike[cells]))) > 1
        )
        for entry, cells in zip(entries, seen, strict=True)
    ]


# Alignment and cell of each column.
_MARKDOWN: Mapping[str, tuple[str, Callable[[Entry], str]]] = {
    "model": ("---", lambda entry: entry.key.model),
    "parameters": ("--:", lambda entry: format_count(entry.key.parameters)),
    "device": ("---", lambda entry: device_cell(entry.key)),
    "precision": ("---", lambda entry: precision_cell(entry.key)),
    "phase": ("---", lambda entry: entry.key.phase),
    "batch (rows)": ("--:", lambda entry: str(entry.key.rows)),
    "microbatch size (rows)": ("--:", lambda entry: str(entry.size.microbatch_size)),
    "microbatches": ("--:", lambda entry: str(entry.num_microbatches)),
    "peak memory": ("--:", _peak),
}

COMMAND = Command(
    name="cache",
    brief="list or clear the microbatch sizes that runs have found",
    description=DESCRIPTION,
    examples=(
        "automicro cache --model GPT2LMHeadModel",
        "automicro cache --clear --older-than 30d",
        "automicro cache --json",
    ),
    exit_codes={
        0: "listed or cleared; what cannot be read was told on stderr",
        1: "a file could not be removed",
    },
    add_arguments=add_arguments,
    run=run,
    place=10,
)
