"""Slicing random nested structures at random sizes: every row once, in order, balanced."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout, balanced_sizes, num_rows, split_batch

# Each leaf holds its row numbers, so a microbatch shows the rows it received.
Make = Callable[[int], Any]


class Named(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    first: Any
    second: Any


LEAVES: list[Make] = [
    lambda rows: torch.arange(rows),
    lambda rows: torch.arange(rows).repeat_interleave(6).reshape(rows, 2, 3),
    lambda rows: np.arange(rows),
    lambda rows: np.arange(rows).repeat(3).reshape(rows, 3),
    lambda rows: [str(row) for row in range(rows)],
    lambda rows: list(range(rows)),
    lambda rows: [{"row": torch.tensor([row])} for row in range(rows)],
]
SHARED: list[Make] = [
    lambda rows: 0.5,
    lambda rows: "text",
    lambda rows: None,
    lambda rows: torch.tensor(7),
]


def nested(parts: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
    pairs = st.tuples(parts, parts)
    return st.one_of(
        st.lists(parts, min_size=1, max_size=3).map(
            lambda makes: lambda rows: {f"k{i}": make(rows) for i, make in enumerate(makes)}
        ),
        pairs.map(lambda pair: lambda rows: Named(pair[0](rows), pair[1](rows))),
        pairs.map(lambda pair: lambda rows: Record(pair[0](rows), pair[1](rows))),
        # Lists and tuples of two parts, one of them a tensor: read as parts unless there are
        # two rows, which is why the batches below have more.
        parts.map(lambda make: lambda rows: (torch.arange(rows), make(rows))),
        parts.map(lambda make: lambda rows: [torch.arange(rows), make(rows)]),
    )


structures = st.recursive(st.sampled_from(LEAVES + SHARED), nested, max_leaves=8)
batches = structures.map(
    lambda make: lambda rows: {"anchor": torch.arange(rows), "rest": make(rows)}
)


def row_numbers(value: Any) -> list[list[int]]:
    """Return the row numbers that each leaf holds."""
    if isinstance(value, torch.Tensor | np.ndarray):
        if value.ndim == 0:
            return []
        return [[int(number) for number in value.reshape(len(value), -1)[:, 0]]]
    if isinstance(value, dict):
        return [numbers for part in value.values() for numbers in row_numbers(part)]
    if isinstance(value, Record):
        return row_numbers(value.first) + row_numbers(value.second)
    if isinstance(value, list) and isinstance(value[0], str | int):
        return [[int(element) for element in value]]
    if isinstance(value, list) and isinstance(value[0], dict) and "row" in value[0]:
        return [[int(element["row"]) for element in value]]
    if isinstance(value, tuple | list):
        return [numbers for part in value for numbers in row_numbers(part)]
    return []


def skeleton(value: Any) -> Any:
    """Return the types of all containers."""
    if isinstance(value, dict):
        return dict, {key: skeleton(part) for key, part in value.items()}
    if isinstance(value, Record):
        return Record, skeleton(value.first), skeleton(value.second)
    if isinstance(value, tuple):
        return type(value), [skeleton(part) for part in value]
    return type(value)


@settings(max_examples=150, deadline=None)
@given(make=batches, rows=st.integers(3, 17), size=st.integers(1, 20))
def test_the_rows_of_every_leaf_are_partitioned_in_order(make, rows, size):
    batch = make(rows)
    assert num_rows(batch) == rows
    pieces = split_batch(batch, size)
    sizes = balanced_sizes(rows, size)
    assert [skeleton(piece) for piece in pieces] == [skeleton(batch)] * len(sizes)
    start = 0
    for piece, piece_rows in zip(pieces, sizes, strict=True):
        expected = list(range(start, start + piece_rows))
        assert all(numbers == expected for numbers in row_numbers(piece))
        assert len(row_numbers(piece)) == len(row_numbers(batch))
        start += piece_rows
    assert start == rows


@settings(max_examples=50, deadline=None)
@given(make=batches, rows=st.integers(3, 9), data=st.data())
def test_chosen_rows_are_the_same_in_every_leaf(make, rows, data):
    indices = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    taken = BatchLayout().take_rows(make(rows), indices)
    assert all(numbers == indices for numbers in row_numbers(taken))


@settings(max_examples=300, deadline=None)
@given(rows=st.integers(1, 500), size=st.integers(1, 600))
def test_sizes_are_balanced_and_the_fewest(rows, size):
    sizes = balanced_sizes(rows, size)
    assert sum(sizes) == rows
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert (len(sizes) - 1) * size < rows


@settings(max_examples=300, deadline=None)
@given(rows=st.integers(1, 200), size=st.integers(1, 250), floor=st.integers(1, 4))
def test_no_size_is_under_the_floor_unless_the_batch_is(rows, size, floor):
    sizes = balanced_sizes(rows, size, min_rows=floor)
    assert sum(sizes) == rows
    assert min(sizes) >= min(floor, rows)
    assert max(sizes) - min(sizes) <= 1
    if size >= 2 * floor - 1:
        assert max(sizes) <= size


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 30), size=st.integers(1, 30))
def test_joining_is_the_inverse_of_cutting(rows, size):
    batch = {"x": torch.arange(rows), "y": (np.arange(rows), [str(row) for row in range(rows)])}
    layout = BatchLayout({"y": "fields"})
    joined = concat_rows(layout.split(batch, balanced_sizes(rows, size)))
    assert row_numbers(joined) == row_numbers(batch)
