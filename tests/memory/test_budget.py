"""The simulated device: what it counts, and when it stops counting."""

import gc

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from automicro.memory.budget import MemoryBudget
from tests.memory.work import KIB, floats, mlp, step

# What is counted


def test_storages_are_counted_while_they_live() -> None:
    with MemoryBudget(None) as budget:
        x = floats(4 * KIB)
        y = x + 1
        assert budget.allocated_bytes == 8 * KIB
        del x
        assert budget.allocated_bytes == 4 * KIB
        del y
    assert budget.allocated_bytes == 0
    assert budget.peak_bytes == 8 * KIB


def test_the_count_follows_tensors_that_die_after_the_budget_is_left() -> None:
    with MemoryBudget(None) as budget:
        x = floats(4 * KIB)
    assert budget.allocated_bytes == 4 * KIB
    del x
    assert budget.allocated_bytes == 0


def test_views_share_what_they_count() -> None:
    with MemoryBudget(None) as budget:
        x = floats(4 * KIB)
        views = [x[:7], x.view(2, -1).t(), x.detach(), x.expand(9, -1), *x.split(100)]
        del x
        assert budget.allocated_bytes == 4 * KIB
        del views
    assert budget.allocated_bytes == 0


def test_sizes_are_rounded_up_to_512_bytes() -> None:
    with MemoryBudget(None) as budget:
        x = torch.zeros(1), torch.zeros(128), torch.zeros(129), torch.zeros(0)
    assert len(x) == 4
    assert budget.allocated_bytes == 512 + 512 + 1024


def test_the_peak_of_a_training_step_is_the_sum_of_what_must_be_alive() -> None:
    rows, width = 256, 64
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    budget = MemoryBudget(None).track(model)
    parameters = budget.allocated_bytes
    assert parameters == 2 * (width * width + 128) * 4  # each bias rounded up to 512 bytes
    with budget:
        model(torch.ones(rows, width)).sum().backward()
    # The input, the hidden layer and its ReLU are saved; the output has died by the backward's
    # peak, where the gradients of the ReLU and of the second layer's parameters exist.
    activation = rows * width * 4
    assert budget.allocated_bytes == 2 * parameters
    assert 4 * activation + parameters < budget.peak_bytes < 5 * activation + 2 * parameters


def test_the_optimizers_state_is_counted() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    budget = MemoryBudget(None).track(model)
    parameters = budget.allocated_bytes
    with budget:
        step(model, torch.ones(8, 64))
        optimizer.step()
    num_counters = 4
    assert budget.allocated_bytes == 4 * parameters + num_counters * 512


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


def test_what_was_not_tracked_is_counted_when_first_used() -> None:
    x = floats(4 * KIB)
    with MemoryBudget(None) as budget:
        assert budget.allocated_bytes == 0
        x.add_(1)
        assert budget.allocated_bytes == 4 * KIB


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
def test_sparse_tensors_count_their_parts() -> None:
    with MemoryBudget(None) as budget:
        x = torch.eye(256).to_sparse()
        y = x.to_sparse_csr()
        del x
        assert y.layout is torch.sparse_csr
        parts = y.crow_indices(), y.col_indices(), y.values()
        rounded = [-(-part.untyped_storage().nbytes() // 512) * 512 for part in parts]
        assert budget.allocated_bytes == sum(rounded)


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


def test_fake_tensors_count_as_if_they_were_real() -> None:
    def peak() -> int:
        model = mlp()
        with MemoryBudget(None).track(model) as budget:
            step(model, torch.ones(32, 64))
        return budget.peak_bytes

    real = peak()
    with FakeTensorMode():
        assert peak() == real


def test_tensors_of_the_meta_device_are_not_counted() -> None:
    with MemoryBudget("1KiB") as budget:
        torch.zeros(1000, 1000, device="meta").add(1)
    assert budget.allocated_bytes == 0
