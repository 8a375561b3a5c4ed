"""One file of the cache: what it holds, and reading and writing it beside other runs."""

import dataclasses
import json
import math
import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automicro.remembered.key import RunKey

FORMAT = 1
"""Raised by one where an older automicro would misread what this one writes."""


class UnreadableEntryError(ValueError):
    """A file holds no size that can be used. The message says why, and nothing else."""


@dataclass(frozen=True, kw_only=True)
class RememberedSize:
    """The microbatch size that a run settled on, with what was measured of it.

    Attributes:
        microbatch_size: rows of the largest microbatch.
        cost_per_row: of the batches it was found with, in the unit of the policy (tokens, say).
        peak_bytes: of an optimization batch at that size.
        seconds: of an optimization batch at that size.

    Raises:
        ValueError: values that nobody can have measured.

    >>> RememberedSize(microbatch_size=16).peak_bytes is None
    True
    """

    microbatch_size: int
    cost_per_row: float | None = None
    peak_bytes: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if type(self.microbatch_size) is not int or self.microbatch_size < 1:
            raise ValueError(
                f"microbatch_size={self.microbatch_size!r} is no size: give an int of at least 1"
            )
        if self.peak_bytes is not None and (
            type(self.peak_bytes) is not int or self.peak_bytes < 0
        ):
            raise ValueError(f"peak_bytes={self.peak_bytes!r}: give a number of bytes, or None")
        for name in ("cost_per_row", "seconds"):
            value = getattr(self, name)
            if value is None:
                continue
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: give a finite number above 0, or None")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One remembered size with what it was found for.

    Attributes:
        key: the kind of run.
        size: what was found.
        written_at: seconds since 1970.
        path: of its file.
    """

    key: RunKey
    size: RememberedSize
    written_at: float
    path: Path

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a batch of as many rows as the key has."""
        return -(-self.key.rows // self.size.microbatch_size)

    def content(self) -> dict[str, Any]:
        """What its file holds."""
        return {
            "format": FORMAT,
            "written_at": self.written_at,
            "size": dataclasses.asdict(self.size),
            "key": self.key.content(),
        }

    @classmethod
    def from_content(cls, content: Any, path: Path) -> "Entry":
        """Read what a file holds.

        Args:
            content: of its JSON.
            path: of the file, whose name is the hash of the key.

        Raises:
            UnreadableEntryError: it is something else, or of another key than the name says.
        """
        if not isinstance(content, dict) or "format" not in content:
            raise UnreadableEntryError("it is no remembered size")
        if content["format"] != FORMAT:
            raise UnreadableEntryError(
                f"it has format {content['format']!r:.20}, and this automicro reads {FORMAT}"
            )
        try:
            key = RunKey.from_content(content["key"])
            size = RememberedSize(**content["size"])
            written_at = content["written_at"]
        except (KeyError, TypeError, ValueError) as error:
            raise UnreadableEntryError(f"it is damaged: {error}") from error
        if type(written_at) not in (int, float) or not 0 <= written_at < math.inf:
            raise UnreadableEntryError(f"it is damaged: it was written at {written_at!r:.60}")
        if size.microbatch_size > key.rows:
            raise UnreadableEntryError(
                f"it is damaged: microbatches of {size.microbatch_size} of {key.rows} rows"
            )
        if key.digest != path.stem:
            raise UnreadableEntryError("its key is not the one that its name stands for")
        return cls(key=key, size=size, written_at=written_at, path=path)


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
