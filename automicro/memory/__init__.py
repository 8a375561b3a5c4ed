"""Reading and limiting device memory, and simulating a device of any size on the CPU."""

from automicro.byte_sizes import format_bytes, parse_bytes, parse_share
from automicro.memory.budget import MemoryBudget, active_budget
from automicro.memory.compiled import refuse_compiled
from automicro.memory.device import (
    allocated_bytes,
    copies_overlap,
    device_identity,
    limit_bytes,
    limit_memory,
    peak_bytes,
    read_counts,
    reset_peak,
    usable_bytes,
)
from automicro.memory.libraries import use_libraries
from automicro.memory.meter import Measured, Meter
from automicro.memory.occupied import OccupiedDevice
from automicro.memory.residents import ResidentMemory, track_residents

__all__ = [
    "Measured",
    "MemoryBudget",
    "Meter",
    "OccupiedDevice",
    "ResidentMemory",
    "active_budget",
    "allocated_bytes",
    "copies_overlap",
    "device_identity",
    "format_bytes",
    "limit_bytes",
    "limit_memory",
    "parse_bytes",
    "parse_share",
    "peak_bytes",
    "read_counts",
    "refuse_compiled",
    "reset_peak",
    "track_residents",
    "usable_bytes",
    "use_libraries",
]
