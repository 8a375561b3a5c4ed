"""Writing a checkpoint completely or not at all."""

import errno
import logging
import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from automicro import files
from automicro.checkpoints.manifest import FileSum, NewFolder, write_manifest
from automicro.checkpoints.peers import ALONE, Peers, exchange, from_first
from automicro.checkpoints.state import Share

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata


logger = logging.getLogger(__name__)

PREFIX = ".tmp-"

# Machines can share a disk, so a process id alone does not show whether a save is running. A
# folder of another machine, or with a reused process id, counts as abandoned after this time.
_SECONDS_TO_LIVE = 24 * 3600
_in_flight: set[str] = set()


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Create a folder and remove it after the block unless it was renamed."""
    with _named_as_in_flight() as name:
        try:
            files.make_folder(parent / name)
            yield parent / name
        finally:
            # If it cannot be removed now, the next save removes it.
            with suppress(OSError):
                if (parent / name).exists():
                    files.remove_folder(parent / name)


def remove(path: Path) -> None:
    """Remove a checkpoint so that it never looks complete while it is being removed."""
    with _named_as_in_flight() as name:
        # Rename it first, which is atomic: half a folder would look like a damaged checkpoint.
        trash = path.parent / name
        files.replace(path, trash)
        files.remove_folder(trash)


def clear(parent: Path) -> None:
    """Remove the temporary folders of processes that have ended."""
    for path in sorted(parent.glob(f"{PREFIX}*")):
        # A save can be running in another process, or on another machine that shares the disk.
        if not _is_alive(path):
            logger.info("removing %s, left by an interrupted save", path)
            with suppress(FileNotFoundError):  # another process removed it first
                files.remove_folder(path)


@contextmanager
def _named_as_in_flight() -> Iterator[str]:
    name = f"{PREFIX}{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    _in_flight.add(name)
    try:
        yield name
    finally:
        _in_flight.discard(name)


def _host() -> str:
    return "".join(c if c.isalnum() else "_" for c in socket.gethostname())


def _is_alive(path: Path) -> bool:
    if path.name in _in_flight:
        return True
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:  # another process removed it first
        return True
    host, _, rest = path.name.removeprefix(PREFIX).partition("-")
    number = rest.partition("-")[0]
    # The processes of another machine cannot be checked.
    if host != _host() or not number.isdigit():
        return age < _SECONDS_TO_LIVE
    # A folder of this process that is not in flight could not be removed.
    return int(number) != os.getpid() and _runs(int(number)) and age < _SECONDS_TO_LIVE


def _runs(number: int) -> bool:
    if os.name == "nt":  # on Windows, os.kill would end the process
        return True
    try:
        os.kill(number, 0)
    except (OSError, OverflowError) as error:  # the process might belong to another user
        return not isinstance(error, ProcessLookupError)
    return True


_NAME = re.compile(r"(\d{5,})-step-(\d+)")


def list_checkpoints(folder: Path) -> list[Path]:
    """List the folders that are named like checkpoints, newest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=number_of, reverse=True)


def number_of(checkpoint: Path) -> int:
    """Parse the number at the start of a checkpoint's name; newer checkpoints have higher ones.

    >>> number_of(Path("00012-step-3400"))
    12
    """
    return int(checkpoint.name.partition("-")[0])


def write_checkpoint(
    folder: Path, *, share: Share, step: int, metrics: Mapping[str, float], peers: Peers = ALONE
) -> Path:
    """Write a checkpoint with the shares of all ranks and return its path."""
    # Rank 0 creates the folder, and renames it after all ranks have sent the checksums of their
    # files. Imported here because the import takes half a second, which only saving should cost.
    from automicro.checkpoints.tensors import TensorsToWrite, write_contents

    tensors = TensorsToWrite(share, is_first=peers.rank == 0)
    plans = exchange(peers, tensors.create_local_plan)
    table: Metadata | None = None  # of contents, on rank 0
    with ExitStack() as stack:

        def begin() -> tuple[Path, list[Any]]:
            nonlocal table
            all_plans, table = tensors.plan_all(plans)
            files.make_folders(folder)
            return stack.enter_context(temporary_folder(folder)), all_plans

        temporary, all_plans = from_first(peers, begin)
        new = NewFolder(temporary)

        def write() -> tuple[Any, dict[str, FileSum]]:
            results = tensors.write(new, all_plans[peers.rank])
            # Rank 0 writes its structure last, with the manifest, because loading starts from it.
            if peers.rank:
                _write_structure(new, structure_file(peers.rank), share)
            return results, new.sums

        written = exchange(peers, write)

        def commit() -> Path:
            assert table is not None
            write_contents(new, table, [results for results, _ in written])
            _write_structure(new, structure_file(0), share)
            for _, sums in written[1:]:
                new.sums.update(sums)
            write_manifest(new, step=step, metrics=metrics, world_size=peers.world_size)
            # File names are not on disk until their folder is synced.
            files.sync_folder(temporary)
            final = _place(temporary, folder, step)
            files.sync_folder(folder)
            return final

        return from_first(peers, commit)


def structure_file(rank: int) -> str:
    """Name the file with the structure of a rank's state; rank 0's describes the whole run."""
    return f"state-of-rank-{rank}.pt" if rank else "state.pt"


def _write_structure(new: NewFolder, name: str, share: Share) -> None:
    with new.create(name) as stream:
        torch.save(dict(share.structure), stream)


def _place(temporary: Path, folder: Path, step: int) -> Path:
    """Rename a complete folder to the next free name."""
    # Numbers count up over all runs in the folder, so the highest is the newest, even if a run
    # resumes from an older checkpoint and reaches the same step again.
    number = max(map(number_of, list_checkpoints(folder)), default=0) + 1
    while True:
        final = folder / f"{number:05d}-step-{step}"
        try:
            files.replace(temporary, final)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            number += 1  # another process took this number
        else:
            return final
