"""The cache: found sizes, one file each. Nothing in it can stop a run."""

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from automicro.errors import SizeCacheWarning, warn
from automicro.remembered.entry import (
    Entry,
    RememberedSize,
    RunKey,
    UnreadableEntryError,
    entry_paths,
    read_entry,
    remove_leftovers,
    write_entry,
)
from automicro.remembered.remote import RemotePath, place_of

SHARED_VARIABLE, VARIABLE = "AUTOMICRO_CACHE", "AUTOMICRO_CACHE_DIR"


def sizes_folder() -> Path | RemotePath:
    """Return the folder of remembered sizes, which need not exist.

    It lies in ``$AUTOMICRO_CACHE``, a folder or a URL that a team shares, else in
    ``$AUTOMICRO_CACHE_DIR``, else in ``$XDG_CACHE_HOME/automicro``, else where the
    system keeps the caches of a user: ``~/.cache/automicro`` on Linux.

    >>> sizes_folder().name
    'sizes'
    """
    shared = os.environ.get(SHARED_VARIABLE)
    return (place_of(shared) if shared else _cache_folder()) / "sizes"


def _cache_folder() -> Path:
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own)
    # The specification of these variables wants relative paths ignored.
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "automicro"
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / "automicro"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "automicro"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else home / "AppData" / "Local") / "automicro" / "Cache"
    return home / ".cache" / "automicro"


logger = logging.getLogger(__name__)

CLEAR = "say automicro cache --clear"
_ELSEWHERE = f"the run goes on without; see that the place can be read, or unset {SHARED_VARIABLE}"

_Failures: TypeAlias = list[tuple[Path | RemotePath, Exception]]


class Cleared(NamedTuple):
    """What clearing did.

    Attributes:
        removed: files that are gone by it.
        kept: files that could not be removed.
    """

    removed: Sequence[Path | RemotePath]
    kept: Sequence[Path | RemotePath]


class SizeCache:
    """Sizes that runs have found, in a folder. Files are data: reading runs nothing of theirs.

    What cannot be read or written is left out, with one `SizeCacheWarning` for each cache.

    Args:
        folder: of the files, or a URL that fsspec reads; made when the first is written; that of
            the environment unless given.

    >>> import tempfile
    >>> from automicro.remembered.entry import RunKey
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

    def __init__(self, folder: Path | RemotePath | str | None = None) -> None:
        # A `Path`, or a `RemotePath`, which has of its methods what is used here.
        self.folder: Any = sizes_folder() if folder is None else _read_place(folder)
        self._has_warned = False
        self._is_given_up = False  # a place that does not answer is not waited for twice

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
                entry = None if self._is_given_up else read_entry(path)
            except (OSError, UnreadableEntryError) as error:
                is_elsewhere = isinstance(path, RemotePath) and isinstance(error, OSError)
                self._is_given_up |= is_elsewhere
                remedy = _ELSEWHERE if is_elsewhere else f"remove it, or {CLEAR}"
                self._warn(f"the remembered size in {path} is not used ({_why(error)}): {remedy}")
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
        if self._is_given_up:
            return
        try:
            write_entry(Entry(key=key, size=size, written_at=time.time(), path=path))
        except OSError as error:
            is_elsewhere = isinstance(path, RemotePath)
            self._is_given_up |= is_elsewhere
            another = SHARED_VARIABLE if is_elsewhere or self._is_shared else VARIABLE
            self._warn(
                f"the microbatch size that was found cannot be remembered in {path} "
                f"({_why(error)}): the next run finds it anew; make the folder writable, or set "
                f"{another} to another"
            )
        else:
            logger.debug("remembered microbatch size %s in %s", size.microbatch_size, path)

    def entries(self) -> list[Entry]:
        """Return all that is remembered, by model, device and rows."""
        entries: list[Entry] = []
        failures: _Failures = []
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
        failures: _Failures = []
        if which is None:
            paths: Sequence[Path | RemotePath] = self._paths(failures)
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

    @property
    def _is_shared(self) -> bool:
        return bool(os.environ.get(SHARED_VARIABLE))

    def _path(self, digest: str) -> Any:
        return self.folder / f"{digest}.json"

    def _paths(self, failures: "_Failures") -> Sequence[Path | RemotePath]:
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


def _read_place(folder: Path | RemotePath | str) -> Path | RemotePath:
    return place_of(folder) if isinstance(folder, str) else folder


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


def _list(failures: _Failures) -> str:
    path, error = failures[0]
    more = f" and {len(failures) - 1} more files" if len(failures) > 1 else ""
    return f"{path} ({_why(error)}){more}"


def _them(failures: _Failures) -> str:
    return "remove it" if len(failures) == 1 else "remove them"


class RememberedSizes:
    """What a run remembers: asked once at its first batch, written when its size changed.

    Args:
        cache: where sizes lie.
        key: of the run, from its first batch.

    >>> import tempfile
    >>> from automicro.remembered.entry import RunKey
    >>> key = RunKey(
    ...     model="Linear", structure="1f2e", parameters=18, device="CPU", memory_bytes=None,
    ...     precision="fp32", phase="train", compiled=False, optimizer="AdamW", rows=64,
    ...     shapes={"0": "float32[8]"}, world_size=1, automicro="0.1.0", torch="2.13.0",
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = RememberedSizes(SizeCache(folder), key)
    ...     first.recalled
    ...     first.settle(RememberedSize(microbatch_size=16), rows=64)
    ...     RememberedSizes(SizeCache(folder), key).recalled.microbatch_size
    16
    """

    def __init__(self, cache: SizeCache, key: RunKey) -> None:
        self._cache = cache
        self._key = key
        self._shapes = key.shapes
        self.recalled = cache.find(key)
        """What an earlier run found, None where there was none."""
        self._written = None if self.recalled is None else self._content(self.recalled)

    @property
    def varies(self) -> bool:
        """Whether batches of several shapes were seen, so that the size is not for one shape."""
        return self._key.shapes is not self._shapes

    def see(self, shapes: Mapping[str, str]) -> None:
        """Note the shapes of a batch, from `describe_shapes`; not needed once they vary.

        Args:
            shapes: of the batch.
        """
        if not self.varies and shapes != self._shapes:
            self._key = self._key.with_any_shape()
            # What was written for one shape does not stand under the new key.
            self._written = None

    def settle(self, size: RememberedSize, *, rows: int) -> None:
        """Write a size that a committed batch used, where it is another than before.

        Batches of other rows, such as the last one of an epoch, say nothing of this key.

        Args:
            size: what the batch used.
            rows: of the batch.
        """
        content = self._content(size)
        if rows != self._key.rows or content == self._written:
            return
        self._written = content
        self._cache.remember(self._key, size)

    def _content(self, size: RememberedSize) -> tuple[int, float | None, str]:
        """What makes two sizes the same: where lengths vary, as many rows may be longer ones."""
        return size.microbatch_size, size.cost_per_row if self.varies else None, size.level
