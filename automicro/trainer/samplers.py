"""Samplers that share the rows of a pass among ranks: each row exactly once, none made up."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from automicro.checkpoints import restore_rng_state, rng_state

Indices = Iterable[Any]


def share_of(rows: int, place: int, places: int) -> slice:
    """The part of so many rows that one of several ranks takes: even, the larger parts first.

    >>> [share_of(8, rank, 3) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
    """
    each, more = divmod(rows, places)
    start = place * each + min(place, more)
    return slice(start, start + each + (place < more))


class _SeededOrder:
    """The order of a sampler in a pass: the same on all ranks, whatever each has drawn before.

    Args:
        sampler: draws indices, or lists of them.
        seed: of the order, the same on all ranks. A generator of the sampler's own counts instead,
            and stands at the same place on all ranks.
    """

    def __init__(self, sampler: Indices, seed: int) -> None:
        self.sampler = sampler
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch the next time."""
        self._epoch = epoch

    def order(self) -> list[Any]:
        """All indices of the pass."""
        here = rng_state()
        try:
            torch.manual_seed(self._seed + self._epoch)
            return list(self.sampler)
        finally:
            restore_rng_state(here)


class SharedBatchSampler(Sampler[list[int]]):
    """Cuts the order of a sampler into whole batches, of which each rank takes its even part.

    A batch over all ranks holds the very rows that a single process with the same order and a
    batch size times the world size would train on, at any number of ranks. Only the last batch of
    a pass has fewer; where it has fewer than there are ranks, some have one batch less.

    Args:
        sampler: gives the order of all rows.
        batch_size: of one rank.
        drop_last: whether to leave out a last batch that is not full, over all ranks.
        rank: this one.
        world_size: how many ranks there are.
        seed: of the order, the same on all ranks.

    Example:
        >>> parts = [
        ...     SharedBatchSampler(range(9), 2, drop_last=False, rank=rank, world_size=2, seed=0)
        ...     for rank in range(2)
        ... ]
        >>> [list(part) for part in parts]
        [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    """

    def __init__(
        self,
        sampler: Indices,
        batch_size: int,
        *,
        drop_last: bool,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self.sampler = sampler  # where generators are looked for, and told the epoch
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._rank = rank
        self._world_size = world_size
        self._order = _SeededOrder(sampler, seed)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch the next time."""
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order.order()
        whole = self.batch_size * self._world_size
        for start in range(0, len(order), whole):
            batch = order[start : start + whole]
            if self.drop_last and len(batch) < whole:
                return
            part = batch[share_of(len(batch), self._rank, self._world_size)]
            if part:
                yield part

    def __len__(self) -> int:
        rows: int = len(self.sampler)  # type: ignore[arg-type]
        full, rest = divmod(rows, self.batch_size * self._world_size)
        return full + bool(rest > self._rank and not self.drop_last)


class SharedSampler(Sampler[Any]):
    """Gives each rank every so-manieth entry of a sampler: of a batch sampler, whole batches.

    Args:
        sampler: gives indices, or lists of them.
        rank: this one.
        world_size: how many ranks there are.
        seed: of the order, the same on all ranks.

    Example:
        >>> list(SharedSampler([[0, 1], [2], [3, 4]], rank=0, world_size=2, seed=0))
        [[0, 1], [3, 4]]
    """

    def __init__(self, sampler: Indices, *, rank: int, world_size: int, seed: int) -> None:
        self.sampler = sampler
        self._rank = rank
        self._world_size = world_size
        self._order = _SeededOrder(sampler, seed)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch the next time."""
        self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._order.order(), self._rank, None, self._world_size)

    def __len__(self) -> int:
        entries: int = len(self.sampler)  # type: ignore[arg-type]
        return len(range(self._rank, entries, self._world_size))
