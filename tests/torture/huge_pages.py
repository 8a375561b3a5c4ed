"""Large pages for what a process holds: a copy of it is made in half the time."""

import ctypes
import sys
from pathlib import Path

_HUGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and later


def use_huge_pages() -> None:
    """Ask for them, once all is imported. Nothing but time depends on it; where none are, none."""
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        place, rights, *_, inode = line.split(maxsplit=5)[:5]
        if rights == "rw-p" and inode == "0":  # memory of no file
            begin, end = (int(each, 16) for each in place.split("-"))
            for address in range(-(-begin // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
                madvise(address, _HUGE, _COLLAPSE)
