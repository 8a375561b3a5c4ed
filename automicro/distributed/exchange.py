"""One exchange among all ranks: up the tree to the root, and down again."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from automicro.distributed.ballot import Ballot, fold
from automicro.distributed.groups import TEXT_BYTES, Group

T = TypeVar("T")


class Exchange(Protocol):
    """What a vote needs to reach all ranks."""

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
    """An exchange within a node, then among the leaders of nodes, then of their groups.

    Args:
        groups: those that this rank belongs to, from its node upwards.
        height: how many levels the tree has, also above this rank.
        rank: this process's number.
        world_size: how many there are.
    """

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
