"""One file of the cache on the disk, while other runs read, write and clear the same."""

import json
import os
import re
import stat
import tempfile
import time
from pathlib import Path

from automicro.size_cache.record import Entry, UnreadableEntryError

_NAME = re.compile(r"[0-9a-f]{64}\.json")
_LEFTOVER = re.compile(r"\.[0-9a-f]{64}\..*\.tmp")
_MOST_BYTES = 1 << 20
_LEFTOVER_SECONDS = 3600


def read_entry(path: Path) -> Entry | None:
    """Read one file; None where there is none.

    Raises:
        OSError: it cannot be read.
        UnreadableEntryError: it holds no size that can be used.
    """
    try:
        facts = path.stat()
        # A pipe would wait for ever for its writer, and a large file is none of ours.
        if not stat.S_ISREG(facts.st_mode):
            raise UnreadableEntryError("it is no file")
        if facts.st_size > _MOST_BYTES:
            raise UnreadableEntryError(f"it has {facts.st_size} bytes")
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return Entry.from_content(json.loads(content), path)
    except UnreadableEntryError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableEntryError("it is no JSON, or cut short") from error


def write_entry(entry: Entry) -> None:
    """Write a file in one step: whoever reads meanwhile sees the old one or the new one, whole.

    It is not forced onto the disk: what a crash takes is found again.

    Raises:
        OSError: it cannot be written.
    """
    folder = entry.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(entry.content(), indent=1, allow_nan=False)
    descriptor, name = tempfile.mkstemp(prefix=f".{entry.path.stem}.", suffix=".tmp", dir=folder)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(name, entry.path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def entry_paths(folder: Path) -> list[Path]:
    """Return the files whose names the cache gives, in order; others are not the cache's.

    Raises:
        OSError: the folder cannot be listed.
    """
    try:
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def remove_leftovers(folder: Path) -> None:
    """Remove what writers that were killed left behind, as far as possible."""
    try:
        for path in folder.iterdir():
            if not _LEFTOVER.fullmatch(path.name):
                continue
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                path.unlink()
    except OSError:
        return  # another run removed it, or it stays: it is never read
