"""Reading and limiting the memory of whatever device a run uses."""

import contextlib
from collections.abc import Iterator

import torch

from automicro.memory.budget import MemoryBudget, active_budget
from automicro.memory.size import format_bytes, parse_bytes


def allocated_bytes(device: torch.device | str) -> int | None:
    """Return what live tensors on a device hold now, or None where nobody counts.

    On a CPU somebody counts only inside a `MemoryBudget`.

    >>> allocated_bytes("cpu") is None
    True
    """
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        return None if budget is None else budget.allocated_bytes
    # MPS has a name of its own for it.
    return _read(device, "memory_allocated", "current_allocated_memory")


def peak_bytes(device: torch.device | str) -> int | None:
    """Return the most that live tensors held since `reset_peak`, or None where nobody counts.

    >>> with MemoryBudget(None):
    ...     x = torch.zeros(1024)
    ...     peak_bytes("cpu")
    4096
    """
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        return None if budget is None else budget.peak_bytes
    return _read(device, "max_memory_allocated")


def reset_peak(device: torch.device | str) -> None:
    """Measure the peak of a device from now on. No-op where nobody counts.

    >>> reset_peak("cpu")
    """
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        if budget is not None:
            budget.reset_peak()
        return
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def limit_memory(
    limit: str | int | float, device: torch.device | str
) -> contextlib.AbstractContextManager[MemoryBudget | None]:
    """Return a context in which a device has no more memory than a limit.

    On a CPU that is a `MemoryBudget`. On CUDA (and ROCm) it is the share of the device that torch's
    allocator may take, cached memory included, and the share from before comes back at the end.

    Raises:
        TypeError: ``limit`` is neither text nor a number.
        ValueError: the limit cannot be read or exceeds the device, or the device cannot be limited.

    >>> with limit_memory("1MiB", "cpu") as budget:
    ...     budget.limit_bytes
    1048576
    """
    device = torch.device(device)
    limit_bytes = parse_bytes(limit)
    if device.type == "cpu":
        return MemoryBudget(limit_bytes)
    if device.type != "cuda":
        raise ValueError(
            f"cannot limit the memory of {device} to {format_bytes(limit_bytes)}: only CUDA can be "
            f"limited, and a CPU can simulate a limit. Leave the limit out, or use one of these"
        )
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if limit_bytes > total_bytes:
        raise ValueError(
            f"the limit of {format_bytes(limit_bytes)} exceeds the {format_bytes(total_bytes)} of "
            f"{device}: give at most that, or leave the limit out"
        )
    return _limited_cuda(limit_bytes / total_bytes, device)


@contextlib.contextmanager
def _limited_cuda(fraction: float, device: torch.device) -> Iterator[None]:
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _read(device: torch.device, name: str, name_without_device: str = "") -> int | None:
    module = torch.get_device_module(device)
    read = getattr(module, name, None)
    if read is not None:
        return int(read(device))
    read = getattr(module, name_without_device, None) if name_without_device else None
    return None if read is None else int(read())
