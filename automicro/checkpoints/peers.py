"""The ranks that save and load together: what fails on one of them fails on all.

Every rank does its part and hands it to rank 0, which decides for all. An error is handed over in
place of a part, so no rank waits for one that failed.
"""

import datetime
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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
V = TypeVar("V")


class Peers:
    """All ranks that save and load together; this class stands for a process that is alone.

    >>> Peers().scatter(Peers().gather(3))
    3
    """

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks in their order, on rank 0; None elsewhere."""
        return [value]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """Rank 0's value for this rank.

        Args:
            values: on rank 0, one for each rank.
        """
        assert values is not None
        return values[0]


ALONE = Peers()


def together(peers: Peers, work: Callable[[], T]) -> T:
    """Do some work on every rank; what it gave here, once it succeeded everywhere.

    Args:
        peers: all ranks, each of which calls this.
        work: what to do.

    Raises:
        Exception: see `decide_together`.

    >>> together(ALONE, lambda: "done")
    'done'
    """
    found: list[T] = []
    decide_together(peers, lambda: found.append(work()), lambda done: done)
    return found[0]


def from_first(peers: Peers, work: Callable[[], T]) -> T:
    """The result of some work that rank 0 alone does.

    Args:
        peers: all ranks, each of which calls this.
        work: what rank 0 does.

    Raises:
        Exception: see `decide_together`.

    >>> from_first(ALONE, lambda: 3)
    3
    """
    return decide_together(peers, lambda: None, lambda parts: [work()] * len(parts))


def decide_together(
    peers: Peers, work: Callable[[], V], decide: Callable[[list[V]], Sequence[T]]
) -> T:
    """Let every rank do its part, and rank 0 decide on the parts of all; this rank's answer.

    Args:
        peers: all ranks, each of which calls this.
        work: the part of this rank.
        decide: on rank 0, from the parts in the order of ranks to an answer for each.

    Raises:
        Exception: what went wrong on this rank.
        OSError, CheckpointError: it went wrong on another rank, which the message names.
        PeerLostError: a rank is gone.

    >>> decide_together(ALONE, lambda: 3, lambda parts: [sum(parts)])
    3
    """
    # Errors keep their class and traceback where no other rank has to learn of them.
    if peers.world_size == 1:
        return decide([work()])[0]
    failure: BaseException | None = None
    part: V | _Trouble
    try:
        part = work()
    except RankError:
        raise  # no rank is left to tell
    except BaseException as error:
        failure, part = error, _Trouble.of(error, peers.rank)
    parts = peers.gather(part)
    answers: Sequence[T | _Trouble] | None = None
    if parts is not None:
        troubles = [each for each in parts if isinstance(each, _Trouble)]
        if troubles:
            answers = [_worst(troubles)] * peers.world_size
        else:
            try:
                answers = decide(parts)
            except BaseException as error:
                failure = error
                answers = [_Trouble.of(error, 0)] * peers.world_size
    answer: T | _Trouble = peers.scatter(answers)
    if not isinstance(answer, _Trouble):
        return answer
    # The rank's own error, with its traceback, says more than what others heard.
    if failure is not None and _Trouble.of(failure, peers.rank).kind == answer.kind:
        raise failure
    raise answer.error() from failure


# The worse, the later: what more ranks than one found is told by the worst.
_DISK, _DAMAGE, _REFUSAL, _OTHER = range(4)


@dataclass(frozen=True, kw_only=True)
class _Trouble:
    """An error, as other ranks learn of it."""

    kind: int
    number: int
    text: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> "_Trouble":
        kind, number, text = _OTHER, 0, describe_error(error)
        if isinstance(error, OSError):
            kind, number, text = _DISK, error.errno or errno.EIO, error.strerror or text_of(error)
        elif isinstance(error, CheckpointError):
            kind = _DAMAGE if isinstance(error, DamagedCheckpointError) else _REFUSAL
            text = text_of(error)
        return cls(kind=kind, number=number, text=f"rank {rank}: {text}")

    def error(self) -> Exception:
        if self.kind == _DISK:
            return OSError(self.number, self.text)
        if self.kind == _DAMAGE:
            return DamagedCheckpointError(self.text)
        if self.kind == _REFUSAL:
            return CheckpointError(self.text)
        # No RankError: all ranks fail here, so a rank that tells the others of an error finds them.
        return CheckpointError(
            f"{self.text}\nAll ranks stop because of it; mend the cause on that rank, whose log "
            "has the traceback"
        )


def _worst(troubles: Sequence[_Trouble]) -> _Trouble:
    worst = max(troubles, key=lambda each: each.kind)
    # All of the worst, as a full disk of one host is mended on each.
    same = [each.text for each in troubles if each.kind == worst.kind]
    return _Trouble(kind=worst.kind, number=worst.number, text="; ".join(same))


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
    """All ranks, over gloo. The group is its own, so a save may run beside the training."""

    def __init__(self, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        timeout = datetime.timedelta(seconds=timeout_seconds)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._broken: PeerLostError | None = None

    def gather(self, value: Any) -> list[Any] | None:
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._run(lambda: dist.gather_object(value, values, dst=0, group=self._group))
        return values

    def scatter(self, values: Sequence[Any] | None) -> Any:
        found: list[Any] = [None]
        given = None if values is None else list(values)
        self._run(lambda: dist.scatter_object_list(found, given, src=0, group=self._group))
        return found[0]

    def _run(self, exchange: Callable[[], Any]) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            # A mode that counts memory would count what is exchanged as the run's.
            with without_modes():
                exchange()
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
