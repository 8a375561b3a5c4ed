"""Rows of every batch structure and of registered types: counted, split, taken and joined."""

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from transformers import BatchEncoding

from automicro import register_batch_type
from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout, balanced_sizes, split_batch
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError
from tests.batch.structures import (
    ROWS,
    STRUCTURES,
    Derived,
    Graphs,
    Pair,
    assert_partition,
    jagged,
    rows_of,
    sequences,
    x,
    y,
)

# With two chosen rows, a list of two parts is ambiguous; other tests cover that.
TIES_AT_TWO_ROWS = {"views beside", "size in a tuple", "deep", "model output"}


def test_taken_rows_match_rows_of_batch():
    for structure in STRUCTURES.keys() - TIES_AT_TWO_ROWS:
        batch = STRUCTURES[structure]()
        layout = BatchLayout()
        first, second = (layout.take_rows(batch, [index]) for index in (6, 1))
        both = layout.take_rows(batch, [6, 1])
        if structure == "detection":  # the other parts show whether a tuple holds rows or parts
            assert layout.num_rows(both) == 2
            assert both[0][0] is batch[0][6]
            assert both[1][1] is batch[1][1]
        else:
            assert_partition(both, [first, second], [1, 1])


def test_cached_property_of_batch_is_not_copied_to_pieces():
    batch = Derived(x())
    assert batch.total == 276.0
    pieces = split_batch(batch, 3)
    assert sum(piece.total for piece in pieces) == 276.0
    assert batch.total == 276.0


def test_batch_encoding_keeps_tokenizer_records():
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


def test_sizes_and_indices_must_match_rows():
    for sizes in ([4, 3], [8, 1], []):
        with pytest.raises(BatchError, match="batch has 8 rows"):
            BatchLayout().split(x(), sizes)
    for indices in ([], [8], [-1]):
        with pytest.raises(BatchError, match="from 0 to 7"):
            BatchLayout().take_rows(x(), indices)
    with pytest.raises(BatchError, match="at least one row"):
        balanced_sizes(0, 4)


@settings(max_examples=300, deadline=None)
@given(rows=st.integers(1, 500), size=st.integers(1, 600), floor=st.integers(1, 4))
def test_balanced_sizes_are_minimal_and_respect_minimum_rows(
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


class TestRegisteredTypes:
    @pytest.fixture(autouse=True)
    def _graphs(self):
        register_batch_type(
            Graphs,
            num_rows=lambda graphs: len(graphs.x),
            take=lambda graphs, start, stop: Graphs(graphs.x[start:stop]),
            concat=lambda parts: Graphs(torch.cat([part.x for part in parts])),
        )

    def test_taking_nonadjacent_rows_requires_concat(self):
        class Plain:
            rows = ROWS

        def take(value, start, stop):
            piece = Plain()
            piece.rows = stop - start
            return piece

        register_batch_type(Plain, num_rows=lambda value: value.rows, take=take)
        assert BatchLayout().take_rows([Plain(), y()], [3, 4])[0].rows == 2
        with pytest.raises(BatchError, match=r"Rows \[6, 1\] of '0'.*concat="):
            BatchLayout().take_rows([Plain(), y()], [6, 1])

    def test_take_function_that_drops_rows_is_detected(self):
        class Leaky(Graphs):
            pass

        register_batch_type(
            Leaky, num_rows=lambda v: len(v.x), take=lambda v, a, b: Leaky(v.x[a : b - 1])
        )
        with pytest.raises(BatchError, match=r"take\(Leaky, 0, 4\).*returned 3 rows instead of 4"):
            split_batch(Leaky(x()), 4)

    def test_invalid_registrations_are_rejected(self):
        cases: list[Any] = [
            ("Graphs", TypeError, "needs a class, got 'Graphs'"),
            (dict, ValueError, "dict already has a meaning"),
            (torch.Tensor, ValueError, "Tensor already has a meaning"),
        ]
        for cls, error, message in cases:
            with pytest.raises(error, match=message):
                register_batch_type(cls, num_rows=len, take=lambda value, a, b: value[a:b])


def test_tensors_in_slots_of_registered_type_are_mapped() -> None:
    class Slotted:
        __slots__ = ("names", "x")

        def __init__(self, x: torch.Tensor, names: list[str]) -> None:
            self.x, self.names = x, names

    register_batch_type(
        Slotted,
        num_rows=lambda rows: len(rows.x),
        take=lambda rows, start, stop: Slotted(rows.x[start:stop], rows.names[start:stop]),
    )
    batch = {"rows": Slotted(x(), ["a"] * ROWS)}
    assert [path for path, _ in tensor_leaves(batch)] == ["rows.x"]
    others = {"b": (y(), [{"c": y()}]), "n": 1, "p": pack_sequence(sequences(), False)}
    assert [path for path, _ in tensor_leaves(others)] == ["b.0", "b.1.0.c", "p.data"]
    moved = map_tensors(batch, lambda tensor: tensor.to("meta"))["rows"]
    assert (moved.x.is_meta, moved.names) == (True, ["a"] * ROWS)
    assert not batch["rows"].x.is_meta


JOINABLE = (
    """
tensor, array, names, tuple, dict, dict subclass, user dict, batch encoding, model output,
named tuple, slotted dataclass, sparse, samples as dicts, proxy, own mapping, jagged, tensordict
""".replace("\n", " ")
    .strip()
    .split(", ")
)


class TestJoining:
    def test_joined_microbatches_equal_batch(self):
        batches = {structure: STRUCTURES[structure]() for structure in JOINABLE} | {
            "deep": {"a": {"b": (x(), {"c": y()})}, "d": Pair(x(), None)},
            "odd": {"x": x(), "device": torch.device("cpu"), "word": "train", "none": None},
        }
        for batch in batches.values():
            for size in (1, 3):
                assert_partition(concat_rows(split_batch(batch, size)), [batch], [ROWS])

    def test_unjoinable_outputs_error_names_path(self):
        cases: list[Any] = [
            ([], "no outputs"),
            ([{"loss": torch.tensor(1.0)}], "output 'loss' is a 0-d Tensor.*one value per row"),
            ([{"loss": 1.0}], "output 'loss' is of type float"),
            ([x(2, 3), x(2, 4)], r"\(2, 3\), \(2, 4\).*Pad"),
            ([x(2, 3).numpy(), x(2, 4).numpy()], r"\(2, 3\), \(2, 4\).*Pad"),
            ([{"a": x()}, {"b": x()}], r"different parts.*\['a'\] and \['b'\]"),
            ([(x(),), (x(), x())], "different parts"),
            ([x(), None], "different types.*NoneType, Tensor"),
            ([{"mode": "a"}, {"mode": "b"}], "'mode' is of type str"),
            ([object()], "type object.*register_batch_type"),
        ]
        for parts, message in cases:
            with pytest.raises(BatchError, match=message):
                concat_rows(parts)


class TestRaggedTensors:
    def test_joined_packed_sequences_equal_original_rows(self):
        for packed in (
            pack_sequence(sequences(), enforce_sorted=False),
            pack_sequence(sequences((9, 7, 7, 5, 4, 2, 2, 1))),
        ):
            joined = concat_rows(split_batch(packed, 3))
            assert (joined.sorted_indices is None) == (packed.sorted_indices is None)
            pairs = zip(unpack_sequence(joined), unpack_sequence(packed), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)

    def test_jagged_tensors_share_offsets_after_split(self):
        first: Any = jagged()
        second = torch.nested.nested_tensor_from_jagged(first.values() * 2, first.offsets())
        for a, b in [
            *split_batch((first, second), 3),
            BatchLayout().take_rows((first, second), [6, 1]),
        ]:
            assert torch.equal((a + b).values(), a.values() * 3)

    def test_strided_nested_tensor_keeps_layout(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch: a prototype layout
            whole = torch.nested.nested_tensor(sequences())
            pieces = split_batch(whole, 3)
            joined = concat_rows(pieces)
        assert all(piece.is_nested and piece.layout is torch.strided for piece in pieces)
        assert [row.tolist() for p in pieces for row in p.unbind()] == rows_of(whole, ROWS)
        assert rows_of(joined, ROWS) == rows_of(whole, ROWS)
