"""Sizes that runs found, kept for the next run: one small JSON file for each kind of run.

fsspec reads and writes, in a folder and behind a URL alike.
"""

import dataclasses
import hashlib
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from automicro.errors import SizeCacheWarning, describe_error, warn
from automicro.files import write_whole

T = TypeVar("T")

VARIABLE = "AUTOMICRO_CACHE"
SECONDS = 15.0  # that an answer may take
_NAME = re.compile(r"[0-9a-f]{64}\.json")
_SECRET = re.compile(r"(?<=://)[^/@\s]*@")

RunKey: TypeAlias = Mapping[str, Any]
"""The kind of run that a size was found in, as plain values; see `describe_run`."""


def sizes_folder() -> str:
    """Return the folder of remembered sizes, or its URL. It need not exist.

    It lies in ``$AUTOMICRO_CACHE``, else in ``$XDG_CACHE_HOME/automicro``, else in
    ``~/.cache/automicro``.
    """
    if named := os.environ.get(VARIABLE):
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


def file_of(key: RunKey) -> str:
    """Return the name of the file of a kind of run, the same on every machine."""
    return f"{digest_of(key)}.json"


@dataclass(frozen=True, kw_only=True)
class RememberedSize:
    """The microbatch size that a run settled on, as its file holds it.

    Attributes:
        key: the kind of run.
        microbatch_size: rows of the largest microbatch.
        cost_per_row: elements of a row of the batch that it was found with.
        peak_bytes: of an optimization batch at that size.
        level: how microbatches were computed, see ``when_too_large``.
        written_at: seconds since 1970.

    Raises:
        ValueError: values that cannot have been measured.
    """

    key: RunKey = field(hash=False)
    microbatch_size: int
    cost_per_row: float | None = None
    peak_bytes: int | None = None
    level: str = "plain"
    written_at: float = field(default_factory=time.time, compare=False)

    def __post_init__(self) -> None:
        numbers = self.microbatch_size, self.cost_per_row or 1, self.peak_bytes or 1
        is_measured = all(0 < number < math.inf for number in (*numbers, self.written_at))
        if not is_measured or self.microbatch_size > self.key["rows"]:
            raise ValueError(f"{self} cannot have been measured: give values of a batch that ran")

    @property
    def file(self) -> str:
        """The name of its file."""
        return file_of(self.key)


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
        """Return what was found for a kind of run."""
        return None if self.has_failed else self._read(file_of(key))

    def remember(self, size: RememberedSize) -> None:
        """Write a size in place of what was there for its key."""
        if not self.has_failed:
            text = json.dumps(dataclasses.asdict(size), indent=1, allow_nan=False).encode()
            self._ask("written", size.file, lambda fs, path: _write(fs, path, text))

    def entries(self) -> list[RememberedSize]:
        """Return all that is remembered, by model, device and rows."""
        order = "model", "parameters", "device", "memory_bytes", "phase", "rows"
        found = filter(None, map(self._read, self._ask("listed", "", _names) or ()))
        return sorted(found, key=lambda size: [size.key[each] or 0 for each in order])

    def clear(self, which: Callable[[RememberedSize], bool] | None = None) -> int:
        """Remove sizes, and return how many are gone."""
        names = self._ask("listed", "", _names) or []
        if which is not None:
            names = [each.file for each in self.entries() if which(each)]
        # Others may clear at the same time: what they have removed is not counted.
        gone = [self._ask("removed", name, lambda fs, path: not fs.rm_file(path)) for name in names]
        return gone.count(True)

    def _read(self, name: str) -> RememberedSize | None:
        # A size takes less than a kilobyte: a huge file in its place is not read to its end.
        text = self._ask("read", name, lambda fs, path: fs.cat_file(path, end=1 << 20))
        if text is None:
            return None
        try:
            size = RememberedSize(**json.loads(text))
            # So no value of the key can be another, and none is missing.
            if size.file != name:
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
        # What is not there was not remembered yet, which is no failure.
        if done == "written" or not isinstance(errors[-1], FileNotFoundError):
            self.has_failed = True
            self._warn(
                f"{self.folder}/{name} cannot be {done} ({describe_error(errors[-1])}): "
                f"sizes are not remembered; give access to it, or set {VARIABLE} to another folder"
            )
        return None

    def _warn(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(_SECRET.sub("…@", message), SizeCacheWarning)


def _names(fs: Any, folder: str) -> list[str]:
    names = (str(each).rpartition("/")[2] for each in fs.ls(folder, detail=False, refresh=True))
    return sorted(filter(_NAME.fullmatch, names))


def _write(fs: Any, path: str, content: bytes) -> None:
    from fsspec.implementations.local import LocalFileSystem

    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    if isinstance(fs, LocalFileSystem):
        write_whole(Path(path), lambda file: file.write(content))
    else:
        fs.pipe_file(path, content)  # stores show an object once it is whole
