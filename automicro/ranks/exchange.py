"""Exchange of small messages among all ranks: up a tree of groups and down again."""

import datetime
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

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
    num_failed: float = 0.0  # number of ranks whose status is not OK
    culprit: float = _NOBODY  # the lowest rank with the worst status; infinite if none
    lowest_point: float = math.inf  # lowest hash of the points in the program where ranks are
    # Highest such hash; below the lowest if no rank reported a point.
    highest_point: float = -math.inf
    lowest_count: float = math.inf  # fewest agreements that a rank has made
    highest_count: float = -math.inf  # most agreements that a rank has made
    flag: float = 0.0  # whether any rank raised its flag, whose meaning depends on the point
    max_extent: float = 0.0  # largest batch, in rows or cost
    min_rows: float = math.inf  # rows of the smallest batch
    num_rows: float = 0.0  # rows of all batches
    # Smallest proposed size, minus a constant per level (see ``ranks.votes``).
    size: float = math.inf
    fewest_unused: float = math.inf  # fewest parameters on a rank that no microbatch used
    highs: tuple[float, ...] = _NO_HIGHS  # numbers of which the maximum over ranks counts
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
    return Ballot(
        status=float(status), num_failed=1.0, culprit=float(rank), highs=padded_highs(highs)
    )


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
        num_failed=one.num_failed + other.num_failed,
        culprit=culprit,
        lowest_point=min(one.lowest_point, other.lowest_point),
        highest_point=max(one.highest_point, other.highest_point),
        lowest_count=min(one.lowest_count, other.lowest_count),
        highest_count=max(one.highest_count, other.highest_count),
        flag=max(one.flag, other.flag),
        max_extent=max(one.max_extent, other.max_extent),
        min_rows=min(one.min_rows, other.min_rows),
        num_rows=one.num_rows + other.num_rows,
        size=min(one.size, other.size),
        fewest_unused=min(one.fewest_unused, other.fewest_unused),
        highs=tuple(map(max, one.highs, other.highs)),
        sums=tuple(a + b for a, b in zip(one.sums, other.sums, strict=True)),
    )


FAN_OUT = 8
"""Number of nodes, or groups of nodes, that exchange directly."""


class Topology(NamedTuple):
    """Position of a rank in the tree."""

    groups: list[list[int]]
    height: int


def arrange(rank: int, world_size: int, local_world_size: int) -> Topology:
    """Return the position of a rank.

    >>> arrange(1, 4, 4)
    Topology(groups=[[0, 1, 2, 3]], height=1)
    >>> arrange(2, 4, 2)
    Topology(groups=[[2, 3], [0, 2]], height=2)
    >>> arrange(3, 4, 2)
    Topology(groups=[[2, 3]], height=2)
    """
    # Ranks of one node exchange directly. Across nodes that would cost each rank one message per
    # rank, so nodes agree internally first, then their leaders in groups of eight, and so on.
    width = local_world_size
    nodes = [list(range(at, min(at + width, world_size))) for at in range(0, world_size, width)]
    levels = plan_levels(nodes)
    groups = [block for blocks in levels for block in blocks if rank in block]
    return Topology(groups, len(levels))


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
    levels = [[list(node) for node in nodes]]
    while len(levels[-1]) > 1:
        leaders = [block[0] for block in levels[-1]]
        levels.append([leaders[at : at + FAN_OUT] for at in range(0, len(leaders), FAN_OUT)])
    return levels


class Group(Protocol):
    """A set of ranks that can exchange messages."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def index(self) -> int:
        """Index of this rank; 0 is the leader."""

    def gather(self, message: list[float]) -> list[list[float]]:
        """Return the messages of all ranks, in order, on each rank."""

    def broadcast(self, message: list[float]) -> list[float]:
        """Return the leader's message on each rank."""

    def gather_text(self, text: bytes) -> list[bytes]:
        """Gather text of at most `TEXT_BYTES`."""

    def broadcast_text(self, text: bytes) -> bytes:
        """Broadcast text of at most `TEXT_BYTES`."""


TEXT_BYTES = 2048


class GlooGroup:
    """Separate process group on the host for votes."""

    def __init__(self, ranks: list[int], *, timeout_seconds: float) -> None:
        self._ranks = ranks
        self._group: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=datetime.timedelta(seconds=timeout_seconds),
            backend="gloo",
        )

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def index(self) -> int:
        return self._ranks.index(dist.get_rank())

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

    def gather_text(self, text: bytes) -> list[bytes]:
        with without_modes():
            return [_read(row) for row in gather_on_host(self._group, _padded(text)).tolist()]

    def broadcast_text(self, text: bytes) -> bytes:
        with without_modes():
            return _read(broadcast_on_host(self._group, _padded(text)).tolist())


def _padded(text: bytes) -> Tensor:
    # The same length on all ranks, so lengths need not be exchanged first.
    return torch.tensor(list(text[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _read(codes: list[int]) -> bytes:
    return bytes(codes).rstrip(b"\0")


T = TypeVar("T")


class Exchange(Protocol):
    """Transport that a vote needs to reach all ranks."""

    @property
    def rank(self) -> int:
        """Rank of this process."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def ballots(self, ballot: Ballot) -> Ballot:
        """Return all ballots combined, on every rank."""

    def texts(self, text: str) -> str:
        """Return the nonempty texts of all ranks, one per line, truncated if necessary."""


class TreeExchange:
    """Exchange within a node, then among leaders of nodes, then among leaders of their groups."""

    def __init__(self, groups: Sequence[Group], *, height: int, rank: int, world_size: int) -> None:
        self._groups = groups
        self._height = height
        self.rank = rank
        self.world_size = world_size

    def ballots(self, ballot: Ballot) -> Ballot:
        together = self._up_and_down(
            ballot.numbers(),
            lambda group, own: fold(map(Ballot.read, group.gather(own))).numbers(),
            lambda group, own: group.broadcast(own),
        )
        return Ballot.read(together)

    def texts(self, text: str) -> str:
        together = self._up_and_down(
            text.encode(errors="backslashreplace")[:TEXT_BYTES],
            lambda group, own: b"\n".join(filter(None, group.gather_text(own)))[:TEXT_BYTES],
            lambda group, own: group.broadcast_text(own),
        )
        # A truncated text might end inside a character.
        return together.decode(errors="replace")

    def _up_and_down(
        self,
        value: T,
        gather: Callable[[Group, T], T],
        broadcast: Callable[[Group, T], T],
    ) -> T:
        for group in self._groups:
            value = gather(group, value)
        # All ranks of the top group have the result; leaders pass it down.
        below_top = self._groups[: self._height - 1]
        for group in reversed(below_top):
            value = broadcast(group, value)
        return value


class AloneExchange:
    """Exchange of a world with one rank."""

    rank = 0
    world_size = 1

    def ballots(self, ballot: Ballot) -> Ballot:
        return ballot

    def texts(self, text: str) -> str:
        return text
