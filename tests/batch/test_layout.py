"""Declared layouts, ambiguous lists, and rejected batches."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from automicro.batch.layout import BatchLayout, Reader, num_rows, split_batch
from automicro.errors import BatchError
from tests.batch.structures import ROWS, Frozen, Pair, sequences, x, y


class TestDeclarations:
    def test_rows_may_be_in_another_dimension(self):
        batch: dict[str, Any] = {"x": x(5, ROWS, 2), "a": x(5, ROWS).numpy(), "y": y()}
        pieces = split_batch(batch, 3, batch_layout={"": 1, "y": 0})
        assert torch.equal(torch.cat([piece["x"] for piece in pieces], dim=1), batch["x"])
        assert np.array_equal(np.concatenate([p["a"] for p in pieces], axis=1), batch["a"])
        assert split_batch(x(5, ROWS), 3, batch_layout=1)[0].shape == (5, 3)
        assert split_batch(x(5, ROWS), 3, batch_layout=-1)[0].shape == (5, 3)
        deep = {"seq": {"a": x(5, ROWS), "b": (x(4, ROWS),)}, "y": y()}
        assert num_rows(deep, batch_layout={"seq": 1}) == ROWS
        taken = BatchLayout({"": 1, "y": 0}).take_rows(batch, [4, 2])
        assert torch.equal(taken["x"], batch["x"][:, [4, 2]])
        assert np.array_equal(taken["a"], batch["a"][:, [4, 2]])
        assert taken["y"].tolist() == [4, 2]

    def test_shared_part_is_passed_whole_to_every_microbatch(self):
        for thing in (x(1, 5), object()):
            pieces = split_batch((x(), {"thing": thing}), 3, batch_layout={"1": "shared"})
            assert all(piece[1]["thing"] is thing for piece in pieces)

    def test_two_views_in_batch_of_two_need_declaration(self):
        batch: dict[str, Any] = {"views": [x(2, 3), x(2, 3) + 9], "y": x(2)}
        with pytest.raises(BatchError, match=r"'views'.*two ways.*'items'.*'fields'"):
            num_rows(batch)
        fields = split_batch(batch, 1, batch_layout={"views": "fields"})
        assert torch.equal(fields[0]["views"][1], batch["views"][1][:1])
        items = split_batch(batch, 1, batch_layout={"views": "items"})
        assert items[1]["views"][0] is batch["views"][1]

    @pytest.mark.parametrize(
        ("early", "late"),
        [
            ({"v": [x(), x()], "y": y()}, {"v": [x(2, 3), x(2, 3)], "y": x(2)}),
            ({"v": [x(2, 3)] * ROWS, "y": y()}, {"v": [x(2, 3), x(2, 3)], "y": x(2)}),
            ({"size": (224, 112), "y": y()}, {"size": (224, 112), "y": x(2)}),
            ([[1, 2], [3], [4, 5]], [[1, 2], [3, 4], [5, 6]]),
        ],
        ids=["fields", "items", "values", "token lists"],
    )
    def test_earlier_batch_resolves_ambiguity(self, early, late):
        layout = BatchLayout()
        layout.num_rows(early)
        pieces = layout.split(late, [1] * layout.num_rows(late))
        fields = BatchLayout({"v": "fields"}) if "v" in late else BatchLayout()
        if "size" in late:
            assert all(piece["size"] == (224, 112) for piece in pieces)
        elif isinstance(late, list):
            assert pieces == [[row] for row in late]
        elif len(early["v"]) == 2:
            assert torch.equal(pieces[1]["v"][0], fields.split(late, [1, 1])[1]["v"][0])
        else:
            assert pieces[1]["v"][0] is late["v"][1]

    def test_earlier_sample_list_does_not_affect_collated_batch(self):
        layout = BatchLayout()
        assert layout.num_rows([{"x": x(3)}, {"x": x(3)}, {"x": x(3)}]) == 3
        assert layout.num_rows([x(3, 2), x(4, 2), x(5, 2)]) == 3
        assert layout.num_rows([x(), y()]) == ROWS
        assert layout.num_rows({"v": [x(), x()], "y": y()}) == 8
        assert layout.num_rows({"v": [x(), x(), x()], "y": x(3)}) == 3

    def test_declaration_that_does_not_match_batch_raises(self):
        cases: list[Any] = [
            ({"labels": y()}, {"lables": "shared"}, "'lables'.*did you mean 'labels'.*'labels'"),
            ({"a": y(), "x": x(3)}, {"aa": "shared"}, "'aa'.*did you mean 'a'"),
            ([{"a": 1}, {"a": 2}], {"0.a": "shared"}, "'0.a'.*inside a list of rows"),
            ({"x": x()}, {"x": "items"}, "'items' for 'x', which is a Tensor"),
            ((x(5, 8), y()), 1, r"'1' of shape \(8,\) has no dimension 1.*'1': 0"),
            ((x(5, 8).numpy(), y().numpy()), 1, r"'1' of shape \(8,\) has no dimension 1"),
        ]
        for batch, layout, message in cases:
            with pytest.raises(BatchError, match=message):
                num_rows(batch, batch_layout=layout)
        layout = BatchLayout({"mask": "shared"})
        layout.num_rows({"x": x(), "mask": x(1, 2)})
        assert layout.num_rows({"x": x()}) == ROWS  # a part may be absent later

    def test_invalid_declarations_are_rejected(self):
        cases: list[Any] = [
            (True, TypeError, "got True"),
            ({"x": True}, ValueError, "'x'] is True"),
            ({"": "shared"}, ValueError, "the batch as a whole cannot be 'shared'"),
        ]
        for layout, error, message in cases:
            with pytest.raises(error, match=message):
                BatchLayout(layout)


def test_ambiguous_batch_error_gives_paths_and_remedy():
    for batch, message in [
        ((x(8, 3), x(6)), r"'0' has 8 rows \(Tensor of shape \(8, 3\)\).*'1' has 6 rows.*'items'"),
        ({"x": x(8), "y": {"z": x(6).numpy()}}, r"'x' has 8.*'y.z' has 6 rows \(ndarray"),
        ({"x": x(8), "names": ["a", "b"]}, r"'x' has 8.*'names' has 2 rows \(list of 2"),
        ({"x": x(8), "boxes": [{"a": 1}] * 3}, r"'x' has 8.*'boxes' has 3 rows"),
        ({"x": x(8), "y": [x(3), x(4)]}, r"'y' has 2 rows"),
        ([{"x": x(8)}, {"y": x(6)}], r"'0.x' has 8.*'1.y' has 6"),
        (Pair(x(8), x(6)), "'x' has 8.*'y' has 6"),
        (Frozen(x(8), ["a"] * 6), "'x' has 8.*'names' has 6"),
        ({"p": pack_sequence(sequences(), False), "y": x(6)}, "PackedSequence.*'y' has 6"),
        ({"x": x(8), "m": x(1, 3)}, r"'x' has 8.*'m' has 1 row .*ambiguous.*'m': 'shared'"),
        ({"x": x(8), "o": object()}, r"'o' is of type object.*register_batch_type.*'shared'"),
        ([x(8), object()], "'1' is of type object"),
        (object(), "The batch is of type object"),
        (None, "holds nothing that has rows"),
        (torch.tensor(1.0), "holds nothing that has rows"),
        ({"a": np.float64(1), "b": torch.tensor(2)}, "holds nothing that has rows"),
        (x(0, 3), "no rows"),
        ([], "no rows"),
        ({"a": (1, 2, 3), "b": (4, 5)}, r"2 or 3 rows.*'a': 'items'\} for 3"),
        ([[x(8), x(8)], [x(8), x(8)]], r"2 or 8 rows.*'': 'items'\} for 2 rows"),
        ((tuple(x(3, 2) for _ in range(8)), tuple(range(8))), r"3 or 8.*'0': 'items'\} for 8"),
    ]:
        with pytest.raises(BatchError, match=message):
            split_batch(batch, 2)


def test_block_sparse_tensor_is_rejected():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that this layout is in beta
        batch = {"graph": torch.eye(4).to_sparse_bsr((2, 2))}
    with pytest.raises(BatchError, match=r"'graph'.*sparse_bsr.*register_batch_type"):
        num_rows(batch)


def test_lists_that_can_be_read_two_ways_need_a_declaration() -> None:
    cases: list[Any] = [
        ([torch.zeros(3, 8, 8) for _ in range(5)], "", "3 or 5 rows", 5, 3),
        ({"views": [x(), x()]}, "views", "2 or 8 rows", 2, 8),
        ([(x(3, 2), row) for row in range(4)], "", "3 or 4 rows", 4, None),
    ]
    for batch, path, said, items, fields in cases:
        with pytest.raises(BatchError, match=rf"{said}.*'{path}': 'items'\}} for {items} rows"):
            num_rows(batch)
        assert num_rows(batch, batch_layout={path: "items"}) == items
        if fields is not None:
            assert num_rows(batch, batch_layout={path: "fields"}) == fields
    assert num_rows([torch.zeros(8, 1), torch.zeros(8, 1)]) == 8  # inputs and targets


def test_row_mismatch_error_names_unambiguous_leaf() -> None:
    either = [torch.zeros(ROWS, 2)] * 3  # three rows, or as many rows as the other parts
    batch = {"x": x(), "meta": {"images": either, "n": torch.zeros(3)}}
    with pytest.raises(BatchError, match=rf"'x' has {ROWS} rows .*, but 'meta.n' has 3 rows"):
        num_rows(batch)


def test_batch_with_known_structure_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []
    reads = Reader.read

    def noting(self: Reader, batch: object) -> object:
        read.append(batch)
        return reads(self, batch)

    monkeypatch.setattr(Reader, "read", noting)
    layout = BatchLayout()
    for count, expected in ((8, 1), (8, 1), (8, 1), (6, 2), (8, 3)):
        batch = torch.randn(count, 3), torch.arange(count)
        half = layout.num_rows(batch) // 2
        pieces = layout.split(batch, [half, half])
        assert [targets.tolist() for _, targets in pieces] == [
            list(range(half)),
            list(range(half, count)),
        ]
        assert len(read) == expected
