"""Lengths of rows, and plans of the batches of an epoch: a single rule covers seven modes.

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


def checksum_of(array: Array, before: int = 0) -> int:
    """Return the checksum of the bytes of an array, continuing an earlier checksum.

    >>> checksum_of(np.arange(3)) == checksum_of(np.arange(4))
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
        buckets: bucket of each row, of shape (rows,); None for a single bucket.
        budget: budget of a batch.
        num_rows: number of rows, if there are no lengths.
        random: shuffles; None keeps rows in order, and batches in the order of their buckets.
        together: number of batches of one bucket that come in a row, so that as many ranks have
            similar work at a time. The few that remain of each bucket come last.

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
