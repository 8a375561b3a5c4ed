"""How long rows are, and which make up which batch of an epoch: one idea for seven modes.

A plan is a rule for *buckets*, which rows may share a batch, times a *budget*, how much of them one
batch holds:

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

Rows are shuffled, then put into their buckets; within a bucket, batches are filled in that order
for as long as the next row fits into the budget; then batches are shuffled. A row that is too much
for the budget by itself makes a batch by itself: nothing is left out, and the last batch of a
bucket has what is left. ``batch_length`` is the sum of the rows' lengths. ``batch_cost`` is what
the batch takes with its padding, rows × cost(longest length, longest second length), so that
batches take about the same memory.
"""

import contextlib
import csv
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

Array = np.ndarray[Any, Any]
Cost = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """The requirements of a mode.

    Attributes:
        dimensions: how many lengths of a row it looks at.
        buckets: "one", "given" or "derived".
        budgets: options of which exactly one says how much a batch holds.
    """

    dimensions: int
    buckets: str
    budgets: tuple[str, ...]


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
    """The cost of a row: its length × (its second length + 1).

    That is the lattice of a transducer, which has a column for "nothing yet"; without a second
    length it is the length.

    >>> length_cost(100.0), length_cost(100.0, 7.0)
    (100.0, 800.0)
    """
    return length * (second + 1)


_ROUNDING = 1e-9  # sums of decimal numbers may be off by so much, relatively
_ASKED_ROWS = 2**20  # so many lengths say where edges between buckets lie


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much a batch holds. One of the first three is given.

    Attributes:
        rows: their number, one for all buckets or one for each.
        length: the sum of lengths.
        cost: rows × ``cost_of`` the longest.
        cost_of: from the length and second length of rows, as arrays of shape (rows,), to what each
            takes, as an array; longer rows must not take less.
    """

    rows: Sequence[int] | None = None
    length: float | None = None
    cost: float | None = None
    cost_of: Cost = length_cost

    def num_fitting(self, lengths: Sequence[Array]) -> int:
        """How many of these rows, from the first on, fit into a batch."""
        if self.length is not None:
            amount, taken = self.length, np.cumsum(lengths[0])
        else:
            assert self.cost is not None
            # A batch pays for its longest row at every row, which is what padding takes.
            longest = (np.maximum.accumulate(each) for each in lengths)
            amount, taken = self.cost, np.arange(1, len(lengths[0]) + 1) * self.cost_of(*longest)
        return int(np.searchsorted(taken, amount * (1 + _ROUNDING), side="right"))


def _derived_edges(values: Array, count: int) -> Array:
    """Edges between so many buckets, each with about the same total.

    >>> _derived_edges(np.array([1.0, 1.0, 2.0, 4.0]), 2)
    array([2.])
    """
    # A sample of millions gives the same edges for a fraction of the sorting.
    ordered = np.sort(values[:: max(1, len(values) // _ASKED_ROWS)])
    totals = np.cumsum(ordered)
    # Rows without any length would all lie on one edge.
    if count < 2 or not len(ordered) or totals[-1] == 0:
        return np.empty(0)
    wanted = totals[-1] * np.arange(1, count) / count
    places = np.searchsorted(totals, wanted, side="right") - 1
    # Many equal lengths give equal edges, and each would be an empty bucket.
    edges: Array = np.unique(ordered[np.maximum(places, 0)])
    return np.asarray(edges[edges < ordered[-1]])


def assign_buckets(lengths: Array, edges: Sequence[float] | Array) -> Array:
    """The bucket of each row, from 0, at edges that are given: those of its upper end belong to it.

    Args:
        lengths: of shape (rows,).
        edges: ascending; longer rows have a bucket after the last.

    >>> assign_buckets(np.array([1.0, 5.0, 6.0, 99.0]), [5, 10])
    array([0, 0, 1, 2], dtype=uint16)
    """
    return np.searchsorted(np.asarray(edges, dtype=np.float64), lengths).astype(np.uint16)


def derive_buckets(lengths: Sequence[Array], counts: Sequence[int]) -> Array:
    """The bucket of each row, from 0: the first length parts rows, the second each of the parts.

    Args:
        lengths: one array of shape (rows,), or two.
        counts: how many buckets to make of each.

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


def checksum_of(array: Array, before: int = 0) -> int:
    """Of the bytes of an array, after those of others.

    >>> checksum_of(np.arange(3)) == checksum_of(np.arange(4))
    False
    """
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, before)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The batches of an epoch, in their order.

    Attributes:
        rows: all rows, of shape (rows,), those of a batch beside each other.
        starts: where each batch begins in ``rows``, of shape (batches + 1,); the last is the end.
        order: the batches, of shape (batches,), in the order in which they come.
    """

    rows: Array
    starts: Array
    order: Array

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, place: int) -> Array:
        """The rows of the batch that comes at a place, from 0."""
        number = self.order[place]
        return self.rows[self.starts[number] : self.starts[number + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self.batch(place) for place in range(len(self)))

    @property
    def checksum(self) -> int:
        """Of all of it: plans of the same batches in the same order have the same."""
        return checksum_of(self.order, checksum_of(self.starts, checksum_of(self.rows)))


def make_plan(
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
        buckets: of each row, of shape (rows,); None for one.
        budget: of a batch.
        num_rows: where there are no lengths.
        random: shuffles; None leaves rows in their order, and batches in that of their buckets.
        together: how many batches of one bucket come one after the other, so that as many ranks
            have about the same work at a time. The few that are left of each bucket come last.

    >>> plan = make_plan([np.array([3.0, 1.0, 2.0])], buckets=None, budget=Budget(length=4.0))
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
        rows = rows[np.argsort(buckets[rows], kind="stable")]  # of 16 bits: sorted by their digits
        bounds = np.searchsorted(buckets[rows], np.arange(int(buckets.max()) + 2))
    starts = _cut([each[rows] for each in lengths], bounds, budget)
    of_batches = np.zeros(len(starts), np.uint16) if buckets is None else buckets[rows[starts]]
    return Plan(
        rows=rows,
        starts=np.append(starts, count),
        # One bucket is the same for all: its batches come alike at any number of ranks.
        order=_arrange(of_batches, random, together if buckets is not None else 1),
    )


def _arrange(buckets: Array, random: np.random.Generator | None, together: int) -> Array:
    """The order of batches, given the bucket of each."""
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
    """Where batches begin, each as full as it gets. Lengths are in the order of the rows."""
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
    """One number for each row of a data set, in double precision.

    Args:
        lengths: the numbers themselves, as a sequence, an array or a tensor of shape (rows,); the
            path of a file: ``.npy``, ``.txt`` with a number on each line, ``.csv``, ``.tsv`` or
            ``.jsonl`` with a column, such as ``"train.csv:seconds"``; the name of a column of the
            data set; or a function from a row of it to its length. What is no number but has a
            length itself, such as a row's ``input_ids``, counts as that length.
        dataset: has the rows. A function is called on each of them, so that all are read once; a
            column of one that keeps columns (``datasets``, ``pandas``) is read as a whole.
        name: of the argument, for errors.

    Raises:
        TypeError: what says nothing about lengths.
        ValueError: no such column or file, a length below 0 or not finite, or as many of them as
            the data set has not.

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
            f"{name} has the shape {tuple(found.shape)}, and a length is one number for each row: "
            "give the shape (rows,)"
        )
    if rows is not None and rows != len(found):
        raise ValueError(
            f"{name} has {len(found):,} numbers, and the data set has {rows:,} rows: give one for "
            "each row, in the same order"
        )
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise ValueError(
            f"{name} has {found[wrong[0]]} at row {wrong[0]:,} ({len(wrong):,} rows are like "
            "that): a length is a finite number of at least 0"
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
        raise ValueError(f"{name} holds what is no number ({error}): {_FORMS}") from None


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
            f"{name}={column!r} is no column of the data set ({type(dataset).__name__} has "
            f"{known}; {type(error).__name__}: {error}): {_FORMS}"
        ) from error


def _length_of(value: Any) -> Any:
    """A number as it is, also as text; of anything that has a length, that."""
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
