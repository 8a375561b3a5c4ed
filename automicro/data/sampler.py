"""A batch sampler for rows of varying length, which is seeded, shared by ranks, and resumable.

A single rule covers its seven modes.

A plan combines a rule for *buckets* (which rows can share a batch) with a *budget* (how much of
them a batch holds):

======================== ============================================ ==========================
mode                     buckets                                      a batch holds
======================== ============================================ ==========================
``fixed``                one                                          ``batch_size`` rows
``duration``             one                                          ``batch_length`` in all
``1D-bucketing``         by length, at ``bucket_edges``               any of the three
``1D-bucketing-dyn``     by length, ``num_buckets`` of equal totals   any of the three
``2D-bucketing``         by length, each of these by second length    ``batch_cost``
``2D-bucketing-fixed``   the same                                     ``batch_size`` rows
``2D-bucketing-singlet`` one                                          ``batch_cost``
======================== ============================================ ==========================

Rows are shuffled and put into their buckets. Within a bucket, batches are filled in that order as
long as the next row fits into the budget; then batches are shuffled. A row that exceeds the budget
on its own becomes a batch of its own: no row is dropped, and the last batch of a bucket holds the
rest. ``batch_length`` is the sum of the rows' lengths. ``batch_cost`` is the cost of a batch with
its padding, rows × cost(longest length, longest second length), so that batches take similar
memory.
"""

import contextlib
import copy
import csv
import functools
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from automicro.errors import CheckpointError
from automicro.options import check_choice, read_amount, read_count
from automicro.torch_private_execution import forget_workers

Array = np.ndarray[Any, Any]
Cost = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The options of a sampling mode."""

    dimensions: int  # number of lengths of a row that it uses
    buckets: str  # "one", "given" or "derived"
    budgets: tuple[str, ...]  # the options for a budget, of which exactly one is given


_ANY = ("batch_size", "batch_length", "batch_cost")
MODES = {
    "fixed": Mode(dimensions=0, buckets="one", budgets=("batch_size",)),
    "duration": Mode(dimensions=1, buckets="one", budgets=("batch_length",)),
    "1D-bucketing": Mode(dimensions=1, buckets="given", budgets=_ANY),
    "1D-bucketing-dyn": Mode(dimensions=1, buckets="derived", budgets=_ANY),
    "2D-bucketing": Mode(dimensions=2, buckets="derived", budgets=("batch_cost",)),
    "2D-bucketing-fixed": Mode(dimensions=2, buckets="derived", budgets=("batch_size",)),
    "2D-bucketing-singlet": Mode(dimensions=2, buckets="one", budgets=("batch_cost",)),
}
"""The meaning of each value of ``sampling_mode``."""

DEFAULT_BUCKETS = {1: (10,), 2: (10, 4)}


def length_cost(length: Any, second: Any = 0) -> Any:
    """Return the cost of a row: its length × (its second length + 1).

    >>> length_cost(100.0), length_cost(100.0, 7.0)
    (100.0, 800.0)
    """
    # The size of a transducer's lattice, which has a column for "nothing yet"; without a second
    # length, the length itself.
    return length * (second + 1)


_ROUNDING = 1e-9  # relative rounding error of sums of decimal numbers
_ASKED_ROWS = 2**20  # number of lengths that determine the edges between buckets


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The capacity of a batch, as one of the first three fields."""

    rows: Sequence[int] | None = None  # number of rows, one for all buckets or one for each
    length: float | None = None  # the sum of lengths
    cost: float | None = None  # number of rows × ``cost_of`` the longest
    # From the length and second length of rows, arrays of shape (rows,), to the cost of each, as an
    # array. Longer rows must not cost less.
    cost_of: Cost = length_cost

    def num_fitting(self, lengths: Sequence[Array]) -> int:
        """Return how many of these rows, from the first on, fit into a batch."""
        if self.length is not None:
            amount, taken = self.length, np.cumsum(lengths[0])
        else:
            assert self.cost is not None
            # With padding, every row of a batch costs as much as its longest row.
            longest = (np.maximum.accumulate(each) for each in lengths)
            amount, taken = self.cost, np.arange(1, len(lengths[0]) + 1) * self.cost_of(*longest)
        return int(np.searchsorted(taken, amount * (1 + _ROUNDING), side="right"))


def _derived_edges(values: Array, count: int) -> Array:
    """Return edges between buckets with about the same total length each.

    >>> _derived_edges(np.array([1.0, 1.0, 2.0, 4.0]), 2)
    array([2.])
    """
    # A sample of many rows gives the same edges with far less sorting.
    ordered = np.sort(values[:: max(1, len(values) // _ASKED_ROWS)])
    totals = np.cumsum(ordered)
    # Rows of length 0 would all lie on one edge.
    if count < 2 or not len(ordered) or totals[-1] == 0:
        return np.empty(0)
    wanted = totals[-1] * np.arange(1, count) / count
    places = np.searchsorted(totals, wanted, side="right") - 1
    # Many equal lengths give equal edges, each of which would create an empty bucket.
    edges: Array = np.unique(ordered[np.maximum(places, 0)])
    return np.asarray(edges[edges < ordered[-1]])


def assign_buckets(lengths: Array, edges: Sequence[float] | Array) -> Array:
    """Return the bucket of each row, from 0; edges are inclusive upper bounds in ascending order.

    >>> assign_buckets(np.array([1.0, 5.0, 6.0, 99.0]), [5, 10])
    array([0, 0, 1, 2], dtype=uint16)
    """
    # Rows longer than the last edge have a bucket of their own.
    return np.searchsorted(np.asarray(edges, dtype=np.float64), lengths).astype(np.uint16)


def derive_buckets(lengths: Sequence[Array], counts: Sequence[int]) -> Array:
    """Return the bucket of each row, from 0, split by the first length and then by the second one.

    >>> first, second = np.array([1.0, 1.0, 9.0, 9.0]), np.array([2.0, 8.0, 2.0, 8.0])
    >>> derive_buckets([first, second], (2, 2))
    array([0, 1, 2, 3], dtype=uint16)
    """
    found = assign_buckets(lengths[0], _derived_edges(lengths[0], counts[0]))
    if len(lengths) == 1:
        return found
    fine, made = np.zeros_like(found), 0
    order = np.argsort(found, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(found[order])) + 1)
    for rows in parts:
        edges = _derived_edges(lengths[1][rows], counts[1])
        fine[rows] = made + np.searchsorted(edges, lengths[1][rows])
        made += len(edges) + 1
    return fine


def _checksum_of(array: Array, before: int = 0) -> int:
    """Return the checksum of the bytes of an array, continuing an earlier checksum.

    >>> _checksum_of(np.arange(3)) == _checksum_of(np.arange(4))
    False
    """
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, before)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The batches of an epoch, in order."""

    rows: Array  # all rows, of shape (rows,), grouped by batch
    starts: Array  # beginning of each batch in ``rows``, and the end, of shape (batches + 1,)
    order: Array  # numbers of the batches in the order in which they come, of shape (batches,)

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, place: int) -> Array:
        """Return the rows of the batch at a position, from 0."""
        number = self.order[place]
        return self.rows[self.starts[number] : self.starts[number + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self.batch(place) for place in range(len(self)))

    @property
    def checksum(self) -> int:
        """The checksum of the plan, equal for plans with the same batches in the same order."""
        return _checksum_of(self.order, _checksum_of(self.starts, _checksum_of(self.rows)))


def _make_plan(
    lengths: Sequence[Array],
    *,
    buckets: Array | None,
    budget: Budget,
    num_rows: int | None = None,
    random: np.random.Generator | None = None,
    together: int = 1,
) -> Plan:
    """Put rows into batches.

    Args:
        lengths: none, one or two arrays of shape (rows,).
        buckets: bucket of each row, of shape (rows,); None for a single bucket.
        budget: budget of a batch.
        num_rows: number of rows, if there are no lengths.
        random: shuffles; None keeps rows in order, and batches in the order of their buckets.
        together: number of batches of one bucket that come in a row, so that as many ranks have
            similar work at a time. The few that remain of each bucket come last.

    >>> plan = _make_plan([np.array([3.0, 1.0, 2.0])], buckets=None, budget=Budget(length=4.0))
    >>> [batch.tolist() for batch in plan]
    [[0, 1], [2]]
    """
    count = len(lengths[0]) if lengths else num_rows
    assert count is not None
    rows = np.arange(count, dtype=np.int32 if count < 2**31 else np.int64)
    if random is not None:
        random.shuffle(rows)
    bounds = np.array([0, count])
    if buckets is not None and count:
        rows = rows[np.argsort(buckets[rows], kind="stable")]  # 16 bits, so a radix sort
        bounds = np.searchsorted(buckets[rows], np.arange(int(buckets.max()) + 2))
    starts = _cut([each[rows] for each in lengths], bounds, budget)
    of_batches = np.zeros(len(starts), np.uint16) if buckets is None else buckets[rows[starts]]
    return Plan(
        rows=rows,
        starts=np.append(starts, count),
        # With a single bucket, batches come in the same order for any number of ranks.
        order=_arrange(of_batches, random, together if buckets is not None else 1),
    )


def _arrange(buckets: Array, random: np.random.Generator | None, together: int) -> Array:
    """Return the order of batches, from the bucket of each."""
    order = np.argsort(buckets, kind="stable")
    if random is None or not len(order):
        return order
    sizes = np.bincount(buckets)
    firsts = np.cumsum(sizes) - sizes
    place = np.arange(len(order)) - firsts[buckets[order]]  # within the bucket
    is_left = place >= sizes[buckets[order]] // together * together
    begins_group = (place % together == 0) | is_left
    group = np.cumsum(begins_group) - 1
    drawn = random.permutation(int(group[-1]) + 1)[group]
    return order[np.lexsort((place, drawn, is_left))]


def _cut(lengths: Sequence[Array], bounds: Array, budget: Budget) -> Array:
    """Return where batches begin, each as full as possible. Lengths are in row order."""
    starts: list[int] = []
    window = 64
    for bucket, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
        if budget.rows is not None:
            starts += range(first, last, budget.rows[bucket if len(budget.rows) > 1 else 0])
            continue
        while first < last:
            starts.append(first)
            while True:
                end = min(first + window, last)
                fitting = budget.num_fitting([each[first:end] for each in lengths])
                if fitting < end - first or end == last:
                    break
                window *= 2
            first += max(fitting, 1)
            window = 2 * fitting + 16
    return np.array(starts, dtype=np.int64)


Lengths: TypeAlias = str | Path | Callable[[Any], Any] | Sequence[float] | Array | torch.Tensor
"""The source of lengths: numbers, a file, a column's name, or a function of a row."""

_FILE = re.compile(r"(?P<path>.*\.(?P<kind>npy|csv|tsv|jsonl|txt))(?::(?P<column>[^:]+))?", re.S)
_FORMS = (
    "give one number for each row, a column of the data set, a function of a row, or a file: "
    "lengths.npy, lengths.txt, rows.csv:seconds or rows.jsonl:seconds"
)


def read_lengths(lengths: Lengths, dataset: Any = None, *, name: str = "lengths") -> Array:
    """Return one number for each row of a data set, in double precision.

    Args:
        lengths: the numbers themselves, as a sequence, an array or a tensor of shape (rows,); the
            path of a file: ``.npy``, ``.txt`` with a number on each line, or ``.csv``, ``.tsv`` or
            ``.jsonl`` with a column, such as ``"train.csv:seconds"``; the name of a column of the
            data set; or a function from one of its rows to a length. A value that is not a number
            but has a length, such as a row's ``input_ids``, counts as that length.
        dataset: the data set. A function is called on each of its rows, which reads all of them
            once; a column of a data set that stores columns (``datasets``, ``pandas``) is read as a
            whole.
        name: name of the argument in errors.

    Raises:
        TypeError: ``lengths`` is none of these.
        ValueError: there is no such column or file, a length is negative or not finite, or the
            number of lengths differs from the number of rows.

    Example:
        >>> read_lengths([3, 1, 2])
        array([3., 1., 2.])
        >>> read_lengths("ids", [{"ids": [5, 7]}, {"ids": [5]}])
        array([2., 1.])
        >>> read_lengths(len, ["a", "abc"])
        array([1., 3.])
    """
    found = _find(lengths, dataset, name)
    rows = None if dataset is None else len(dataset)
    if found.ndim != 1:
        raise ValueError(
            f"{name} has the shape {tuple(found.shape)}, but each row has one length: give the "
            "shape (rows,)"
        )
    if rows is not None and rows != len(found):
        raise ValueError(
            f"{name} has {len(found):,} numbers, but the data set has {rows:,} rows: give one "
            "for each row, in the same order"
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise ValueError(
            f"{name} has {found[wrong[0]]} at row {wrong[0]:,} (one of {len(wrong):,} such "
            "rows), but lengths are finite and at least 0: correct or remove these rows"
        )
    return found


def _find(lengths: Lengths, dataset: Any, name: str) -> Array:
    values: Any = lengths
    if isinstance(lengths, Path | str):
        match = _FILE.fullmatch(str(lengths))
        if match is None:
            values = _read_column(str(lengths), dataset, name)
        else:
            values = _read_file(**match.groupdict(), name=name)
    elif isinstance(lengths, torch.Tensor):
        values = lengths.detach().cpu().numpy()
    elif not isinstance(lengths, np.ndarray | Sequence):
        if not callable(lengths):
            raise TypeError(f"{name} is a {type(lengths).__name__}: {_FORMS}")
        if dataset is None:
            raise ValueError(f"{name} is a function of a row: give the dataset whose rows it reads")
        values = [_length_of(lengths(dataset[row])) for row in range(len(dataset))]
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} has values that are no numbers ({error}): {_FORMS}") from None


def _read_column(column: str, dataset: Any, name: str) -> list[Any]:
    if dataset is None:
        raise ValueError(f"{name}={column!r} is a column's name: give the dataset that has it")
    columns = getattr(dataset, "column_names", getattr(dataset, "columns", None))
    try:
        if columns is not None:
            return list(map(_length_of, dataset[column]))
        return [_length_of(dataset[row][column]) for row in range(len(dataset))]
    except (KeyError, IndexError, TypeError) as error:
        known = "rows without it" if columns is None else ", ".join(map(str, columns))
        raise ValueError(
            f"{name}={column!r} is not a column of the data set ({type(dataset).__name__} has "
            f"{known}; {type(error).__name__}: {error}): {_FORMS}"
        ) from error


def _length_of(value: Any) -> Any:
    """Return a number, also from text; for any other value, its length."""
    if getattr(value, "ndim", 1) == 0 or not hasattr(value, "__len__"):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return len(value)


def _read_file(path: str, kind: str, column: str | None, name: str) -> Any:
    try:
        if kind == "npy":
            return np.load(path, allow_pickle=False)
        with Path(path).open(encoding="utf-8", newline="") as file:
            lines = filter(str.strip, file)
            if kind == "txt":
                return list(map(str.strip, lines))
            separator = "\t" if kind == "tsv" else ","
            table = csv.DictReader(lines, delimiter=separator)
            rows: Iterator[Any] = map(json.loads, lines) if kind == "jsonl" else table
            found: list[Any] = []
            for row in rows:
                if column is None and len(row) == 1:
                    column = next(iter(row))
                found.append(_length_of(row[column]))
            return found
    except OSError as error:
        raise ValueError(f"{name}={path!r} cannot be read ({error}): {_FORMS}") from error
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{name}={path!r} has rows without the column {column!r}: {_FORMS}"
        ) from error


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

    This module defines the modes: ``"fixed"``, ``"duration"``, ``"1D-bucketing"``,
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
            plan = _make_plan(
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
            value = _checksum_of(each, value)
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
