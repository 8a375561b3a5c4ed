"""The folder of a checkpoint during a save, and the manifest with the checksums of its files."""

import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from automicro import files
from automicro.errors import CheckpointError, DamagedCheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """Size and checksum of a file."""

    size: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> "FileSum":
        """Compute the size and the checksum of a file."""
        size = crc32 = 0
        # One buffer is reused, because a file can be larger than the memory.
        with path.open("rb", buffering=0) as file:
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            while count := file.readinto(buffer):
                size += count
                crc32 = zlib.crc32(buffer[:count], crc32)
        return cls(size=size, crc32=crc32)


class _SummedFile(io.FileIO):
    """A new file that computes the checksum of the data written to it."""

    # The first error is stored and later writes are discarded. torch writes from C++, where an
    # exception in the middle of an archive turns into another one or ends the process.

    def __init__(self, path: Path) -> None:
        # "x" fails if the file exists: two processes must not write into the same file.
        super().__init__(path, "x", opener=files.open_new)
        self.error: OSError | None = None
        self._crc32 = 0

    def write(self, data: "ReadableBuffer") -> int:
        view = memoryview(data).cast("B")
        if self.error is not None:
            return len(view)
        try:
            count = files.write(self.fileno(), view)
        except OSError as error:
            # Stored, because torch's code, which calls this, might swallow or replace the error.
            self.error = error
            return len(view)
        self._crc32 = zlib.crc32(view[:count], self._crc32)
        return count

    def sum(self) -> FileSum:
        return FileSum(size=self.tell(), crc32=self._crc32)


class NewFolder:
    """A folder that a save fills with files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file; at the end of the block, sync it to disk and record its checksum."""
        with _SummedFile(self.path / name) as raw:
            # Large blocks bypass the buffer, so they are not copied.
            stream = io.BufferedWriter(raw, _BUFFER_BYTES)
            try:
                yield stream
                stream.flush()
            except Exception as error:
                if raw.error is not None:
                    raise raw.error from error
                raise
            if raw.error is not None:
                raise raw.error
            # Sync before the folder gets its final name, or a power failure could leave a
            # checkpoint of empty files.
            files.sync(raw.fileno())
            self.sums[name] = raw.sum()

    def rename(self, old: str, new: str) -> None:
        """Rename a file and keep its checksum."""
        files.replace(self.path / old, self.path / new)
        self.sums[new] = self.sums.pop(old)


MANIFEST = "manifest.json"
FORMAT = 3
"""Incremented when the format or its meaning changes."""

_ALL = slice(None)
_REMEDY = "it was cut short or changed; load another checkpoint, and delete this one"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The step, the metrics and the files of a checkpoint."""

    step: int
    metrics: Mapping[str, float]
    files: Mapping[str, FileSum]
    world_size: int = 1


def write_manifest(
    new: NewFolder, *, step: int, metrics: Mapping[str, float], world_size: int = 1
) -> None:
    """Write the manifest of all files in a new folder."""
    content = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "metrics": {name: float(value) for name, value in metrics.items()},
        "files": {name: asdict(each) for name, each in new.sums.items()},
    }
    with new.create(MANIFEST) as stream:
        # The manifest has its own checksum, because all other files are checked against it.
        stream.write(json.dumps({"crc32": _crc32(content)} | content, indent=1).encode())


def _read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        if content.pop("crc32") != _crc32(content):
            raise DamagedCheckpointError(f"{path} does not match its own checksum: {_REMEDY}")
        # Not reported as damage, because find_newest would skip a checkpoint of a newer version.
        if (version := content.pop("format")) != FORMAT:
            raise CheckpointError(
                f"{path} has the format {version}, but this automicro reads {FORMAT}. Use the "
                "version that wrote it"
            )
        sums = {name: FileSum(**each) for name, each in content.pop("files").items()}
        # A checkpoint from an untrusted source must not name files outside its folder.
        if outside := [name for name in sums if Path(name).name != name]:
            raise DamagedCheckpointError(f"{path} lists {outside[0]!r}, outside of it: {_REMEDY}")
        return Manifest(files=sums, **content)
    except OSError as error:
        raise DamagedCheckpointError(
            f"{path} cannot be read ({error.strerror}): {_REMEDY}"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is not a manifest: {_REMEDY}") from error


def verify(folder: Path, *, contents: bool = True, share: slice = _ALL) -> Manifest:
    """Read the manifest of a checkpoint and compare its files with it."""
    manifest = _read_manifest(folder)
    # Several ranks each read one share of the files; sizes alone are compared without reading.
    read = set(list(manifest.files)[share]) if contents else ()
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
            # Most damaged files are truncated, which their size shows without reading them.
            if size != expected.size:
                raise DamagedCheckpointError(
                    f"{path} has {size:,} bytes of {expected.size:,}: {_REMEDY}"
                )
            if name in read and FileSum.of(path) != expected:
                raise DamagedCheckpointError(f"{path} does not match its checksum: {_REMEDY}")
        except OSError as error:
            raise DamagedCheckpointError(
                f"{path} cannot be read ({error.strerror}): {_REMEDY}"
            ) from error
    return manifest


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
