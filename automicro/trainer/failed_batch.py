"""Files with batches that did not fit into memory."""

import contextlib
import dataclasses
import os
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
from automicro.batch.tensors import builder, open_container, tensor_leaves
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

FORMAT = "automicro: a batch that did not fit, 1"
MOST_BYTES = 256 * 2**20
"""Size limit of a saved batch; larger ones are not saved."""
KEPT = "failed-batch-"
"""Prefix of the file names."""
CONFIG = "config.yaml"
"""The config of the run, written beside the saved batches."""
_ARRAY, _KIND = "array of numpy", "kind of container"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)


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
    """Write a batch to a file as tensors on the host and plain values, without any code.

    Args:
        path: the new file.
        failed: the batch and the circumstances of its failure.

    Raises:
        UnreadableBatchError: the batch is too large, or has values that only their own code can
            write.

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
        content = {
            "format": FORMAT,
            **{each.name: getattr(failed, each.name) for each in dataclasses.fields(failed)},
            "batches": [_plain(each) for each in failed.batches],
        }
        write_whole(Path(path), lambda file: torch.save(content, file))


def load_batch(path: str | os.PathLike[str], *, like: Any = None) -> FailedBatch:
    """Read a batch that `save_batch` wrote, without running code from the file."""
    try:
        with on_host():
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        why = describe_error(error).splitlines()[0]
        raise UnreadableBatchError(
            f"{path} holds no batch that automicro has saved ({why})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UnreadableBatchError(f"{path} holds no batch that automicro has saved")
    try:
        fields = {each.name: content[each.name] for each in dataclasses.fields(FailedBatch)}
        fields["batches"] = [_rebuilt(each, like) for each in fields["batches"]]
        return FailedBatch(**fields)
    except (KeyError, TypeError) as error:
        raise UnreadableBatchError(f"{path} is damaged ({describe_error(error)})") from error


def _plain(value: Any) -> Any:
    """Convert a batch to tensors, plain values and containers of these."""
    if isinstance(value, Tensor):
        # Copied, because torch would save a view with the whole tensor that it belongs to.
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return {_ARRAY: torch.from_numpy(np.array(value))}
    if not _is_container(value):
        raise UnreadableBatchError(
            f"the batch holds a {_name_of(value)}, which only its own code can save"
        )
    keys, parts = open_container(value)
    parts = [_plain(each) for each in parts]
    if type(value) in (list, tuple, dict):
        return builder(value, keys)(parts)
    is_mapping = isinstance(value, Mapping)
    return {_KIND: _name_of(value), "keys": list(keys), "parts": parts, "is_mapping": is_mapping}


def _rebuilt(value: Any, like: Any) -> Any:
    """Rebuild a batch from `_plain` with the classes of another batch of the same kind."""
    if type(value) not in (list, tuple, dict):
        return value
    if type(value) is dict and _ARRAY in value:
        return value[_ARRAY].numpy()
    is_named = type(value) is dict and _KIND in value
    keys, parts = (value["keys"], value["parts"]) if is_named else open_container(value)
    others = dict(zip(*open_container(like), strict=True)) if _is_container(like) else {}
    parts = [_rebuilt(each, others.get(key)) for key, each in zip(keys, parts, strict=True)]
    if not is_named:
        return builder(value, keys)(parts)
    if value[_KIND] == _name_of(like):
        return builder(like, keys)(parts)
    if value["is_mapping"]:
        return dict(zip(keys, parts, strict=True))  # models read a mapping of any class alike
    raise UnknownClassError(
        f"the batch holds a {value[_KIND]}, which cannot be loaded without running code from the "
        "file. Pass a batch of the same kind, like=next(iter(loader))"
    )


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value)


def _name_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


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
