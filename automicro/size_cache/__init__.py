"""Sizes that were found, kept on disk for the next run: one small JSON file for each kind of run.

::

    place       which folder
    key         RunKey: what a size was found for
    describing  a model, a device and a batch to a RunKey; imported by its name, for it takes torch
    record      RememberedSize, Entry: what a file holds, checked while it is read
    files       reading and writing one file, whoever else does so
    cache       SizeCache: find, remember, list, clear
    memory      SizeMemory: when one run asks and when it writes
"""

from automicro.size_cache.cache import SizeCache
from automicro.size_cache.key import RunKey
from automicro.size_cache.memory import SizeMemory
from automicro.size_cache.place import sizes_folder
from automicro.size_cache.record import Entry, RememberedSize

__all__ = [
    "Entry",
    "RememberedSize",
    "RunKey",
    "SizeCache",
    "SizeMemory",
    "sizes_folder",
]
