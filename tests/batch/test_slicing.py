"""Rows of batches of every structure: counted, cut and taken."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BatchEncoding

from automicro.batch.layout import BatchLayout, balanced_sizes, split_batch
from automicro.errors import BatchError
from tests.batch.structures import (
    ROWS,
    STRUCTURES,
    Derived,
    assert_partition,
    x,
)

# With two chosen rows, a list of two parts is ambiguous, which has its own tests.
TIES_AT_TWO_ROWS = {"views beside", "size in a tuple", "deep", "model output"}


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s not in TIES_AT_TWO_ROWS])
def test_chosen_rows_are_those_of_the_batch(structure):
    batch = STRUCTURES[structure]()
    layout = BatchLayout()
    first, second = (layout.take_rows(batch, [index]) for index in (6, 1))
    both = layout.take_rows(batch, [6, 1])
    if structure == "detection":  # the other parts show whether a tuple holds rows or parts
        assert layout.num_rows(both) == 2
        assert both[0][0] is batch[0][6]
        assert both[1][1] is batch[1][1]
        return
    assert_partition(both, [first, second], [1, 1])


def test_a_cached_property_of_the_whole_batch_is_not_carried_over():
    batch = Derived(x())
    assert batch.total == 276.0
    pieces = split_batch(batch, 3)
    assert sum(piece.total for piece in pieces) == 276.0
    assert batch.total == 276.0


def test_a_batch_encoding_takes_its_tokenizer_records_along():
    class Record:
        n_sequences = 1

    records = [Record() for _ in range(ROWS)]
    batch: Any = BatchEncoding({"input_ids": x()}, encoding=records)  # type: ignore[arg-type]
    batch.origin = "loader"
    pieces = split_batch(batch, 3)
    assert [len(piece.encodings) for piece in pieces] == [3, 3, 2]
    assert [record for piece in pieces for record in piece.encodings] == records
    assert pieces[1].origin == "loader"
    assert BatchLayout().take_rows(batch, [5]).encodings == [records[5]]


@pytest.mark.parametrize("sizes", [[4, 3], [8, 1], []])
def test_sizes_that_would_drop_rows_are_refused(sizes):
    with pytest.raises(BatchError, match="batch has 8 rows"):
        BatchLayout().split(x(), sizes)


@pytest.mark.parametrize("indices", [[], [8], [-1]])
def test_rows_that_do_not_exist_cannot_be_taken(indices):
    with pytest.raises(BatchError, match="from 0 to 7"):
        BatchLayout().take_rows(x(), indices)


@settings(max_examples=300, deadline=None)
@given(rows=st.integers(1, 500), size=st.integers(1, 600), floor=st.integers(1, 4))
def test_sizes_are_balanced_the_fewest_and_not_under_the_floor(
    rows: int, size: int, floor: int
) -> None:
    sizes = balanced_sizes(rows, size, min_rows=floor)
    assert sum(sizes) == rows
    assert min(sizes) >= min(floor, rows)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert (len(sizes) - 1) * size < rows
    if size >= 2 * floor - 1:
        assert max(sizes) <= size


class TestSizes:
    def test_nothing_cannot_be_cut(self):
        with pytest.raises(BatchError, match="at least one row"):
            balanced_sizes(0, 4)
