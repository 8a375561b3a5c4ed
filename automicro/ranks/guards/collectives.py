"""Guard for collectives that a model runs itself: SyncBatchNorm, tensor parallelism, its own code.

A model, a loss, a metric or a callback might run unannounced collectives. A rank that ran out of
memory, or never reaches one, would leave its peers waiting. So a hook votes before each collective,
except those of automicro and of wrappers, which are voted on elsewhere.
"""

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from automicro.memory.device import tensors_in
from automicro.torch_private import without_modes
from automicro.torch_private_distributed import before_collectives, group_of, is_in_backward

_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
}
# In these, every member must contribute equally many numbers.
_ALIKE = {
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "allgather_",
    "allgather_coalesced_",
    "_allgather_base_",
    "allgather_into_tensor_coalesced_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "reduce_scatter_",
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective that is about to run."""

    name: str  # for messages
    members: tuple[int, ...]  # the ranks of its group, in order
    root: int | None = None  # rank that sends to all or receives from all, or None
    # The rank that it sends to or receives from, or None if it involves all members.
    peer: int | None = None
    sends: bool = False  # whether it sends to one peer
    shape: str = ""  # sizes and dtypes, if all members must contribute the same

    def __str__(self) -> str:
        what = f"{self.name} of {self.shape}" if self.shape else self.name
        if self.peer is not None:
            return f"{what} {'to' if self.sends else 'from'} rank {self.peer}"
        root = "" if self.root is None else f", root {self.root}"
        return f"{what} among ranks {', '.join(map(str, self.members))}{root}"


class Keeper(Protocol):
    """Observer that is called before each collective."""

    def before(self, call: Call) -> None:
        """Handle a collective that is about to run; an exception prevents it."""


@dataclass
class _Kept:
    """Current observers, with the thread, process and process group that they apply to."""

    step: Keeper | None = None  # in an attempt
    run: Keeper | None = None  # between attempts of a Trainer's run
    thread: int = 0
    process: int = 0
    group: object = None


class _Own(threading.local):
    depth: int = 0


_kept = _Kept()
_own = _Own()


def open_entrance() -> None:
    """Intercept the collectives of this process group."""
    # Registered with torch once; later process groups use the same hook.
    if _kept.process == 0:
        before_collectives(_come_by)
    _kept.process = os.getpid()
    _kept.group = dist.group.WORLD


def keep_in_step(keeper: Keeper | None) -> None:
    """Set the observer of an attempt, on this thread and in backwards; None ends it."""
    _kept.step = keeper
    _kept.thread = threading.get_ident()


@contextlib.contextmanager
def keeping_between_steps(keeper: Keeper) -> Iterator[None]:
    """Set the observer between attempts, on this thread."""
    outer, _kept.run = _kept.run, keeper
    _kept.thread = threading.get_ident()
    try:
        yield
    finally:
        _kept.run = outer


@contextlib.contextmanager
def own_collectives() -> Iterator[None]:
    """Context for collectives that are voted on elsewhere, and hidden from user modes."""
    _own.depth += 1
    try:
        with without_modes():
            yield
    finally:
        _own.depth -= 1


def _come_by(name: str, arguments: Mapping[str, Any]) -> None:
    keeper = _kept.step or _kept.run
    if os.getpid() != _kept.process:
        _refuse_worker(name)
    if keeper is None or _own.depth:
        return
    # Autograd runs backwards on its own threads.
    if threading.get_ident() != _kept.thread and not (_kept.step is not None and is_in_backward()):
        return  # a thread of other code, whose collectives can run at any time
    tensors = list(tensors_in(arguments))
    if not any(each.is_meta for each in tensors):  # otherwise a compiler is tracing
        keeper.before(_read(name, arguments, tensors))


def _refuse_worker(name: str) -> None:
    if dist.group.WORLD is _kept.group:  # it inherits no connections of its own
        raise RuntimeError(
            f"{_NAMES.get(name, name.strip('_'))} in a process that was forked from rank "
            f"{dist.get_rank()}, such as a data loader worker, cannot reach other ranks; let the "
            "rank itself communicate: in a callback, or with num_workers=0"
        )


def _read(name: str, arguments: Mapping[str, Any], tensors: Sequence[Tensor]) -> Call:
    group = group_of(arguments["process_group"])
    members = tuple(dist.get_process_group_ranks(group))
    place = {each: arguments[each] for each in ("root_rank", "src", "dst") if each in arguments}
    root = place.get("root_rank")
    peer = place.get("dst", place.get("src"))
    is_alike = name in _ALIKE or peer is not None
    return Call(
        name=_NAMES.get(name, name.strip("_")),
        members=members,
        root=None if root is None else members[root],
        peer=None if peer is None else members[peer],
        sends="dst" in place,
        shape=_shape(tensors) if is_alike else "",
    )


def _shape(tensors: Sequence[Tensor]) -> str:
    sizes = [f"{each.numel()} {str(each.dtype).removeprefix('torch.')}" for each in tensors]
    counted = [(size, len(list(each))) for size, each in itertools.groupby(sizes)]
    return ", ".join(size if count == 1 else f"{count} times {size}" for size, count in counted)
