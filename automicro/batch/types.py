"""Kinds of values in batches, and the classes whose rows are cut and joined.

A class whose values have rows has a `RowType`: tensors, arrays, packed sequences, and classes given
to `register_batch_type` (`ragged.py`).
"""

import argparse
import dataclasses
import datetime
import enum
import functools
import math
import numbers
import pathlib
import types
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from automicro.errors import BatchError

Selections = Sequence[Sequence[int]]
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class Pieces:
    """The rows of each piece of a batch: a ``range`` of neighbors, or a list of indices."""

    def __init__(self, selections: Selections, *, sizes: Sequence[int] | None = None) -> None:
        self.selections = selections
        # Of pieces that have all rows in order; else None.
        self.sizes = None if sizes is None else list(sizes)
        # Of jagged pieces, by the id of the offsets of the whole.
        self.offsets: dict[int, list[torch.Tensor]] = {}

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> "Pieces":
        """Cut all rows into pieces of these sizes."""
        stops = accumulate(sizes)
        ranges = [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        return cls(ranges, sizes=sizes)

    def __len__(self) -> int:
        return len(self.selections)

    def of(self, elements: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the pieces of a list or tuple with one element per row."""
        return [
            elements[each.start : each.stop]
            if isinstance(each, range)
            else [elements[row] for row in each]
            for each in self.selections
        ]


class RowType:
    """The way to count, cut, join and map the values of a class."""

    def count(self, value: Any, dim: int, path: str) -> int | None:
        """Return the number of rows; None if all rows share the value."""
        raise NotImplementedError

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        """Return a value for each piece: a view where possible, if its rows are neighbors."""
        raise NotImplementedError

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        """Join the rows of all values."""
        raise NotImplementedError

    can_concat = True

    def map(self, value: Any, fn: TensorFunction) -> Any | None:
        """Return a copy with all tensors mapped; None: map its attributes instead."""
        raise NotImplementedError

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]] | None:
        """Return its tensors by path; None if its attributes are to be opened instead."""
        raise NotImplementedError


class _Tensors(RowType):
    """Dense, nested and sparse tensors, and subclasses of tensors."""

    def count(self, value: Any, dim: int, path: str) -> int | None:
        if value.is_nested:
            return int(value.size(0))
        if value.layout not in _LAYOUTS:
            raise BatchError(
                f"{subject(path)} is a tensor of layout {value.layout}, which cannot be cut into "
                "rows. Convert it to a dense, COO or CSR tensor, or wrap it in a class known to "
                f"register_batch_type{or_shared(path)}."
            )
        return _rows_along(value.shape, dim, path) if value.dim() else None

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        if type(value) is torch.Tensor and self.is_dense(value):
            return self.cut_dense(value, pieces, dim)
        return _beside("tensor").cut(value, pieces, dim, path)

    @staticmethod
    def is_dense(value: torch.Tensor) -> bool:
        """Whether rows are slices of one block of memory."""
        return value.layout is torch.strided and not value.is_nested

    @staticmethod
    def cut_dense(value: torch.Tensor, pieces: Pieces, dim: int) -> Sequence[torch.Tensor]:
        """Cut a tensor; pieces are views if their rows are neighbors."""
        # One call for all pieces, because hundreds of slices would take longer than a small
        # forward.
        if pieces.sizes is not None:
            return value.split_with_sizes(pieces.sizes, dim)
        chosen = (torch.as_tensor(list(s), device=value.device) for s in pieces.selections)
        return [_select(value, dim, rows) for rows in chosen]

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        if self.is_dense(values[0]):
            return torch.cat(list(values), dim)
        return _beside("tensor").concat(values, dim)

    def map(self, value: Any, fn: TensorFunction) -> Any:
        return fn(value) if type(value) is torch.Tensor else _beside("tensor").map(value, fn)

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
        return [("", value)]


class _Arrays(RowType):
    """NumPy arrays."""

    def count(self, value: Any, dim: int, path: str) -> int | None:
        return _rows_along(value.shape, dim, path) if value.ndim else None

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        if pieces.sizes is None:
            return [value.take(list(each), axis=dim) for each in pieces.selections]
        before = (slice(None),) * (dim % value.ndim)
        return [value[(*before, slice(each[0], each[-1] + 1))] for each in pieces.selections]

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        # np.concatenate loses the mask.
        if isinstance(values[0], np.ma.MaskedArray):
            return np.ma.concatenate(values)  # type: ignore[no-untyped-call]
        return np.concatenate(values)

    def map(self, value: Any, fn: TensorFunction) -> Any:
        return value

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
        return ()


_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
# PackedSequence is a tuple, too, so row types are looked up before containers.
TENSORS = _Tensors()
BUILT_IN: Mapping[type, RowType] = {
    torch.Tensor: TENSORS,
    np.ndarray: _Arrays(),
}
registered: dict[type, RowType] = {}
"""The row types of classes given to `register_batch_type`."""


class Kind(enum.Enum):
    """The treatment of a value: its rows are cut, it is opened, or it is passed on whole."""

    ROWS = "rows"
    MAPPING = "mapping"
    RECORD = "record"
    NAMED_TUPLE = "named tuple"
    SEQUENCE = "list or tuple"
    SHARED = "shared"
    UNKNOWN = "unknown"


STRUCTURES = frozenset({Kind.MAPPING, Kind.RECORD, Kind.NAMED_TUPLE})
"""Kinds whose parts always hold all rows, never one row each."""


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
"""Methods that mark a class as data, even if it is callable."""


def _beside(name: str) -> RowType:
    """Return a row type for values that are not dense tensors, loaded on first use."""
    from automicro.batch.ragged import ROW_TYPES

    return ROW_TYPES[name]


def forget_lookups() -> None:
    """Look up the kinds of all classes again, because subclasses may now be of another kind."""
    _cached_kind.cache_clear()
    _cached_row_type.cache_clear()


@functools.lru_cache(maxsize=1024)
def _cached_row_type(cls: type) -> RowType | None:
    """Return the row type registered for a class or its nearest base, or a known one."""
    own = next((registered[base] for base in cls.__mro__ if base in registered), None)
    if own is not None:
        return own
    # By name, because importing the library would take seconds.
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in cls.__mro__}
    is_tensordict = "tensordict.TensorCollection" in names or hasattr(cls, "_is_tensorclass")
    if is_tensordict or issubclass(cls, PackedSequence):
        return _beside("tensordict" if is_tensordict else "packed")
    return next((BUILT_IN[base] for base in cls.__mro__ if base in BUILT_IN), None)


@functools.lru_cache(maxsize=1024)
def _cached_kind(cls: type) -> Kind:
    """Return the kind of all values of type `cls`."""
    if _cached_row_type(cls) is not None:
        return Kind.ROWS
    # Order matters: torch.Size is a tuple, ModelOutput is also a dataclass.
    if issubclass(cls, _WHOLE_TEXTS):
        return Kind.SHARED
    if issubclass(cls, Mapping | types.MappingProxyType):
        return Kind.MAPPING
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
    """Whether values of type `cls` serve to be called; a callable graph holds data."""
    # Both are callable, and the attributes of a module are not part of a batch.
    if issubclass(cls, type | torch.nn.Module):
        return True
    # Search the bases: every class has "__call__" through its metaclass.
    names = {name for base in cls.__mro__ for name in vars(base)}
    return "__call__" in names and names.isdisjoint(_OF_DATA)


# Annotated again, because mypy expects a Hashable for a cached function, and type[Any] is not one.
kind_of: Callable[[type], Kind] = _cached_kind
row_type_of: Callable[[type], RowType | None] = _cached_row_type


def _select(value: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    """Select rows of a tensor in the memory format of a slice of it, such as channels_last.

    >>> images = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    >>> _select(images, 0, torch.tensor([0, 2])).is_contiguous(memory_format=torch.channels_last)
    True
    """
    # The common case needs no permutation.
    if value.is_contiguous():
        return value.index_select(dim, rows)
    # The dimension with the largest stride first; expanded dimensions have stride 0.
    steps = value.stride()
    order = sorted(range(value.dim()), key=lambda each: -steps[each] or -math.inf)
    # Select in the order of memory, so that a kernel reads rows contiguously.
    chosen = value.permute(order).index_select(order.index(dim % value.dim()), rows)
    return chosen.permute([order.index(each) for each in range(value.dim())])


def _rows_along(shape: Sequence[int], dim: int, path: str) -> int:
    """Return the size of dimension `dim`, or raise an error that names the declaration needed."""
    if not -len(shape) <= dim < len(shape):
        raise BatchError(
            f"{subject(path)} of shape {tuple(shape)} has no dimension {dim}, which batch_layout "
            f"names for its rows. Declare another: batch_layout={{'': {dim}, {path!r}: 0}}."
        )
    return shape[dim]


def join_path(path: str, key: object) -> str:
    """Return the path of the part `key` of the value at `path`.

    >>> join_path("", 1), join_path("1", "boxes")
    ('1', '1.boxes')
    """
    return f"{path}.{key}" if path else str(key)


def or_shared(path: str) -> str:
    """Complete a remedy for a part that may stay whole; the batch itself may not."""
    if not path:
        return ""
    return f", or declare batch_layout={{{path!r}: 'shared'}} to give it whole to every microbatch"


def subject(path: str) -> str:
    """Return a path for the start of a sentence."""
    return repr(path) if path else "The batch"


def where(path: str) -> str:
    """Return a path for the middle of a sentence.

    >>> where(""), where("1.boxes")
    ('the batch', "'1.boxes'")
    """
    return repr(path) if path else "the batch"
