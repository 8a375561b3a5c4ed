"""The processes of a run as torchrun starts them: their ranks, and their process group."""

import atexit
import functools
import os
import sys
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from automicro.errors import PeerLostError
from automicro.torch_private_distributed import HashStore, PrefixStore, Store

_MEETING = timedelta(minutes=10)
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process among the processes of its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # rank on its machine, which selects the device

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes the results that all ranks share."""
        return self.rank == 0


def process_in_environment() -> Process:
    """Read the process from the variables that torchrun sets; a single process without them.

    >>> process_in_environment()
    Process(rank=0, world_size=1, local_rank=0)
    """
    world_size = _read("WORLD_SIZE", 1)
    if world_size > 1 and "RANK" not in os.environ:
        raise ValueError(
            f"WORLD_SIZE={world_size} means several processes, but RANK is not set. Start them "
            "with torchrun, or also set RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
        )
    rank = _read("RANK", 0)
    if rank >= world_size:
        raise ValueError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}. Start the processes with torchrun"
        )
    return Process(rank=rank, world_size=world_size, local_rank=_read("LOCAL_RANK", rank))


def process_here() -> Process:
    """Read the process from the process group if there is one, else from the environment."""
    if dist.is_available() and dist.is_initialized():
        return Process(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_rank=_read("LOCAL_RANK", dist.get_rank()),
        )
    return process_in_environment()


def place_for_output() -> Process:
    """Return `process_here`, or a single process if the environment is invalid."""
    try:
        return process_here()
    except ValueError:
        return Process()


def own_device(device: torch.device | str, place: Process) -> torch.device | str:
    """Choose the device of a process: the accelerator with its local rank.

    >>> own_device("cpu", Process(rank=1, world_size=2, local_rank=1))
    'cpu'
    """
    # A device with an index is unchanged. Availability is checked, because torch from pip on Linux
    # is built for CUDA on any machine. A single visible accelerator is used whatever the local
    # rank, because many clusters show each process only its own.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    name = str(device)
    if accelerator is None or name not in ("auto", accelerator.type):
        return device
    count = torch.accelerator.device_count()
    if count == 1:
        return torch.device(accelerator.type, 0)
    if place.local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK={place.local_rank}, but this machine has {count} {accelerator.type} "
            f"devices. Start at most {count} processes on it (torchrun --nproc-per-node {count}), "
            "or pass device='cpu'"
        )
    return torch.device(accelerator.type, place.local_rank)


def meet(device: torch.device, place: Process) -> None:
    """Create the process group, for the life of the process, unless there is one."""
    # It uses a part of the store that belongs to this start only, because values that an earlier
    # start left in the store would mislead its processes.
    if dist.is_initialized():
        return
    own_backend = dist.get_default_backend_for_device(device)
    has_own = own_backend != "gloo"
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    try:
        dist.init_process_group(
            f"cpu:gloo,{device.type}:{own_backend}" if has_own else "gloo",
            store=_store(place),
            rank=place.rank,
            world_size=place.world_size,
            device_id=device if has_own else None,
        )
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        raise PeerLostError(
            f"rank {place.rank} of {place.world_size} could not connect to the others ({error}). "
            "Read the cause in their logs, and start all processes again"
        ) from error
    atexit.register(part)


def leave() -> None:
    """Skip the orderly end of the process group at exit, because other ranks might be gone."""
    atexit.unregister(part)


def agreed_time(now: str) -> str:
    """Agree on one time for all processes of a run, also after torchrun restarts them."""
    place = process_in_environment()
    if place.world_size == 1 or "MASTER_ADDR" not in os.environ:
        return now
    store, key = _tcp_store(place), "automicro/begun at"
    if place.is_first:
        # A stored time is from an earlier start, whose folder this start continues to use.
        return str(store.compare_set(key, "", now).decode())
    return str(store.get(key).decode())


def part() -> None:
    """End the process group in order unless the process ends with an error."""
    # After an error peers might be gone, and destroying the group would wait for them.
    if dist.is_available() and dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Copy the tensors of rank 0 to all ranks; all must pass the same tensors in order."""
    if dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            data = tensor.detach()
            whole = data.contiguous()
            dist.broadcast(whole, 0)
            if whole is not data:
                data.copy_(whole)


def _store(place: Process) -> Store:
    if place.world_size == 1:
        return HashStore()
    store = _tcp_store(place)
    if not _has_agent_store():
        return store  # rank 0 holds the store, so it is new with each start
    return PrefixStore(f"automicro/start {name_of_start(store, place)}", store)


def name_of_start(store: Store, place: Process) -> str:
    """Agree on a name for this start that differs from earlier starts in the same store.

    >>> len(name_of_start(HashStore(), Process()))
    32
    """
    # torchrun's restart count is not unique, because each agent counts the failures of its own
    # host. So each process stores a random word, and rank 0 answers to that word.
    own, prefix = uuid.uuid4().hex, "automicro/meeting"
    if not place.is_first:
        store.set(f"{prefix}/hello/{place.rank}", own)
        name: str = store.get(f"{prefix}/answer/{own}").decode()
        store.set(f"{prefix}/{name}/{place.rank}", "here")
        return name
    others = range(1, place.world_size)
    end = time.monotonic() + _MEETING.total_seconds()
    while absent := [rank for rank in others if not store.check([f"{prefix}/{own}/{rank}"])]:
        if time.monotonic() > end:
            raise PeerLostError(
                f"rank 0 of {place.world_size} waited {_MEETING} for ranks "
                f"{', '.join(map(str, absent))}. Read the cause in their logs, and start all "
                "processes again"
            )
        for rank in absent:
            # The hello can be from an earlier start until the rank of this start stores its own.
            if store.check([f"{prefix}/hello/{rank}"]):
                word = store.get(f"{prefix}/hello/{rank}").decode()
                store.set(f"{prefix}/answer/{word}", own)
        time.sleep(_POLL_SECONDS)
    return own


def _has_agent_store() -> bool:
    """Whether torchrun's agent holds the store, so that it outlives the processes."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


@functools.cache
def _tcp_store(place: Process) -> Store:
    meeting = rendezvous("env://", place.rank, place.world_size, timeout=_MEETING)
    store: Store
    store, _, _ = next(meeting)
    return store


def _read(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(
            f"the environment has {name}={text!r}, which is not a whole number; start the "
            "processes with torchrun, or unset it"
        )
    return int(text)
