"""Sizes that runs found, kept for the next run: one small JSON file for each kind of run.

fsspec reads and writes, in a folder and behind a URL alike.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from automicro.errors import SizeCacheWarning, describe_error, warn
from automicro.files import write_whole

T = TypeVar("T")

VARIABLE = "AUTOMICRO_CACHE"
SECONDS = 15.0  # that an answer may take
_NAME = re.compile(r"[0-9a-f]{64}\.json")
_DIMENSION = re.compile(r"(?<=[\[ ])\d+(?=[,\]])")
_SECRET = re.compile(r"(?<=://)[^/@\s]*@")


def sizes_folder() -> str:
    """Return the folder of remembered sizes, or its URL. It need not exist.

    It lies in ``$AUTOMICRO_CACHE``, else in ``$XDG_CACHE_HOME/automicro``, else in
    ``~/.cache/automicro``.
    """
    named = os.environ.get(VARIABLE)
    if not named and f"{VARIABLE}_DIR" in os.environ:
        warn(f"{VARIABLE}_DIR is not read any more; name it in {VARIABLE}", SizeCacheWarning)
    if named:
        return f"{named.rstrip('/')}/sizes"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The specification of this variable wants relative paths ignored.
    return str((base if base.is_absolute() else Path.home() / ".cache") / "automicro" / "sizes")


def digest_of(content: Any) -> str:
    """Return the SHA-256 of plain values, whatever the order of their mappings.

    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class RunKey:
    """The kind of run that a size was found in. Two runs with the same key share their size.

    Attributes:
        model: class names of all modules that take part.
        structure: hash of their classes, parameters and buffers.
        parameters: how many values all parameters have.
        device: its name.
        memory_bytes: that the run may use of it; None where that is not known.
        precision: as the `Microbatcher` has it.
        phase: ``"train"`` or ``"eval"``.
        compiled: whether a module is compiled.
        optimizer: its class; None without one.
        rows: of the batch.
        shapes: of the batch's tensors by path, without the rows: ``{"0": "float32[1, 8, 8]"}``.
        world_size: processes that train together.
        automicro: its version.
        torch: its version.
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

    @property
    def file(self) -> str:
        """Name of the file of its size, the same on every machine."""
        return f"{digest_of(dataclasses.asdict(self))}.json"

    def with_any_shape(self) -> "RunKey":
        """The key of runs whose batches have other lengths each time."""
        shapes = {path: _DIMENSION.sub("?", shape) for path, shape in self.shapes.items()}
        return dataclasses.replace(self, shapes=shapes)


@dataclass(frozen=True, kw_only=True)
class RememberedSize:
    """The microbatch size that a run settled on, as its file holds it.

    Attributes:
        key: the kind of run.
        microbatch_size: rows of the largest microbatch.
        cost_per_row: of the batch it was found with, in the unit of the policy (tokens, say).
        peak_bytes: of an optimization batch at that size.
        level: how microbatches were computed, see ``when_too_large``.
        written_at: seconds since 1970.

    Raises:
        ValueError: values that cannot have been measured.
    """

    key: RunKey
    microbatch_size: int
    cost_per_row: float | None = None
    peak_bytes: int | None = None
    level: str = "plain"
    written_at: float = field(default_factory=time.time, compare=False)

    def __post_init__(self) -> None:
        numbers = self.microbatch_size, self.cost_per_row or 1, self.peak_bytes or 1
        is_measured = all(0 < number < math.inf for number in (*numbers, self.written_at))
        if not is_measured or self.microbatch_size > self.key.rows:
            raise ValueError(f"{self} cannot have been measured: give values of a batch that ran")


class SizeCache:
    """Sizes that runs have found. Files are data: reading one runs nothing.

    What fails or is damaged is left out, with one `SizeCacheWarning` for each cache.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._url = sizes_folder() if folder is None else os.fspath(folder)
        self.folder = _SECRET.sub("…@", self._url)
        """Where sizes lie, for people: without a password."""
        self.has_failed = False
        """Whether it could not be read or written; `find` and `remember` ask no more then."""
        self._has_warned = False

    def find(self, key: RunKey) -> RememberedSize | None:
        """Return what was found for a kind of run: for these shapes, or else for varying ones."""
        for each in (key, key.with_any_shape()):
            found = None if self.has_failed else self._read(each.file)
            if found is not None:
                return found
        return None

    def remember(self, size: RememberedSize) -> None:
        """Write a size in place of what was there for its key."""
        if not self.has_failed:
            text = json.dumps(dataclasses.asdict(size), indent=1, allow_nan=False)
            self._ask("written", size.key.file, lambda fs, path: _write(fs, path, text.encode()))

    def entries(self) -> list[RememberedSize]:
        """Return all that is remembered, by model, device and rows."""
        found = filter(None, map(self._read, self._ask("listed", "", _names) or ()))
        return sorted(found, key=lambda each: _order(each.key))

    def clear(self, which: Callable[[RememberedSize], bool] | None = None) -> int:
        """Remove sizes, and return how many are gone."""
        names = self._ask("listed", "", _names) or []
        if which is not None:
            names = [each.key.file for each in self.entries() if which(each)]
        # Others may clear at the same time: what they have removed is not counted.
        gone = [self._ask("removed", name, lambda fs, path: not fs.rm_file(path)) for name in names]
        return gone.count(True)

    def _read(self, name: str) -> RememberedSize | None:
        # A size takes less than a kilobyte: a huge file in its place is not read to its end.
        text = self._ask("read", name, lambda fs, path: fs.cat_file(path, end=1 << 20))
        if text is None:
            return None
        try:
            content = json.loads(text)
            size = RememberedSize(**{**content, "key": RunKey(**content["key"])})
            # A file that was renamed would give this run the size of another.
            if size.key.file != name:
                raise ValueError("its key is that of another file")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            self._warn(
                f"{self.folder}/{name} holds no remembered size ({describe_error(error)}): it is "
                "ignored, and automicro cache --clear removes it"
            )
            return None
        return size

    def _ask(self, done: str, name: str, work: Callable[[Any, str], T]) -> T | None:
        """The result of work on a file, or on the folder; None where it is missing or failed."""
        answers: list[T] = []
        errors: list[Exception] = [TimeoutError(f"no answer within {SECONDS:g} seconds")]

        def ask() -> None:
            try:
                import fsspec

                answers.append(work(*fsspec.core.url_to_fs(f"{self._url}/{name}".rstrip("/"))))
            except Exception as error:  # of any library behind fsspec
                errors.append(error)

        # A file system that does not answer must hold up neither the run nor its end.
        thread = threading.Thread(target=ask, daemon=True, name="automicro-cache")
        thread.start()
        thread.join(SECONDS)
        if answers:
            return answers[0]
        error = errors[-1]
        # What is not there was not remembered yet, which is no failure.
        if done == "written" or not isinstance(error, FileNotFoundError):
            self.has_failed = True
            self._warn(
                f"{self.folder}/{name} cannot be {done} ({describe_error(error)}): "
                f"sizes are not remembered; give access to it, or set {VARIABLE} to another folder"
            )
        return None

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(_SECRET.sub("…@", message), SizeCacheWarning)


def _names(fs: Any, folder: str) -> list[str]:
    names = (str(each).rpartition("/")[2] for each in fs.ls(folder, detail=False, refresh=True))
    return sorted(name for name in names if _NAME.fullmatch(name))


def _write(fs: Any, path: str, content: bytes) -> None:
    from fsspec.implementations.local import LocalFileSystem

    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if isinstance(fs, LocalFileSystem):
        # Readable and writable by those who share the folder.
        mode = stat.S_IMODE(Path(path).parent.stat().st_mode) & 0o666
        write_whole(Path(path), lambda file: file.write(content), mode=mode)
    else:
        fs.pipe_file(path, content)  # stores show an object once it is whole


def _order(key: RunKey) -> tuple[object, ...]:
    return key.model, key.parameters, key.device, key.memory_bytes or 0, key.phase, key.rows
