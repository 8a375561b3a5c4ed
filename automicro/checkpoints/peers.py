"""The ranks that save and load together: an error on one rank fails on all ranks.

Every rank does its part and sends the result to all others. A rank that fails sends its error
instead, so no rank waits for a failed one and all ranks end the same way.
"""

import datetime
import errno
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from automicro.errors import (
    CheckpointError,
    DamagedCheckpointError,
    PeerLostError,
    RankError,
    add_note,
    describe_error,
    text_of,
)
from automicro.sharding import num_ranks
from automicro.torch_private import without_modes

T = TypeVar("T")


class Peers:
    """All ranks that save and load together; the base class is a single process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """Gather the values of all ranks in rank order; all ranks must call this."""
        return [value]


ALONE = Peers()


def together(peers: Peers, work: Callable[[], T]) -> T:
    """Run a function on every rank and return this rank's result once all have succeeded."""
    found: list[T] = []  # stays on this rank: it can be the whole state of a run
    exchange(peers, lambda: found.append(work()))
    return found[0]


def exchange(peers: Peers, work: Callable[[], T]) -> list[T]:
    """Run a function on every rank and return the results of all ranks once all have succeeded."""
    # On a single rank, errors keep their class and traceback.
    if peers.world_size == 1:
        return [work()]
    failure: BaseException | None = None
    part: T | Exception
    try:
        part = work()
    except RankError:
        raise  # the other ranks cannot be reached, or have already stopped
    except BaseException as error:
        failure = error
        part = _as_told(error, peers.rank)
    parts: list[T | Exception] = peers.gather(part)
    troubles = [each for each in parts if isinstance(each, Exception)]
    if not troubles:
        return [each for each in parts if not isinstance(each, Exception)]
    worst = max(map(_badness, troubles))
    # The rank's own error has its traceback; the copy sent to other ranks does not.
    if failure is not None and isinstance(part, Exception) and _badness(part) == worst:
        raise failure
    # Name all of the worst errors: a disk that is full on several hosts has to be fixed on each.
    first, *others = [each for each in troubles if _badness(each) == worst]
    text = "; ".join(getattr(each, "strerror", None) or str(each) for each in (first, *others))
    raise type(first)(*first.args[:-1], text) from failure


def from_first(peers: Peers, work: Callable[[], T]) -> T:
    """Run a function on rank 0 only and return its result on all ranks."""
    found: T | None = exchange(peers, lambda: work() if peers.rank == 0 else None)[0]
    return cast(T, found)


def _as_told(error: BaseException, rank: int) -> Exception:
    """Convert an error to a class that can be pickled, with the rank in its message."""
    if isinstance(error, OSError):
        return OSError(error.errno or errno.EIO, f"rank {rank}: {error.strerror or text_of(error)}")
    if isinstance(error, DamagedCheckpointError):
        return DamagedCheckpointError(f"rank {rank}: {text_of(error)}")
    if isinstance(error, CheckpointError):
        return CheckpointError(f"rank {rank}: {text_of(error)}")
    # Not a RankError: all ranks fail here together, so every rank can still be reached.
    return CheckpointError(
        f"rank {rank}: {describe_error(error)}\nAll ranks stop because of it. Read the traceback "
        "in the log of that rank, and remove the cause"
    )


def _badness(error: Exception) -> int:
    """Rank the errors of several ranks: disk errors first, then damage, then all others."""
    return 0 if isinstance(error, OSError) else 1 + (not isinstance(error, DamagedCheckpointError))


TIMEOUT_SECONDS = 600.0


def open_peers(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Peers:
    """Open the process group that checkpoints use; all ranks must call this.

    Args:
        timeout_seconds: how long a rank waits for the slowest rank to write its part.

    Returns:
        All ranks of the default process group, or the single process.

    >>> open_peers().world_size
    1
    """
    return ALONE if num_ranks() == 1 else _GroupPeers(timeout_seconds=timeout_seconds)


class _GroupPeers(Peers):
    """All ranks, in a separate gloo group with its own timeout."""

    def __init__(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._broken: PeerLostError | None = None

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        if self._broken is not None:
            raise self._broken
        try:
            # A mode that counts memory would count the exchanged data as memory of the run.
            with without_modes():
                dist.all_gather_object(values, value, group=self._group)
        except PeerLostError as error:  # names the lost rank and the reason
            self._broken = error
            add_note(error, "no checkpoint was written; the older ones are unchanged")
            raise
        except RuntimeError as error:
            self._broken = PeerLostError(
                f"rank {self.rank} of {self.world_size} could not continue with a checkpoint: a "
                f"peer ended or took too long ({error}). The older checkpoints are unchanged. Read "
                "the cause in the log of the missing rank, and start again"
            )
            raise self._broken from error
        return values
