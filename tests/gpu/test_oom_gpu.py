"""Real out-of-memory errors of a device are recovered bit-identically, without a trace."""

import gc
import time
from typing import Any

import pytest
import torch
from torch import nn

from automicro import SampleTooLargeError
from automicro.memory.oom import release
from automicro.torch_private_execution import tell_no_more, tell_of_shortage
from tests.gpu.conftest import Record
from tests.gpu.device import (
    DEVICE,
    GPU,
    MIB,
    SECOND,
    accelerator,
    allocated_bytes,
    differences,
    has_native_allocator,
    needs_two_devices,
    only_cuda,
    pinned,
    room,
    snapshot,
    to_device,
)
from tests.gpu.subjects import (
    HALF,
    PHASES,
    ROOM,
    ROWS,
    Hungry,
    OnTwoDevices,
    batch,
    microbatcher,
    model,
    require_same_bits,
)

pytestmark = GPU


@pytest.mark.parametrize(
    ("phase", "place", "precision"),
    [
        ("forward", lambda rows: rows, "fp32"),
        ("forward", pinned, "bf16"),
        ("forward", to_device, "fp32"),
        ("backward", lambda rows: rows, "bf16"),
        ("backward", pinned, "fp32"),
    ],
    ids=["host", "pinned, bf16", "device", "backward, host, bf16", "backward, pinned"],
)
@pytest.mark.usefixtures("deterministic")
def test_step_after_oom_is_bit_identical_to_undisturbed_step(
    phase: str, place: Any, precision: str
) -> None:
    def run(size: Any, limit: int) -> dict[str, torch.Tensor]:
        net = model(PHASES[phase], batchnorm=True)
        optimizer = torch.optim.AdamW(net.parameters())
        step = microbatcher(net, size, optimizer=optimizer, precision=precision)
        torch.manual_seed(3)
        with room(limit):
            result = step.backward(place(batch()))
        optimizer.step()
        assert (result.microbatch_size, result.ooms) == (HALF, size == "auto")
        return {**snapshot(net, optimizer), "loss": result.loss.cpu()}

    require_same_bits(run)


@pytest.mark.usefixtures("deterministic")
def test_evaluation_after_oom_counts_each_row_once() -> None:
    net = model(PHASES["forward"])
    expected = microbatcher(net, HALF).evaluate(batch(), return_outputs=True)
    with room(ROOM):
        result = microbatcher(net).evaluate(batch(), return_outputs=True)
    assert (result.ooms, result.microbatch_size) == (1, HALF)
    assert torch.equal(result.outputs, expected.outputs)
    assert torch.equal(result.loss, expected.loss)  # type: ignore[arg-type]
    assert net.training


@needs_two_devices()
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.usefixtures("deterministic")
def test_step_after_oom_on_second_device_is_bit_identical(phase: str) -> None:
    def run(size: Any, limit: int) -> dict[str, torch.Tensor]:
        net = OnTwoDevices(PHASES[phase])
        step = microbatcher(net, size)
        accelerator.manual_seed_all(3)
        with room(limit, SECOND):
            result = step.backward(batch())
        assert (result.microbatch_size, result.ooms) == (HALF, size == "auto")
        generator = {"second generator": accelerator.get_rng_state(SECOND)}
        return {**snapshot(net), **generator, "loss": result.loss.cpu()}

    require_same_bits(run)


@needs_two_devices()
def test_second_device_is_freed_if_no_row_fits() -> None:
    net = OnTwoDevices(Hungry(0, 4096))
    gc.collect()
    state, held = accelerator.get_rng_state(SECOND), accelerator.memory_allocated(SECOND)
    with room(2048 * MIB, SECOND), pytest.raises(SampleTooLargeError):
        microbatcher(net, probe=False).backward(batch())
    assert accelerator.memory_allocated(SECOND) == held
    assert torch.equal(accelerator.get_rng_state(SECOND), state)


def test_state_is_unchanged_if_no_row_fits() -> None:
    microbatcher(model()).backward(batch())  # so that libraries create their permanent state
    net = model(Hungry(0, 4096), batchnorm=True)
    before, before_bytes = snapshot(net), allocated_bytes()
    said = "a microbatch of 1 of 16 rows does not fit"
    with room(2048 * MIB), pytest.raises(SampleTooLargeError, match=said) as caught:
        microbatcher(net).backward(batch())
    del caught
    assert differences(before, snapshot(net)) == []
    assert allocated_bytes() == before_bytes


@pytest.mark.parametrize("phase", PHASES)
def test_retry_starts_without_cached_blocks_of_failed_attempt(
    phase: str, record_property: Record
) -> None:
    """Rollback returns freed memory to the device; the retry would fragment cached blocks."""
    net = model(PHASES[phase])
    optimizer = torch.optim.AdamW(net.parameters())
    step = microbatcher(net, optimizer=optimizer, probe=False)
    cached_bytes: list[int] = []

    def look(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        [rows] = args
        if len(rows) < ROWS and not cached_bytes:
            held = accelerator.memory_reserved(DEVICE) - accelerator.memory_allocated(DEVICE)
            cached_bytes.append(int(held))

    net.register_forward_pre_hook(look)
    with room(ROOM):
        assert step.backward(batch()).ooms >= 1  # two if blocks were fragmented
    record_property("cached_bytes_at_the_retry", cached_bytes)
    assert cached_bytes[0] < 64 * MIB


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty(2**50, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("fails_first", [True, False])
def test_release_frees_tensors_queued_by_failed_backward(
    fails_first: bool, record_property: Record
) -> None:
    x = torch.randn(MIB, device=DEVICE, requires_grad=True)
    x.sin().sum().backward()
    x.grad = None

    def fail() -> BaseException:
        hidden = x.exp()  # 4 MiB, saved for the branch that succeeds
        # Of two ready branches, the one created last runs its backward first.
        branches = [torch.sin, _Fails.apply]
        one, other = (each(hidden) for each in (branches if fails_first else branches[::-1]))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            (one + other).sum().backward()
        return caught.value.with_traceback(None)

    before_bytes = allocated_bytes()
    error = fail()
    at_once = accelerator.memory_allocated(DEVICE) - before_bytes
    time.sleep(0.1)
    later = allocated_bytes() - before_bytes
    release(error, DEVICE)
    released = accelerator.memory_allocated(DEVICE) - before_bytes
    record_property("bytes_alive_at_once", at_once)
    record_property("bytes_alive_after_a_while", later)
    record_property("bytes_alive_after_release", released)
    record_property("engine_trap_exists", later > 0)
    assert released == 0


@only_cuda("an observer of requests that cannot be served")
@pytest.mark.skipif(not has_native_allocator(), reason="cudaMallocAsync has none")
def test_shortage_listener_is_called_while_device_is_full() -> None:
    held: list[int] = []
    net = model(Hungry(0, 64))
    before = int(accelerator.memory_allocated(DEVICE))

    def note() -> None:
        held.append(int(accelerator.memory_allocated(DEVICE)))

    tell_of_shortage(note)
    try:
        with room(ROOM):
            assert microbatcher(net).backward(batch()).ooms >= 1
    finally:
        tell_no_more(note)
    assert max(held) > before + 16 * MIB, "activations were given back before"
