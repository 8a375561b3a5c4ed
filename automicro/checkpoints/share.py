"""What one rank brings to a checkpoint.

The state of the whole run is rank 0's: what is equal on all ranks, and what is its own. Of sharded
tensors every rank brings its part. The other ranks bring, besides, a state of their own: random
numbers, say.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from automicro.checkpoints.shards import local_part
from automicro.checkpoints.structure import take_apart
from automicro.shards import is_sharded


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of a checkpoint.

    Attributes:
        structure: of the whole state on rank 0, of its own state on any other.
        tensors: by the name under which they are stored.
        copies: of sharded tensors, on the host, once they were copied.
        names: a checksum of the places and shapes of all sharded tensors; equal on all ranks.
    """

    structure: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]
    names: int

    @classmethod
    def of(
        cls, state: Mapping[str, Any], *, own: Mapping[str, Any] | None = None, rank: int = 0
    ) -> "Share":
        """The share of a rank.

        Args:
            state: of the whole run, with all sharded tensors.
            own: what is this rank's alone; rank 0 has it in its state.
            rank: whose share.

        Raises:
            CheckpointError: no checkpoint can hold it.
        """
        structure, tensors = take_apart(state)
        sharded = {name: each for name, each in tensors.items() if is_sharded(each)}
        names = zlib.crc32(repr([(name, *each.shape) for name, each in sharded.items()]).encode())
        if rank:
            structure, plain = take_apart(own or {})
            tensors = sharded | {name_of_own(rank, place): each for place, each in plain.items()}
        return cls(structure=structure, tensors=tensors, copies={}, names=names)

    def copied(self) -> "Share":
        """The same with all data copied to the host's memory."""
        tensors: dict[str, Tensor] = {}
        copies: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            copy = local_part(tensor).to("cpu", copy=True)
            if is_sharded(tensor):
                # It still says which part that is. Its own data is not looked at any more.
                tensors[name], copies[name] = tensor, copy
            else:
                tensors[name] = copy
        return replace(self, tensors=tensors, copies=copies)

    def data(self, name: str) -> Tensor:
        """What this rank has of a tensor."""
        return self.copies[name] if name in self.copies else local_part(self.tensors[name])


def name_of_own(rank: int, place: str) -> str:
    """Under which name a tensor of a rank's own state is stored.

    >>> name_of_own(1, "rng.torch")
    'rank-1.rng.torch'
    """
    return f"rank-{rank}.{place}"
