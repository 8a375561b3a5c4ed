"""A batch sampler for rows of varying length, which is seeded, shared by ranks, and resumable."""

import copy
import functools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from automicro.data.plan import (
    DEFAULT_BUCKETS,
    MODES,
    Array,
    Budget,
    Cost,
    Lengths,
    Mode,
    Plan,
    assign_buckets,
    checksum_of,
    derive_buckets,
    length_cost,
    make_plan,
    read_lengths,
)
from automicro.errors import CheckpointError
from automicro.options import check_choice, read_amount, read_count
from automicro.torch_private import forget_workers

LENGTHS = ("lengths", "second_lengths")
UNITS = ("seconds", "tokens")


@dataclass(frozen=True, kw_only=True)
class AverageBatch:
    """The average batch of one device; None for unknown totals.

    >>> AverageBatch(rows=32.0, seconds=400.0).tokens is None
    True
    """

    rows: float
    tokens: float | None = None
    seconds: float | None = None


class LengthBatchSampler(Sampler[list[int]]):
    """Yields batches of rows of a map-style data set, chosen by the lengths of rows.

    `automicro.data.plan` defines the modes: ``"fixed"``, ``"duration"``, ``"1D-bucketing"``,
    ``"1D-bucketing-dyn"``, ``"2D-bucketing"``, ``"2D-bucketing-fixed"`` and
    ``"2D-bucketing-singlet"``.

    An epoch is planned as one order of batches, which depends on seed and epoch. With n ranks, each
    takes every n-th batch. Over all ranks, every row comes once, and all ranks have the same number
    of batches. If the last round has fewer batches than ranks, these batches are split. If they
    have fewer rows than ranks, each row joins a batch of the previous round, which might then
    exceed its budget by one row. At any time, ranks take batches from the same bucket, except for
    the remainder of each bucket.

    The position in an epoch is a number of batches of that order. So another number of ranks can
    resume the epoch, and the rest follows exactly, with every row once. Only if fewer rows than
    ranks are left, some ranks have one batch less.

    Args:
        dataset: a data set with rows and a length; None if ``lengths`` has a number for each row.
        mode: one of `MODES`.
        lengths: the lengths of rows; see `read_lengths`. Not needed by ``"fixed"``.
        second_lengths: another length of each row, such as the tokens of its transcript; for modes
            with two dimensions.
        batch_size: rows of a batch, per device; for ``"1D-bucketing"`` also one number for each
            bucket.
        batch_length: maximum sum of lengths in a batch.
        batch_cost: maximum cost of a batch with its padding.
        cost: a function from the length and second length of rows, arrays of shape (rows,), to the
            cost of each, as an array. Longer rows must not cost less. The default is
            ``length * (second length + 1)``, or ``length`` without second lengths.
        bucket_edges: ascending lengths. A bucket has the rows up to its edge, and one more bucket
            has longer rows.
        num_buckets: number of buckets, for modes that derive them; or two numbers: for lengths, and
            for second lengths in each of these. By default 10, and 10 × 4.
        shuffle: whether each epoch has a different order. Otherwise rows keep their order within
            buckets.
        seed: seed of the order.
        rank: rank of this process; None for the rank in torch.distributed, or 0 without it.
        world_size: number of ranks; None as for ``rank``.
        unit: the unit of ``lengths``: "seconds", "tokens", or None for any other. Reports and
            ``accumulate_batches="5h"`` use it.
        second_unit: the unit of ``second_lengths``.

    Raises:
        TypeError, ValueError: options that are invalid or that the mode does not use; fewer rows
            than ranks.

    Example:
        >>> sampler = LengthBatchSampler(
        ...     mode="duration", lengths=[5.0, 9.0, 2.0, 4.0, 8.0], batch_length=10.0, shuffle=False
        ... )
        >>> list(sampler)
        [[0], [1], [2, 3], [4]]
        >>> parts = [
        ...     LengthBatchSampler(range(7), mode="fixed", batch_size=2, rank=rank, world_size=2)
        ...     for rank in range(2)
        ... ]
        >>> [len(part) for part in parts], sorted(sum((sum(part, []) for part in parts), []))
        ([2, 2], [0, 1, 2, 3, 4, 5, 6])
    """

    def __init__(
        self,
        dataset: Any = None,
        *,
        mode: str,
        lengths: Lengths | None = None,
        second_lengths: Lengths | None = None,
        batch_size: int | Sequence[int] | None = None,
        batch_length: float | None = None,
        batch_cost: float | None = None,
        cost: Cost | None = None,
        bucket_edges: Sequence[float] | None = None,
        num_buckets: int | Sequence[int] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        unit: str | None = None,
        second_unit: str | None = None,
    ) -> None:
        rule = MODES[check_choice("mode", mode, MODES)]
        self.mode, self.shuffle, self.seed = mode, shuffle, read_count("seed", seed, least=0)
        given = {"lengths": lengths, "second_lengths": second_lengths}
        budgets = {"batch_size": batch_size, "batch_length": batch_length, "batch_cost": batch_cost}
        others = {"cost": cost, "bucket_edges": bucket_edges, "num_buckets": num_buckets}
        _check_options(mode, given | budgets | others)
        # Lengths that the mode does not use can be given for reports.
        self._known: dict[str, Array] = {
            name: read_lengths(each, dataset, name=name)
            for name, each in given.items()
            if each is not None
        }
        self._by_unit: dict[str, Array] = {}
        units = (("unit", unit), ("second_unit", second_unit))
        for (option, counted), name in zip(units, given, strict=True):
            if counted is None:
                continue
            if name not in self._known:
                raise ValueError(f"{option}={counted!r} needs {name}: give both, or neither")
            self._by_unit[check_choice(option, counted, UNITS)] = self._known[name]
        self.num_rows = _count_rows(dataset, self._known)
        self._lengths = list(self._known.values())[: rule.dimensions]
        self._buckets: Array | None = None
        if bucket_edges is not None:
            self._buckets = assign_buckets(self._lengths[0], _read_edges(bucket_edges))
        elif rule.buckets == "derived":
            self._buckets = derive_buckets(self._lengths, _read_counts(num_buckets, rule))
        self._budget = Budget(
            rows=_read_sizes(batch_size, bucket_edges),
            length=read_amount("batch_length", batch_length),
            cost=read_amount("batch_cost", batch_cost),
            cost_of=cost or length_cost,
        )
        self._options = repr((mode, batch_size, batch_length, batch_cost, shuffle))
        self._own_place = _read_place(rank, world_size)
        self._epoch = 0
        self._start = 0  # batches of the plan before this pass
        self._next_start = 0  # batches of the plan before the next pass
        self._given = 0  # rounds of this pass so far
        # Number of ranks that began the epoch, if it was resumed.
        self._planned_for: int | None = None
        self._plan: tuple[tuple[int, ...], Plan] | None = None

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._place[0]

    @property
    def world_size(self) -> int:
        """The number of ranks that take batches."""
        return self._place[1]

    @property
    def _place(self) -> tuple[int, int]:
        if self._own_place is not None:
            return self._own_place
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    @property
    def has_place(self) -> bool:
        """Whether its rank was given instead of taken from torch.distributed."""
        return self._own_place is not None

    def at(self, *, rank: int, world_size: int) -> "LengthBatchSampler":
        """Return a sampler of the same batches for another rank.

        >>> LengthBatchSampler(range(4), mode="fixed", batch_size=2).at(rank=1, world_size=2).rank
        1
        """
        # A shallow copy, because both share lengths, perhaps of millions of rows.
        other = copy.copy(self)
        other._own_place = _read_place(rank, world_size)
        return other

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Start this epoch. If it is the current one, it continues where it is.

        Args:
            epoch: number of the epoch, from 0.
        """
        # A resumed epoch is set again by its training loop, and must not begin again.
        if epoch != self._epoch:
            self._epoch, self._given, self._planned_for = epoch, 0, None
            self._start = self._next_start = 0

    def plan(self) -> Plan:
        """Return all batches of the epoch, for all ranks, in order."""
        if self.num_rows < self.world_size:
            raise ValueError(
                f"{self.num_rows} rows cannot be divided among {self.world_size} ranks with the "
                "same number of batches for each: use fewer processes, or more data"
            )
        together = self._planned_for or self.world_size
        # The number of ranks that began the epoch: plans for another number have other batches.
        key = (self.seed, self._epoch, together)
        if self._plan is None or self._plan[0] != key:
            self._plan = None  # two plans at a time would take twice the memory
            plan = make_plan(
                self._lengths,
                buckets=self._buckets,
                budget=self._budget,
                num_rows=self.num_rows,
                random=np.random.default_rng([self.seed, self._epoch]) if self.shuffle else None,
                together=together,
            )
            self._plan = key, plan
        return self._plan[1]

    def __iter__(self) -> Iterator[list[int]]:
        self._start, self._given = self._next_start, 0
        share = self._share()
        for number in range(share.rounds):
            # Counted before the yield, because the consumer has the batch from then on.
            self._given += 1
            # At the end of a resumed epoch, there might be fewer rows than ranks.
            if len(rows := share.rows(number)):
                yield rows.tolist()
        self._next_start = 0  # the next pass is a whole epoch

    def __len__(self) -> int:
        """Return the number of batches of this pass on this rank."""
        return len(self._share())

    def _share(self) -> "_Share":
        return _Share(self.plan(), self._start, *self._place)

    @property
    def num_rounds_before(self) -> int:
        """The number of batches before this pass on this rank, for this number of ranks."""
        return -(-self._start // self.world_size)

    @property
    def checksum(self) -> int:
        """The checksum of the plan, which is the same on all ranks that share it."""
        return self.plan().checksum

    @functools.cached_property
    def fingerprint(self) -> int:
        """The checksum of lengths and options, equal for samplers with the same plans."""
        value = zlib.crc32(f"{self.num_rows} {self._options}".encode())
        # Lengths themselves, because another data set with as many rows has other batches.
        for each in (*self._lengths, *([] if self._buckets is None else [self._buckets])):
            value = checksum_of(each, value)
        return value

    def batch_costs(self) -> list[float] | None:
        """Return the cost of each batch of this pass on this rank, with padding, for a rehearsal.

        That is rows × cost of the longest; None if lengths are unknown.
        >>> LengthBatchSampler(
        ...     mode="fixed", lengths=[2, 3, 4], batch_size=2, shuffle=False
        ... ).batch_costs()
        [6.0, 4.0]
        """
        lengths = self._lengths or list(self._known.values())[:1]
        if not lengths:
            return None
        share = self._share()
        batches = map(share.rows, range(len(share)))
        cost_of = self._budget.cost_of
        return [len(rows) * float(cost_of(*(e[rows].max() for e in lengths))) for rows in batches]

    @property
    def units(self) -> tuple[str, ...]:
        """The known units of rows: "seconds", "tokens", both or none."""
        return tuple(self._by_unit)

    def total_of(self, number: int, unit: str) -> float:
        """Return the total length of a batch of this pass on this rank, without padding.

        Args:
            number: number of the batch, from 0.
            unit: one of `units`.

        >>> sampler = LengthBatchSampler(
        ...     mode="fixed", lengths=[2, 3, 4], unit="seconds", batch_size=2, shuffle=False
        ... )
        >>> sampler.total_of(0, "seconds"), sampler.total_of(1, "seconds")
        (5.0, 4.0)
        """
        return float(self._by_unit[unit][self._share().rows(number)].sum())

    def average_batch(self) -> AverageBatch:
        """Return the average batch of the epoch, on one device.

        >>> LengthBatchSampler(range(6), mode="fixed", batch_size=4).average_batch().rows
        3.0
        """
        count = max(len(self.plan()), 1)
        totals = {unit: float(each.sum()) / count for unit, each in self._by_unit.items()}
        return AverageBatch(rows=self.num_rows / count, **totals)

    def state_dict(self, *, batches_given: int | None = None) -> dict[str, int]:
        """Return the position in the epoch, which is the same on all ranks.

        Args:
            batches_given: number of batches of this pass used on this rank; None for the batches
                requested so far, which are more if workers of a loader prefetch.

        >>> sampler = LengthBatchSampler(range(8), mode="fixed", batch_size=2)
        >>> batches = iter(sampler)
        >>> first = next(batches)
        >>> later = LengthBatchSampler(range(8), mode="fixed", batch_size=2)
        >>> later.load_state_dict(sampler.state_dict())
        >>> list(later) == list(batches)
        True
        """
        given = self._given if batches_given is None else batches_given
        # The last round might hold fewer batches than ranks, so the product would miss the end.
        is_complete = given >= self._share().rounds
        return {
            "epoch": self._epoch,
            "seed": self.seed,
            "start": len(self.plan()) if is_complete else self._start + given * self.world_size,
            "planned_for": self._planned_for or self.world_size,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the rest of an epoch, without the rows already used; whole epochs follow.

        Args:
            state: state of a sampler with the same rows and options, for any number of ranks.

        Raises:
            CheckpointError: the state is from other lengths or options.
        """
        if state["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                "the saved position is of a LengthBatchSampler with other lengths or options "
                f"than this one ({self._options}, {self.num_rows:,} rows), so its batches had "
                "other rows. Use the same lengths and options, or start with the next epoch"
            )
        self._epoch, self.seed = state["epoch"], state["seed"]
        self._start = self._next_start = state["start"]
        self._given = 0
        self._planned_for = state["planned_for"]

    def __repr__(self) -> str:
        return f"LengthBatchSampler({self.mode!r}, {self.num_rows:,} rows)"


class _Share:
    """A rank's share of a plan from some batch on: one batch of each round of all ranks."""

    def __init__(self, plan: Plan, start: int, rank: int, world_size: int) -> None:
        self._plan, self._first, self._step = plan, start + rank, world_size
        self._even, rest = divmod(len(plan) - start, world_size)  # rounds that are as planned
        self._last: Array | None = None  # a last round that is not
        if not rest:
            return
        left = [plan.batch(place) for place in range(len(plan) - rest, len(plan))]
        if sum(map(len, left)) >= world_size or not self._even:
            # A rank without a batch would leave the others waiting in their collectives.
            while len(left) < world_size:  # halve the largest; rows might be too few for all
                largest = max(range(len(left)), key=lambda place: len(left[place]))
                left[largest], half = np.array_split(left[largest], 2)
                left.append(half)
            self._last = left[rank]
            return
        # One more row for each rank; there are fewer than ranks.
        self._even -= 1
        full = plan.batch(len(plan) - rest - world_size + rank)
        self._last = np.append(full, np.concatenate(left)[rank : rank + 1])

    @property
    def rounds(self) -> int:
        return self._even + (self._last is not None)

    def __len__(self) -> int:
        return self._even + (self._last is not None and len(self._last) > 0)

    def rows(self, number: int) -> Array:
        """Return the rows of the batch in a round."""
        if number >= self._even and self._last is not None:
            return self._last
        return self._plan.batch(self._first + number * self._step)


def with_batch_sampler(loader: Any, sampler: Iterable[list[int]]) -> DataLoader[Any]:
    """Return a copy of a loader with other batches, and the same workers, collation and options.

    Args:
        loader: a loader of a map-style data set.
        sampler: yields the rows of each batch.

    Raises:
        TypeError: not a ``DataLoader`` that forms batches of a map-style data set.

    >>> loader = with_batch_sampler(DataLoader([1, 2, 3]), [[0, 2], [1]])
    >>> [batch.tolist() for batch in loader]
    [[1, 3], [2]]
    """
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        raise TypeError(
            f"{loader!r} cannot be sampled by length. Give a torch.utils.data.DataLoader that "
            "cuts batches itself (no batch_size=None), over a data set with indices and a length"
        )
    # A copy keeps workers, collation and all additions of a subclass, whose constructor might have
    # other arguments.
    other = copy.copy(loader)
    forget_workers(other)
    vars(other)["batch_sampler"] = sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return other
    # Remove values that are no longer true.
    vars(other)["batch_size"], vars(other)["drop_last"] = None, False
    return other


def _count_rows(dataset: Any, known: Mapping[str, Array]) -> int:
    if not known and not hasattr(dataset, "__len__"):
        raise ValueError("the number of rows is unknown: give a dataset with a length")
    counts = list(map(len, known.values())) or [len(dataset)]
    if min(counts) != max(counts):
        raise ValueError(
            f"lengths has {counts[0]:,} numbers and second_lengths {counts[1]:,}: give one of each "
            "for every row"
        )
    return counts[0]


def _check_options(mode: str, options: Mapping[str, Any]) -> None:
    rule = MODES[mode]
    given = [name for name, value in options.items() if value is not None]
    budgets = [name for name in rule.budgets if name in given]
    needed = [*LENGTHS[: rule.dimensions], *["bucket_edges"] * (rule.buckets == "given")]
    further = [*["num_buckets"] * (rule.buckets == "derived"), *["cost"] * ("batch_cost" in given)]
    allowed = {*LENGTHS, *needed, *further, *budgets}
    if len(budgets) != 1 or not {*needed} <= {*given} <= allowed:
        raise ValueError(
            f"mode={mode!r} needs {', '.join([*needed, ' or '.join(rule.budgets)])}, accepts "
            f"{', '.join(further) or 'nothing else'} (cost with batch_cost), but got "
            f"{', '.join(given) or 'none'}: give one of each"
        )


def _read_edges(edges: Sequence[float]) -> Sequence[float]:
    # No row would fall into the bucket between equal edges.
    if not len(edges) or list(edges) != sorted(set(edges)):
        raise ValueError(f"bucket_edges={list(edges)} do not ascend: give ascending lengths")
    return edges


def _read_counts(counts: int | Sequence[int] | None, rule: Mode) -> tuple[int, ...]:
    default = DEFAULT_BUCKETS[rule.dimensions]
    given = default if counts is None else counts
    numbers = (given, *default[1:]) if isinstance(given, int) else tuple(given)
    if len(numbers) != rule.dimensions:
        form = f"a number, such as {default[0]}" if rule.dimensions == 1 else "two numbers"
        raise ValueError(f"num_buckets={counts!r}: give {form}")
    # Bucket numbers have 16 bits, which halves the memory for large data sets.
    if np.prod([read_count("num_buckets", each) for each in numbers]) > 2**16:
        raise ValueError(f"num_buckets={counts!r} is too many: give at most {2**16:,} in all")
    return numbers


def _read_sizes(sizes: int | Sequence[int] | None, edges: Sequence[float] | None) -> Any:
    if sizes is None:
        return None
    if not isinstance(sizes, Sequence):
        return (read_count("batch_size", sizes),)
    wanted = 0 if edges is None else len(edges) + 1
    if len(sizes) != wanted:
        raise ValueError(
            f"batch_size={list(sizes)} has {len(sizes)} numbers: give one, or in "
            f"mode='1D-bucketing' one for each bucket and one for longer rows ({wanted} here)"
        )
    return tuple(read_count("batch_size", each) for each in sizes)


def _read_place(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"rank={rank}, world_size={world_size}: give both, or neither")
    read_count("world_size", world_size)
    if not 0 <= read_count("rank", rank, least=0) < world_size:
        raise ValueError(f"rank={rank} of {world_size} ranks: give 0 to {world_size - 1}")
    return rank, world_size
