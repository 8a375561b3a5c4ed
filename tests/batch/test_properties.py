"""Random batch structures, trained on by a forward that spoils its microbatches."""

import argparse
import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from transformers import BatchEncoding, BatchFeature

from automicro.batch.joining import concat_rows
from automicro.batch.layout import BatchLayout, balanced_sizes, split_batch
from automicro.batch.tensors import tensor_leaves
from tests.batch.structures import Text, numbers_of
from tests.batch.training import Waves, forward, gradient, spoiling

Make = Callable[[int], Any]


class Named(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    y: Any


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any


@attrs.define
class Attrs:
    x: Any
    y: Any


def mapping(cls: Callable[[dict[str, Any]], Any]) -> Callable[[Any, Any], Any]:
    return lambda first, second: cls({"x": first, "y": second})


def namespace(cls: Any) -> Callable[[Any, Any], Any]:
    return lambda first, second: cls(x=first, y=second)


CONTAINERS: list[Callable[[Any, Any], Any]] = [
    mapping(dict),
    mapping(collections.OrderedDict),
    mapping(collections.UserDict),
    mapping(lambda items: collections.defaultdict(list, items)),
    mapping(types.MappingProxyType),
    mapping(BatchEncoding),
    mapping(BatchFeature),
    Named,
    Slotted,
    Plain,
    Attrs,
    namespace(types.SimpleNamespace),
    namespace(argparse.Namespace),
]


def numbers(rows: int, *shape: int) -> torch.Tensor:
    count = torch.Size((rows, *shape)).numel()
    return torch.arange(1.0, count + 1, dtype=torch.float64).reshape(rows, *shape) / 7


def sparse(rows: int) -> torch.Tensor:
    dense = torch.tril(numbers(rows, 3) + 1)
    return dense.to_sparse(layout=torch.sparse_coo)


LEAVES: list[Make] = [
    numbers,
    lambda rows: numbers(rows, 2, 3),
    lambda rows: numbers(rows, 4).t().contiguous().t(),
    lambda rows: numbers(rows, 0),
    lambda rows: numbers(rows, 2).numpy(),
    lambda rows: np.arange(rows),
    lambda rows: np.array([[row] for row in range(rows)], dtype=object),
    lambda rows: [f"text {row}" for row in range(rows)],
    lambda rows: [float(row) for row in range(rows)],
    lambda rows: [{"x": numbers(2) + row, "t": str(row)} for row in range(rows)],
    lambda rows: [numbers(row + 1, 2) for row in range(rows)],
    lambda rows: [Text(str(row)) for row in range(rows)],
    sparse,
    lambda rows: torch.nested.nested_tensor(
        [numbers(row % 3 + 1, 2) for row in range(rows)], layout=torch.jagged
    ),
    lambda rows: TensorDict({"x": numbers(rows, 2), "d": {"y": numbers(rows)}}, batch_size=[rows]),
]
SHARED: list[Make] = [
    lambda rows: 0.5,
    lambda rows: "text",
    lambda rows: None,
    lambda rows: torch.relu,
    lambda rows: torch.tensor(7.0),
]


def nested(parts: st.SearchStrategy[Make]) -> st.SearchStrategy[Make]:
    containers = st.sampled_from(CONTAINERS)
    return st.one_of(
        st.tuples(containers, parts, parts).map(
            lambda drawn: lambda rows: drawn[0](drawn[1](rows), drawn[2](rows))
        ),
        parts.map(lambda make: lambda rows: (numbers(rows), make(rows))),
        parts.map(lambda make: lambda rows: [numbers(rows), make(rows)]),
    )


structures = st.recursive(st.sampled_from(LEAVES + SHARED), nested, max_leaves=6)
batches = st.tuples(st.sampled_from(CONTAINERS), structures).map(
    lambda drawn: lambda rows: drawn[0](numbers(rows), drawn[1](rows))
)


def together(value: Any) -> torch.Tensor:
    return torch.cat(numbers_of(value))


def columns(pieces: list[Any]) -> list[list[float]]:
    """Return all numbers of the pieces, leaf by leaf."""
    return [torch.cat(each).tolist() for each in zip(*map(numbers_of, pieces), strict=True)]


@settings(max_examples=150, deadline=None)
@given(make=batches, rows=st.integers(3, 9), size=st.integers(1, 9), data=st.data())
def test_rows_are_counted_and_the_slices_make_the_batch_in_order(
    make: Make, rows: int, size: int, data: st.DataObject
) -> None:
    batch, layout = make(rows), BatchLayout()
    assert layout.num_rows(batch) == rows
    pieces = layout.split(batch, balanced_sizes(rows, size))
    assert {type(piece) for piece in pieces} == {type(batch)}
    # Rows with tensors of their own, as in lists, are many leaves.
    found = torch.cat([together(piece) for piece in pieces])
    assert torch.equal(found.sort().values, together(batch).sort().values)
    if len(numbers_of(pieces[0])) == len(numbers_of(batch)):
        assert columns(pieces) == columns([batch])
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
    taken = together(layout.take_rows(batch, chosen))
    each = torch.cat([together(layout.take_rows(batch, [row])) for row in chosen])
    assert torch.equal(taken.sort().values, each.sort().values)


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


@settings(max_examples=150, deadline=None)
@given(make=batches, rows=st.integers(3, 9), size=st.sampled_from([1, 2, 3, 4, "auto"]))
def test_the_gradient_is_the_whole_batchs_and_the_batch_stays_as_it_was(
    make: Make, rows: int, size: Any
) -> None:
    whole = Waves()
    forward(whole, make(rows)).backward()
    assert whole.scale.grad is not None
    model, batch = Waves(), make(rows)
    if size == "auto":
        model.most = len(together(batch)) - 1  # the whole batch fails after it was spoiled
    found = gradient(model, size, batch, spoiling)
    assert torch.allclose(found, whole.scale.grad, rtol=1e-12, atol=1e-9)
    assert torch.equal(together(batch), together(make(rows)))
    assert not any(leaf.requires_grad for _, leaf in tensor_leaves(batch))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), size=st.integers(1, 9), leaf=st.sampled_from(LEAVES))
def test_outputs_of_slices_are_joined_in_order(rows: int, size: int, leaf: Make) -> None:
    batch = {"x": numbers(rows), "leaf": leaf(rows)}
    if not isinstance(batch["leaf"], list) or rows != 1:
        joined = concat_rows(split_batch(batch, size))
        assert torch.equal(together(joined), together(batch))
