"""Communicators are connected before any size is tried, while the device still has memory.

NCCL makes a communicator at its first collective, and connects it for an algorithm when a
collective first needs that. It takes the memory from the device and not from torch's allocator,
and where there is none, its error is no running out of memory that could be recovered from: the
communicator is lost. The first collectives would run in the first attempt that fits, which is the
fullest. So all that guards know of run before it: once with a few numbers and once with many, for
which other algorithms are chosen.
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
"""Of a device, what sizes that are predicted leave to communicators: they connect anew, now and
then (after a fault of the network, for another size), and take that from what torch left."""

_FEW = 64  # numbers, for the algorithms that answer soon
_MANY = 8 * 2**20  # numbers, 32 MiB, for those that move much
# These have their memory on the host.
_ON_HOST = ("gloo", "mpi")


class Use(NamedTuple):
    """One kind of collective over one group.

    Attributes:
        kind: ``"all_reduce"``, ``"broadcast"``, ``"all_gather"`` or ``"reduce_scatter"``.
        group: of processes.
        device: whose tensors it takes.
        op: that it reduces by.
    """

    kind: str
    group: dist.ProcessGroup
    device: torch.device
    op: Any = dist.ReduceOp.SUM

    @property
    def takes_device_memory(self) -> bool:
        """Whether the communicator has memory on the device."""
        return self.device.type != "cpu" and backend_name(self.group, self.device) not in _ON_HOST

    def __str__(self) -> str:
        return f"{self.kind} of {dist.get_world_size(self.group)}"


class WarmUp:
    """Connects all that steps will use, before the first one."""

    def __init__(self, uses: Iterable[Use], done: set[Use]) -> None:
        self._uses = [each for each in dict.fromkeys(uses) if each.takes_device_memory]
        self._done = done
        self._tensors: dict[Use, list[tuple[Tensor, Tensor]]] = {}

    @property
    def share(self) -> float:
        """Of the device, what predicted sizes leave to communicators."""
        return COMMUNICATION_SHARE if self._uses else 0.0

    def __str__(self) -> str:
        """Groups that are still to be connected, the same on all ranks; may be empty."""
        waiting = ", ".join(map(str, self._waiting()))
        return f" (first connecting {waiting})" if waiting else ""

    def prepare(self) -> None:
        """Before the ranks agree: allocate what the collectives need, so that those cannot fail.

        Raises:
            torch.OutOfMemoryError: there is no memory even for that.
        """
        try:
            self._allocate()
        except torch.OutOfMemoryError as error:
            add_note(
                error,
                "automicro: that was before the first batch, while the communicators of all ranks "
                "were to be connected, which takes some 64 MiB of each device; no smaller "
                "microbatch helps there, free memory",
            )
            raise

    def _allocate(self) -> None:
        buffers: dict[tuple[torch.device, int], Tensor] = {}
        for use in self._waiting():
            size = dist.get_world_size(use.group)
            self._tensors[use] = []
            for most in (_FEW, _MANY):
                # A multiple of the ranks, as gathering and scattering need it.
                count = max(1, most // size)
                key = use.device, count * size
                # Shared by all uses of its size, since nothing reads what it holds.
                if key not in buffers:
                    buffers[key] = torch.zeros(count * size, device=use.device)
                part = torch.zeros(count, device=use.device)
                self._tensors[use].append((buffers[key], part))

    def run(self) -> None:
        """Right after the ranks agreed: run them. All ranks call it."""
        waiting = self._waiting()
        for use in waiting:
            self._connect(use)
        for device in dict.fromkeys(use.device for use in waiting):
            torch.get_device_module(device).synchronize(device)
            empty_cache(device)  # else the first attempt would cut these blocks up

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
