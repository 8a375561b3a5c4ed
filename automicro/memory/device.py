"""Measurement and limits of memory on the device of a run.

A CPU counts only inside a `MemoryBudget`. Abilities of an accelerator are looked up in its torch
module (``torch.cuda``, ``torch.xpu``, ``torch.mps`` …), not derived from its name.

cuBLAS and cuDNN allocate device memory outside torch's allocator when a thread first uses them: in
the forward on the caller's thread, and in the backward on a thread of autograd. If the first
attempt has filled the device, their failures are hard to distinguish from a broken device.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro.memory.budget import MemoryBudget, active_budget
from automicro.torch_private import without_modes
from automicro.units import format_bytes, parse_bytes, parse_share


@dataclass(frozen=True, kw_only=True)
class AllocatorCounts:
    """Counts of a device's allocator; None if not counted."""

    allocated_bytes: int | None = None  # of live tensors now
    peak_bytes: int | None = None  # since the device's own counter was reset
    reserved_bytes: int | None = None  # from the device, including cached blocks
    alloc_retries: int | None = None  # how often the cache was freed to serve a request
    ooms: int | None = None  # number of failed requests


logger = logging.getLogger(__name__)

NO_COUNTS = AllocatorCounts()
_uncounted: set[torch.device] = set()
"""Devices whose allocator keeps no statistics, such as some pluggable allocators."""


def read_counts(device: torch.device | str) -> AllocatorCounts:
    """Return all counts of a device's allocator in one query."""
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        if budget is None:
            return NO_COUNTS
        return AllocatorCounts(
            allocated_bytes=budget.allocated_bytes,
            peak_bytes=budget.lap_peak_bytes,
            ooms=budget.num_ooms,
        )
    # The nested form costs a tenth of the flat one, which is sorted.
    read = _ability(device, "memory_stats_as_nested_dict")
    if read is None or device in _uncounted:  # MPS counts neither peaks nor retries
        return NO_COUNTS
    try:
        stats = read(device)
    except RuntimeError as error:
        _uncounted.add(device)
        logger.warning(
            "automicro: the allocator of %s keeps no statistics (%s), so sizes are only halved "
            "and no memory is reported. Use torch's own allocator for both",
            device,
            next(iter(str(error).splitlines()), ""),
        )
        return NO_COUNTS
    return _from_stats(stats)


def _from_stats(stats: Mapping[str, Any]) -> AllocatorCounts:
    if not stats:  # nothing has been allocated yet
        return AllocatorCounts(
            allocated_bytes=0, peak_bytes=0, reserved_bytes=0, alloc_retries=0, ooms=0
        )
    allocated = stats["allocated_bytes"]["all"]
    return AllocatorCounts(
        allocated_bytes=allocated["current"],
        peak_bytes=allocated["peak"],
        reserved_bytes=stats["reserved_bytes"]["all"]["current"],
        alloc_retries=stats.get("num_alloc_retries", 0),
        ooms=stats.get("num_ooms", 0),
    )


def allocated_bytes(device: torch.device | str) -> int | None:
    """Return the bytes of live tensors on a device, or None if not counted."""
    return read_counts(device).allocated_bytes


_earlier_laps: dict[torch.device, int] = {}
"""The highest peak since `reset_peak`, by device: a device counts only one peak at a time."""


def peak_bytes(device: torch.device | str) -> int | None:
    """Return the peak memory of live tensors since `reset_peak`, or None if not counted.

    >>> with MemoryBudget(None):
    ...     x = torch.zeros(1024)
    ...     peak_bytes("cpu")
    4096
    """
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        return None if budget is None else budget.peak_bytes
    peak = read_counts(device).peak_bytes
    return None if peak is None else max(peak, _earlier_laps.get(device, 0))


def reset_peak(device: torch.device | str) -> None:
    """Restart the measurement of a device's peak, if bytes are counted."""
    device = torch.device(device)
    if device.type == "cpu":
        if (budget := active_budget()) is not None:
            budget.reset_peak()
        return
    _earlier_laps.pop(device, None)
    if read_counts(device) is not NO_COUNTS:
        _reset_counter(device)


def begin_lap(device: torch.device | str) -> AllocatorCounts:
    """Start measuring the peak of a part of a run, without changing `peak_bytes`.

    On an accelerator this resets torch's own peak statistics.

    >>> with MemoryBudget(None):
    ...     x = torch.zeros(1024)
    ...     del x
    ...     _ = begin_lap("cpu")
    ...     read_counts("cpu").peak_bytes, peak_bytes("cpu")
    (0, 4096)
    """
    device = torch.device(device)
    counts = read_counts(device)
    if device.type == "cpu":
        if (budget := active_budget()) is not None:
            budget.begin_lap()
    elif counts.peak_bytes is not None:
        # Torch keeps only one peak, so the peak of earlier laps is kept here.
        _earlier_laps[device] = max(counts.peak_bytes, _earlier_laps.get(device, 0))
        _reset_counter(device)
    return counts


def capacity_bytes(device: torch.device | str) -> int | None:
    """Return the bytes that this process could hold on a device now, or None if unknown."""
    device = torch.device(device)
    if device.type == "cpu":
        budget = active_budget()
        return None if budget is None else budget.limit_bytes
    read_free = _ability(device, "mem_get_info")
    reserved = read_counts(device).reserved_bytes
    if read_free is None or reserved is None:
        return None
    free, total = map(int, read_free(device))
    # Cached blocks of the allocator count as free, because the next attempt can use them.
    return min(free + reserved, int(_share(device) * total))


def total_bytes(device: torch.device | str) -> int | None:
    """Return the total memory of a device, or None if unknown."""
    found = _property(torch.device(device), "total_memory")
    return None if found is None else int(found)


def usable_bytes(device: torch.device | str) -> int | None:
    """Return the total memory that this process may use on a device, or None if unknown."""
    device = torch.device(device)
    if device.type == "cpu":
        return capacity_bytes(device)
    total = total_bytes(device)
    return None if total is None else round(total * _share(device))


def copies_overlap(device: torch.device | str) -> bool:
    """Return whether copies to a device can run in parallel with its work, on their own stream."""
    device = torch.device(device)
    return device.type != "cpu" and _ability(device, "Stream") is not None


def synchronize(device: torch.device | str) -> None:
    """Wait until a device has finished its work; do nothing on the CPU."""
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def limit_memory(
    limit: str | int | float, device: torch.device | str
) -> contextlib.AbstractContextManager[MemoryBudget | None]:
    """Return a context in which a device has at most a limit of memory.

    >>> with limit_memory("1MiB", "cpu") as budget:
    ...     budget.limit_bytes
    1048576
    """
    # On an accelerator, the limit is the share that torch's allocator may take, including its
    # cache. It also helps with drivers that use host memory instead of failing.
    device = torch.device(device)
    num_bytes = limit_bytes(limit, device)
    if device.type == "cpu":
        return MemoryBudget(num_bytes)
    total = total_bytes(device)
    if total is None or _ability(device, "set_per_process_memory_fraction") is None:
        raise ValueError(
            f"cannot limit the memory of {device} to {format_bytes(num_bytes)}: only a CPU "
            "(simulated) and devices like CUDA can be limited. Leave the limit out, or use one "
            "of these"
        )
    if read_counts(device) is NO_COUNTS:
        raise ValueError(
            f"cannot limit the memory of {device} to {format_bytes(num_bytes)}: its pluggable "
            "allocator keeps no statistics. Leave the limit out, or use torch's own allocator"
        )
    if num_bytes > total:
        raise ValueError(
            f"the limit of {format_bytes(num_bytes)} exceeds the {format_bytes(total)} of "
            f"{device}: give at most that, or leave the limit out"
        )
    return _limited(num_bytes / total, device)


def limit_bytes(limit: str | int | float, device: torch.device | str) -> int:
    """Return a memory limit in bytes; shares refer to the total memory of the device."""
    device, share = torch.device(device), parse_share(limit)
    if share is None:
        return parse_bytes(limit)
    total = None if device.type == "cpu" else total_bytes(device)
    if total is None:
        raise ValueError(
            f"memory_limit={limit!r} is a share of a device's memory, but {device} has no "
            "memory of its own. Give bytes, such as '24MiB'"
        )
    return int(share * total)


@contextlib.contextmanager
def _limited(fraction: float, device: torch.device) -> Iterator[None]:
    module = torch.get_device_module(device)
    before = _share(device)
    # By index, or None: torch 2.11 does not limit a device without an index.
    module.set_per_process_memory_fraction(fraction, device.index)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(before, device.index)


def _share(device: torch.device) -> float:
    read = _ability(device, "get_per_process_memory_fraction")
    if read is None or device in _uncounted:
        return 1.0
    return min(1.0, float(read(device.index)))  # cudaMallocAsync without a limit reports millions


def _property(device: torch.device, name: str) -> Any:
    """Return a property of a device, or None if it does not exist."""
    read = _ability(device, "get_device_properties")
    return None if read is None else getattr(read(device), name, None)


def _ability(device: torch.device, name: str) -> Callable[..., Any] | None:
    found: Callable[..., Any] | None = getattr(torch.get_device_module(device), name, None)
    return found


def _reset_counter(device: torch.device) -> None:
    reset = _ability(device, "reset_peak_memory_stats")
    if reset is not None:
        reset(device)


# Layers that cuDNN, or MIOpen on ROCm, might compute.
_CONVOLVING = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.RNNBase, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
)  # fmt: skip
_used: set[tuple[torch.device, str]] = set()


def use_libraries(devices: Iterable[torch.device], modules: Sequence[nn.Module]) -> None:
    """Use the libraries that modules will need, forward and backward, once on each accelerator."""
    # Errors are ignored here, because the step reports them with more context.
    for device in devices:
        if device.type == "cpu":
            continue
        _use(device, "products")
        if any(isinstance(each, _CONVOLVING) for root in modules for each in root.modules()):
            _use(device, "convolutions")


def _use(device: torch.device, library: str) -> None:
    if (device, library) in _used:
        return
    # Marked before the attempt, because a failure would otherwise be repeated in every step.
    _used.add((device, library))
    try:
        # The caller might be in inference mode or without gradients. The backward loads the
        # libraries on autograd's thread.
        with without_modes(), torch.inference_mode(False), torch.enable_grad():
            _WORK[library](device).sum().backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, MemoryError) as error:
        logger.debug("%s were not tried on %s: %s", library, device, error)


def _multiply(device: torch.device) -> Tensor:
    one = torch.ones(16, 16, device=device, requires_grad=True)
    return one @ one


def _convolve(device: torch.device) -> Tensor:
    weight = torch.ones(1, 1, 3, 3, device=device, requires_grad=True)
    return F.conv2d(torch.ones(1, 1, 8, 8, device=device), weight)


_WORK = {"products": _multiply, "convolutions": _convolve}
