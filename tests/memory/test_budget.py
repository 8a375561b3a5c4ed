"""The simulated device: counted tensors, threads and layouts, limits, and state after an error."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

from automicro.memory.budget import MemoryBudget, refuse_compiled
from automicro.memory.device import active_budget
from automicro.memory.oom import release

KIB = 1024


def floats(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes // 4)


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def test_tracked_tensors_are_counted_once() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, torch.ones(8, 64))
    optimizer.step()
    budget = MemoryBudget(None).track(model)
    gradients_and_parameters = budget.allocated_bytes
    budget.track(model, optimizer, [{"again": model[0].weight}], model)
    assert budget.allocated_bytes == gradients_and_parameters * 3 // 2
    assert budget.peak_bytes == budget.allocated_bytes


def test_lazy_layer_is_counted_from_first_use() -> None:
    model = nn.LazyLinear(64)
    budget = MemoryBudget(None).track(model)
    assert budget.allocated_bytes == 0
    with budget:
        model(torch.ones(2, 64))
    assert budget.allocated_bytes == 64 * 64 * 4 + 512


def test_wrong_use_of_budget_is_rejected() -> None:
    with pytest.raises(TypeError, match=r"cannot track 3 of type int: give modules"):
        MemoryBudget(None).track(3)
    said = (
        r"cannot enter MemoryBudget\('1\.00 MiB'\) inside "
        r"MemoryBudget\('1\.00 GiB'\).*leave the outer budget first"
    )
    with MemoryBudget("1GiB") as outer:
        with pytest.raises(ValueError, match=said), MemoryBudget("1MiB"):
            pass
        assert active_budget() is outer
    budget = MemoryBudget("4KiB")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 17\.50 KiB"):
        budget.track(mlp())
    assert budget.allocated_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_existing_sparse_tensors_are_counted(layout: torch.layout) -> None:
    x = torch.eye(1024).to_sparse(layout=layout)
    with MemoryBudget(None) as budget:
        (x * 2).to_dense()
        assert 12 * KIB <= budget.allocated_bytes < 40 * KIB
    del x
    assert budget.allocated_bytes == 0


class Wrapper(torch.Tensor):
    """A tensor subclass that makes a temporary copy of its inner tensor in every operation."""

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


def test_operations_inside_tensor_wrapper_are_counted() -> None:
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


def test_host_block_is_not_counted() -> None:
    x = torch.zeros(1024)
    with MemoryBudget(None) as budget:
        with budget.host():
            x.add_(1)
        with pytest.raises(KeyError), budget.host():
            raise KeyError
        assert budget.allocated_bytes == 0
        other = torch.zeros(1024)
    assert budget.allocated_bytes == other.nbytes
    assert budget.track(x).allocated_bytes == x.nbytes + other.nbytes


def test_oversized_transfer_raises_oom() -> None:
    batch = torch.zeros(1024)
    with MemoryBudget("1KiB") as budget:
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 4\.00 KiB"):
            budget.transfer(batch)
        assert budget.transfer(batch[:100]).shape == (100,)
    assert budget.allocated_bytes == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4).t(),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
    ],
    ids=["channels_last", "transposed", "coo", "csr"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_transfer_keeps_layout_and_strides(make) -> None:
    tensor = make()
    with MemoryBudget(None) as budget:
        moved = budget.transfer(tensor)
    assert moved.layout is tensor.layout
    assert torch.equal(moved.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided:
        assert moved.stride() == tensor.stride()


def test_other_threads_are_not_counted() -> None:
    seen: list[MemoryBudget | None] = []

    def work() -> None:
        seen.append(active_budget())
        torch.zeros(1024)

    with MemoryBudget("1KiB") as budget:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [None]
    assert budget.peak_bytes == 0


def compile_forward(module: nn.Module) -> nn.Module:
    module.forward = torch.compile(module.forward, backend="eager")
    return module


def compile_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


@pytest.mark.parametrize(
    "compiled",
    [lambda module: torch.compile(module, backend="eager"), compile_in_place, compile_forward],
)
def test_compiled_modules_are_rejected(compiled) -> None:
    module = compiled(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"compiled: 1\.0\. Leave out either"):
        refuse_compiled(nn.Sequential(nn.ReLU(), nn.Sequential(module)))
    with pytest.raises(ValueError, match=r"compiled: (Linear|OptimizedModule)"):
        MemoryBudget(None).track(module)


def test_step_fits_in_budget_of_its_measured_peak() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    limit: int | None = None
    for _ in range(2):
        measured = copy.deepcopy(model)
        with MemoryBudget(limit).track(measured) as budget:
            step(measured, torch.ones(8, 1, 12, 12))
        limit = limit or budget.peak_bytes
        assert budget.peak_bytes == limit
    assert limit is not None
    with MemoryBudget(limit - 512).track(model), pytest.raises(torch.OutOfMemoryError):
        step(model, torch.ones(8, 1, 12, 12))


def test_rejected_argument_is_not_counted() -> None:
    x = floats(8 * KIB)
    with MemoryBudget("4KiB") as budget:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match=r"allocate 8\.00 KiB"):
                x.add_(1)
            assert budget.allocated_bytes == 0
    assert x.sum() == 0


@pytest.mark.parametrize("training", [True, False])
def test_batchnorm_oom_leaves_running_statistics_unchanged(training: bool) -> None:
    layer = nn.BatchNorm2d(4).train(training)
    x = torch.randn(8, 4, 6, 6)
    before = copy.deepcopy(layer.state_dict())
    budget = MemoryBudget(None).track(layer, x)
    with MemoryBudget(budget.allocated_bytes + 600).track(layer, x) as limited:
        with pytest.raises(torch.OutOfMemoryError):
            nn.functional.batch_norm(
                x, layer.running_mean, layer.running_var, layer.weight, layer.bias, training
            )
        assert limited.allocated_bytes == budget.allocated_bytes
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_oom_reverts_declared_writes_of_operation() -> None:
    noise = torch.full((512,), 7.0)
    x = torch.randn(512)
    with MemoryBudget("4KiB").track(noise, x), pytest.raises(torch.OutOfMemoryError):
        torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
    assert torch.equal(noise, torch.full((512,), 7.0))


def test_failed_backward_holds_memory_until_release() -> None:
    x = torch.ones(256, requires_grad=True)

    class Hungry(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return floats(64 * KIB).sum() * gradient

    def attempt() -> None:
        branches = [x.exp().sin() for _ in range(5)]
        (Hungry.apply(x) + sum(branches)).sum().backward()

    with MemoryBudget("32KiB").track(x) as budget:
        before = budget.allocated_bytes
        try:
            attempt()
        except torch.OutOfMemoryError as error:
            failed = error
        failed.__traceback__ = None
        gc.collect()
        assert budget.allocated_bytes > before
        release(failed)
        assert budget.allocated_bytes == before
