"""The device under test, its free memory, and all state on it that a step may change."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro.torch_private_execution import can_record_memory

# CUDA, another accelerator, or the stand-in if pytest runs with -p tests.standin.plugin.
_KIND = torch.accelerator.current_accelerator(check_available=True) or torch.device("cuda")
DEVICE = torch.device(_KIND.type, 0)
SECOND = torch.device(_KIND.type, 1)
accelerator: Any = torch.get_device_module(DEVICE)
MIB = 2**20

# Each file of this folder: ``pytestmark = GPU``.
GPU = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    # Warnings depend on the versions of libraries, and some features are prototypes.
    pytest.mark.filterwarnings("default", "error::automicro.errors.AutomicroWarning"),
    pytest.mark.skipif(not accelerator.is_available(), reason="there is no accelerator"),
]


def only_cuda(what: str) -> pytest.MarkDecorator:
    """Mark tests of features that only CUDA has."""
    return pytest.mark.skipif(DEVICE.type != "cuda", reason=f"only CUDA has {what}")


def needs_two_devices() -> pytest.MarkDecorator:
    """Mark tests of models on two devices."""
    has_two = accelerator.is_available() and accelerator.device_count() > 1
    return pytest.mark.skipif(not has_two, reason="there is one accelerator")


def start_cublas(device: torch.device = DEVICE) -> None:
    """Make cuBLAS allocate its permanent memory: 32 MiB for each thread on an H100."""
    weight = torch.ones(8, 8, device=device, requires_grad=True)
    torch.nn.functional.linear(weight, weight, weight[0]).sum().backward()


def has_native_allocator() -> bool:
    """Return whether torch counts retries and rounds blocks, unlike cudaMallocAsync."""
    is_cuda = DEVICE.type == "cuda" and accelerator.is_available()
    return can_record_memory(DEVICE) if is_cuda else True


def share_of_device(device: torch.device = DEVICE) -> float:
    """Return the share torch may use. Without a limit, cudaMallocAsync returns some millions."""
    return min(1.0, float(accelerator.get_per_process_memory_fraction(device)))


@contextlib.contextmanager
def room(num_bytes: int, device: torch.device = DEVICE) -> Iterator[None]:
    """Limit torch to the bytes in use plus this many, so that out-of-memory errors are real."""
    start_cublas(device)
    gc.collect()
    accelerator.empty_cache()
    allowed_bytes = accelerator.memory_reserved(device) + num_bytes
    total_bytes = accelerator.get_device_properties(device).total_memory
    before = share_of_device(device)
    accelerator.set_per_process_memory_fraction(min(allowed_bytes / total_bytes, 1.0), device)
    try:
        yield
    finally:
        accelerator.set_per_process_memory_fraction(before, device)


def allocated_bytes() -> int:
    """Return the bytes of live tensors, after collecting cycles."""
    gc.collect()
    accelerator.synchronize(DEVICE)
    return int(accelerator.memory_allocated(DEVICE))


def requested_bytes(when: str = "current") -> int:
    """Return the requested bytes of live tensors, now or at the "peak", without rounding."""
    gc.collect()
    return int(accelerator.memory_stats(DEVICE)[f"requested_bytes.all.{when}"])


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Copy parameters, gradients, buffers, optimizer state and generators to the host."""
    found: dict[str, Tensor] = {
        "host generator": torch.get_rng_state(),
        "device generator": accelerator.get_rng_state(DEVICE),
    }
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad
    found.update({f"buffer {name}": buffer for name, buffer in model.named_buffers()})
    states = {} if optimizer is None else optimizer.state_dict()["state"]
    for index, values in states.items():
        for name, value in values.items():
            found[f"optimizer {index}.{name}"] = torch.as_tensor(value)
    return {name: value.detach().to("cpu", copy=True) for name, value in found.items()}


def differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Return the names of values that differ in bits, or exist on only one side."""
    return [
        name
        for name in {**one, **other}
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def waits(work: Callable[[], Any]) -> int:
    """Return how often the host waits for the device during the work."""
    if DEVICE.type != "cuda":
        before = torch.ops.standin.num_waits()
        work()
        return int(torch.ops.standin.num_waits() - before)
    accelerator.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            work()
    finally:
        accelerator.set_sync_debug_mode("default")
    return sum("synchroniz" in str(each.message) for each in said)


def num_segments() -> int:
    """Return how many segments the allocator has allocated; 0 if it does not count them."""
    return int(accelerator.memory_stats(DEVICE).get("segment.all.allocated", 0))


def to_device(batch: Any) -> Any:
    """Move a batch of ``(inputs, targets)`` to the device."""
    return tuple(part.to(DEVICE) for part in batch)


def pinned(batch: Any) -> Any:
    """Copy a batch of ``(inputs, targets)`` into pinned memory."""
    return tuple(part.pin_memory() for part in batch)
