"""The compiled allocator, from Python."""

import ctypes
from pathlib import Path

_UNLIMITED = -1


class CappedAllocator:
    """Replaces torch's CPU allocator until the process ends.

    It counts the bytes requested by tensors of all threads since its installation.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("set_limit", "fail_at"):
            getattr(self._library, f"capped_{name}").argtypes = [ctypes.c_int64]
        for name in ("used_bytes", "peak_bytes", "allocations", "refusals", "until_fault"):
            getattr(self._library, f"capped_{name}").restype = ctypes.c_int64
        self._library.capped_install()

    @property
    def used_bytes(self) -> int:
        return int(self._library.capped_used_bytes())

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes in use since `reset_peak`."""
        return int(self._library.capped_peak_bytes())

    @property
    def allocations(self) -> int:
        """Return the number of allocations, including refused ones."""
        return int(self._library.capped_allocations())

    @property
    def refusals(self) -> int:
        return int(self._library.capped_refusals())

    @property
    def fault_is_pending(self) -> bool:
        return bool(self._library.capped_until_fault())

    def limit(self, num_bytes: int) -> None:
        self._library.capped_set_limit(num_bytes)

    def fail_at(self, allocation: int) -> None:
        """Refuse the n-th allocation from now, once."""
        self._library.capped_fail_at(allocation)

    def relent(self) -> None:
        """Remove the limit and the fault."""
        self._library.capped_set_limit(_UNLIMITED)
        self._library.capped_fail_at(0)

    def reset_peak(self) -> None:
        self._library.capped_reset_peak()
