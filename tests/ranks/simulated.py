"""Simulation of many ranks in one process: threads that exchange in memory and count messages."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from automicro.ranks.exchange import Exchange, plan_levels

T = TypeVar("T")


class _Meeting:
    """Repeated meeting point of the members of a group."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=timeout_seconds)

    def exchange(self, index: int, value: Any) -> list[Any]:
        self.slots[index] = value
        try:
            self.barrier.wait()
            seen = [*self.slots]
            self.barrier.wait()  # no rank writes before all have read
        except threading.BrokenBarrierError as error:
            raise RuntimeError("a simulated rank is gone, or took too long") from error
        return seen


class _SimulatedGroup:
    """Group of threads."""

    def __init__(self, meeting: _Meeting, index: int) -> None:
        self._meeting, self.index, self.size = meeting, index, len(meeting.slots)
        self.messages = 0

    def gather(self, message: list[float]) -> list[list[float]]:
        self.messages += self.size - 1
        return self._meeting.exchange(self.index, message)

    def broadcast(self, message: list[float]) -> list[float]:
        self.messages += self.size - 1 if self.index == 0 else 0
        values: list[list[float]] = self._meeting.exchange(self.index, message)
        return values[0]


class SimulatedWorld:
    """Ranks as threads of this process."""

    def __init__(
        self, world_size: int, *, local_world_size: int | None = None, timeout_seconds: float = 10.0
    ) -> None:
        self.world_size = world_size
        ranks, width = list(range(world_size)), local_world_size or world_size
        self.levels = plan_levels([ranks[at : at + width] for at in ranks[::width]])
        # Keyed by members, so all threads of a group find the same meeting.
        self._meetings = {
            tuple(members): _Meeting(len(members), timeout_seconds)
            for blocks in self.levels
            for members in blocks
        }
        self._groups: dict[int, list[_SimulatedGroup]] = {}

    def exchange(self, rank: int) -> Exchange:
        """Return the exchange of one rank."""
        groups = [
            _SimulatedGroup(self._meetings[tuple(members)], members.index(rank))
            for blocks in self.levels
            for members in blocks
            if rank in members
        ]
        self._groups[rank] = groups
        return Exchange(groups, height=len(self.levels), rank=rank, world_size=self.world_size)

    def messages(self, rank: int) -> int:
        """Return the number of messages that a rank sent through its last exchange."""
        return sum(group.messages for group in self._groups[rank])

    def run(self, work: Callable[[int], T]) -> Sequence[T]:
        """Run work on every rank at once; return results in order, or raise the first error."""
        with ThreadPoolExecutor(self.world_size) as threads:
            return [*threads.map(work, range(self.world_size))]
