"""Real out-of-memory errors of a device are recovered bit-identically, without a trace."""

import gc
import time

import pytest
import torch
from torch import nn

from automicro import SampleTooLargeError
from automicro.memory.oom import Failure, classify, release
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
from tests.gpu.subjects import ROWS, Hungry, OnTwoDevices, batch, microbatcher, model

pytestmark = GPU

# A row needs 64 MiB: the whole batch 1 GiB, half of it 512 MiB.
PHASES = {"forward": Hungry(64, 0), "backward": Hungry(0, 64)}
ROOM = 900 * MIB


def test_oom_error_of_full_device_is_recognized() -> None:
    with room(64 * MIB), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(1024 * MIB, dtype=torch.uint8, device=DEVICE)
    assert classify(caught.value) is Failure.RETRYABLE


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", ["host", "pinned", "device"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.usefixtures("deterministic")
def test_step_after_oom_is_bit_identical_to_undisturbed_step(
    phase: str, where: str, precision: str
) -> None:
    rows = batch()
    if where == "pinned":
        rows = pinned(rows)
    if where == "device":
        rows = to_device(rows)
    found = []
    for size, limit in ((ROWS // 2, 64 * 1024 * MIB), ("auto", ROOM)):
        net = model(PHASES[phase], batchnorm=True)
        optimizer = torch.optim.AdamW(net.parameters())
        step = microbatcher(net, size, optimizer=optimizer, precision=precision)
        torch.manual_seed(3)
        with room(limit):
            result = step.backward(rows)
        optimizer.step()
        assert result.microbatch_size == ROWS // 2
        found.append({**snapshot(net, optimizer), "loss": result.loss.cpu()})
    assert result.ooms == 1
    assert differences(*found) == []


@pytest.mark.usefixtures("deterministic")
def test_evaluation_after_oom_counts_each_row_once() -> None:
    net = model(PHASES["forward"])
    expected = microbatcher(net, ROWS // 2).evaluate(batch(), return_outputs=True)
    with room(ROOM):
        result = microbatcher(net).evaluate(batch(), return_outputs=True)
    assert (result.ooms, result.microbatch_size) == (1, ROWS // 2)
    assert torch.equal(result.outputs, expected.outputs)
    assert torch.equal(result.loss, expected.loss)  # type: ignore[arg-type]
    assert net.training


@needs_two_devices()
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.usefixtures("deterministic")
def test_step_after_oom_on_second_device_is_bit_identical(
    phase: str,
) -> None:
    found = []
    for size, limit in ((ROWS // 2, 64 * 1024 * MIB), ("auto", ROOM)):
        net = OnTwoDevices(PHASES[phase])
        step = microbatcher(net, size)
        accelerator.manual_seed_all(3)
        with room(limit, SECOND):
            result = step.backward(batch())
        assert result.microbatch_size == ROWS // 2
        generator = {"second generator": accelerator.get_rng_state(SECOND)}
        found.append({**snapshot(net), **generator, "loss": result.loss.cpu()})
    assert result.ooms == 1
    assert differences(*found) == []


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
    message = ""
    with room(2048 * MIB):
        try:
            microbatcher(net).backward(batch())
        except SampleTooLargeError as error:
            message = str(error)
    assert "a microbatch of 1 of 16 rows does not fit" in message
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
        if fails_first:
            works = hidden.sin()
            fails = _Fails.apply(hidden)
        else:
            fails = _Fails.apply(hidden)
            works = hidden.sin()
        loss = (works + fails).sum()
        try:
            loss.backward()
        except torch.OutOfMemoryError as error:
            return error.with_traceback(None)
        raise AssertionError("there was memory for a PiB")

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


class ShortageRecorder:
    """Record the bytes of live tensors whenever the allocator cannot serve a request."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def note(self) -> None:
        self.held.append(int(accelerator.memory_allocated(DEVICE)))


@only_cuda("an observer of requests that cannot be served")
@pytest.mark.skipif(not has_native_allocator(), reason="cudaMallocAsync has none")
def test_shortage_listener_is_called_while_device_is_full() -> None:
    watch = ShortageRecorder()
    net = model(Hungry(0, 64))
    before = int(accelerator.memory_allocated(DEVICE))
    tell_of_shortage(watch.note)
    try:
        with room(ROOM):
            assert microbatcher(net).backward(batch()).ooms >= 1
    finally:
        tell_no_more(watch.note)
    assert watch.held
    assert max(watch.held) > before + 16 * MIB, "activations were given back before"
