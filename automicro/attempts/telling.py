"""What an attempt measured, as numbers of which the highest of all ranks counts."""

import math
from collections.abc import Sequence

from automicro.memory import Measured

_UNKNOWN = -math.inf


def highs_of(measured: Measured | None) -> list[float]:
    """The numbers of one rank; what it does not know is lower than anything.

    >>> highs_of(None)
    []
    """
    if measured is None:
        return []
    # Of capacities the lowest counts.
    capacity = None if measured.capacity_bytes is None else -measured.capacity_bytes
    values = (
        measured.peak_bytes,
        measured.resident_bytes,
        capacity,
        measured.alloc_retries,
        measured.seconds,
    )
    return [_UNKNOWN if value is None else float(value) for value in values]


def measured_by_all(highs: Sequence[float], own: Measured | None) -> Measured | None:
    """What all ranks measured together, the same on every one, where this one measures at all.

    >>> one = Measured(
    ...     peak_bytes=9, resident_bytes=1, capacity_bytes=20, seconds=0.5, alloc_retries=None
    ... )
    >>> measured_by_all([12, 1, -16, -math.inf, 0.75], one).capacity_bytes
    16
    """
    if own is None or not highs or highs[4] == _UNKNOWN:
        return None
    peak, resident, capacity, retries = (
        None if value == _UNKNOWN else int(value) for value in highs[:4]
    )
    return Measured(
        peak_bytes=peak,
        resident_bytes=resident,
        capacity_bytes=None if capacity is None else -capacity,
        seconds=highs[4],
        alloc_retries=retries,
        has_waited=own.has_waited,
    )
