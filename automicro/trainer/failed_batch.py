"""Files with batches that did not fit into memory."""

import contextlib
import dataclasses
import os
import pickle
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import (
    BatchError,
    PeerStoppedError,
    SampleTooLargeError,
    add_note,
    describe_error,
    facts_of,
    text_of,
)
from automicro.files import write_whole
from automicro.memory.device import capacity_bytes
from automicro.memory.oom import is_out_of_memory
from automicro.units import format_bytes
from automicro.values import walk

FORMAT = "automicro: a batch that did not fit, 2"
MOST_BYTES = 256 * 2**20
"""Size limit of a saved batch; larger ones are not saved."""
KEPT = "failed-batch-"
"""Prefix of the file names."""
CONFIG = "config.yaml"
"""The config of the run, written beside the saved batches."""


class UnreadableBatchError(BatchError):
    """The file has no batch, or its batch cannot be rebuilt."""


class UnknownClassError(UnreadableBatchError):
    """The batch has a class that the file only names, so a batch of that class is needed."""


@dataclass(frozen=True, kw_only=True)
class FailedBatch:
    """A batch that did not fit into memory.

    Attributes:
        batches: the batches of the loader that made up the optimization batch.
        phase: ``"train"`` or ``"eval"``.
        message: message of the error.
        where: place in the run where the error happened.
        device: device that ran out of memory.
        limit_bytes: memory limit of the device; None if unknown.
    """

    batches: list[Any]
    phase: str
    message: str
    where: str
    device: str
    limit_bytes: int | None


def save_batch(path: str | os.PathLike[str], failed: FailedBatch) -> None:
    """Write a batch to a file with tensors on the host.

    Args:
        path: the new file.
        failed: the batch and the circumstances of its failure.

    Raises:
        UnreadableBatchError: the batch is too large.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> batch = {"input_ids": torch.zeros(2, 7, dtype=torch.int64), "names": ["a", "b"]}
        >>> failed = FailedBatch(
        ...     batches=[batch], phase="train", message="", where="", device="cpu", limit_bytes=None
        ... )
        >>> save_batch(f"{folder.name}/batch.pt", failed)
        >>> load_batch(f"{folder.name}/batch.pt").batches[0]["names"]
        ['a', 'b']
        >>> folder.cleanup()
    """
    with on_host():
        size = sum(each.nbytes for _, each in tensor_leaves(failed.batches))
        if size > MOST_BYTES:
            raise UnreadableBatchError(
                f"the batch has {format_bytes(size)}, but at most {format_bytes(MOST_BYTES)} are "
                "saved"
            )
        # Models read a mapping of any class alike, and some classes hold more than their entries.
        plain = [dict(each) if isinstance(each, Mapping) else each for each in failed.batches]
        content = {
            "format": FORMAT,
            **{each.name: getattr(failed, each.name) for each in dataclasses.fields(failed)},
            "batches": [map_tensors(each, _whole_copy) for each in plain],
        }
        write_whole(Path(path), lambda file: torch.save(content, file))


def _whole_copy(tensor: Tensor) -> Tensor:
    # Copied, because torch would save a view with the whole tensor that it belongs to.
    return tensor.detach().to("cpu", copy=True).contiguous()


def load_batch(path: str | os.PathLike[str], *, like: Any = None) -> FailedBatch:
    """Read a batch that `save_batch` wrote; of classes, only those in ``like`` are made."""
    # Containers alone: other classes could be made to run code.
    kinds = {type(each) for _, each in walk({"like": like}) if _is_container(each)}
    try:
        with on_host(), torch.serialization.safe_globals([*_OF_NUMPY, *kinds]):
            content = torch.load(path, map_location="cpu", weights_only=True)
            if content.pop("format") != FORMAT:
                raise ValueError("it has another format")
            return FailedBatch(**content)
    except OSError:
        raise
    except Exception as error:
        why, unknown = describe_error(error).splitlines()[0], list[str]()
        with contextlib.suppress(Exception):  # a file of another kind
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if isinstance(error, pickle.UnpicklingError) and unknown:
            raise UnknownClassError(
                f"the batch holds a {unknown[0]}, which cannot be loaded without running code from "
                "the file. Pass a batch of the same kind, like=next(iter(loader))"
            ) from error
        raise UnreadableBatchError(
            f"{path} holds no batch that automicro has saved ({why})"
        ) from error


def _is_container(value: Any) -> bool:
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return is_record or isinstance(value, Mapping | list | tuple)


# A saved array of numpy names these.
_OF_NUMPY: tuple[Any, ...] = (
    np.ndarray,
    np.dtype,
    np.zeros(0).__reduce__()[0],  # which rebuilds arrays
    *{type(np.dtype(code)) for code in np.typecodes["All"] if code not in "OV"},
)


@dataclass(kw_only=True)
class Failures:
    """Saves a batch that does not fit even in the smallest microbatches."""

    device: torch.device
    rank: int = 0
    folder: Path | None = None

    @contextlib.contextmanager
    def kept(self, batches: Sequence[Any], *, phase: str, where: str) -> Iterator[None]:
        """Save these batches if the block runs out of memory, and name the file in a note."""
        # On several ranks, only the ranks that ran out of memory save their batches.
        try:
            yield
        except Exception as error:
            is_own = isinstance(error, SampleTooLargeError) or is_out_of_memory(error)
            is_own &= facts_of(error).bystander is None  # otherwise the batch is not the cause
            if is_own and batches and not isinstance(error.__cause__, PeerStoppedError):
                self._keep(error, batches, phase=phase, where=where)
            raise

    def _keep(self, error: Exception, batches: Sequence[Any], *, phase: str, where: str) -> None:
        try:
            failed = FailedBatch(
                batches=list(batches),
                phase=phase,
                message=text_of(error),
                where=where,
                device=str(self.device),
                limit_bytes=capacity_bytes(self.device),
            )
            path = self._path()
            save_batch(path, failed)
        except Exception as failure:  # any error: the run has already failed
            add_note(error, f"automicro: the batch could not be saved ({describe_error(failure)})")
            return
        beside = path.parent / CONFIG
        config = "" if beside.exists() else " CONFIG"
        add_note(
            error,
            f"automicro: the batch was saved to {path}; to run it alone: automicro replay "
            f"{shlex.quote(str(path))}{config}",
        )

    def _path(self) -> Path:
        folder = self.folder or new_folder()
        folder.mkdir(parents=True, exist_ok=True)
        rank = f"-rank{self.rank}" if self.rank else ""
        number = 1
        while os.path.lexists(path := folder / f"{KEPT}{number:04d}{rank}.pt"):
            number += 1
        return path


def new_folder() -> Path:
    """Create a temporary folder that only its owner can access."""
    return Path(tempfile.mkdtemp(prefix="automicro-"))
