"""The simulated device: what it counts, and when it stops counting."""

import gc

import pytest
import torch
from torch import nn

from automicro.memory.budget import MemoryBudget
from tests.memory.work import KIB, mlp, step

# What is counted


def test_residents_are_tracked_once() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, torch.ones(8, 64))
    optimizer.step()
    budget = MemoryBudget(None).track(model)
    gradients_and_parameters = budget.allocated_bytes
    budget.track(model, optimizer, [{"again": model[0].weight}], model)
    assert budget.allocated_bytes == gradients_and_parameters * 3 // 2
    assert budget.peak_bytes == budget.allocated_bytes


def test_a_lazy_layer_counts_from_its_first_use() -> None:
    model = nn.LazyLinear(64)
    budget = MemoryBudget(None).track(model)
    assert budget.allocated_bytes == 0
    with budget:
        model(torch.ones(2, 64))
    assert budget.allocated_bytes == 64 * 64 * 4 + 512


def test_tracking_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match=r"cannot track 3 of type int: give modules"):
        MemoryBudget(None).track(3)


def test_a_model_that_does_not_fit_is_refused_and_not_counted() -> None:
    model = mlp()
    budget = MemoryBudget("4KiB")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 17\.50 KiB"):
        budget.track(model)
    assert budget.allocated_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensors_from_before_are_counted(layout: torch.layout) -> None:
    x = torch.eye(1024).to_sparse(layout=layout)
    with MemoryBudget(None) as budget:
        (x * 2).to_dense()
        assert 12 * KIB <= budget.allocated_bytes < 40 * KIB
    del x
    assert budget.allocated_bytes == 0


class Wrapper(torch.Tensor):
    """Holds a tensor, and needs a temporary copy of it for every operation."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        wrapper.held = held
        return wrapper

    def __tensor_flatten__(self):
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        plain = [arg.held.clone() if isinstance(arg, Wrapper) else arg for arg in args]
        return Wrapper(func(*plain, **(kwargs or {})))


def test_what_a_wrapper_does_inside_is_counted() -> None:
    wrapper = Wrapper(torch.zeros(1024))
    with MemoryBudget(None).track(wrapper) as budget:
        assert budget.allocated_bytes == 4 * KIB
        result = wrapper * 2
    assert isinstance(result, Wrapper)
    assert budget.allocated_bytes == 8 * KIB
    assert budget.peak_bytes == 12 * KIB


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_counted_in_forward_and_backward(layout: torch.layout) -> None:
    model = nn.Linear(64, 64)
    rows = [torch.ones(n, 64) for n in (3, 5)]
    budget = MemoryBudget(None).track(model)
    parameters = budget.allocated_bytes
    batch = torch.nested.nested_tensor(rows, layout=layout)
    with budget:
        output = model(batch)
        assert budget.allocated_bytes >= parameters + 2 * 8 * 64 * 4
        if layout is torch.jagged:
            output.values().sum().backward()
        moved = budget.transfer(batch)
    del moved, output, batch
    gc.collect()
    assert budget.allocated_bytes == (2 if layout is torch.jagged else 1) * parameters
