"""Tensors on disk in the format of ``torch.distributed.checkpoint``, read without running code.

The format's own table of contents, ``.metadata``, is a pickle, which runs code when it is read.
It is written so that other tools can read the folder, but never read here. ``tensors.pt`` has the
same content. Like the tensors, it is read with ``weights_only=True``.

Each rank writes its own file. Reading needs no communication: each rank reads the tensors that it
needs from any file, so the number of ranks can change.
"""

import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import safe_globals

from automicro.checkpoints.manifest import NewFolder
from automicro.checkpoints.state import Share
from automicro.errors import DamagedCheckpointError
from automicro.sharding import local
from automicro.torch_private_distributed import parts_of_tables

TABLE = "tensors.pt"


class TensorsToWrite(DefaultSavePlanner):
    """Writes the tensors of this rank to a new folder that all ranks share."""

    # Replaces `torch.distributed.checkpoint.save`, which warns on every save of a single process.
    # Filtering that warning would change the filters of the whole process.

    def __init__(self, share: Share, *, is_first: bool) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self._share = share
        self.set_up_planner(dict(share.tensors), StorageMeta(), is_coordinator=is_first)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the local data of a tensor."""
        return local(self._share.tensors[index.fqn])

    def plan_all(self, plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Plan, on rank 0, the parts that each rank writes and the table of contents."""
        plans, metadata = self.create_global_plan(plans)
        # File names begin with the number of the rank that writes them.
        return FileSystemWriter("").prepare_global_plan(plans), metadata

    def write(self, new: NewFolder, plan: SavePlan) -> list[WriteResult]:
        """Write the parts of this rank and return their positions."""
        writer = _Writer(new)
        writer.set_up_storage_writer(is_coordinator=self.is_coordinator)
        return list(writer.write_data(self.finish_plan(plan), self).value())


def write_contents(new: NewFolder, metadata: Metadata, results: list[list[WriteResult]]) -> None:
    """Write the table of contents, on rank 0, after all ranks have written their parts."""
    _Writer(new).finish(metadata, results)
    # Older versions of torch set it only in a copy.
    metadata.storage_data = {each.index: each.storage_data for part in results for each in part}
    with new.create(TABLE) as stream:
        torch.save(metadata, stream)


def read_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors from a folder into existing tensors on any device."""
    path = folder / TABLE
    with safe_globals(parts_of_tables()):
        metadata: Metadata = torch.load(path, weights_only=True)
    # A checkpoint from an untrusted source must not name files outside its folder.
    for place in metadata.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise DamagedCheckpointError(
                f"{path} names the file {place.relative_path!r}, outside of the folder; load "
                "another checkpoint"
            )
    reader, planner = FileSystemReader(folder), DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(into), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()


class _DurableFiles(FileSystem):
    """Creates the files of a folder with a checksum and a sync to disk."""

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


class _KeptOpen(io.BufferedIOBase):
    """A stream that ignores the flush after each tensor; the block that opened it flushes."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.write, self.tell = stream.write, stream.tell  # type: ignore[method-assign]

    def flush(self) -> None:
        pass


class _Writer(FileSystemWriter):
    def __init__(self, new: NewFolder) -> None:
        super().__init__(new.path, sync_files=False)
        self.fs = _DurableFiles(new)

    def storage_meta(self) -> StorageMeta:
        # Leave out the name of the folder, because it will be renamed.
        return StorageMeta(save_id=self.save_id)
