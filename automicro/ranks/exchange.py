"""Exchange of small messages among all ranks: up a tree of groups and down again."""

import datetime
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from automicro.ranks.interface import HIGHS, Status
from automicro.torch_private import without_modes
from automicro.torch_private_distributed import broadcast_on_host, gather_on_host

SLOTS = 8
"""Number of denominators that one ballot carries."""

_NOBODY = math.inf
_NO_SUMS = (0.0,) * SLOTS
_NO_HIGHS = (-math.inf,) * HIGHS


class Ballot(NamedTuple):
    """Fixed set of numbers, exact in float64, so that any two votes can be combined."""

    status: float = 0.0  # the worst
    culprit: float = _NOBODY  # the lowest rank with the worst status; infinite if none
    lowest_point: float = math.inf  # lowest hash of the points in the program where ranks are
    # Highest such hash; below the lowest if no rank reported a point.
    highest_point: float = -math.inf
    lowest_count: float = math.inf  # fewest agreements that a rank has made
    highest_count: float = -math.inf  # most agreements that a rank has made
    flag: float = 0.0  # whether any rank raised its flag, whose meaning depends on the point
    highs: tuple[float, ...] = (
        _NO_HIGHS  # numbers of which the maximum counts; negated, the minimum
    )
    sums: tuple[float, ...] = _NO_SUMS  # numbers that are summed over ranks

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks that reported a point are at the same one."""
        if self.highest_point < self.lowest_point:
            return True
        return self.lowest_point == self.highest_point and self.lowest_count == self.highest_count

    @property
    def means(self) -> Status:
        """The status as an enum."""
        return Status(int(self.status))

    def numbers(self) -> list[float]:
        """Return all fields as one list for sending."""
        return [*self[:-2], *self.highs, *self.sums]

    @classmethod
    def read(cls, numbers: list[float]) -> "Ballot":
        """Build a ballot from its numbers."""
        highs, sums = numbers[-SLOTS - HIGHS : -SLOTS], numbers[-SLOTS:]
        return cls._make([*numbers[: -SLOTS - HIGHS], tuple(highs), tuple(sums)])


def healthy(point: str, count: int, *, flag: bool = False) -> Ballot:
    """Return the ballot of a healthy rank at a named point of the program.

    >>> healthy("commit", 3).is_in_step
    True
    """
    # Not hash(), which is salted in each process.
    where = float(zlib.crc32(point.encode()))
    return Ballot(
        lowest_point=where,
        highest_point=where,
        lowest_count=float(count),
        highest_count=float(count),
        flag=float(flag),
    )


def failed(status: Status, rank: int, *, highs: Sequence[float] = ()) -> Ballot:
    """Return the ballot of a failed rank, which matches its peers at any point.

    >>> together = fold([healthy("commit", 3), failed(Status.OUT_OF_MEMORY, 1)])
    >>> together.is_in_step, together.means.name, together.culprit
    (True, 'OUT_OF_MEMORY', 1.0)
    """
    return Ballot(status=float(status), culprit=float(rank), highs=padded_highs(highs))


def padded_highs(values: Sequence[float]) -> tuple[float, ...]:
    """Return values padded with -inf to the slots of a ballot."""
    assert len(values) <= HIGHS, "a ballot has no room for them"
    return (*values, *_NO_HIGHS[len(values) :])


def fold(ballots: Iterable[Ballot]) -> Ballot:
    """Combine ballots. Grouping changes only the rounding of sums."""
    return functools.reduce(_both, ballots)


def _both(one: Ballot, other: Ballot) -> Ballot:
    # The culprit belongs to the worst status.
    if one.status == other.status:
        culprit = min(one.culprit, other.culprit)
    else:
        culprit = max(one, other, key=lambda ballot: ballot.status).culprit
    return Ballot(
        status=max(one.status, other.status),
        culprit=culprit,
        lowest_point=min(one.lowest_point, other.lowest_point),
        highest_point=max(one.highest_point, other.highest_point),
        lowest_count=min(one.lowest_count, other.lowest_count),
        highest_count=max(one.highest_count, other.highest_count),
        flag=max(one.flag, other.flag),
        highs=tuple(map(max, one.highs, other.highs)),
        sums=tuple(a + b for a, b in zip(one.sums, other.sums, strict=True)),
    )


FAN_OUT = 8
"""Number of nodes, or groups of nodes, that exchange directly."""


def ranks_by_node(local_world_sizes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, or a single group if the reported sizes are inconsistent.

    >>> ranks_by_node([2, 2, 1])
    [[0, 1], [2]]
    >>> ranks_by_node([2, 1, 2])
    [[0, 1, 2]]
    """
    world_size = len(local_world_sizes)
    nodes: list[list[int]] = []
    while (start := sum(map(len, nodes))) < world_size:
        size = local_world_sizes[start]
        # Wrong groups would deadlock; one group of all ranks is always correct.
        if size < 1 or list(local_world_sizes[start : start + size]) != [size] * size:
            return [list(range(world_size))]
        nodes.append(list(range(start, start + size)))
    return nodes


def plan_levels(nodes: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return all groups of the tree, level by level from the nodes up.

    >>> plan_levels([[0, 1], [2, 3]]), plan_levels([[0, 1, 2]])
    ([[[0, 1], [2, 3]], [[0, 2]]], [[[0, 1, 2]]])
    """
    # Ranks of one node exchange directly. Across nodes that would cost each rank one message per
    # rank, so nodes agree internally first, then their leaders in groups of eight, and so on.
    levels = [[list(node) for node in nodes]]
    while len(levels[-1]) > 1:
        leaders = [block[0] for block in levels[-1]]
        levels.append([leaders[at : at + FAN_OUT] for at in range(0, len(leaders), FAN_OUT)])
    return levels


class Group(Protocol):
    """A set of ranks that can exchange messages; the first one leads."""

    def gather(self, message: list[float]) -> list[list[float]]:
        """Return the messages of all ranks, in order, on each rank."""

    def broadcast(self, message: list[float]) -> list[float]:
        """Return the leader's message on each rank."""


class GlooGroup:
    """Separate process group on the host for votes."""

    def __init__(self, ranks: list[int], *, timeout_seconds: float) -> None:
        self._group: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            backend="gloo",
        )

    def gather(self, message: list[float]) -> list[list[float]]:
        # A user's dispatch mode (fake tensors, a memory budget) would replace or count these
        # numbers.
        with without_modes():
            numbers = torch.tensor(message, dtype=torch.float64)
            rows: list[list[float]] = gather_on_host(self._group, numbers).tolist()
            return rows

    def broadcast(self, message: list[float]) -> list[float]:
        with without_modes():
            numbers = torch.tensor(message, dtype=torch.float64)
            leaders: list[float] = broadcast_on_host(self._group, numbers).tolist()
            return leaders


TEXT_BYTES = 2048


def _numbers_of(text: bytes) -> list[float]:
    # The same length on all ranks, so lengths need not be exchanged first.
    return list(map(float, text[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")))


def _text_of(numbers: Iterable[float]) -> bytes:
    return bytes(map(int, numbers)).rstrip(b"\0")


def _joined(texts: Iterable[list[float]]) -> list[float]:
    return _numbers_of(b"\n".join(filter(None, map(_text_of, texts))))


def _added(rows: Iterable[list[float]]) -> list[float]:
    return list(map(math.fsum, zip(*rows, strict=True)))


def _folded(ballots: Iterable[list[float]]) -> list[float]:
    return fold(map(Ballot.read, ballots)).numbers()


class Exchange:
    """Exchange within a node, then among leaders of nodes, then among leaders of their groups.

    >>> alone = Exchange([], height=0, rank=0, world_size=1)
    >>> alone.texts("here")
    'here'
    """

    def __init__(self, groups: Sequence[Group], *, height: int, rank: int, world_size: int) -> None:
        self._groups = groups
        self._height = height
        self.rank = rank
        self.world_size = world_size

    def ballots(self, ballot: Ballot) -> Ballot:
        """Return all ballots combined, on every rank."""
        return Ballot.read(self._up_and_down(ballot.numbers(), _folded))

    def sums(self, numbers: list[float]) -> list[float]:
        """Return the sums over ranks of equally many numbers."""
        return self._up_and_down(numbers, _added)

    def texts(self, text: str) -> str:
        """Return the nonempty texts of all ranks, one per line, truncated if necessary."""
        own = _numbers_of(text.encode(errors="backslashreplace"))
        # A truncated text might end inside a character.
        return _text_of(self._up_and_down(own, _joined)).decode(errors="replace")

    def _up_and_down(
        self, message: list[float], combine: Callable[[Iterable[list[float]]], list[float]]
    ) -> list[float]:
        for group in self._groups:
            message = combine(group.gather(message))
        # All ranks of the top group have the result; leaders pass it down.
        for group in reversed(self._groups[: max(self._height - 1, 0)]):
            message = group.broadcast(message)
        return message
