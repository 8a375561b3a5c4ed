"""Tensors on the disk, by ``torch.distributed.checkpoint``, read back without running anything.

The format's own table of contents, ``.metadata``, is a pickle: reading it runs what it says.
It is written, so that other tools can read the folder, and never read here. ``tensors.json`` says
the same as plain text. The tensors themselves are read with ``weights_only=True``.

Each rank writes a file of its own. Reading asks no other rank: each reads what it needs, wherever
that was written, so the number of ranks may be another one.
"""

import io
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from automicro.checkpoints.manifest import NewFolder
from automicro.checkpoints.state import Share
from automicro.errors import DamagedCheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


INDEX = "tensors.json"


class TensorsToWrite:
    """Tensors of this rank on their way into a new folder, together with those of other ranks."""

    # What `torch.distributed.checkpoint.save` does, without what cannot run in a thread: it warns
    # each time that a process is alone, and a filter for that would hold everywhere.

    def __init__(self, share: Share, *, is_first: bool) -> None:
        self._planner = _SavePlanner(share)
        self._is_first = is_first

    def plan(self) -> SavePlan:
        """The parts that this rank has."""
        self._planner.set_up(is_first=self._is_first)
        return self._planner.create_local_plan()

    def plan_all(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The parts that each rank writes, and the table of contents. On rank 0."""
        plans, metadata = self._planner.create_global_plan(plans)
        # The name of a file begins with the number of the rank that writes it.
        return _Writer.numbered(plans), metadata

    def write(self, new: NewFolder, plan: SavePlan) -> list[WriteResult]:
        """Write what this rank is to write; where it lies.

        Raises:
            OSError: it could not be written.
        """
        writer = _Writer(new)
        writer.set_up_storage_writer(is_coordinator=self._is_first)
        plan = self._planner.finish_plan(plan)
        return list(writer.write_data(plan, self._planner).value())


def write_contents(new: NewFolder, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Write the table of contents, once all ranks have written. On rank 0.

    Raises:
        OSError: it could not be written.
    """
    _Writer(new).finish(metadata, results)


def read_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors from a folder into tensors that exist, on whatever device they lie.

    Raises:
        DamagedCheckpointError: the table of contents is not one.
        OSError: a file cannot be read.
        pickle.UnpicklingError: a file holds something else than a tensor.
    """
    reader, planner = _Reader(folder), DefaultLoadPlanner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(into), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _SavePlanner(DefaultSavePlanner):
    """Plans by what tensors are, and takes their data from where a share has it."""

    def __init__(self, share: Share) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._share = share

    def set_up(self, *, is_first: bool) -> None:
        self.set_up_planner(dict(self._share.tensors), StorageMeta(), is_coordinator=is_first)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._share.data(index.fqn)


class _DurableFiles(FileSystem):
    """The files of a folder, through what sums them up and waits for the disk."""

    def __init__(self, new: NewFolder) -> None:
        self._new = new

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        with self._new.create(Path(path).name) as stream:
            yield _KeptOpen(stream)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._new.rename(Path(path).name, Path(new_path).name)


class _KeptOpen(io.IOBase):
    """A stream that is flushed and closed by the block that opened it, not after each tensor."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: "ReadableBuffer") -> int:
        return self._stream.write(data)

    def tell(self) -> int:
        return self._stream.tell()

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Writer(FileSystemWriter):
    def __init__(self, new: NewFolder) -> None:
        super().__init__(new.path, sync_files=False)
        self._new = new
        self.fs = _DurableFiles(new)

    def storage_meta(self) -> StorageMeta:
        # Without the name of the folder, which is about to change.
        return StorageMeta(save_id=self.save_id)

    @staticmethod
    def numbered(plans: list[SavePlan]) -> list[SavePlan]:
        return FileSystemWriter("").prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        with self._new.create(INDEX) as stream:
            stream.write(json.dumps(_index_of(metadata, results), indent=1).encode())


def _index_of(metadata: Metadata, results: list[list[WriteResult]]) -> dict[str, Any]:
    # Not from `storage_data` of the metadata: older versions of torch set it in a copy.
    places = {each.index: each.storage_data for of_rank in results for each in of_rank}
    index = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), name
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                {
                    "offsets": list(chunk.offsets),
                    "shape": list(chunk.sizes),
                    "file": place.relative_path,
                    "start": place.offset,
                    "length": place.length,
                }
            )
        index[name] = {
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "shape": list(tensor.size),
            "chunks": chunks,
        }
    return index


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a chunk lies, under the names that the reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / INDEX
        try:
            return _metadata_of(json.loads(path.read_bytes()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpointError(
                f"{path} is not a table of tensors ({error}); load another checkpoint"
            ) from error


def _metadata_of(index: Any) -> Metadata:
    tensors: dict[str, Any] = {}
    places = {}
    for name, entry in index.items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name} has the dtype {entry['dtype']!r}")
        chunks = []
        for chunk in entry["chunks"]:
            if Path(chunk["file"]).name != chunk["file"]:
                raise ValueError(f"{name} lies in {chunk['file']!r}, outside of the folder")
            offsets = torch.Size(chunk["offsets"])
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(chunk["shape"])))
            places[MetadataIndex(name, offsets)] = _Place(
                relative_path=chunk["file"], offset=chunk["start"], length=chunk["length"]
            )
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(entry["shape"]),
            chunks=chunks,
        )
    return Metadata(state_dict_metadata=tensors, storage_data=places)
