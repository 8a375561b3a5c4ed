"""When the simulated device refuses, what a refusal leaves behind, and recovering from it."""

import copy
import gc

import pytest
import torch
from torch import nn

from automicro.memory.budget import MemoryBudget
from automicro.memory.oom import release
from tests.memory.work import KIB, floats, step

# When it refuses


def test_the_measured_peak_is_a_limit_in_which_the_same_step_fits() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    batch = torch.ones(8, 1, 12, 12)
    peaks: list[int] = []
    for limit in (None, "measured"):
        measured = copy.deepcopy(model)
        with MemoryBudget(peaks[0] if limit else None).track(measured) as budget:
            step(measured, batch.clone())
        peaks.append(budget.peak_bytes)
    assert peaks[0] == peaks[1]
    with MemoryBudget(peaks[0] - 512).track(model), pytest.raises(torch.OutOfMemoryError):
        step(model, batch.clone())


def test_a_refused_argument_is_not_counted_and_refused_again() -> None:
    x = floats(8 * KIB)
    with MemoryBudget("4KiB") as budget:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match=r"allocate 8\.00 KiB"):
                x.add_(1)
            assert budget.allocated_bytes == 0
    assert x.sum() == 0


@pytest.mark.parametrize("training", [True, False])
def test_a_refused_batchnorm_leaves_its_statistics(training: bool) -> None:
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


def test_a_refused_operation_that_declares_its_writes_takes_them_back() -> None:
    noise = torch.full((512,), 7.0)
    x = torch.randn(512)
    with MemoryBudget("4KiB").track(noise, x), pytest.raises(torch.OutOfMemoryError):
        torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)
    assert torch.equal(noise, torch.full((512,), 7.0))


# Recovering


def test_the_engine_trap_holds_memory_until_release() -> None:
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
