"""The ranks that save and load together: what fails on one of them fails on all.

Every rank does its part and hands it to rank 0, which decides for all. An error is handed over in
place of a part, so no rank waits for one that failed.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from automicro.errors import (
    CheckpointError,
    DamagedCheckpointError,
    RankError,
    describe_error,
    text_of,
)

T = TypeVar("T")
V = TypeVar("V")


class Peers(Protocol):
    """All ranks, at points that all of them come by."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks in order, on rank 0.

        Raises:
            PeerLostError: a rank is gone.
        """

    def scatter(self, values: Sequence[Any] | None) -> Any:
        """This rank's of the values that rank 0 gives.

        Raises:
            PeerLostError: a rank is gone.
        """


class Alone:
    """One process."""

    rank = 0
    world_size = 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def scatter(self, values: Sequence[Any] | None) -> Any:
        assert values is not None
        return values[0]


ALONE = Alone()


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
    """What some work gave on rank 0, which alone does it.

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
    if peers.world_size == 1:
        return decide([work()])[0]
    failure: BaseException | None = None
    part: V | _Trouble
    try:
        part = work()
    except RankError:
        raise  # there is nobody left to tell
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
        # No RankError: all ranks fail here, so whoever tells the others of an error finds them.
        return CheckpointError(
            f"{self.text}\nAll ranks stop because of it; mend the cause on that rank, whose log "
            "has the traceback"
        )


def _worst(troubles: Sequence[_Trouble]) -> _Trouble:
    worst = max(troubles, key=lambda each: each.kind)
    same = [each.text for each in troubles if each.kind == worst.kind]
    return _Trouble(kind=worst.kind, number=worst.number, text="; ".join(same))
