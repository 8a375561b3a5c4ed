"""What a checkpoint says about itself. Written last: without it, a folder is no checkpoint."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automicro.checkpoints.files import FileSum, NewFolder
from automicro.errors import CheckpointError, DamagedCheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
"""Raised by one where an older automicro could not load what this one writes."""

_ALL = slice(None)
_REMEDY = "it was cut short or changed; load another checkpoint, and delete this one"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The step, the metrics and the files of a checkpoint.

    Attributes:
        step: optimization batches done.
        metrics: values by name.
        files: the sum of every file but the manifest, by name.
        world_size: how many ranks saved it.
    """

    step: int
    metrics: Mapping[str, float]
    files: Mapping[str, FileSum]
    world_size: int = 1


def write_manifest(
    new: NewFolder, *, step: int, metrics: Mapping[str, float], world_size: int = 1
) -> None:
    """Write the manifest of all files in a new folder.

    Args:
        new: the folder, with all its other files in it.
        step: optimization batches done.
        metrics: values by name.
        world_size: how many ranks have written into it.

    Raises:
        OSError: it could not be written.
    """
    content = {
        "format": FORMAT,
        "step": step,
        "world_size": world_size,
        "metrics": {name: float(value) for name, value in metrics.items()},
        "files": {
            name: {"size": each.size, "crc32": each.crc32} for name, each in new.sums.items()
        },
    }
    with new.create(MANIFEST) as stream:
        stream.write(json.dumps({"crc32": _crc32(content)} | content, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Args:
        folder: of the checkpoint.

    Raises:
        DamagedCheckpointError: there is none, or it is incomplete or was changed.
        CheckpointError: it was written by a newer automicro.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
        is_whole = content.pop("crc32") == _crc32(content)
    except OSError as error:
        raise DamagedCheckpointError(
            f"{path} cannot be read ({error.strerror}): {_REMEDY}"
        ) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is no manifest: {_REMEDY}") from error
    if not is_whole:
        raise DamagedCheckpointError(f"{path} does not match its own checksum: {_REMEDY}")
    return _of(content, path)


def verify(folder: Path, *, contents: bool = True, share: slice = _ALL) -> Manifest:
    """Read the manifest of a checkpoint and compare the files with it.

    Args:
        folder: of the checkpoint.
        contents: read every file to the end. Without, only their sizes are compared.
        share: of which files to read, where other ranks read the others.

    Raises:
        DamagedCheckpointError: a file is missing, incomplete or was changed; the message names it.
        CheckpointError: it was written by a newer automicro.
    """
    manifest = read_manifest(folder)
    read = set(list(manifest.files)[share]) if contents else ()
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
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


def _of(content: Mapping[str, Any], path: Path) -> Manifest:
    try:
        version = content["format"]
        if version > FORMAT:
            raise CheckpointError(
                f"{path} has the format {version}, and this automicro reads up to {FORMAT}: "
                "install the newer automicro that wrote it"
            )
        files = {}
        for name, each in content["files"].items():
            if Path(name).name != name:
                raise DamagedCheckpointError(f"{path} names {name!r}, outside of it: {_REMEDY}")
            files[name] = FileSum(size=each["size"], crc32=each["crc32"])
        return Manifest(
            step=content["step"],
            metrics=content["metrics"],
            files=files,
            world_size=content.get("world_size", 1),  # one was not told at first
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} is no manifest: {_REMEDY}") from error


def _crc32(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
