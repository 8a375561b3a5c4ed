"""Rows of batches of every structure: counted, cut and taken."""

import collections
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from automicro.batch.layout import BatchLayout, balanced_sizes, num_rows, split_batch
from automicro.batch.tensors import tensor_leaves
from automicro.errors import BatchError
from tests.batch.structures import (
    ROWS,
    SIZES,
    STRUCTURES,
    Boxes,
    Derived,
    Store,
    assert_partition,
    tagged,
    x,
)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_microbatches_hold_every_row_once_and_leave_the_batch_as_it_was(structure):
    batch = STRUCTURES[structure]()
    before = [(path, tensor) for path, tensor in tensor_leaves(batch)]
    assert num_rows(batch) == ROWS
    for size in SIZES:
        assert_partition(batch, split_batch(batch, size), balanced_sizes(ROWS, size))
    after = tensor_leaves(batch)
    assert [path for path, _ in after] == [path for path, _ in before]
    assert all(new is old for (_, new), (_, old) in zip(after, before, strict=True))


# Where two rows are chosen, two parts in a list are a tie: that has its own tests.
TIES_AT_TWO_ROWS = {"views beside", "size in a tuple", "deep", "model output"}


@pytest.mark.parametrize("structure", [s for s in STRUCTURES if s not in TIES_AT_TWO_ROWS])
def test_chosen_rows_are_those_of_the_batch(structure):
    batch = STRUCTURES[structure]()
    layout = BatchLayout()
    first, second = (layout.take_rows(batch, [index]) for index in (6, 1))
    both = layout.take_rows(batch, [6, 1])
    if structure == "detection":  # a tuple per row is told from a tuple of parts by the rest
        assert layout.num_rows(both) == 2
        assert both[0][0] is batch[0][6]
        assert both[1][1] is batch[1][1]
        return
    assert_partition(both, [first, second], [1, 1])


def test_tensors_and_arrays_are_views_of_the_batch():
    batch = (x(), x().numpy())
    for tensor, array in split_batch(batch, 3):
        assert tensor.untyped_storage().data_ptr() == batch[0].untyped_storage().data_ptr()
        assert np.shares_memory(array, batch[1])


def test_gradients_flow_through_the_slices_of_a_leaf_that_requires_grad():
    leaf = x().requires_grad_()
    for number, (piece,) in enumerate(split_batch((leaf,), 3)):
        (piece.sum() * number).backward()
    assert leaf.grad is not None
    assert leaf.grad[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_attributes_of_mapping_and_list_subclasses_survive():
    boxes = Boxes(range(ROWS))
    boxes.source = "camera"
    piece = split_batch({"x": tagged(), "boxes": boxes}, 3)[0]
    assert piece["x"].tag == "kept"
    assert piece["boxes"].source == "camera"
    assert split_batch(Store({"x": x()}), 3)[0].source == "store"
    factory = split_batch(collections.defaultdict(list, x=x()), 3)[0]
    assert factory["absent"] == []


def test_a_cached_property_of_the_whole_batch_is_not_carried_over():
    batch = Derived(x())
    assert batch.total == 276.0
    pieces = split_batch(batch, 3)
    assert sum(piece.total for piece in pieces) == 276.0
    assert batch.total == 276.0


def test_empty_containers_are_not_shared_between_microbatches():
    first, second = split_batch({"x": x(), "cache": {}}, 4)
    first["cache"]["seen"] = True
    assert second["cache"] == {}


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


class TestSizes:
    @pytest.mark.parametrize(
        ("rows", "size", "min_rows", "sizes"),
        [
            (10, 4, 1, [4, 3, 3]),
            (10, 9, 1, [5, 5]),
            (8, 8, 1, [8]),
            (8, 100, 1, [8]),
            (5, 2, 2, [3, 2]),
            (3, 1, 2, [3]),
            (4, 1, 2, [2, 2]),
            (1, 1, 2, [1]),
        ],
    )
    def test_sizes_are_balanced_and_respect_the_floor(self, rows, size, min_rows, sizes):
        assert balanced_sizes(rows, size, min_rows=min_rows) == sizes

    def test_nothing_cannot_be_cut(self):
        with pytest.raises(BatchError, match="at least one row"):
            balanced_sizes(0, 4)

    @pytest.mark.parametrize("size", [3, np.int64(3), torch.tensor(3)])
    def test_whole_numbers_of_any_library_are_sizes(self, size):
        assert [len(each) for each in split_batch(x(), size)] == [3, 3, 2]

    @pytest.mark.parametrize(
        ("size", "error"),
        [
            (0, ValueError),
            (-1, ValueError),
            (1.5, TypeError),
            (2.0, TypeError),
            (True, TypeError),
            (np.bool_(True), TypeError),
            ("many", TypeError),
            (None, TypeError),
        ],
    )
    def test_senseless_sizes_are_refused_with_the_remedy(self, size, error):
        with pytest.raises(error, match=r"^microbatch_size is .* at least 1$"):
            split_batch(x(), size)
