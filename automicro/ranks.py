"""What a step asks of the other ranks: the one interface between it and several devices.

A step that finds out alone what fits would leave its peers waiting in a collective. So ranks agree
on a size before an attempt, and vote on its outcome before any of them commits::

    agreement = ranks.agree(Proposal(num_rows=…, microbatch_size=…))
    try:
        for index, microbatch in enumerate(…):      # agreement.num_microbatches of them
            with ranks.microbatch(index):
                …                                   # forward and backward
        ranks.vote()
    except BaseException as error:
        failure = error
    else:
        …                                           # commit
    # outside "except", with the memory given back
    status = ranks.stop(failure, status)            # all ranks learn the same

`OneRank` is the implementation for one process, where all of it is free.
"""

import contextlib
import enum
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Agreement", "OneRank", "Proposal", "Ranks", "Status", "rows_of_microbatches"]


class Status(enum.IntEnum):
    """How an attempt went on a rank. The worst of all ranks counts for all."""

    OK = 0
    TWO_ROWS = 1
    """BatchNorm refused a single row: the same size, cut so that no row is alone."""
    OUT_OF_MEMORY = 2
    FATAL = 3


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """What one rank brings to a step.

    Attributes:
        num_rows: of this rank's batch; 0 where its data have run out.
        microbatch_size: rows that its policy proposes.
        denominators: what each loss of its batch is divided by, by name.
        wants_to_stop: whether somebody asked this rank to end the run.
        training: whether gradients will be computed.
    """

    num_rows: int
    microbatch_size: int
    denominators: Mapping[str, float] = field(default_factory=dict)
    wants_to_stop: bool = False
    training: bool = True


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks together bring to a step; the same on every one of them.

    Attributes:
        world_size: the number of ranks.
        microbatch_size: the smallest that a rank proposed, at most `max_rows`.
        max_rows: rows of the largest batch.
        min_rows: rows of the smallest batch.
        num_rows: of all batches.
        denominators: summed over ranks.
        stops: whether any rank wants to end the run.
    """

    world_size: int
    microbatch_size: int
    max_rows: int
    min_rows: int
    num_rows: int
    denominators: Mapping[str, float]
    stops: bool

    @property
    def num_microbatches(self) -> int:
        """How many microbatches every rank runs, fillers included.

        >>> agreement = OneRank().agree(Proposal(num_rows=10, microbatch_size=4))
        >>> agreement.num_microbatches
        3
        """
        return max(1, -(-self.max_rows // self.microbatch_size))

    def loss_scale(self, denominator: float, *, name: str = "") -> float:
        """What a rank's loss is multiplied by where gradients are averaged over ranks.

        Averaging divides by the number of ranks, whatever each of them had to train on.

        Args:
            denominator: what the rank's own loss was divided by.
            name: of the loss.

        >>> agreement = OneRank().agree(
        ...     Proposal(num_rows=4, microbatch_size=4, denominators={"": 4.0})
        ... )
        >>> agreement.loss_scale(4.0)
        1.0
        """
        total = self.denominators[name]
        return self.world_size * denominator / total if total else 0.0


class Ranks(Protocol):
    """The other ranks, as a step sees them."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    def agree(self, proposal: Proposal) -> Agreement:
        """Begin an attempt: put together what all ranks bring. All call it."""

    def microbatch(self, index: int) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch."""

    def vote(self) -> None:
        """Say that this rank is ready to commit, and wait for the others.

        Raises:
            PeerStoppedError: another rank is not; call `stop`.
        """

    def stop(self, failure: BaseException, status: Status) -> Status:
        """End an attempt that failed here or elsewhere. Call it outside ``except``.

        Afterwards all ranks have been told, no rank waits for another, and wrappers of the model
        can start anew. Returns what all ranks found together; where that is ``FATAL`` because of
        this rank, raise the failure.

        Args:
            failure: what ended the attempt here.
            status: what it means, unless it is a `PeerStoppedError`.

        Raises:
            PeerFailedError: another rank failed for good.
        """

    def fail(self, failure: BaseException) -> None:
        """Tell the others that this rank ends outside a step, with a reason."""

    def from_first(self, values: Iterable[float]) -> list[float]:
        """Rank 0's values on every rank: a size that it remembers, say."""


class OneRank:
    """One process, alone."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._nothing: AbstractContextManager[None] = contextlib.nullcontext()

    def agree(self, proposal: Proposal) -> Agreement:
        return Agreement(
            world_size=1,
            microbatch_size=max(1, min(proposal.microbatch_size, proposal.num_rows)),
            max_rows=proposal.num_rows,
            min_rows=proposal.num_rows,
            num_rows=proposal.num_rows,
            denominators=proposal.denominators,
            stops=proposal.wants_to_stop,
        )

    def microbatch(self, index: int) -> AbstractContextManager[None]:
        return self._nothing

    def vote(self) -> None:
        """There is nobody to wait for."""

    def stop(self, failure: BaseException, status: Status) -> Status:
        return status

    def fail(self, failure: BaseException) -> None:
        """There is nobody to tell."""

    def from_first(self, values: Iterable[float]) -> list[float]:
        return list(values)


def rows_of_microbatches(num_rows: int, num_microbatches: int, *, min_rows: int = 1) -> list[int]:
    """The rows of a rank's microbatches where all ranks run the same number of them.

    Balanced, the larger first. A 0 stands for a filler: a microbatch of any rows whose loss weighs
    nothing, run because the peers' collectives need it.

    Args:
        num_rows: of the rank's batch.
        num_microbatches: that were agreed on.
        min_rows: the fewest rows of a microbatch that is no filler, if the batch has as many.

    >>> rows_of_microbatches(5, 3), rows_of_microbatches(2, 3)
    ([2, 2, 1], [1, 1, 0])
    >>> rows_of_microbatches(5, 3, min_rows=2)
    [3, 2, 0]
    """
    pieces = min(num_microbatches, max(1, num_rows // min_rows)) if num_rows else 0
    sizes = [num_rows // pieces + (index < num_rows % pieces) for index in range(pieces)]
    return sizes + [0] * (num_microbatches - pieces)
