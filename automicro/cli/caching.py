"""What ``automicro cache`` does: list the sizes that runs have found, and forget them."""

import argparse
import re
import time
from collections.abc import Callable, Sequence

from automicro.cli.results import to_json
from automicro.cli.size_table import as_markdown, as_values, print_sizes
from automicro.errors import ConfigError
from automicro.remembered.cache import SizeCache
from automicro.remembered.entry import Entry

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")


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


def run_cache(arguments: argparse.Namespace) -> int:
    """Do what the command was asked for, and return the exit code."""
    forms = [name for name in ("json", "markdown", "clear") if getattr(arguments, name)]
    if len(forms) > 1:
        raise ConfigError(
            f"{' and '.join(f'--{name}' for name in forms)} do not go together: give one of them"
        )
    folder = arguments.folder
    if folder is not None and not folder.is_dir():
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
