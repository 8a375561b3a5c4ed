"""Samplers that share the rows of a pass among ranks: each row exactly once, none made up."""

import contextlib
import itertools
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Sampler

from automicro.checkpoints import restore_rng_state, rng_state
from automicro.trainer.plain_text import as_text

Indices = Iterable[Any]


def share_of(rows: int, place: int, places: int) -> slice:
    """The part of so many rows that one of several ranks takes: even, the larger parts first.

    >>> [share_of(8, rank, 3) for rank in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 8, None)]
    """
    each, more = divmod(rows, places)
    start = place * each + min(place, more)
    return slice(start, start + each + (place < more))


def num_sharing(rows: int, places: int, batch_size: int) -> int:
    """How many of several ranks take a part of so many rows.

    All, unless one of them would get a single row where another has more: BatchNorm cannot train on
    that, and the whole batch would fail. The ranks without rows run fillers.

    Args:
        rows: of all ranks.
        places: how many ranks there are.
        batch_size: rows of each in a full batch; of one, no rank has more.

    >>> [num_sharing(rows, 4, 8) for rows in (1, 2, 3, 5, 8, 9)]
    [1, 1, 1, 2, 4, 4]
    """
    if batch_size == 1 or rows >= 2 * places:
        return places
    return max(1, rows // 2)


class _OneOrder(Sampler[Any]):
    """An order that is the same on all ranks, whatever each has drawn before; each has a part.

    Args:
        sampler: draws indices, or lists of them.
        rank: this one.
        world_size: how many ranks there are.
        seed: of the order, the same on all ranks. A generator of the sampler's own counts instead,
            and stands at the same place on all ranks.

    Attributes:
        sampler: as given.
        rank: as given.
        world_size: as given.
        seed: as given; another may be put in its place.
        checksum: of the order that was drawn last; None before the first.
    """

    per_batch: int
    """How many entries of the order make a batch of all ranks."""

    def __init__(self, sampler: Indices, *, rank: int, world_size: int, seed: int) -> None:
        self.sampler = sampler  # where generators are looked for, and told the epoch
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.checksum: int | None = None
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch the next time."""
        self._epoch = epoch

    def order(self) -> list[Any]:
        """All entries of the pass."""
        here = rng_state()
        seed = self.seed + self._epoch
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            torch.manual_seed(seed)
            order = list(self.sampler)
        finally:
            restore_rng_state(here)
        self.checksum = _checksum(order)
        return order


class SharedBatchSampler(_OneOrder):
    """Cuts the order of a sampler into whole batches, of which each rank takes its even part.

    A batch over all ranks holds the very rows that a single process with the same order and a
    batch size times the world size would train on, at any number of ranks. Only the last batch of
    a pass has fewer; where it has fewer than two for each rank, some have one batch less.

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
        super().__init__(sampler, rank=rank, world_size=world_size, seed=seed)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.per_batch = batch_size * world_size

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for start in range(0, len(order), self.per_batch):
            batch = order[start : start + self.per_batch]
            if self.drop_last and len(batch) < self.per_batch:
                return
            part = batch[self._share(len(batch))]
            if part:
                yield part

    def __len__(self) -> int:
        rows: int = len(self.sampler)  # type: ignore[arg-type]
        full, rest = divmod(rows, self.per_batch)
        last = self._share(rest)
        return full + (last.stop > last.start and not self.drop_last)

    def _share(self, rows: int) -> slice:
        places = num_sharing(rows, self.world_size, self.batch_size)
        return share_of(rows, self.rank, places) if self.rank < places else slice(0, 0)


class SharedSampler(_OneOrder):
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
        super().__init__(sampler, rank=rank, world_size=world_size, seed=seed)
        self.per_batch = world_size

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.order(), self.rank, None, self.world_size)

    def __len__(self) -> int:
        entries: int = len(self.sampler)  # type: ignore[arg-type]
        return len(range(self.rank, entries, self.world_size))


Shared: TypeAlias = SharedBatchSampler | SharedSampler


def shared_sampler(loader: object) -> Shared | None:
    """What shares the rows of a loader among ranks; None where it is none of ours.

    Args:
        loader: anything that gives batches.

    >>> shared_sampler([1, 2]) is None
    True
    """
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name, None)
        if isinstance(sampler, Shared):
            return sampler
    return None


def _checksum(order: list[Any]) -> int:
    with contextlib.suppress(TypeError, OverflowError):
        return zlib.crc32(array("q", order))
    with contextlib.suppress(TypeError, OverflowError):  # lists of indices
        lengths = zlib.crc32(array("q", map(len, order)))
        return zlib.crc32(array("q", itertools.chain.from_iterable(order)), lengths)
    return zlib.crc32(as_text(order).encode())  # names of rows, say
