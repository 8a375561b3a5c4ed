"""Mapping every tensor of a batch, and joining the outputs of microbatches."""

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from automicro import register_batch_type
from automicro.batch.joining import concat_rows
from automicro.batch.layout import split_batch
from automicro.batch.tensors import map_tensors, tensor_leaves
from automicro.errors import BatchError
from tests.batch.structures import ROWS, STRUCTURES, Pair, assert_partition, sequences, x, y


class TestMapping:
    def test_paths_lead_to_the_tensors(self):
        batch = {"a": x(), "b": (y(), [{"c": y()}]), "n": 1, "p": pack_sequence(sequences(), False)}
        leaves = tensor_leaves(batch)
        assert [path for path, _ in leaves] == ["a", "b.0", "b.1.0.c", "p.data"]


class Slotted:
    """Rows of a class with slots and no dictionary."""

    __slots__ = ("names", "x")

    def __init__(self, x: torch.Tensor, names: list[str]) -> None:
        self.x, self.names = x, names


def test_tensors_in_the_slots_of_a_registered_type_are_found_and_mapped() -> None:
    register_batch_type(
        Slotted,
        num_rows=lambda rows: len(rows.x),
        take=lambda rows, start, stop: Slotted(rows.x[start:stop], rows.names[start:stop]),
    )
    batch = {"rows": Slotted(x(), ["a"] * ROWS)}
    assert [path for path, _ in tensor_leaves(batch)] == ["rows.x"]
    moved = map_tensors(batch, lambda tensor: tensor.to("meta"))["rows"]
    assert moved.x.is_meta
    assert moved.names == ["a"] * ROWS
    assert not batch["rows"].x.is_meta


JOINABLE = [
    "tensor",
    "array",
    "names",
    "tuple",
    "dict",
    "ordered",
    "dict subclass",
    "user dict",
    "batch encoding",
    "model output",
    "named tuple",
    "slotted dataclass",
    "deep",
    "sparse",
    "samples as dicts",
    "proxy",
    "own mapping",
    "jagged",
    "tensordict",
    "odd objects beside",
]


class TestJoining:
    @pytest.mark.parametrize("structure", JOINABLE)
    @pytest.mark.parametrize("size", [1, 3])
    def test_joining_microbatches_gives_the_batch(self, structure, size):
        batch = STRUCTURES[structure]()
        if structure == "deep":
            batch = {"a": {"b": (x(), {"c": y()})}, "d": Pair(x(), None)}
        if structure == "odd objects beside":
            batch = {"x": x(), "device": torch.device("cpu"), "word": "train", "none": None}
        joined = concat_rows(split_batch(batch, size))
        assert_partition(joined, [batch], [ROWS])

    @pytest.mark.parametrize(
        ("parts", "message"),
        [
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
        ],
    )
    def test_outputs_that_cannot_be_joined_are_refused_by_path(self, parts, message):
        with pytest.raises(BatchError, match=message):
            concat_rows(parts)
