"""The one interface between a step and the other ranks.

A step that finds out alone what fits would leave its peers waiting in a collective. So ranks agree
on a size before an attempt, and vote on its outcome before any of them commits::

    agreement = ranks.agree(Proposal(num_rows=…, microbatch_size=…))
    ranks.begin(agreement.num_microbatches)
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

`OneRank` is the implementation for one process, where all of it is free. What several ranks need is
imported where `find_ranks` finds some.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ParamSpec, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from automicro.errors import add_note, remember
from automicro.modules import ModuleIndex, is_parallel

P = ParamSpec("P")

HIGHS = 6
"""How many highs one vote carries."""


class Status(enum.IntEnum):
    """How an attempt went on a rank. The worst of all ranks counts for all."""

    OK = 0
    STRAYED = 1
    """The model ran other collectives than before: the same again, with a vote before each."""
    TWO_ROWS = 2
    """BatchNorm refused a single row: the same size, cut so that no row is alone."""
    SMALLER_PART = 3
    """Memory ran out in a part with a size of its own, smaller now: the same size again."""
    OUT_OF_MEMORY = 4
    FATAL = 5


class Sync(enum.IntEnum):
    """How late gradients are reduced over ranks. The earliest of all ranks counts for all."""

    EACH = 0
    """With every microbatch."""
    REPLICAS_LAST = 1
    """Shards with every microbatch; replicas of these add up with the last one."""
    LAST = 2
    """With the last microbatch; until then every rank holds gradients of whole parameters."""


class StrayedError(Exception):
    """A model is about to run other collectives than before. It is raised inside steps only."""


class HeldBackError(StrayedError):
    """Gradients held back for the last microbatch cannot be reduced with it: use each."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The proposal of one rank for a step.

    Attributes:
        num_rows: of this rank's batch, or of all that count as one; 0 where its data have run out.
        microbatch_size: that its policy proposes.
        level: at which it is to be used.
        denominators: what each loss of its batch is divided by, by name.
        num_batches: that count as one.
        max_extent: what sizes are shares of, of the largest of them: its rows, or what they cost as
            one slice; ``num_rows`` unless given.
        cost: of one row, None where it is not known.
        wants_to_stop: whether this rank was asked to end the run.
        training: whether gradients will be computed.
        lacks_rows: whether this rank has no rows and has never had any, not even for fillers.
        sync: how late its wrappers may reduce gradients.
    """

    num_rows: int
    microbatch_size: int
    denominators: Mapping[str, float] = field(default_factory=dict)
    num_batches: int = 1
    max_extent: int | None = None
    cost: float | None = None
    wants_to_stop: bool = False
    training: bool = True
    lacks_rows: bool = False
    level: int = 0
    sync: Sync = Sync.EACH

    @property
    def largest(self) -> int:
        """Rows of the largest batch, or what they cost."""
        return self.num_rows if self.max_extent is None else self.max_extent


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The agreement of all ranks on a step; the same on every one of them.

    Attributes:
        microbatch_size: the smallest that a rank proposed at the level, at most `max_extent`.
        max_extent: rows of the largest batch, or what they cost as one slice.
        min_rows: rows of the smallest batch.
        num_rows: of all batches.
        denominators: summed over ranks.
        num_batches: the most that count as one on a rank.
        cost: the highest of a row, None if none is known.
        stops: whether any rank wants to end the run.
        donor: the lowest rank that has rows, where another lacks any to run fillers on; else None.
        level: the highest that a rank proposed.
        sync: how late wrappers may reduce gradients on every rank.
    """

    microbatch_size: int
    max_extent: int
    min_rows: int
    num_rows: int
    denominators: Mapping[str, float]
    num_batches: int
    cost: float | None
    stops: bool
    donor: int | None = None
    level: int = 0
    sync: Sync = Sync.EACH

    @property
    def num_microbatches(self) -> int:
        """How many microbatches every rank runs, fillers included.

        >>> agreement = OneRank().agree(Proposal(num_rows=10, microbatch_size=4))
        >>> agreement.num_microbatches
        3
        """
        return max(1, -(-self.max_extent // self.microbatch_size))


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rank's report with its vote to commit, and the sum of all reports.

    Attributes:
        sums: numbers that are added up over ranks.
        highs: numbers of which the highest of all ranks counts, at most `HIGHS`.
    """

    sums: Sequence[float] = ()
    highs: Sequence[float] = ()


class Ranks(Protocol):
    """The other ranks, as a step sees them."""

    @property
    def rank(self) -> int:
        """This process's number, from 0."""

    @property
    def world_size(self) -> int:
        """How many processes there are."""

    @property
    def is_alone(self) -> bool:
        """Whether there is no other rank, and nothing to guard."""

    @property
    def copies(self) -> int:
        """How many ranks have the same rows, because they share the work on each."""

    @property
    def communicates_in_forward(self) -> bool:
        """Whether a forward outside of a step needs all ranks."""

    @property
    def communication_share(self) -> float:
        """Of a device's memory, what sizes that are predicted leave to communication."""

    sync: Sync
    """How late gradients are to be reduced, where wrappers and memory allow it."""

    synced: Sync
    """How late the gradients of the last attempt were reduced."""

    whole_fits_below: dict[int, int]
    """By level, the smallest size at which gradients of whole parameters did not fit."""

    def sync_late(self) -> None:
        """Reduce sharded gradients with the last microbatch, where wrappers and memory allow it."""

    @property
    def told(self) -> Sequence[float]:
        """The highs of the vote that ended the last attempt; empty if none were exchanged."""

    def settle(self, parameters: Sequence[Tensor] = ()) -> None:
        """Put wrappers back into the state between steps, which a forward of the user's may change.

        Args:
            parameters: of the model and all that is trained with it, before a training step.

        Raises:
            ValueError: some of them came into a model after it was wrapped.
        """

    def looking_alone(self) -> AbstractContextManager[None]:
        """Around forwards of an attempt that this rank alone runs: a collective in one raises."""

    def voted(self) -> AbstractContextManager[None]:
        """Around collectives that a vote has come before."""

    def guarding_calls(self) -> AbstractContextManager[None]:
        """Around what users do between attempts: a vote comes before each collective of theirs."""

    def agree(self, proposal: Proposal) -> Agreement:
        """Put together what all ranks bring to an attempt. All call it."""

    def drop_whole_gradients(self) -> bool:
        """After an attempt that ran out of memory: whether the same size needs less from now on.

        It does where gradients of whole parameters were held back for the last microbatch. All
        ranks answer alike.
        """

    def begin(self, num_microbatches: int, *, training: bool = True) -> None:
        """Begin the attempt that was agreed on, with so many microbatches on every rank."""

    def microbatch(self, index: int, *, weightless: bool = False) -> AbstractContextManager[None]:
        """Around forward and backward of one microbatch.

        Args:
            index: of the microbatch.
            weightless: whether its gradient is to count as zero, whatever it computes to.
        """

    def vote(self, report: Report = ...) -> Report:
        """Say that this rank is ready to commit, and wait for the others; what all told together.

        Raises:
            PeerStoppedError: another rank is not; call `stop`.
        """

    def stop(self, failure: BaseException, status: Status, highs: Sequence[float] = ()) -> Status:
        """End an attempt that failed here or elsewhere. Call it outside ``except``.

        Afterwards all ranks have been told, no rank waits for another, and wrappers of the model
        can start anew. Returns what all ranks found together; where that is ``FATAL`` because of
        this rank, raise the failure.

        Args:
            failure: what ended the attempt here.
            status: what it means, unless it is a `PeerStoppedError`.
            highs: told with it, see `told`.

        Raises:
            PeerFailedError: another rank failed for good.
        """

    def fail(self, failure: BaseException) -> None:
        """Tell the others that this rank ends outside a step, with a reason."""

    def ready(self, point: str) -> None:
        """Vote right before collectives outside a step, named by a point that all come by.

        Raises:
            PeerFailedError: another rank called `fail` and will not come.
        """

    def from_first(self, values: Iterable[float]) -> list[float]:
        """Rank 0's values on every rank: a size that it remembers, say."""

    def from_rank(self, rank: int, message: bytes) -> bytes:
        """A rank's message, of any length, on every rank. All call it, outside of attempts."""

    def add_up(self, values: Iterable[float]) -> list[float]:
        """As many values of every rank, added up over ranks."""

    def most(self, value: float) -> float:
        """The highest value of any rank."""


class OneRank:
    """One process, alone."""

    rank = 0
    world_size = 1
    is_alone = True
    copies = 1
    communicates_in_forward = False
    communication_share = 0.0
    told: Sequence[float] = ()
    synced = Sync.EACH

    def __init__(self) -> None:
        # One for all: it is entered for each microbatch.
        self._nothing: AbstractContextManager[None] = contextlib.nullcontext()
        self.sync = Sync.EACH
        self.whole_fits_below: dict[int, int] = {}

    def sync_late(self) -> None:
        """There is no wrapper."""

    def settle(self, parameters: Sequence[Tensor] = ()) -> None:
        """There is no wrapper."""

    def looking_alone(self) -> AbstractContextManager[None]:
        return self._nothing

    def voted(self) -> AbstractContextManager[None]:
        return self._nothing

    def guarding_calls(self) -> AbstractContextManager[None]:
        return self._nothing

    def agree(self, proposal: Proposal) -> Agreement:
        return Agreement(
            microbatch_size=max(1, min(proposal.microbatch_size, proposal.largest)),
            max_extent=proposal.largest,
            min_rows=proposal.num_rows,
            num_rows=proposal.num_rows,
            denominators=proposal.denominators,
            num_batches=proposal.num_batches,
            cost=proposal.cost,
            stops=proposal.wants_to_stop,
            level=proposal.level,
        )

    def drop_whole_gradients(self) -> bool:
        return False

    def begin(self, num_microbatches: int, *, training: bool = True) -> None:
        """There is nothing to guard."""

    def microbatch(self, index: int, *, weightless: bool = False) -> AbstractContextManager[None]:
        return self._nothing

    def vote(self, report: Report = Report()) -> Report:
        return report

    def stop(self, failure: BaseException, status: Status, highs: Sequence[float] = ()) -> Status:
        return status

    def fail(self, failure: BaseException) -> None:
        """There is no other rank to tell."""

    def ready(self, point: str) -> None:
        """There is no other rank to wait for."""

    def from_first(self, values: Iterable[float]) -> list[float]:
        return list(values)

    def from_rank(self, rank: int, message: bytes) -> bytes:
        return message

    def add_up(self, values: Iterable[float]) -> list[float]:
        return list(values)

    def most(self, value: float) -> float:
        return value


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def announcing_failure(ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    """Tell the other ranks of an error of this one, before it has begun to agree with them.

    >>> with announcing_failure(OneRank()):
    ...     pass
    """
    return _NOTHING if ranks.is_alone else _telling(ranks)


@contextlib.contextmanager
def _telling(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        ranks.fail(error)
        raise


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
    # Rather fewer slices than one with a single row; fillers make up the number.
    pieces = min(num_microbatches, max(1, num_rows // min_rows)) if num_rows else 0
    sizes = [num_rows // pieces + (index < num_rows % pieces) for index in range(pieces)]
    return sizes + [0] * (num_microbatches - pieces)


def note_told(error: BaseException, rank: int, world_size: int, told: str) -> None:
    """Note of an error on which rank it was raised, and that the others know of it.

    Args:
        error: the error.
        rank: on which it was raised.
        world_size: how many ranks there are.
        told: what the others do now, for people.

    >>> error = ValueError()
    >>> note_told(error, 1, 2, "the others were told")
    >>> error.__notes__
    ['automicro: this happened on rank 1 of 2; the others were told']
    """
    add_note(error, f"automicro: this happened on rank {rank} of {world_size}; {told}")
    remember(error, is_told=True)


def find_ranks(modules: Sequence[nn.Module]) -> Ranks:
    """The ranks that train modules together. All of them call it.

    Args:
        modules: that take part, wrapped already.

    Raises:
        ValueError: a wrapper under which no attempt can be undone, or a lazy module in it.

    >>> find_ranks([nn.Linear(2, 2)]).world_size
    1
    """
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()

    from automicro.ranks.coordinated import coordinate

    ranks = coordinate(modules)
    # Each rank would take them from rows of its own, and they might differ.
    if not ranks.is_alone and ModuleIndex(modules).is_lazy:
        raise ValueError(
            "some module takes its shapes from its first input (a lazy module), which several "
            "ranks cannot do together; run the model once on one row before it is wrapped"
        )
    return ranks


def announcing_failed_construction(
    construct: Callable[P, None],
) -> Callable[P, None]:
    """Let a constructor that fails on this rank tell the others, who would wait for it.

    Args:
        construct: an ``__init__`` whose first argument, ``model``, is wrapped for several ranks
            where it is for them.
    """

    @functools.wraps(construct)
    def announcing_failure(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            construct(*args, **kwargs)
        except Exception as error:
            # The first argument is the object that is being made.
            model = args[1] if len(args) > 1 else kwargs.get("model")
            if kwargs.get("parallel") or (isinstance(model, nn.Module) and is_parallel([model])):
                _announce(error)
            raise

    return announcing_failure


def _announce(error: Exception) -> None:
    """Tell the other ranks, if there are any, that this one could not make what all make."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        from automicro.ranks.coordinated import announce_absence

        announce_absence(error)
