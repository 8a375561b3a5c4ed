"""Connect communicators before any size is tried, while the device still has memory.

NCCL creates a communicator at its first collective, and connects it for an algorithm when a
collective first needs that. Both take device memory outside torch's allocator. If there is none
left, the error cannot be recovered from: the communicator is lost. The first collectives would run
in the first attempt that fits, which fills memory most. So all collectives that guards know run
before it: once with few numbers and once with many, which use other algorithms.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from automicro.errors import add_note
from automicro.memory.oom import empty_cache
from automicro.torch_private_distributed import all_gather_flat, backend_name, reduce_scatter_flat

COMMUNICATION_SHARE = 0.01
"""Share of device memory that predicted sizes leave to communicators: they reconnect at times
(after a network fault, for another size), and need memory that torch has not taken."""

_FEW = 64  # numbers, for low-latency algorithms
_MANY = 8 * 2**20  # numbers (32 MiB), for high-bandwidth algorithms
# These keep their memory on the host.
_ON_HOST = ("gloo", "mpi")


class Use(NamedTuple):
    """One kind of collective over one group."""

    kind: str  # "all_reduce", "broadcast", "all_gather" or "reduce_scatter"
    group: dist.ProcessGroup  # process group
    device: torch.device  # device of its tensors
    op: Any = dist.ReduceOp.SUM  # reduce operation

    @property
    def takes_device_memory(self) -> bool:
        """Whether the communicator uses memory on the device."""
        return self.device.type != "cpu" and backend_name(self.group, self.device) not in _ON_HOST

    def __str__(self) -> str:
        return f"{self.kind} of {dist.get_world_size(self.group)}"


class WarmUp:
    """Connection of all communicators that steps will use, before the first step."""

    def __init__(self, uses: Iterable[Use], done: set[Use]) -> None:
        self._uses = [each for each in dict.fromkeys(uses) if each.takes_device_memory]
        self._done = done
        self._tensors: dict[Use, list[tuple[Tensor, Tensor]]] = {}

    @property
    def share(self) -> float:
        """Share of device memory that predicted sizes leave to communicators."""
        return COMMUNICATION_SHARE if self._uses else 0.0

    def __str__(self) -> str:
        """Return a suffix that lists groups still to be connected, the same on all ranks, or ""."""
        waiting = ", ".join(map(str, self._waiting()))
        return f" (first connecting {waiting})" if waiting else ""

    def prepare(self) -> None:
        """Allocate buffers before ranks agree, so that the collectives cannot fail."""
        try:
            self._allocate()
        except torch.OutOfMemoryError as error:
            add_note(
                error,
                "automicro: this was before the first batch, while connecting the communicators "
                "of all ranks, which takes about 64 MiB of each device; a smaller microbatch "
                "does not help, so free memory",
            )
            raise

    def _allocate(self) -> None:
        buffers: dict[tuple[torch.device, int], Tensor] = {}
        for use in self._waiting():
            size = dist.get_world_size(use.group)
            self._tensors[use] = []
            for most in (_FEW, _MANY):
                # A multiple of the number of ranks, as gathering and scattering need.
                count = max(1, most // size)
                key = use.device, count * size
                # Shared by all uses of this size, because nothing reads the contents.
                if key not in buffers:
                    buffers[key] = torch.zeros(count * size, device=use.device)
                part = torch.zeros(count, device=use.device)
                self._tensors[use].append((buffers[key], part))

    def run(self) -> None:
        """Run the collectives right after ranks agreed. All ranks must call this."""
        waiting = self._waiting()
        for use in waiting:
            self._connect(use)
        for device in dict.fromkeys(use.device for use in waiting):
            torch.get_device_module(device).synchronize(device)
            empty_cache(device)  # otherwise the first attempt would fragment these blocks

    def _connect(self, use: Use) -> None:
        for whole, part in self._tensors.pop(use):
            _run(use, whole, part)
        self._done.add(use)

    def _waiting(self) -> Sequence[Use]:
        return [each for each in self._uses if each not in self._done]


def _run(use: Use, whole: Tensor, part: Tensor) -> None:
    if use.kind == "all_reduce":
        dist.all_reduce(whole, op=use.op, group=use.group)
    elif use.kind == "broadcast":
        dist.broadcast(whole, group=use.group, group_src=0)
    elif use.kind == "all_gather":
        all_gather_flat(whole, part, group=use.group)
    else:
        reduce_scatter_flat(part, whole, op=use.op, group=use.group)
