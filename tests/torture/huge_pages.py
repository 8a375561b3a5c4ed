"""Huge pages for the memory of a process, which halve the time of a fork."""

import ctypes
import sys
from pathlib import Path

_HUGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and later


def use_huge_pages() -> None:
    """Request huge pages after all imports. They only save time, and may be unavailable."""
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        place, rights, *_, inode = line.split(maxsplit=5)[:5]
        if rights == "rw-p" and inode == "0":  # anonymous memory
            begin, end = (int(each, 16) for each in place.split("-"))
            for address in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                madvise(address, _HUGE, _COLLAPSE)
