"""Reading and limiting the memory of whatever device a run uses."""

import contextlib
from collections.abc import Iterator

import torch

from automicro.byte_sizes import format_bytes, parse_bytes, parse_share
from automicro.memory.budget import MemoryBudget, active_budget


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


_earlier_laps: dict[torch.device, int] = {}
"""The highest peak of laps since `reset_peak`, by device: a device counts one peak at a time."""


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
    peak = _read(device, "max_memory_allocated")
    return None if peak is None else max(peak, _earlier_laps.get(device, 0))


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
    _earlier_laps.pop(device, None)
    _reset_counter(device)


def begin_lap(device: torch.device | str) -> None:
    """Measure the peak of a part of a run from now on; `peak_bytes` goes on as it was.

    On CUDA this resets torch's own peak statistics.

    >>> with MemoryBudget(None):
    ...     x = torch.zeros(1024)
    ...     del x
    ...     begin_lap("cpu")
    ...     lap_peak_bytes("cpu"), peak_bytes("cpu")
    (0, 4096)
    """
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        if budget is not None:
            budget.begin_lap()
        return
    peak = peak_bytes(device)
    if peak is not None:
        _earlier_laps[device] = peak
        _reset_counter(device)


def lap_peak_bytes(device: torch.device | str) -> int | None:
    """Return the most that live tensors held since `begin_lap`, or None where nobody counts."""
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        return None if budget is None else budget.lap_peak_bytes
    return _read(device, "max_memory_allocated")


def capacity_bytes(device: torch.device | str) -> int | None:
    """Return what this process could hold on a device now, or None where nobody knows.

    On CUDA: what is free, and what torch's allocator holds already, within the process's share.

    >>> with MemoryBudget("1MiB"):
    ...     capacity_bytes("cpu")
    1048576
    """
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        return None if budget is None else budget.limit_bytes
    if device.type != "cuda":
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(free_bytes + torch.cuda.memory_reserved(device), int(share * total_bytes))


def num_alloc_retries(device: torch.device | str) -> int | None:
    """Return how often the allocator had to give its cache back to serve a request.

    >>> num_alloc_retries("cpu") is None
    True
    """
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def synchronize(device: torch.device | str) -> None:
    """Wait until a device has done what it was given. No-op on the CPU.

    >>> synchronize("cpu")
    """
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def limit_memory(
    limit: str | int | float, device: torch.device | str
) -> contextlib.AbstractContextManager[MemoryBudget | None]:
    """Return a context in which a device has no more memory than a limit.

    On a CPU that is a `MemoryBudget`. On CUDA (and ROCm) it is the share of the device that torch's
    allocator may take, cached memory included, and the share from before comes back at the end.
    That is also the answer to a driver that lends host memory instead of failing.

    Args:
        limit: what `limit_bytes` reads.
        device: to be limited.

    Raises:
        TypeError: ``limit`` is neither text nor a number.
        ValueError: the limit cannot be read or exceeds the device, or the device cannot be limited.

    >>> with limit_memory("1MiB", "cpu") as budget:
    ...     budget.limit_bytes
    1048576
    """
    device = torch.device(device)
    num_bytes = limit_bytes(limit, device)
    if device.type == "cpu":
        return MemoryBudget(num_bytes)
    if device.type != "cuda":
        raise ValueError(
            f"cannot limit the memory of {device} to {format_bytes(num_bytes)}: only CUDA can be "
            f"limited, and a CPU can simulate a limit. Leave the limit out, or use one of these"
        )
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    if num_bytes > total_bytes:
        raise ValueError(
            f"the limit of {format_bytes(num_bytes)} exceeds the {format_bytes(total_bytes)} of "
            f"{device}: give at most that, or leave the limit out"
        )
    return _limited_cuda(num_bytes / total_bytes, device)


def limit_bytes(limit: str | int | float, device: torch.device | str) -> int:
    """Return a memory limit in bytes.

    Args:
        limit: what `parse_bytes` reads, or a share of the device: ``"80%"``, or a float of at
            most 1.
        device: of which it is a share.

    Raises:
        TypeError: ``limit`` is neither text nor a number.
        ValueError: it cannot be read, or is a share of a device whose memory nobody knows.

    >>> limit_bytes("1MiB", "cpu")
    1048576
    """
    device, share = torch.device(device), parse_share(limit)
    if share is None:
        return parse_bytes(limit)
    if device.type != "cuda":
        raise ValueError(
            f"memory_limit={limit!r} is a share of a device, and {device} has no memory of its own "
            "that could be shared out: give bytes, such as '24MiB'"
        )
    return int(share * torch.cuda.get_device_properties(device).total_memory)


@contextlib.contextmanager
def _limited_cuda(fraction: float, device: torch.device) -> Iterator[None]:
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(fraction, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


def _reset_counter(device: torch.device) -> None:
    reset = getattr(torch.get_device_module(device), "reset_peak_memory_stats", None)
    if reset is not None:
        reset(device)


def _read(device: torch.device, name: str, name_without_device: str = "") -> int | None:
    module = torch.get_device_module(device)
    read = getattr(module, name, None)
    if read is not None:
        return int(read(device))
    read = getattr(module, name_without_device, None) if name_without_device else None
    return None if read is None else int(read())
