"""Training on batches of every structure is exact, and failed attempts leave them unchanged.

The loss sums a function of every number in the batch, so the gradient exposes a row that is
dropped, changed or counted twice.
"""

import copy
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from automicro import BatchError, Microbatcher, RollbackError
from automicro.batch.tensors import tensor_leaves
from automicro.values import same_content
from tests.batch.structures import STRUCTURES, Pair, Text, numbers_of, x
from tests.batch.training import Waves, forward, gradient, spoiling


def expected(batch: Any) -> Tensor:
    model = Waves()
    forward(model, batch).backward()
    assert model.scale.grad is not None
    return model.scale.grad


# Containers that hold a structure beside a tensor.
BESIDE: list[Callable[[Any], Any]] = [
    lambda part: {"x": x(), "part": part},
    lambda part: (x(), part),
    lambda part: [x(), part],
    lambda part: Pair(x(), part),
    lambda part: types.SimpleNamespace(x=x(), part=part),
]


@settings(max_examples=60, deadline=None)
@given(
    structures=st.lists(st.sampled_from([*STRUCTURES]), min_size=1, max_size=3),
    beside=st.sampled_from(BESIDE),
    around=st.sampled_from(BESIDE),
    size=st.sampled_from([1, 3, "auto"]),
)
def test_nested_structures_are_exact_and_restored(
    structures: list[str], beside: Any, around: Any, size: Any
) -> None:
    def make() -> Any:
        return around(beside({str(at): STRUCTURES[each]() for at, each in enumerate(structures)}))

    model, batch = Waves(), make()
    if size == "auto":
        model.most = sum(map(len, numbers_of(batch))) - 1
    found = gradient(model, size, batch, spoiling)
    assert torch.allclose(found, expected(make()), rtol=1e-12, atol=1e-9)
    assert torch.equal(torch.cat(numbers_of(batch)), torch.cat(numbers_of(make())))


def test_every_structure_is_exact_and_restored_before_retry() -> None:
    for structure, make in STRUCTURES.items():
        model, batch, untouched = Waves(), make(), make()
        wanted = expected(make())
        for size in (1, 3):
            assert torch.allclose(gradient(Waves(), size, make()), wanted, rtol=0, atol=1e-9)
        model.most = sum(map(len, numbers_of(batch))) - 1
        found = gradient(model, "auto", batch, spoiling)
        assert model.most is None, f"no attempt failed: {structure}"
        assert torch.allclose(found, wanted, rtol=0, atol=1e-9), structure
        pairs = [*zip(tensor_leaves(batch), tensor_leaves(untouched), strict=True)]
        assert all(path == was for (path, _), (was, _) in pairs), structure
        assert all(same_content(a, b) for (_, a), (_, b) in pairs), structure
        assert not any(leaf.requires_grad for _, leaf in tensor_leaves(batch)), structure
        assert torch.equal(torch.cat(numbers_of(batch)), torch.cat(numbers_of(untouched)))


LATE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "replaced entry": (
        lambda: {"x": torch.rand(8, 2)},
        lambda batch: batch.update(x=batch["x"] / 2),
    ),
    "popped entry": (lambda: {"x": torch.rand(8), "w": torch.rand(8)}, lambda b: b.pop("w")),
    "grown list": (lambda: ([0.5] * 8, torch.rand(8)), lambda batch: batch[0].append(1.0)),
    "normalized array in sample": (
        lambda: [{"x": np.arange(3.0) + i} for i in range(8)],
        lambda batch: [np.divide(row["x"], 2, row["x"]) for row in batch],
    ),
    "input requires grad": (
        lambda: {"x": torch.rand(8, 2)},
        lambda batch: batch["x"].requires_grad_(),
    ),
    "replaced tensor data": (
        lambda: {"x": torch.rand(8, 2)},
        lambda batch: batch["x"].__setattr__("data", batch["x"].data / 2),
    ),
    "changed object attribute": (
        lambda: [Text(letter) for letter in "abcdefgh"],
        lambda batch: [row.__setattr__("text", "z") for row in batch],
    ),
    "shortened list in object": (
        lambda: [Text([1.0, 2.0]) for _ in range(8)],  # type: ignore[arg-type]
        lambda batch: [row.text.pop() for row in batch],
    ),
}


@pytest.mark.parametrize(("make", "change"), LATE.values(), ids=LATE)
def test_changes_from_second_batch_are_undone_before_retry(
    make: Callable[[], Any], change: Callable[[Any], Any]
) -> None:
    first, second = make(), make()
    wanted, changes = expected(copy.deepcopy(second)), False

    def run(model: Any, batch: Any) -> Any:
        found = torch.cat([number.clone() for number in numbers_of(batch)])
        if changes:
            change(batch)
        return model(found)

    model = Waves()
    microbatcher = Microbatcher(model, forward=run, loss_average="none", probe=False)
    microbatcher.backward(first)
    model.zero_grad()
    changes = True
    model.most = sum(map(len, numbers_of(second))) - 1  # runs out of memory after all changes
    assert microbatcher.backward(second).ooms == 1
    assert model.scale.grad is not None
    assert torch.allclose(model.scale.grad, wanted, rtol=0, atol=1e-9)


def doubling(model: Any, batch: Any) -> Any:
    for row in batch:
        row.text.mul_(2)
    return model(torch.cat([row.text for row in batch]))


def test_tensor_modified_inside_object_is_restored_before_retry() -> None:
    values = [torch.rand(2, dtype=torch.float64) for _ in range(8)]
    wanted = expected(torch.cat(values) * 2)
    rows = [Text(value) for value in values]  # type: ignore[arg-type]
    found = gradient(Waves(most=8), "auto", rows, doubling)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-9)


def test_modified_tensor_in_uncopyable_object_raises_rollback_error() -> None:
    class Open(Text):
        def __del__(self) -> None:
            """Close a file, for example; a copy would close it, too."""

    rows = [Open(torch.rand(2)) for _ in range(8)]  # type: ignore[arg-type]
    with pytest.raises(RollbackError, match=r"inside an opaque object of the batch.*clone"):
        gradient(Waves(most=8), "auto", rows, doubling)


def test_one_time_iterators_are_rejected_as_rows() -> None:
    rows = [(float(i) for i in range(3)) for _ in range(8)]
    with pytest.raises(BatchError, match="generator, which can be read only once"):
        gradient(Waves(), 3, rows)
