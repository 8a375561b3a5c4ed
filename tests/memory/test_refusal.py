"""When the simulated device refuses, what a refusal leaves behind, and recovering from it."""

import copy
import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from automicro.memory.budget import MemoryBudget
from automicro.memory.oom import release
from tests.memory.work import KIB, floats, mlp, step


def limit_between(model: nn.Module, rows: int, width: int = 64) -> int:
    """Return a limit in which half of the rows train, and all of them do not."""
    peaks = []
    for size in (rows // 2, rows):
        measured = copy.deepcopy(model)
        with MemoryBudget(None).track(measured) as budget:
            step(measured, torch.ones(size, width))
        peaks.append(budget.peak_bytes)
    assert peaks[0] < peaks[1]
    return sum(peaks) // 2


# When it refuses


def test_a_refusal_says_what_was_asked_and_what_is_left() -> None:
    with MemoryBudget("8KiB") as budget:
        kept = floats(6 * KIB)
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"^Simulated device out of memory\. Tried to allocate 4\.00 KiB\. The budget has "
            r"a total capacity of 8\.00 KiB of which 2\.00 KiB is free\. Live tensors hold 6\.00 "
            r"KiB, and held 6\.00 KiB at most\.$",
        ):
            floats(4 * KIB)
    assert budget.num_ooms == 1
    assert budget.allocated_bytes == kept.nbytes
    assert budget.peak_bytes == kept.nbytes


def test_what_was_refused_is_gone_before_its_error_is() -> None:
    with MemoryBudget("8KiB") as budget:
        try:
            torch.zeros(1024).repeat(8)
        except torch.OutOfMemoryError:
            # Only the argument: the traceback holds the frame of the refusal.
            assert budget.allocated_bytes <= 4 * KIB


def test_exactly_the_limit_fits() -> None:
    with MemoryBudget("4KiB") as budget:
        x = floats(4 * KIB)
        with pytest.raises(torch.OutOfMemoryError):
            floats(4)
    assert budget.allocated_bytes == x.nbytes


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


def test_a_plain_loop_dies_at_a_batch_and_not_at_half_of_it() -> None:
    model, rows = mlp(), 256
    budget = MemoryBudget(limit_between(model, rows)).track(model)
    with budget:
        step(model, torch.ones(rows // 2, 64))
        model.zero_grad()
        with pytest.raises(torch.OutOfMemoryError):
            step(model, torch.ones(rows, 64))
    assert budget.num_ooms == 1


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


@pytest.mark.parametrize(
    "grow",
    [
        lambda x: x.resize_(2048),
        lambda x: torch.add(torch.ones(2048), 1, out=x),
        lambda x: x.set_(torch.zeros(2048).untyped_storage()),
        lambda x: torch.ops.aten._foreach_add.Scalar_out([torch.ones(2048)], 1, out=[x]),
    ],
    ids=["resize_", "out=", "set_", "returns nothing"],
)
def test_a_tensor_that_grows_is_counted_again(grow: Callable[[torch.Tensor], object]) -> None:
    x = torch.zeros(0)
    with MemoryBudget(None) as budget:
        grow(x)
    assert budget.allocated_bytes == 8 * KIB
    with MemoryBudget("4KiB"), pytest.raises(torch.OutOfMemoryError):
        grow(torch.zeros(0))


def test_shrinking_is_allowed_on_a_device_that_is_too_full() -> None:
    with MemoryBudget("4KiB") as budget:
        x = torch.zeros(0)
        with pytest.raises(torch.OutOfMemoryError):
            x.resize_(2048)
        assert budget.allocated_bytes == 8 * KIB  # it has happened, and is said so
        x.set_(torch.zeros(0).untyped_storage())
    assert budget.allocated_bytes == 0


# Recovering


def train_until_it_fits(budget: MemoryBudget, model: nn.Module, rows: int) -> int:
    while rows:
        try:
            step(model, torch.ones(rows, 64))
        except torch.OutOfMemoryError as error:
            failed = error
        else:
            return rows
        model.zero_grad()
        release(failed)
        rows //= 2
    return 0


def train_until_it_fits_inside_except(budget: MemoryBudget, model: nn.Module, rows: int) -> int:
    if rows == 0:
        return 0
    try:
        step(model, torch.ones(rows, 64))
    except torch.OutOfMemoryError:
        model.zero_grad()
        return train_until_it_fits_inside_except(budget, model, rows // 2)
    return rows


def test_trying_again_outside_except_fits_and_inside_it_does_not() -> None:
    """Inside, the interpreter holds the failed frames, and they hold their activations."""
    model = mlp()
    limit = limit_between(model, 256)
    with MemoryBudget(limit).track(model) as budget:
        assert train_until_it_fits(budget, model, 256) == 128
    model.zero_grad()
    with MemoryBudget(limit).track(model) as budget:
        assert train_until_it_fits_inside_except(budget, model, 256) < 128
    assert budget.num_ooms > 1


def test_after_release_the_count_is_back_where_the_attempt_began() -> None:
    model = mlp()
    with MemoryBudget(None).track(model) as measured:
        step(model, torch.ones(64, 64))
    model.zero_grad()
    num_limits = 0
    for limit in range(measured.peak_bytes - 512, 18 * KIB, -5 * KIB):
        budget = MemoryBudget(limit).track(model)
        before = budget.allocated_bytes
        with budget:
            try:
                step(model, torch.ones(64, 64))
            except torch.OutOfMemoryError as error:
                failed = error
            model.zero_grad()
            release(failed)
        assert budget.allocated_bytes == before
        num_limits += 1
    assert num_limits >= 5


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
