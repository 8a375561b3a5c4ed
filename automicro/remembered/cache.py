"""The cache of microbatch sizes, with one small JSON file for each kind of run."""

# fsspec reads and writes the files, in a local folder as well as at a URL.

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
SECONDS = 15.0  # time limit of a request
_NAME = re.compile(r"[0-9a-f]{64}\.json")
_SECRET = re.compile(r"(?<=://)[^/@\s]*@")

RunKey: TypeAlias = Mapping[str, Any]
"""The kind of run that a size was found in, as plain values; see `describe_run`."""


def sizes_folder() -> str:
    """Return the folder of remembered sizes, or its URL. It need not exist."""
    # In ``$AUTOMICRO_CACHE``, or else ``$XDG_CACHE_HOME/automicro``, or else
    # ``~/.cache/automicro``.
    if named := os.environ.get(VARIABLE):
        return f"{named.rstrip('/')}/sizes"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # According to the specification of this variable, relative paths are ignored.
    return str((base if base.is_absolute() else Path.home() / ".cache") / "automicro" / "sizes")


def digest_of(content: Any) -> str:
    """Return the SHA-256 of plain values, regardless of the order of mappings.

    >>> digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_of(key: RunKey) -> str:
    """Return the file name for a kind of run, which is the same on every machine."""
    return f"{digest_of(key)}.json"


@dataclass(frozen=True, kw_only=True)
class RememberedSize:
    """The microbatch size that a run settled on, with the contents of its file."""

    key: RunKey = field(hash=False)  # the kind of run
    microbatch_size: int  # rows of the largest microbatch
    cost_per_row: float | None = None  # elements of a row of the batch with which it was found
    peak_bytes: int | None = None  # peak memory of an optimization batch at that size
    level: str = "plain"  # the level of memory savers, see ``when_too_large``
    # Seconds since 1970.
    written_at: float = field(default_factory=time.time, compare=False)

    def __post_init__(self) -> None:
        numbers = self.microbatch_size, self.cost_per_row or 1, self.peak_bytes or 1
        is_measured = all(0 < number < math.inf for number in (*numbers, self.written_at))
        if not is_measured or self.microbatch_size > self.key["rows"]:
            raise ValueError(f"{self} cannot have been measured. Use values of a batch that ran")

    @property
    def is_cut(self) -> bool:
        """Whether the batch had several microbatches."""
        return bool(self.microbatch_size < self.key["rows"])

    @property
    def elements(self) -> float:
        """The elements of the largest microbatch."""
        return self.microbatch_size * (self.cost_per_row or 1.0)

    @property
    def file(self) -> str:
        """The name of its file."""
        return file_of(self.key)


class SizeCache:
    """The sizes that runs have found. Its files are data, so reading one executes no code."""

    # Files that cannot be used are ignored, with one `SizeCacheWarning` per cache.

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._url = sizes_folder() if folder is None else os.fspath(folder)
        self.folder = _SECRET.sub("…@", self._url)
        """The folder of the sizes, without a password."""
        self.has_failed = False
        """Whether reading or writing failed; `find` and `remember` then do nothing."""
        self._has_warned = False

    def find(self, key: RunKey) -> RememberedSize | None:
        """Return the size found for a kind of run, or None."""
        return None if self.has_failed else self._read(file_of(key))

    def remember(self, size: RememberedSize) -> None:
        """Write a size, replacing the earlier one for its key."""
        if not self.has_failed:
            text = json.dumps(dataclasses.asdict(size), indent=1, allow_nan=False).encode()
            self._ask("written", size.file, lambda fs, path: _write(fs, path, text))

    def entries(self) -> list[RememberedSize]:
        """Return all remembered sizes, sorted by model, device and rows."""
        order = "model", "parameters", "device", "memory_bytes", "phase", "rows"
        found = filter(None, map(self._read, self._ask("listed", "", _names) or ()))
        return sorted(found, key=lambda size: [size.key[each] or 0 for each in order])

    def clear(self) -> int:
        """Remove all sizes, and return the number of removed files."""
        names = self._ask("listed", "", _names) or []
        # Other processes might clear at the same time: files that they removed do not count.
        gone = [self._ask("removed", name, lambda fs, path: not fs.rm_file(path)) for name in names]
        return gone.count(True)

    def _read(self, name: str) -> RememberedSize | None:
        # A size takes less than a kilobyte; a huge file in its place must not be read to its end.
        text = self._ask("read", name, lambda fs, path: fs.cat_file(path, end=1 << 20))
        if text is None:
            return None
        try:
            size = RememberedSize(**json.loads(text))
            # Ensures that no value of the key was changed or is missing.
            if size.file != name:
                raise ValueError("its key belongs to another file")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            self._warn(
                f"{self.folder}/{name} holds no remembered size ({describe_error(error)}), so it "
                "is ignored. Run automicro cache --clear to remove it"
            )
            return None
        return size

    def _ask(self, done: str, name: str, work: Callable[[Any, str], T]) -> T | None:
        """Return the result of work on a file or on the folder; None if it is missing or failed."""
        answers: list[T] = []
        errors: list[Exception] = [TimeoutError(f"no answer within {SECONDS:g} seconds")]

        def ask() -> None:
            try:
                import fsspec

                answers.append(work(*fsspec.core.url_to_fs(f"{self._url}/{name}".rstrip("/"))))
            except Exception as error:  # from any library behind fsspec
                errors.append(error)

        # In a thread, because a file system that hangs must delay neither the run nor its end.
        thread = threading.Thread(target=ask, daemon=True, name="automicro-cache")
        thread.start()
        thread.join(SECONDS)
        if answers:
            return answers[0]
        # A missing file is a size that was not remembered yet, not a failure.
        if done == "written" or not isinstance(errors[-1], FileNotFoundError):
            self.has_failed = True
            self._warn(
                f"{self.folder}/{name} cannot be {done} ({describe_error(errors[-1])}), so sizes "
                f"are not remembered. Give access to it, or set {VARIABLE} to another folder"
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
        fs.pipe_file(path, content)  # object stores show an object only once it is complete
