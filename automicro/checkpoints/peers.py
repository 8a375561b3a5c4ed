"""The ranks that save and load together: what fails on one of them fails on all.

Every rank does its part and hands it to all others. An error is handed over in place of a part, so
no rank waits for one that failed, and all come to the same end.
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
    """All ranks that save and load together; this class stands for a process that is alone.

    >>> Peers().gather(3)
    [3]
    """

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in their order. All ranks call it."""
        return [value]


ALONE = Peers()


def together(peers: Peers, work: Callable[[], T]) -> T:
    """Do some work on every rank; what it gave here, once it succeeded everywhere.

    >>> together(ALONE, lambda: "done")
    'done'
    """
    found: list[T] = []  # and not handed over: it may be the whole state of a run
    exchange(peers, lambda: found.append(work()))
    return found[0]


def exchange(peers: Peers, work: Callable[[], T]) -> list[T]:
    """Do some work on every rank; what it gave on each, once it succeeded everywhere.

    >>> exchange(ALONE, lambda: 3)
    [3]
    """
    # Errors keep their class and traceback where no other rank has to learn of them.
    if peers.world_size == 1:
        return [work()]
    failure: BaseException | None = None
    part: T | Exception
    try:
        part = work()
    except RankError:
        raise  # no rank is left to tell
    except BaseException as error:
        failure = error
        part = _as_told(error, peers.rank)
    parts: list[T | Exception] = peers.gather(part)
    troubles = [each for each in parts if isinstance(each, Exception)]
    if not troubles:
        return [each for each in parts if not isinstance(each, Exception)]
    worst = max(map(_badness, troubles))
    # The rank's own error, with its traceback, says more than what others heard.
    if failure is not None and isinstance(part, Exception) and _badness(part) == worst:
        raise failure
    # All of the worst, as a full disk of one host is mended on each.
    first, *others = [each for each in troubles if _badness(each) == worst]
    text = "; ".join(getattr(each, "strerror", None) or str(each) for each in (first, *others))
    raise type(first)(*first.args[:-1], text) from failure


def from_first(peers: Peers, work: Callable[[], T]) -> T:
    """The result of some work that rank 0 alone does.

    >>> from_first(ALONE, lambda: 3)
    3
    """
    found: T | None = exchange(peers, lambda: work() if peers.rank == 0 else None)[0]
    return cast(T, found)


def _as_told(error: BaseException, rank: int) -> Exception:
    """An error as other ranks learn of it: of a class that can be pickled, and naming the rank."""
    if isinstance(error, OSError):
        return OSError(error.errno or errno.EIO, f"rank {rank}: {error.strerror or text_of(error)}")
    if isinstance(error, DamagedCheckpointError):
        return DamagedCheckpointError(f"rank {rank}: {text_of(error)}")
    if isinstance(error, CheckpointError):
        return CheckpointError(f"rank {rank}: {text_of(error)}")
    # No RankError: all ranks fail here, so a rank that tells the others of an error finds them.
    return CheckpointError(
        f"rank {rank}: {describe_error(error)}\nAll ranks stop because of it; mend the cause on "
        "that rank, whose log has the traceback"
    )


def _badness(error: Exception) -> int:
    """The order in which errors of several ranks count: a disk, damage, then all else."""
    return 0 if isinstance(error, OSError) else 1 + (not isinstance(error, DamagedCheckpointError))


TIMEOUT_SECONDS = 600.0


def open_peers(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Peers:
    """All ranks, as checkpoints need them. All ranks call it; one process is alone.

    Args:
        timeout_seconds: how long one waits for the slowest rank to write its part.

    >>> open_peers().world_size
    1
    """
    return ALONE if num_ranks() == 1 else _GroupPeers(timeout_seconds=timeout_seconds)


class _GroupPeers(Peers):
    """All ranks, over gloo, in a group of their own with a timeout of its own."""

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
            # A mode that counts memory would count what is exchanged as the run's.
            with without_modes():
                dist.all_gather_object(values, value, group=self._group)
        except PeerLostError as error:  # it says who and why
            self._broken = error
            add_note(error, "no checkpoint was written here; the older ones are as they were")
            raise
        except RuntimeError as error:
            self._broken = PeerLostError(
                f"rank {self.rank} of {self.world_size} could not go on with a checkpoint: a peer "
                f"is gone, or took too long ({error}). The older checkpoints are as they were: "
                "start again; the log of the missing rank has the cause"
            )
            raise self._broken from error
        return values
