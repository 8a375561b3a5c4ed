"""What one attempt takes of a device: peak, time, and what the device could have given."""

import re
import time
from dataclasses import dataclass

import torch

from automicro.byte_sizes import parse_bytes
from automicro.errors import text_of
from automicro.memory.device import (
    NO_COUNTS,
    begin_lap,
    capacity_bytes,
    read_counts,
    synchronize,
)

_REQUEST = re.compile(r"Tried to allocate ([\d.]+ ?\w+)")
_SECONDS_BETWEEN_READINGS = 1.0  # of the capacity, for which the driver is asked


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one attempt took.

    Attributes:
        peak_bytes: the most that live tensors held; of an attempt that ran out of memory, with
            what it asked for last, so its need was at least that.
        resident_bytes: what lay there before.
        capacity_bytes: what the process could hold.
        seconds: from beginning to end.
        alloc_retries: how often the allocator gave its cache back to go on.
        has_waited: whether the seconds are the device's. Without waiting for an accelerator they
            are those of the host, which hands it its work.

    What nobody counts is None.
    """

    peak_bytes: int | None
    resident_bytes: int | None
    capacity_bytes: int | None
    seconds: float
    alloc_retries: int | None
    has_waited: bool = True


class Meter:
    """Measures attempts on a device, one after the other.

    Args:
        device: that it measures.
        repeatable: whether what it reads may not depend on the clock: the capacity is asked for
            at every attempt then, and not once a second.

    Attributes:
        is_repeatable: as given; nobody may then decide by seconds.

    >>> from automicro.memory import MemoryBudget
    >>> meter = Meter(torch.device("cpu"))
    >>> with MemoryBudget("1MiB"):
    ...     meter.begin()
    ...     x = torch.zeros(1024)
    ...     measured = meter.end()
    >>> measured.peak_bytes, measured.resident_bytes, measured.capacity_bytes
    (4096, 0, 1048576)
    """

    def __init__(self, device: torch.device, *, repeatable: bool = False) -> None:
        self._device = device
        self.is_repeatable = repeatable
        self._seconds_between_readings = 0.0 if repeatable else _SECONDS_BETWEEN_READINGS
        self._start = 0.0
        self._before = NO_COUNTS
        self._capacity: int | None = None
        self._read_at = float("-inf")
        self._is_cpu = device.type == "cpu"
        self._waits = True

    def begin(self, *, waits: bool = False) -> None:
        """An attempt begins.

        Args:
            waits: for the device, now and at the end, so that the seconds are the device's.
        """
        self._waits = waits or self._is_cpu
        if waits:
            synchronize(self._device)
        self._before = begin_lap(self._device)
        self._start = time.perf_counter()

    def end(self, failure: BaseException | None = None) -> Measured:
        """It went through, or ran out of memory with this error.

        Call it before the memory of the attempt is given back.
        """
        if self._waits and failure is None:
            synchronize(self._device)
        now = time.perf_counter()
        if failure is not None or now - self._read_at >= self._seconds_between_readings:
            self._capacity, self._read_at = capacity_bytes(self._device), now
        elif self._is_cpu:
            self._capacity = capacity_bytes(self._device)  # of a budget, which costs nothing
        counts = read_counts(self._device)
        peak, retries, earlier = counts.peak_bytes, counts.alloc_retries, self._before.alloc_retries
        if failure is not None and peak is not None:
            peak = max(peak, (counts.allocated_bytes or 0) + _requested_bytes(failure))
        return Measured(
            peak_bytes=peak,
            resident_bytes=self._before.allocated_bytes,
            capacity_bytes=self._capacity,
            seconds=now - self._start,
            alloc_retries=None if retries is None or earlier is None else retries - earlier,
            has_waited=self._waits,
        )


def _requested_bytes(failure: BaseException) -> int:
    """What an out-of-memory error says that was asked for; 0 where it does not say.

    >>> _requested_bytes(MemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0"))
    20971520
    """
    found = _REQUEST.search(text_of(failure))
    if found is None:
        return 0
    try:
        return parse_bytes(found[1])
    except ValueError:
        return 0
