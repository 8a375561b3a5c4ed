"""What a value in a batch is, told by its type; and the types that users register."""

import argparse
import dataclasses
import datetime
import enum
import functools
import numbers
import pathlib
import types
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from automicro.slicing.batch_types import BatchType, batch_type_of_library


class Kind(enum.Enum):
    """What can be done with a value: slice it, open it, or hand it on whole."""

    TENSOR = "tensor"
    ARRAY = "array"
    PACKED = "packed sequence"
    REGISTERED = "registered type"
    MAPPING = "mapping"
    RECORD = "record"
    NAMED_TUPLE = "named tuple"
    SEQUENCE = "list or tuple"
    SHARED = "shared"
    UNKNOWN = "unknown"


STRUCTURES = frozenset({Kind.MAPPING, Kind.RECORD, Kind.NAMED_TUPLE})
"""Kinds whose parts always hold all rows, never one row each."""


_registered: dict[type, BatchType] = {}

_WHOLE_TEXTS = (str, bytes, bytearray, torch.Size)
_SHARED_TYPES = (
    numbers.Number,
    np.generic,
    enum.Enum,
    type(None),
    type(Ellipsis),
    slice,
    torch.device,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    pathlib.PurePath,
    uuid.UUID,
)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_OF_DATA = frozenset({"__len__", "__iter__", "__getitem__", "to", "num_rows", "batch_size"})
"""Methods of what holds data, even if it can be called."""

_BUILT_IN = frozenset(
    {object, torch.Tensor, np.ndarray, PackedSequence, Mapping, dict, list, tuple, str, bytes}
    | {int, float, bool, complex, type(None)}
)


def register_batch_type(
    cls: type,
    *,
    num_rows: Callable[[Any], int],
    take: Callable[[Any, int, int], Any],
    concat: Callable[[Sequence[Any]], Any] | None = None,
    map_tensors: Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Any] | None = None,
) -> None:
    """Teach the slicing a type of your own, and its subclasses.

    `num_rows(value)` counts rows and `take(value, start, stop)` gives those rows as a value of
    the same type. `concat(values)` is the inverse of `take`. `map_tensors(value, fn)` gives a copy
    with `fn` applied to each tensor; without it the tensors among the attributes are mapped.

    Raises:
        TypeError: `cls` is not a class or one of the functions cannot be called.
        ValueError: `cls` is a built-in container or leaf, whose meaning is fixed.

    >>> class Graphs:
    ...     def __init__(self, names):
    ...         self.names = names
    >>> register_batch_type(
    ...     Graphs,
    ...     num_rows=lambda graphs: len(graphs.names),
    ...     take=lambda graphs, start, stop: Graphs(graphs.names[start:stop]),
    ... )
    """
    checked: object = cls
    if not isinstance(checked, type):
        raise TypeError(f"register_batch_type needs a class, got {cls!r}. Pass the type itself.")
    if cls in _BUILT_IN:
        raise ValueError(
            f"{cls.__name__} already has a meaning in a batch. Register a subclass of it, or "
            "declare single parts with batch_layout."
        )
    required: dict[str, Any] = {"num_rows": num_rows, "take": take}
    optional = {"concat": concat, "map_tensors": map_tensors}
    given = {name: function for name, function in optional.items() if function is not None}
    for name, function in (required | given).items():
        if not callable(function):
            raise TypeError(
                f"register_batch_type({cls.__name__}, {name}=...) needs a function, got "
                f"{function!r}. Pass a callable."
            )
    _registered[cls] = BatchType(
        num_rows=num_rows, take=take, concat=concat, map_tensors=map_tensors
    )
    _cached_kind.cache_clear()
    _cached_batch_type.cache_clear()


@functools.lru_cache(maxsize=1024)
def _cached_batch_type(cls: type) -> BatchType | None:
    """The registration that holds for `cls`: its own, its nearest base's, or a known library's."""
    own = next((_registered[base] for base in cls.__mro__ if base in _registered), None)
    return own or batch_type_of_library(cls)


@functools.lru_cache(maxsize=1024)
def _cached_kind(cls: type) -> Kind:
    """The kind of all values of type `cls`."""
    if _cached_batch_type(cls) is not None:
        return Kind.REGISTERED
    # Order matters: PackedSequence and torch.Size are tuples, ModelOutput is also a dataclass.
    ordered: tuple[tuple[Kind, type | tuple[type, ...]], ...] = (
        (Kind.TENSOR, torch.Tensor),
        (Kind.ARRAY, np.ndarray),
        (Kind.PACKED, PackedSequence),
        (Kind.SHARED, _WHOLE_TEXTS),
        (Kind.MAPPING, (Mapping, types.MappingProxyType)),
    )
    for kind, classes in ordered:
        if issubclass(cls, classes):
            return kind
    if dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
        return Kind.RECORD
    if issubclass(cls, _NAMESPACES):
        return Kind.RECORD
    if issubclass(cls, tuple) and (hasattr(cls, "_fields") or hasattr(cls, "n_sequence_fields")):
        return Kind.NAMED_TUPLE
    if issubclass(cls, list | tuple):
        return Kind.SEQUENCE
    return Kind.SHARED if issubclass(cls, _SHARED_TYPES) or _is_function(cls) else Kind.UNKNOWN


def _is_function(cls: type) -> bool:
    """Whether values of type `cls` are there to be called: a graph that can be called holds data.

    On the class alone: every class answers to "__call__" through its metaclass.
    """
    if issubclass(cls, type | torch.nn.Module):
        return True
    names = {name for base in cls.__mro__ for name in vars(base)}
    return "__call__" in names and names.isdisjoint(_OF_DATA)


# Typed anew: mypy takes the argument of a cached function for any hashable, which type[Any] is not.
kind_of: Callable[[type], Kind] = _cached_kind
batch_type_of: Callable[[type], BatchType | None] = _cached_batch_type
