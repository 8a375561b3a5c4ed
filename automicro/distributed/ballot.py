"""What a rank puts into a vote, and how the ballots of many become one."""

import functools
import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from automicro.ranks import HIGHS, Status

SLOTS = 8
"""How many denominators one ballot carries."""

_NOBODY = math.inf
_NO_SUMS = (0.0,) * SLOTS
_NO_HIGHS = (-math.inf,) * HIGHS


class Ballot(NamedTuple):
    """Numbers of a fixed count, so that any two votes can meet: all are exact in fp64.

    Attributes:
        status: the worst.
        num_failed: how many ranks have a status that is not OK.
        culprit: the lowest rank with the worst status; infinite without one.
        lowest_point: of the points in the program where the ranks are, as numbers.
        highest_point: the same; below the lowest where no rank told one.
        lowest_count: of the agreements that the ranks have made.
        highest_count: the same.
        flag: whether any rank raised its flag, whose meaning depends on the point.
        max_rows: of a batch.
        min_rows: of a batch.
        num_rows: of all batches.
        size: the smallest proposed.
        fewest_unused: the fewest parameters that no microbatch of a rank used.
        highs: of what the highest of all ranks counts.
        sums: of what is added up over ranks.
    """

    status: float = 0.0
    num_failed: float = 0.0
    culprit: float = _NOBODY
    lowest_point: float = math.inf
    highest_point: float = -math.inf
    lowest_count: float = math.inf
    highest_count: float = -math.inf
    flag: float = 0.0
    max_rows: float = 0.0
    min_rows: float = math.inf
    num_rows: float = 0.0
    size: float = math.inf
    fewest_unused: float = math.inf
    highs: tuple[float, ...] = _NO_HIGHS
    sums: tuple[float, ...] = _NO_SUMS

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks that told where they are, are at the same point."""
        if self.highest_point < self.lowest_point:
            return True
        return self.lowest_point == self.highest_point and self.lowest_count == self.highest_count

    @property
    def means(self) -> Status:
        """The status by name."""
        return Status(int(self.status))

    def numbers(self) -> list[float]:
        """All as one list, for sending.

        >>> len(Ballot().numbers()) == len(healthy("commit", 3).numbers())
        True
        """
        return [*self[:-2], *self.highs, *self.sums]

    @classmethod
    def read(cls, numbers: list[float]) -> "Ballot":
        """A ballot from its numbers.

        >>> ballot = Ballot(status=2.0, size=4.0)
        >>> Ballot.read(ballot.numbers()) == ballot
        True
        """
        highs, sums = numbers[-SLOTS - HIGHS : -SLOTS], numbers[-SLOTS:]
        return cls._make([*numbers[: -SLOTS - HIGHS], tuple(highs), tuple(sums)])


def healthy(point: str, count: int, *, flag: bool = False) -> Ballot:
    """The ballot of a rank that is well, at a named point of the program.

    >>> healthy("commit", 3).is_in_step
    True
    """
    where = float(zlib.crc32(point.encode()))
    return Ballot(
        lowest_point=where,
        highest_point=where,
        lowest_count=float(count),
        highest_count=float(count),
        flag=float(flag),
    )


def failed(status: Status, rank: int, *, highs: Sequence[float] = ()) -> Ballot:
    """The ballot of a rank that failed: it meets its peers wherever they are.

    >>> together = fold([healthy("commit", 3), failed(Status.OUT_OF_MEMORY, 1)])
    >>> together.is_in_step, together.means.name, together.culprit
    (True, 'OUT_OF_MEMORY', 1.0)
    """
    return Ballot(
        status=float(status), num_failed=1.0, culprit=float(rank), highs=padded_highs(highs)
    )


def padded_highs(values: Sequence[float]) -> tuple[float, ...]:
    """Values in the slots of a ballot; what nobody told is infinitely low.

    >>> padded_highs([3.0])[:2]
    (3.0, -inf)
    """
    assert len(values) <= HIGHS, "a ballot has no room for them"
    return (*values, *_NO_HIGHS[len(values) :])


def fold(ballots: Iterable[Ballot]) -> Ballot:
    """All ballots as one. How they are grouped does not matter, but for the rounding of sums."""
    return functools.reduce(_both, ballots)


def _both(one: Ballot, other: Ballot) -> Ballot:
    # The culprit goes with the worst status.
    if one.status == other.status:
        culprit = min(one.culprit, other.culprit)
    else:
        culprit = max(one, other, key=lambda ballot: ballot.status).culprit
    return Ballot(
        status=max(one.status, other.status),
        num_failed=one.num_failed + other.num_failed,
        culprit=culprit,
        lowest_point=min(one.lowest_point, other.lowest_point),
        highest_point=max(one.highest_point, other.highest_point),
        lowest_count=min(one.lowest_count, other.lowest_count),
        highest_count=max(one.highest_count, other.highest_count),
        flag=max(one.flag, other.flag),
        max_rows=max(one.max_rows, other.max_rows),
        min_rows=min(one.min_rows, other.min_rows),
        num_rows=one.num_rows + other.num_rows,
        size=min(one.size, other.size),
        fewest_unused=min(one.fewest_unused, other.fewest_unused),
        highs=tuple(map(max, one.highs, other.highs)),
        sums=tuple(a + b for a, b in zip(one.sums, other.sums, strict=True)),
    )
