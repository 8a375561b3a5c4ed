"""Packed, nested and sparse tensors are cut into rows like dense ones."""

import warnings
from typing import Any

import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout, split_batch
from tests.batch.structures import ROWS, jagged, rows_of, sequences


class TestRaggedTensors:
    def test_joining_packed_sequences_gives_the_rows_back(self):
        for packed in (
            pack_sequence(sequences(), enforce_sorted=False),
            pack_sequence(sequences((9, 7, 7, 5, 4, 2, 2, 1))),
        ):
            joined = concat_rows(split_batch(packed, 3))
            assert (joined.sorted_indices is None) == (packed.sorted_indices is None)
            pairs = zip(unpack_sequence(joined), unpack_sequence(packed), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)

    def test_jagged_tensors_that_share_offsets_still_do_in_a_microbatch(self):
        first: Any = jagged()
        second = torch.nested.nested_tensor_from_jagged(first.values() * 2, first.offsets())
        for a, b in [
            *split_batch((first, second), 3),
            BatchLayout().take_rows((first, second), [6, 1]),
        ]:
            assert torch.equal((a + b).values(), a.values() * 3)

    def test_a_strided_nested_tensor_keeps_its_layout(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls these a prototype
            whole = torch.nested.nested_tensor(sequences())
            pieces = split_batch(whole, 3)
            joined = concat_rows(pieces)
        assert all(piece.is_nested and piece.layout is torch.strided for piece in pieces)
        assert [row.tolist() for p in pieces for row in p.unbind()] == rows_of(whole, ROWS)
        assert rows_of(joined, ROWS) == rows_of(whole, ROWS)
