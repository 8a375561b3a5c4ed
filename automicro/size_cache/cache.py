"""The cache: found sizes, one file each. Nothing in it can stop a run."""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from automicro.errors import SizeCacheWarning
from automicro.size_cache.files import entry_paths, read_entry, remove_leftovers, write_entry
from automicro.size_cache.key import RunKey
from automicro.size_cache.place import sizes_folder
from automicro.size_cache.record import Entry, RememberedSize, UnreadableEntryError
from automicro.warn import warn

logger = logging.getLogger(__name__)

CLEAR = "say automicro cache --clear"


class Cleared(NamedTuple):
    """What clearing did.

    Attributes:
        removed: files that are gone by it.
        kept: files that could not be removed.
    """

    removed: list[Path]
    kept: list[Path]


class SizeCache:
    """Sizes that runs have found, in a folder. Files are data: reading runs nothing of theirs.

    What cannot be read or written is left out, with one `SizeCacheWarning` for each cache.

    Args:
        folder: of the files, made when the first is written; the user's own unless given.

    >>> import tempfile
    >>> from automicro.size_cache import RunKey
    >>> key = RunKey(
    ...     model="Linear", structure="1f2e", parameters=18, device="CPU", memory_bytes=None,
    ...     precision="fp32", phase="train", compiled=False, optimizer="AdamW", rows=64,
    ...     shapes={"0": "float32[8]"}, world_size=1, automicro="0.1.0", torch="2.13.0",
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = SizeCache(folder)
    ...     cache.remember(key, RememberedSize(microbatch_size=16))
    ...     cache.find(key).microbatch_size, len(cache.entries()), len(cache.clear().removed)
    (16, 1, 1)
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = sizes_folder() if folder is None else Path(folder)
        self._has_warned = False

    def __repr__(self) -> str:
        return f"SizeCache({str(self.folder)!r})"

    def find(self, key: RunKey) -> RememberedSize | None:
        """Return what was found for a kind of run: for these shapes, or else for varying ones.

        Args:
            key: of the run.
        """
        for each in dict.fromkeys((key.digest, key.with_any_shape().digest)):
            path = self._path(each)
            try:
                entry = read_entry(path)
            except (OSError, UnreadableEntryError) as error:
                self._warn(
                    f"the remembered size in {path} is not used ({_why(error)}): remove it, or "
                    f"{CLEAR}"
                )
                continue
            if entry is not None:
                return entry.size
        return None

    def remember(self, key: RunKey, size: RememberedSize) -> None:
        """Write what was found for a kind of run, in place of what was there.

        Args:
            key: of the run.
            size: what it settled on.

        Raises:
            ValueError: the size exceeds the rows of the key.
        """
        if size.microbatch_size > key.rows:
            raise ValueError(
                f"microbatches of {size.microbatch_size} rows cannot be cut from a batch of "
                f"{key.rows}: give the rows of the largest microbatch that was used"
            )
        path = self._path(key.digest)
        try:
            write_entry(Entry(key=key, size=size, written_at=time.time(), path=path))
        except OSError as error:
            self._warn(
                f"the microbatch size that was found cannot be remembered in {path} "
                f"({_why(error)}): the next run finds it anew; make the folder writable, or set "
                f"AUTOMICRO_CACHE_DIR to another"
            )
        else:
            logger.debug("remembered microbatch size %s in %s", size.microbatch_size, path)

    def entries(self) -> list[Entry]:
        """Return all that is remembered, by model, device and rows."""
        entries: list[Entry] = []
        failures: list[tuple[Path, Exception]] = []
        for path in self._paths(failures):
            try:
                entry = read_entry(path)
            except (OSError, UnreadableEntryError) as error:
                failures.append((path, error))
                continue
            if entry is not None:  # cleared meanwhile
                entries.append(entry)
        if failures:
            self._warn(f"{_list(failures)} cannot be read: {_them(failures)}, or {CLEAR}")
        return sorted(entries, key=_order)

    def clear(self, which: Callable[[Entry], bool] | None = None) -> "Cleared":
        """Remove sizes, and return which files are gone and which are not.

        Args:
            which: whether one is to go. Without it all of the cache's files go, damaged ones too;
                files with other names stay in any case.
        """
        failures: list[tuple[Path, Exception]] = []
        if which is None:
            paths = self._paths(failures)
            remove_leftovers(self.folder)
        else:
            paths = [entry.path for entry in self.entries() if which(entry)]
        removed = []
        for path in paths:
            try:
                path.unlink()
            except FileNotFoundError:  # another one clears, too
                continue
            except OSError as error:
                failures.append((path, error))
            else:
                removed.append(path)
        if failures:
            self._warn(f"{_list(failures)} cannot be removed: {_them(failures)} by hand")
        return Cleared(removed=removed, kept=[path for path, _ in failures])

    def _path(self, digest: str) -> Path:
        return self.folder / f"{digest}.json"

    def _paths(self, failures: list[tuple[Path, Exception]]) -> list[Path]:
        try:
            return entry_paths(self.folder)
        except OSError as error:
            failures.append((self.folder, error))
            return []

    def _warn(self, message: str) -> None:
        if self._has_warned:
            logger.debug("%s", message)
            return
        self._has_warned = True
        warn(message, SizeCacheWarning)


def _order(entry: Entry) -> tuple[object, ...]:
    key = entry.key
    return (
        key.model, key.parameters, key.device, key.memory_bytes or 0, key.phase, key.precision,
        key.rows, key.digest,
    )  # fmt: skip


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)


def _list(failures: list[tuple[Path, Exception]]) -> str:
    path, error = failures[0]
    more = f" and {len(failures) - 1} more files" if len(failures) > 1 else ""
    return f"{path} ({_why(error)}){more}"


def _them(failures: list[tuple[Path, Exception]]) -> str:
    return "remove it" if len(failures) == 1 else "remove them"
