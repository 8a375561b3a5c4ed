"""One exchange among all ranks: small groups, who talks to whom, up the tree and down again."""

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
        max_extent: the largest of a batch: its rows, or what they cost.
        min_rows: of a batch.
        num_rows: of all batches.
        size: the smallest proposed, below it whole steps for levels (see ``ranks.votes``).
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
    max_extent: float = 0.0
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
    # Not hash(), which Python salts anew in each process.
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
    """Values in the slots of a ballot; an empty slot is infinitely low.

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
        max_extent=max(one.max_extent, other.max_extent),
        min_rows=min(one.min_rows, other.min_rows),
        num_rows=one.num_rows + other.num_rows,
        size=min(one.size, other.size),
        fewest_unused=min(one.fewest_unused, other.fewest_unused),
        highs=tuple(map(max, one.highs, other.highs)),
        sums=tuple(a + b for a, b in zip(one.sums, other.sums, strict=True)),
    )


FAN_OUT = 8
"""How many nodes, or groups of nodes, talk to each other directly."""


class Topology(NamedTuple):
    """A rank's place in the tree."""

    groups: list[list[int]]
    height: int


def arrange(rank: int, world_size: int, local_world_size: int) -> Topology:
    """The place of a rank.

    On one node all ranks exchange directly. On several nodes that would cost each rank as many
    messages as there are ranks, so nodes agree within themselves first, then their leaders in
    groups of eight, and so on.

    >>> arrange(1, 4, 4)
    Topology(groups=[[0, 1, 2, 3]], height=1)
    >>> arrange(2, 4, 2)
    Topology(groups=[[2, 3], [0, 2]], height=2)
    >>> arrange(3, 4, 2)
    Topology(groups=[[2, 3]], height=2)
    """
    width = local_world_size
    nodes = [list(range(at, min(at + width, world_size))) for at in range(0, world_size, width)]
    levels = plan_levels(nodes)
    groups = [block for blocks in levels for block in blocks if rank in block]
    return Topology(groups, len(levels))


def ranks_by_node(local_world_sizes: Sequence[int]) -> list[list[int]]:
    """The ranks of each node; all in one where what they say does not fit together.

    >>> ranks_by_node([2, 2, 1])
    [[0, 1], [2]]
    >>> ranks_by_node([2, 1, 2])
    [[0, 1, 2]]
    """
    world_size = len(local_world_sizes)
    nodes: list[list[int]] = []
    while (start := sum(map(len, nodes))) < world_size:
        size = local_world_sizes[start]
        # Wrong groups would leave ranks waiting for each other; one group of all is right anywhere.
        if size < 1 or list(local_world_sizes[start : start + size]) != [size] * size:
            return [list(range(world_size))]
        nodes.append(list(range(start, start + size)))
    return nodes


def plan_levels(nodes: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """All groups of the tree, level by level from the nodes upwards.

    >>> plan_levels([[0, 1], [2, 3]]), plan_levels([[0, 1, 2]])
    ([[[0, 1], [2, 3]], [[0, 2]]], [[[0, 1, 2]]])
    """
    levels = [[list(node) for node in nodes]]
    while len(levels[-1]) > 1:
        leaders = [block[0] for block in levels[-1]]
        levels.append([leaders[at : at + FAN_OUT] for at in range(0, len(leaders), FAN_OUT)])
    return levels


class Group(Protocol):
    """Some ranks that can talk to each other."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def index(self) -> int:
        """This rank's number among them; 0 is their leader."""

    def gather(self, message: list[float]) -> list[list[float]]:
        """The messages of all, in order, on all of them."""

    def broadcast(self, message: list[float]) -> list[float]:
        """The leader's message on all of them."""

    def gather_text(self, text: bytes) -> list[bytes]:
        """As `gather`, for text of at most `TEXT_BYTES`."""

    def broadcast_text(self, text: bytes) -> bytes:
        """As `broadcast`, for text."""


TEXT_BYTES = 2048


class GlooGroup:
    """A process group of its own on the host, apart from those of the training."""

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
        # Under a user's dispatch mode (fake tensors, a memory budget) these numbers would be
        # replaced or counted.
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
    # Of one length on all ranks, so that no exchange of lengths has to come first.
    return torch.tensor(list(text[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _read(codes: list[int]) -> bytes:
    return bytes(codes).rstrip(b"\0")


T = TypeVar("T")


class Exchange(Protocol):
    """The transport that a vote needs to reach all ranks."""

    @property
    def rank(self) -> int:
        """This process's number."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def ballots(self, ballot: Ballot) -> Ballot:
        """All ranks' ballots as one, on every rank."""

    def texts(self, text: str) -> str:
        """All ranks' texts that are not empty, one to a line, as far as there is room."""


class TreeExchange:
    """An exchange within a node, then among the leaders of nodes, then of their groups."""

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
        # A text that was cut off may end in the middle of a character.
        return together.decode(errors="replace")

    def _up_and_down(
        self,
        value: T,
        gather: Callable[[Group, T], T],
        broadcast: Callable[[Group, T], T],
    ) -> T:
        for group in self._groups:
            value = gather(group, value)
        # All of the topmost group know by now; below it, leaders pass it on.
        below_top = self._groups[: self._height - 1]
        for group in reversed(below_top):
            value = broadcast(group, value)
        return value


class AloneExchange:
    """The exchange of a world of one."""

    rank = 0
    world_size = 1

    def ballots(self, ballot: Ballot) -> Ballot:
        return ballot

    def texts(self, text: str) -> str:
        return text
