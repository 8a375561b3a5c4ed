"""Memory on the device of a run: its limits, and what attempts take of it, and how long.

A CPU counts only inside a `MemoryBudget`. Abilities of an accelerator are looked up in its torch
module (``torch.cuda``, ``torch.xpu``, ``torch.mps`` …), not derived from its name.
"""

import collections
import contextlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from automicro.errors import text_of

if TYPE_CHECKING:
    from automicro.memory.budget import MemoryBudget


class Entered(threading.local):
    """The budget that this thread has entered, and how many times."""

    budget: "MemoryBudget | None" = None
    depth: int = 0


entered = Entered()


def active_budget() -> "MemoryBudget | None":
    """Return the budget that this thread has entered, or None."""
    return entered.budget


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
    read = ability(device, "memory_stats_as_nested_dict")
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

    >>> from automicro import MemoryBudget
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

    >>> from automicro import MemoryBudget
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
    read_free = ability(device, "mem_get_info")
    reserved = read_counts(device).reserved_bytes
    if read_free is None or reserved is None:
        return None
    free, total = map(int, read_free(device))
    # Cached blocks of the allocator count as free, because the next attempt can use them.
    return min(free + reserved, int(share_of(device) * total))


def total_bytes(device: torch.device | str) -> int | None:
    """Return the total memory of a device, or None if unknown."""
    device = torch.device(device)
    read = ability(device, "get_device_properties")
    found = None if read is None else getattr(read(device), "total_memory", None)
    return None if found is None else int(found)


def copies_overlap(device: torch.device | str) -> bool:
    """Return whether copies to a device can run in parallel with its work, on their own stream."""
    device = torch.device(device)
    return device.type != "cpu" and ability(device, "Stream") is not None


def synchronize(device: torch.device | str) -> None:
    """Wait until a device has finished its work; do nothing on the CPU."""
    device = torch.device(device)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def share_of(device: torch.device) -> float:
    """Return the share of a device that this process may allocate."""
    read = ability(device, "get_per_process_memory_fraction")
    if read is None or device in _uncounted:
        return 1.0
    return min(1.0, float(read(device.index)))  # cudaMallocAsync without a limit reports millions


def ability(device: torch.device, name: str) -> Callable[..., Any] | None:
    """Return a function of a device's module in torch, or None if it has none."""
    found: Callable[..., Any] | None = getattr(torch.get_device_module(device), name, None)
    return found


def _reset_counter(device: torch.device) -> None:
    reset = ability(device, "reset_peak_memory_stats")
    if reset is not None:
        reset(device)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested mappings and sequences, such as the state of an optimizer."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in([*value.values()])
    elif isinstance(value, list | tuple | set | collections.deque):
        for each in value:
            yield from tensors_in(each)


class OccupiedDevice:
    """A device with modules and an optimizer's state; `residents` measures these.

    >>> occupied = OccupiedDevice(torch.device("cpu"), [nn.Linear(16, 16)], None, "1MiB")
    >>> with occupied.limited():
    ...     active_budget().allocated_bytes
    1536
    """

    def __init__(
        self,
        device: torch.device,
        modules: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        memory_limit: str | int | float | None = None,
        *,
        sums_in_float32: bool = False,
    ) -> None:
        self.device = device
        self.modules = modules
        self.optimizer = optimizer
        self.memory_limit = memory_limit
        self.sums_in_float32 = sums_in_float32
        self._limit: contextlib.AbstractContextManager[MemoryBudget | None] | None = None
        if memory_limit is not None:
            from automicro.memory.budget import limit_memory

            limit = limit_memory(memory_limit, device)
            # A simulated device and its counts persist from step to step.
            self._limit = limit if device.type == "cpu" else None

    def limited(self) -> contextlib.AbstractContextManager[None]:
        """Return a context with the limit, in which everything on the device is counted."""
        # A settled step without a limit enters no context.
        if self.memory_limit is None and active_budget() is None:
            return _NOTHING
        return self._limited()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        from automicro.memory.budget import limit_memory, track_residents

        with contextlib.ExitStack() as stack:
            if self.memory_limit is not None:
                # An accelerator is limited only during a step, because other code uses it in
                # between.
                stack.enter_context(self._limit or limit_memory(self.memory_limit, self.device))
            budget = active_budget()
            if budget is not None:
                track_residents(budget, [*self.modules, self.optimizer])
            yield


_REQUEST = re.compile(r"(?:Tried to allocate|^Requested +:) ([\d.]+ ?\w+)", re.M)
_SECONDS_BETWEEN_READINGS = 1.0  # of the capacity, which needs a call of the driver


class Measured(NamedTuple):
    """The measurements of one attempt; None if not counted."""

    peak_bytes: int | None  # of live tensors; a failed attempt adds the bytes of its last request
    resident_bytes: int | None  # before the attempt
    capacity_bytes: int | None  # available to the process
    seconds: float
    alloc_retries: int | None  # how often the allocator freed its cache to continue
    # Whether the seconds are those of the device. Without waiting for an accelerator, they are
    # those of the host, which only queues work.
    has_waited: bool = True


_UNKNOWN = -math.inf


def highs_of(measured: Measured | None) -> list[float]:
    """Return the numbers of one rank for a vote; unknown values are lower than any number."""
    if measured is None:
        return []
    # The lowest capacity counts. It is negated, because a vote only finds maxima.
    capacity = None if measured.capacity_bytes is None else -measured.capacity_bytes
    values = measured.peak_bytes, measured.resident_bytes, capacity, measured.alloc_retries
    return [_UNKNOWN if each is None else float(each) for each in (*values, measured.seconds)]


def measured_by_all(highs: Sequence[float], own: Measured | None) -> Measured | None:
    """Return the measurements over all ranks, or None if this rank does not measure."""
    if own is None or not highs or highs[4] == _UNKNOWN:
        return None
    peak, resident, capacity, retries = [None if v == _UNKNOWN else int(v) for v in highs[:4]]
    return own._replace(
        peak_bytes=peak,
        resident_bytes=resident,
        capacity_bytes=None if capacity is None else -capacity,
        seconds=highs[4],
        alloc_retries=retries,
    )


class Meter:
    """Measures attempts, one after the other.

    >>> from automicro import MemoryBudget
    >>> meter = Meter([torch.device("cpu")])
    >>> with MemoryBudget("1MiB"):
    ...     meter.begin()
    ...     x = torch.zeros(1024)
    ...     measured = meter.end()
    >>> measured.peak_bytes, measured.resident_bytes, measured.capacity_bytes
    (4096, 0, 1048576)
    """

    def __init__(
        self, devices: Sequence[torch.device], *, repeatable: bool = False, left_free: float = 0.0
    ) -> None:
        # With several devices, the fullest decides which sizes fit. Reported numbers are those of
        # the first device, with its peak scaled to the same share of free memory as the fullest's.
        self._devices = devices
        self._left_free = left_free
        self.is_repeatable = repeatable  # if so, seconds must not decide anything
        self._seconds_between_readings = 0.0 if repeatable else _SECONDS_BETWEEN_READINGS
        self._start = 0.0
        self._before = [NO_COUNTS for _ in devices]
        self._capacities: list[int | None] = [None for _ in devices]
        self._read_at = float("-inf")
        self._is_cpu = all(each.type == "cpu" for each in devices)
        self._waits = True

    def begin(self, *, waits: bool = False) -> None:
        """Start an attempt."""
        self._waits = waits or self._is_cpu
        if waits and not self._is_cpu:
            self._synchronize()
        self._before = [begin_lap(each) for each in self._devices]
        # After the wait, so that this attempt does not include the time of the previous one.
        self._start = time.perf_counter()

    def end(self, failure: BaseException | None = None) -> Measured:
        """End the attempt, before its memory is released, with the error if memory ran out."""
        # The speed of a failed attempt is of no use, so it needs no wait.
        if self._waits and failure is None and not self._is_cpu:
            self._synchronize()
        now = time.perf_counter()
        # Always after a failure, because the capacity decides the next size.
        if failure is not None or now - self._read_at >= self._seconds_between_readings:
            self._capacities, self._read_at = self._read_capacities(), now
        elif self._is_cpu:  # the capacity of a budget costs nothing to read
            self._capacities = self._read_capacities()
        peaks: list[int | None] = []
        residents: list[int | None] = []
        retries: int | None = None
        for device, before in zip(self._devices, self._before, strict=True):
            counts = read_counts(device)
            peaks.append(_peak(counts, failure))
            residents.append(before.allocated_bytes)
            if counts.alloc_retries is not None and before.alloc_retries is not None:
                retries = (retries or 0) + counts.alloc_retries - before.alloc_retries
        return Measured(
            peak_bytes=_peak_of_first(peaks, residents, self._capacities),
            resident_bytes=residents[0],
            capacity_bytes=self._capacities[0],
            seconds=now - self._start,
            alloc_retries=retries,
            has_waited=self._waits,
        )

    def _read_capacities(self) -> list[int | None]:
        found = map(capacity_bytes, self._devices)
        return [None if each is None else int(each * (1 - self._left_free)) for each in found]

    def _synchronize(self) -> None:
        for each in self._devices:
            synchronize(each)


def _peak(counts: AllocatorCounts, failure: BaseException | None) -> int | None:
    if failure is None or counts.peak_bytes is None:
        return counts.peak_bytes
    return max(counts.peak_bytes, (counts.allocated_bytes or 0) + _requested_bytes(failure))


def _peak_of_first(
    peaks: Sequence[int | None], residents: Sequence[int | None], capacities: Sequence[int | None]
) -> int | None:
    """Return the first device's peak, scaled up if another device is fuller.

    >>> _peak_of_first([30, 50], [10, 0], [110, 100])
    60
    """
    first, resident, capacity = peaks[0], residents[0], capacities[0]
    if len(peaks) < 2 or first is None or resident is None or capacity is None:
        return first
    shares = list(map(_used_share, peaks, residents, capacities))
    return max(first, resident + round(max(shares) * (capacity - resident)))


def _used_share(peak: int | None, resident: int | None, capacity: int | None) -> float:
    """Return the share of a device's free memory that an attempt used; 0 if unknown."""
    if peak is None or resident is None or capacity is None or capacity <= resident:
        return 0.0
    return (peak - resident) / (capacity - resident)


def _requested_bytes(failure: BaseException) -> int:
    r"""Return the bytes requested according to an out-of-memory error; 0 if it does not say.

    >>> _requested_bytes(MemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0"))
    20971520
    >>> _requested_bytes(MemoryError("Allocation … memory)\nRequested               : 2.00 KiB"))
    2048
    """
    found = _REQUEST.search(text_of(failure))
    if found is None:
        return 0
    from automicro.units import parse_bytes

    try:
        return parse_bytes(found[1])
    except ValueError:
        return 0
