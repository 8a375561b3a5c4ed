"""Ranks say a word to each other before they have votes: in the store that they met in.

Nobody waits for a rank that could not come this far, as long as it says so.
"""

import time

import torch.distributed as dist

from automicro.errors import PeerFailedError, PeerLostError
from automicro.torch_private_distributed import PrefixStore, Store, default_store

TIMEOUT_SECONDS = 600.0
_POLL_SECONDS = 0.01
_FAILED = "failed"

_group: object = None
_count = 0


def exchange_words(word: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[str]:
    """The words of all ranks, in order. All ranks call it, or `say_failed` in its place.

    Args:
        word: of this rank.
        timeout_seconds: how long to wait for the slowest.

    Raises:
        PeerFailedError: a rank said that it failed.
        PeerLostError: a rank said nothing.
    """
    store, rank, world_size = _meeting(), dist.get_rank(), dist.get_world_size()
    keys = list(map(str, range(world_size)))
    store.set(keys[rank], _plain(word))
    end = time.monotonic() + timeout_seconds
    while not store.check(keys):
        if store.check([_FAILED]):
            raise PeerFailedError(
                f"rank {rank} stops because another rank failed:\n{_read(store, _FAILED)}\nMend "
                "the cause on that rank (its log has the traceback), and start again."
            )
        if time.monotonic() > end:
            missing = ", ".join(key for key in keys if not store.check([key]))
            raise PeerLostError(
                f"rank {rank} of {world_size} waited {timeout_seconds:g} s for rank {missing} to "
                "make its Microbatcher or Trainer, in vain; the log of the missing rank has the "
                "cause: start all processes again"
            )
        time.sleep(_POLL_SECONDS)
    return [_read(store, key) for key in keys]


def say_failed(reason: str) -> None:
    """Say that this rank will not come to the next exchange of words, and why; wait for nobody."""
    _meeting().set(_FAILED, _plain(f"rank {dist.get_rank()}: {reason}"))


def _plain(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _read(store: Store, key: str) -> str:
    word: str = store.get(key).decode(errors="replace")
    return word


def _meeting() -> Store:
    """A place in the store for this meeting alone: the next one has another."""
    global _group, _count
    group = dist.group.WORLD
    assert group is not None
    if _group is not group:
        _group, _count = group, 0
    _count += 1
    return PrefixStore(f"automicro/words of {group.group_name}, {_count}", default_store())
