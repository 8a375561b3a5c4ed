"""Interface between a step and the other ranks.

A rank that decided alone what fits would leave its peers waiting in a collective. So ranks agree on
a size before an attempt, and vote on its outcome before any of them commits::

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
    # outside "except", with the memory freed
    status = ranks.stop(failure, status)            # the same on all ranks

`OneRank` implements it at no cost for one process. The implementation for several ranks is imported
by `find_ranks` when needed.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import ParamSpec

import torch.distributed as dist
from torch import Tensor, nn

from automicro.modules import is_parallel

P = ParamSpec("P")

HIGHS = 8
"""Number of highs that one vote carries."""


class Status(enum.IntEnum):
    """Outcome of an attempt on a rank. The worst outcome of any rank applies to all."""

    OK = 0
    STRAYED = 1
    """The model ran different collectives: repeat the same attempt, with a vote before each."""
    TWO_ROWS = 2
    """BatchNorm refused a single row: repeat the same size, without single rows."""
    SMALLER_PART = 3
    """Memory ran out in a part with its own size, now smaller: repeat the same size."""
    OUT_OF_MEMORY = 4
    FATAL = 5


class Sync(enum.IntEnum):
    """How late gradients are reduced over ranks. The earliest choice of any rank applies to all."""

    EACH = 0
    """With every microbatch."""
    REPLICAS_LAST = 1
    """Shards with every microbatch, replicas of shards with the last one."""
    LAST = 2
    """With the last microbatch; until then every rank holds gradients of whole parameters."""


class StrayedError(Exception):
    """A model is about to run different collectives than before. Raised inside steps only."""


class HeldBackError(StrayedError):
    """Gradients held back for the last microbatch cannot be reduced with it: reduce with each."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Proposal of one rank for a step."""

    num_rows: int  # rows of this rank's batch, or of all batches counted as one; 0 without data
    microbatch_size: int  # proposed by its policy
    # Divisor of each loss of its batch, by name.
    denominators: Mapping[str, float] = field(default_factory=dict)
    num_batches: int = 1  # counted as one
    # Extent of the largest batch, in rows or in cost as one slice; ``num_rows`` by default.
    max_extent: int | None = None
    cost: float | None = None  # of one row, or None if unknown
    wants_to_stop: bool = False  # whether this rank was asked to end the run
    training: bool = True  # whether gradients will be computed
    lacks_rows: bool = False  # whether this rank has never had rows, not even for fillers
    level: int = 0  # proposed for this size
    sync: Sync = Sync.EACH  # how late its wrappers can reduce gradients

    @property
    def largest(self) -> int:
        """Extent of the largest batch, in rows or cost."""
        return self.num_rows if self.max_extent is None else self.max_extent


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Agreement on a step, identical on all ranks."""

    microbatch_size: int  # smallest size proposed at this level, at most `max_extent`
    max_extent: int  # extent of the largest batch, in rows or in cost as one slice
    min_rows: int  # rows of the smallest batch
    num_rows: int  # rows of all batches
    denominators: Mapping[str, float]  # sums over ranks
    num_batches: int  # largest number of batches that a rank counts as one
    cost: float | None  # highest cost of a row, or None if unknown
    stops: bool  # whether any rank wants to end the run
    # Lowest rank with rows if another rank lacks rows for fillers; otherwise None.
    donor: int | None = None
    level: int = 0  # highest level that a rank proposed
    sync: Sync = Sync.EACH  # how late wrappers reduce gradients on every rank

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches that every rank runs, fillers included.

        >>> agreement = OneRank().agree(Proposal(num_rows=10, microbatch_size=4))
        >>> agreement.num_microbatches
        3
        """
        return max(1, -(-self.max_extent // self.microbatch_size))


@dataclass(frozen=True, kw_only=True)
class Report:
    """A rank's numbers that accompany its vote to commit, or their combination."""

    sums: Sequence[float] = ()  # numbers that are summed over ranks
    highs: Sequence[float] = ()  # numbers of which the maximum over ranks counts, at most `HIGHS`


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Ranks:
    """Interface of a step to the other ranks. The defaults are those of a single process."""

    rank: int = 0
    world_size: int = 1
    copies: int = 1
    """Number of ranks that share the same rows and the work on each row."""

    told: Sequence[float] = ()
    """Highs of the vote that ended the last attempt; empty if none were exchanged."""

    is_alone: bool = True
    """Whether there is no other rank and nothing to guard."""

    communicates_in_forward: bool = False
    """Whether a forward outside a step needs all ranks."""

    communication_share: float = 0.0
    """Share of device memory that predicted sizes leave to communication."""

    sync: Sync = Sync.EACH
    """How late gradients should be reduced, if wrappers and memory allow it."""

    synced: Sync = Sync.EACH
    """How late the gradients of the last attempt were reduced."""

    def __init__(self) -> None:
        # Smallest size, by level, at which gradients of whole parameters did not fit.
        self.whole_fits_below: dict[int, int] = {}

    def sync_late(self) -> None:
        """Reduce sharded gradients with the last microbatch, if wrappers and memory allow it."""

    def settle(self, parameters: Sequence[Tensor] = ()) -> None:
        """Restore the wrappers' state between steps, which a user's forward might have changed."""

    def looking_alone(self) -> AbstractContextManager[None]:
        """Return a context for forwards that only this rank runs; a collective raises."""
        return _NOTHING

    def voted(self) -> AbstractContextManager[None]:
        """Return a context for collectives that were already voted on."""
        return _NOTHING

    def guarding_calls(self) -> AbstractContextManager[None]:
        """Return a context for user code between attempts: each collective is voted on first."""
        return _NOTHING

    def agree(self, proposal: Proposal) -> Agreement:
        """Combine the proposals of all ranks for an attempt. All ranks must call this."""
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
        """Return whether the size that ran out of memory needs less without whole gradients."""
        return False

    def begin(self, num_microbatches: int, *, training: bool = True) -> None:
        """Begin the agreed attempt with this number of microbatches on every rank."""

    def microbatch(self, index: int, *, weightless: bool = False) -> AbstractContextManager[None]:
        """Return a context for one microbatch; a weightless one has zero gradients."""
        return _NOTHING

    def vote(self, report: Report = Report()) -> Report:
        """Vote to commit, wait for all other ranks, and return the combined report."""
        return report

    def stop(self, failure: BaseException, status: Status, highs: Sequence[float] = ()) -> Status:
        """End an attempt that failed on any rank, and return the status that applies to all."""
        # Called outside ``except``. Afterwards no rank waits for another, and wrappers of the model
        # can start again. If the status is FATAL because of this rank, the caller raises the
        # failure.
        return status

    def fail(self, failure: BaseException) -> None:
        """Notify the others that this rank ends outside a step, with the reason."""

    def ready(self, point: str) -> None:
        """Vote before collectives outside a step, at a named point that all ranks reach."""

    def from_first(self, values: Iterable[float]) -> list[float]:
        """Return rank 0's values on every rank."""
        return list(values)

    def from_rank(self, rank: int, message: bytes) -> bytes:
        """Send one rank's message, of any length, to all. All ranks call it between attempts."""
        return message

    def add_up(self, values: Iterable[float]) -> list[float]:
        """Return the sums over ranks of equally many values."""
        return list(values)

    def most(self, value: float) -> float:
        """Return the highest value of any rank."""
        return value


class OneRank(Ranks):
    """A single process."""


def announcing_failure(ranks: Ranks) -> AbstractContextManager[None]:
    """Return a context that reports an error before this rank has agreed with the others."""
    return _NOTHING if ranks.is_alone else _telling(ranks)


@contextlib.contextmanager
def _telling(ranks: Ranks) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        ranks.fail(error)
        raise


def find_ranks(modules: Sequence[nn.Module]) -> Ranks:
    """Return the ranks that train these wrapped modules together. All ranks must call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return OneRank()

    from automicro.ranks.coordinated import coordinate

    return coordinate(modules)


def announcing_failed_construction(
    construct: Callable[P, None],
) -> Callable[P, None]:
    """Decorate a constructor to notify waiting ranks if it fails on this one."""

    @functools.wraps(construct)
    def announcing_failure(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            construct(*args, **kwargs)
        except Exception as error:
            # The first argument is the object under construction.
            model = args[1] if len(args) > 1 else kwargs.get("model")
            if kwargs.get("parallel") or (isinstance(model, nn.Module) and is_parallel([model])):
                _announce(error)
            raise

    return announcing_failure


def _announce(error: Exception) -> None:
    """Notify any other ranks that this one failed to construct a shared object."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        from automicro.ranks.coordinated import announce_absence

        announce_absence(error)
