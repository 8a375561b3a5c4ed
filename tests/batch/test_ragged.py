"""Packed, nested and sparse tensors are cut into rows like dense ones."""

import warnings
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout, split_batch
from tests.batch.structures import ROWS, SIZES, jagged, rows_of, sequences, x, y


class TestRaggedTensors:
    @pytest.mark.parametrize("enforce_sorted", [True, False])
    @pytest.mark.parametrize("size", SIZES)
    def test_a_packed_sequence_is_cut_in_the_order_of_its_rows(self, size, enforce_sorted):
        lengths = (9, 7, 7, 5, 4, 2, 2, 1) if enforce_sorted else (2, 5, 1, 3, 4, 3, 2, 6)
        rows = sequences(lengths)
        pieces = split_batch(pack_sequence(rows, enforce_sorted=enforce_sorted), size)
        for piece in pieces:
            assert (piece.sorted_indices is None) == enforce_sorted
        unpacked = [row for piece in pieces for row in unpack_sequence(piece)]
        assert all(torch.equal(a, b) for a, b in zip(unpacked, rows, strict=True))

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

    def test_a_transposed_jagged_tensor_is_cut(self):
        turned = jagged().transpose(1, 2)
        rows = [row for piece in split_batch(turned, 3) for row in piece.unbind()]
        assert all(torch.equal(a, b.T) for a, b in zip(rows, sequences(), strict=True))

    def test_a_jagged_tensor_with_holes_is_cut(self):
        holes = torch.nested.narrow(
            x(ROWS, 6), 1, torch.arange(ROWS) % 3, torch.arange(ROWS) % 4 + 1, layout=torch.jagged
        )
        pieces = split_batch((holes, y()), 3)
        assert [row.tolist() for p, _ in pieces for row in p.unbind()] == rows_of(holes, ROWS)
        taken, _ = BatchLayout().take_rows((holes, y()), [6, 1])
        assert [row.tolist() for row in taken.unbind()] == [rows_of(holes, ROWS)[i] for i in (6, 1)]

    def test_gradients_flow_into_a_jagged_tensor(self):
        values = x(6, 2).requires_grad_()
        whole = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 3, 6]))
        pieces = split_batch(whole, 1)
        sum(piece.values().sum() * number for number, piece in enumerate(pieces, 1)).backward()
        assert values.grad is not None
        assert values.grad[:, 0].tolist() == [1, 1, 2, 3, 3, 3]

    def test_a_strided_nested_tensor_keeps_its_layout(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls these a prototype
            whole = torch.nested.nested_tensor(sequences())
            pieces = split_batch(whole, 3)
            joined = concat_rows(pieces)
        assert all(piece.is_nested and piece.layout is torch.strided for piece in pieces)
        assert [row.tolist() for p in pieces for row in p.unbind()] == rows_of(whole, ROWS)
        assert rows_of(joined, ROWS) == rows_of(whole, ROWS)

    def test_sparse_rows_can_be_chosen(self):
        taken = BatchLayout().take_rows(torch.eye(4).to_sparse_coo(), [2, 0])
        assert taken.to_dense().tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
