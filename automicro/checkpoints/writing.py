"""Writing a checkpoint: whole, or not at all."""

import errno
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automicro.checkpoints import files
from automicro.checkpoints.files import NewFolder
from automicro.checkpoints.leftovers import temporary_folder
from automicro.checkpoints.manifest import write_manifest

STRUCTURE = "state.pt"

_NAME = re.compile(r"(\d{5,})-step-(\d+)")


def list_checkpoints(folder: Path) -> list[Path]:
    """What is called like a checkpoint, the latest first.

    Args:
        folder: in which they lie; it may not exist.

    Raises:
        OSError: the folder cannot be read.
    """
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=number_of, reverse=True)


def number_of(checkpoint: Path) -> int:
    """The number that the name of a checkpoint begins with: higher is later.

    >>> number_of(Path("00012-step-3400"))
    12
    """
    return int(checkpoint.name.partition("-")[0])


def write_checkpoint(
    folder: Path,
    *,
    structure: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    step: int,
    metrics: Mapping[str, float],
) -> Path:
    """Write a checkpoint beside the others in a folder.

    Its name begins with a number that counts up, so the latest is found even where a run goes on
    from an older one and comes by the same step again.

    Args:
        folder: in which they lie; it is made where it does not exist.
        structure: of the state, see `take_apart`.
        tensors: of the state.
        step: optimization batches done.
        metrics: values by name.

    Raises:
        OSError: it could not be written. Nothing of it is left, as far as that could be removed.
    """
    # Importing it takes half a second, which who never saves does not pay.
    from automicro.checkpoints.tensors import write_tensors

    files.make_folders(folder)
    with temporary_folder(folder) as temporary:
        new = NewFolder(temporary)
        write_tensors(new, tensors)
        with new.create(STRUCTURE) as stream:
            torch.save(dict(structure), stream)
        write_manifest(new, step=step, metrics=metrics)
        files.sync_folder(temporary)
        final = _place(temporary, folder, step)
    files.sync_folder(folder)
    return final


def _place(temporary: Path, folder: Path, step: int) -> Path:
    """Rename a complete folder to the next free name."""
    number = max(map(number_of, list_checkpoints(folder)), default=0) + 1
    while True:
        final = folder / f"{number:05d}-step-{step}"
        try:
            files.replace(temporary, final)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            number += 1  # Another process took it.
        else:
            return final
