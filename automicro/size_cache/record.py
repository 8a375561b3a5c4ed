"""What one file of the cache holds."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automicro.size_cache.key import RunKey

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
