"""What a size was found for, and the file that holds it, beside other runs."""

import dataclasses
import hashlib
import json
import math
import re
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automicro.files import write_whole
from automicro.remembered.remote import RemotePath

_DIMENSION = re.compile(r"(?<=[\[ ])\d+(?=[,\]])")


@dataclass(frozen=True, kw_only=True)
class RunKey:
    """The kind of run that a size was found in. Two runs with the same key share their sizes.

    Some of what decides about memory cannot be seen from outside, such as activation checkpointing
    inside a model. So a size that is found is a first proposal, and never more.

    Attributes:
        model: class names of all modules that take part.
        structure: hash of these modules: classes, parameters, buffers, with name, shape, dtype and
            whether they are trained.
        parameters: how many values all parameters have.
        device: its name.
        memory_bytes: what the run may use of it: the limit or else all; None where nobody says.
        precision: as the `Microbatcher` has it.
        phase: ``"train"`` or ``"eval"``.
        compiled: whether some module is compiled.
        optimizer: its class; None without one.
        rows: of the batch.
        shapes: of the batch's tensors by path, without the rows: ``{"0": "float32[1, 8, 8]"}``.
        world_size: processes that train together.
        automicro: its version.
        torch: its version.

    >>> key = RunKey(
    ...     model="Linear", structure="1f2e", parameters=18, device="CPU", memory_bytes=None,
    ...     precision="fp32", phase="train", compiled=False, optimizer="AdamW", rows=64,
    ...     shapes={"0": "float32[8]"}, world_size=1, automicro="0.1.0", torch="2.13.0",
    ... )
    >>> key.with_any_shape().shapes
    {'0': 'float32[?]'}
    >>> RunKey.from_content(key.content()) == key
    True
    """

    model: str
    structure: str
    parameters: int
    device: str
    memory_bytes: int | None
    precision: str
    phase: str
    compiled: bool
    optimizer: str | None
    rows: int
    shapes: Mapping[str, str] = field(hash=False)
    world_size: int
    automicro: str
    torch: str

    def content(self) -> dict[str, Any]:
        """The same as values that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_content(cls, content: Any) -> "RunKey":
        """Read what `content` returned.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(content, dict) or content.keys() != _TYPES.keys():
            raise ValueError("its key has other fields")
        for name, types in _TYPES.items():
            # True is an int to Python, and no number of rows.
            if type(content[name]) not in types:
                raise ValueError(f"{name} of its key is {content[name]!r:.60}")
        if not all(isinstance(shape, str) for shape in content["shapes"].values()):
            raise ValueError("shapes of its key are no texts")
        if content["rows"] < 1:
            raise ValueError(f"rows of its key is {content['rows']}")
        return cls(**content)

    @property
    def digest(self) -> str:
        """SHA-256 of the content in one canonical spelling: the same on every machine."""
        return sha256_of(self.content())

    def with_any_shape(self) -> "RunKey":
        """The key of runs whose batches have other lengths each time: dtypes and dimensions stay.

        What a size is worth there depends on the cost of a row, which is remembered beside it.
        """
        shapes = {path: _DIMENSION.sub("?", shape) for path, shape in self.shapes.items()}
        return dataclasses.replace(self, shapes=shapes)


def sha256_of(content: Any) -> str:
    """Return the SHA-256 of values, whatever the order of their mappings.

    >>> sha256_of({"a": 1, "b": 2}) == sha256_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "structure": (str,),
    "parameters": (int,),
    "device": (str,),
    "memory_bytes": (int, type(None)),
    "precision": (str,),
    "phase": (str,),
    "compiled": (bool,),
    "optimizer": (str, type(None)),
    "rows": (int,),
    "shapes": (dict,),
    "world_size": (int,),
    "automicro": (str,),
    "torch": (str,),
}


FORMAT = 1
"""Raised by one where what is written, or what it means, changes."""


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
        level: how microbatches were computed, see ``when_too_large``.

    Raises:
        ValueError: values that nobody can have measured.

    >>> RememberedSize(microbatch_size=16).peak_bytes is None
    True
    """

    microbatch_size: int
    cost_per_row: float | None = None
    peak_bytes: int | None = None
    seconds: float | None = None
    level: str = "plain"

    def __post_init__(self) -> None:
        if not isinstance(self.level, str):
            raise ValueError(f"level={self.level!r}: give the name of a level")
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
    path: Path | RemotePath

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
    def from_content(cls, content: Any, path: Path | RemotePath) -> "Entry":
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


def read_entry(path: Path | RemotePath) -> Entry | None:
    """Read one file; None where there is none.

    Raises:
        OSError: it cannot be read.
        UnreadableEntryError: it holds no size that can be used.
    """
    try:
        content = _read(path)
    except FileNotFoundError:
        return None
    try:
        return Entry.from_content(json.loads(content), path)
    except UnreadableEntryError:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableEntryError("it is no JSON, or cut short") from error


def _read(path: Path | RemotePath) -> bytes:
    if isinstance(path, RemotePath):
        content = path.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise UnreadableEntryError(f"it has more than {_MOST_BYTES} bytes")
        return content
    facts = path.stat()
    # A pipe would wait for ever for its writer, and a large file is none of ours.
    if not stat.S_ISREG(facts.st_mode):
        raise UnreadableEntryError("it is no file")
    if facts.st_size > _MOST_BYTES:
        raise UnreadableEntryError(f"it has {facts.st_size} bytes")
    return path.read_bytes()


def write_entry(entry: Entry) -> None:
    """Write a file in one step: whoever reads meanwhile sees the old one or the new one, whole.

    It is not forced onto the disk: what a crash takes is found again.

    Raises:
        OSError: it cannot be written.
    """
    text = f"{json.dumps(entry.content(), indent=1, allow_nan=False)}\n".encode()
    if isinstance(entry.path, RemotePath):
        entry.path.write(text)
        return
    folder = entry.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    # For whoever shares the folder: a team, where it is one's.
    mode = stat.S_IMODE(folder.stat().st_mode) & 0o666
    write_whole(entry.path, lambda file: file.write(text), mode=mode)


def entry_paths(folder: Path | RemotePath) -> list[Path] | list[RemotePath]:
    """Return the files whose names the cache gives, in order; others are not the cache's.

    Raises:
        OSError: the folder cannot be listed.
    """
    try:
        if isinstance(folder, RemotePath):
            return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
        return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def remove_leftovers(folder: Path | RemotePath) -> None:
    """Remove what writers that were killed left behind, as far as possible."""
    if isinstance(folder, RemotePath):
        return  # an object is there as a whole or not at all
    try:
        for path in folder.iterdir():
            if not _LEFTOVER.fullmatch(path.name):
                continue
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                path.unlink()
    except OSError:
        return  # another run removed it, or it stays: it is never read
