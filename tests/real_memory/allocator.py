"""The compiled allocator, from Python."""

import ctypes
from pathlib import Path

_UNLIMITED = -1


class CappedAllocator:
    """Replaces torch's CPU allocator until the process ends.

    It counts the bytes requested by tensors of all threads since its installation: `used_bytes`,
    and `peak_bytes` since `reset_peak`; and `allocations`, including the `refusals`.
    """

    used_bytes: int
    peak_bytes: int
    allocations: int
    refusals: int

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("set_limit", "fail_at"):
            getattr(self._library, f"capped_{name}").argtypes = [ctypes.c_int64]
        self._library.capped_install()

    def __getattr__(self, name: str) -> int:
        read = getattr(self._library, f"capped_{name}")
        read.restype = ctypes.c_int64
        return int(read())

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
