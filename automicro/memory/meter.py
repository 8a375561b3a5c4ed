"""Measurements of one attempt: its peak, its time, and the memory available to it."""

import math
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from automicro.errors import text_of
from automicro.memory.device import (
    NO_COUNTS,
    AllocatorCounts,
    begin_lap,
    capacity_bytes,
    read_counts,
    synchronize,
)
from automicro.units import parse_bytes

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
        self,
        devices: Sequence[torch.device],
        *,
        repeatable: bool = False,
        left_free: float = 0.0,
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
    shares = list(map(_share, peaks, residents, capacities))
    return max(first, resident + round(max(shares) * (capacity - resident)))


def _share(peak: int | None, resident: int | None, capacity: int | None) -> float:
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
    try:
        return parse_bytes(found[1])
    except ValueError:
        return 0
