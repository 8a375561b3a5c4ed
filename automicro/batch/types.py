"""What batches are made of: kinds of values, and those with rows, which are cut and joined.

A class whose values have rows is a `RowType`: tensors, arrays and packed sequences as well as what
`register_batch_type` teaches.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

from automicro.errors import BatchError
from automicro.memory.oom import ignoring_errors
from automicro.torch_private import is_wrapper
from automicro.values import same_values

Selections = Sequence[Sequence[int]]
TensorFunction = Callable[[torch.Tensor], torch.Tensor]


class Pieces:
    """Which rows each piece of a batch has: a ``range`` of neighbours, or a list of indices.

    Args:
        selections: the rows of each piece.

    Attributes:
        sizes: of pieces that have all rows in order, one behind the other; else None.
        offsets: of jagged pieces, by the identity of the offsets of the whole.
    """

    def __init__(self, selections: Selections, *, sizes: Sequence[int] | None = None) -> None:
        self.selections = selections
        self.sizes = None if sizes is None else list(sizes)
        self.offsets: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> "Pieces":
        """All rows, cut into pieces of these sizes."""
        stops = accumulate(sizes)
        ranges = [range(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]
        return cls(ranges, sizes=sizes)

    def __len__(self) -> int:
        return len(self.selections)

    def of(self, elements: Sequence[Any]) -> list[Sequence[Any]]:
        """Those of a list or tuple with one element for each row."""
        return [
            elements[each.start : each.stop]
            if isinstance(each, range)
            else [elements[row] for row in each]
            for each in self.selections
        ]


class RowType:
    """How values of a class are counted, cut, joined and mapped."""

    def count(self, value: Any, dim: int, path: str) -> int | None:
        """Its rows; None where all rows share it.

        Args:
            value: of the class.
            dim: of tensors and arrays, that holds the rows.
            path: of the value, for messages.

        Raises:
            BatchError: they cannot be counted.
        """
        raise NotImplementedError

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        """A value for each piece: views where rows are neighbours, as far as that can be."""
        raise NotImplementedError

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        """The rows of all values as one.

        Raises:
            RuntimeError, ValueError: their shapes do not join.
        """
        raise NotImplementedError

    can_concat = True

    def map(self, value: Any, fn: TensorFunction) -> Any | None:
        """A copy with all of its tensors mapped; None: it is its attributes, which are opened."""
        raise NotImplementedError

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]] | None:
        """Its tensors by path; None as for `map`."""
        raise NotImplementedError


class _Tensors(RowType):
    """Dense, nested and sparse tensors, and subclasses of them."""

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
        if value.is_nested:
            return _cut_nested(value, pieces)
        if value.layout is not torch.strided:
            return _cut_sparse(value, pieces.selections, dim)
        found: Sequence[Any]
        if pieces.sizes is not None:
            found = value.split_with_sizes(pieces.sizes, dim)
        else:
            chosen = (torch.as_tensor(list(s), device=value.device) for s in pieces.selections)
            found = [_select(value, dim, rows) for rows in chosen]
        if type(value) is torch.Tensor:
            return found
        return _cut_subclass(value, found, dim, pieces.selections)

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        layout = values[0].layout
        if values[0].is_nested:
            rows = [row for value in values for row in value.unbind()]
            return torch.nested.as_nested_tensor(rows, layout=layout)
        if layout is torch.strided:
            return torch.cat(list(values), dim)
        joined = torch.cat([each.to_sparse(layout=torch.sparse_coo) for each in values])
        return joined.to_sparse(layout=layout)

    def map(self, value: Any, fn: TensorFunction) -> Any:
        new = fn(value)
        return new if new is value else _like_subclass([new], value)[0]

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
        return [("", value)]


class _Arrays(RowType):
    """Arrays of numpy."""

    def count(self, value: Any, dim: int, path: str) -> int | None:
        return _rows_along(value.shape, dim, path) if value.ndim else None

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        if pieces.sizes is None:
            return [value.take(list(each), axis=dim) for each in pieces.selections]
        before = (slice(None),) * (dim % value.ndim)
        return [value[(*before, slice(each[0], each[-1] + 1))] for each in pieces.selections]

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        if isinstance(values[0], np.ma.MaskedArray):
            return np.ma.concatenate(values)  # type: ignore[no-untyped-call]
        return np.concatenate(values)

    def map(self, value: Any, fn: TensorFunction) -> Any:
        return value

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
        return ()


class _Packed(RowType):
    """Packed sequences. Rows count in the caller's order, not the sorted one."""

    def count(self, value: Any, dim: int, path: str) -> int:
        return int(value.batch_sizes[0])

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        found = []
        for selection in pieces.selections:
            rows = torch.as_tensor(list(selection))
            if isinstance(selection, range):
                piece = padded[selection.start : selection.stop]
            else:
                piece = padded.index_select(0, rows.to(padded.device))
            own = lengths[rows]
            # Sequences that were packed as sorted carry no indices, and stay so where they can.
            in_order = value.sorted_indices is None and bool(torch.all(own.diff() <= 0))
            packed = pack_padded_sequence(piece, own, batch_first=True, enforce_sorted=in_order)
            found.append(packed)
        return found

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        rows = [row for value in values for row in unpack_sequence(value)]
        lengths = [len(row) for row in rows]
        unsorted = any(value.sorted_indices is not None for value in values)
        in_order = not unsorted and lengths == sorted(lengths, reverse=True)
        return pack_sequence(rows, enforce_sorted=in_order)

    def map(self, value: Any, fn: TensorFunction) -> Any:
        data = fn(value.data)
        # Indices are no data: they follow to its device, and keep their dtype and their values.
        waits = data.device.type == "cpu"
        order, inverse = (
            None if each is None else each.to(data.device, non_blocking=not waits)
            for each in (value.sorted_indices, value.unsorted_indices)
        )
        return PackedSequence(data, value.batch_sizes, order, inverse)

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
        return [("data", value.data)]


class _Registered(RowType):
    """Values of a class that `register_batch_type` was told of."""

    def __init__(
        self,
        num_rows: Callable[[Any], int],
        take: Callable[[Any, int, int], Any],
        concat: Callable[[Sequence[Any]], Any] | None,
        map_tensors: Callable[[Any, TensorFunction], Any] | None,
    ) -> None:
        self._num_rows, self._take = num_rows, take
        self._concat, self._map = concat, map_tensors
        self.can_concat = concat is not None

    def count(self, value: Any, dim: int, path: str) -> int | None:
        return self._num_rows(value)

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        return [self._chosen(value, each, path) for each in pieces.selections]

    def _chosen(self, value: Any, rows: Sequence[int], path: str) -> Any:
        start, name = rows[0], type(value).__name__
        if list(rows) != list(range(start, start + len(rows))):
            if self._concat is None:
                raise BatchError(
                    f"Rows {list(rows)} of '{path}' ({name}) are not neighbours and {name} has no "
                    f"way to join rows. Give register_batch_type({name}, ..., concat=...)."
                )
            return self._concat([self._chosen(value, [row], path) for row in rows])
        stop = start + len(rows)
        piece = self._take(value, start, stop)
        found = self._num_rows(piece)
        if found != stop - start:
            raise BatchError(
                f"take({name}, {start}, {stop}) of '{path}' gave {found} rows instead of "
                f"{stop - start}. Correct the functions given to register_batch_type({name}, ...)."
            )
        return piece

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        assert self._concat is not None
        return self._concat(values)

    def map(self, value: Any, fn: TensorFunction) -> Any | None:
        if self._map is not None:
            return self._map(value, fn)
        return fn(value) if isinstance(value, torch.Tensor) else None

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]] | None:
        return [("", value)] if isinstance(value, torch.Tensor) else None


class _TensorDicts(_Registered):
    """Those of tensordict, which are known without an import of the library."""

    def __init__(self) -> None:
        super().__init__(
            num_rows=lambda value: int(value.batch_size[0]),
            take=lambda value, start, stop: value[start:stop],
            concat=lambda values: torch.cat(list(values), 0),
            map_tensors=_map_tensordict,
        )

    def count(self, value: Any, dim: int, path: str) -> int:
        name = type(value).__name__
        if dim:
            own = f", or declare batch_layout={{'': {dim}, {path!r}: 0}}" if path else ""
            raise BatchError(
                f"{subject(path)} is a {name}, whose rows are dimension 0 of its batch_size, and "
                f"batch_layout says dimension {dim}. Transpose it{own}."
            )
        if not value.batch_size:
            raise BatchError(
                f"A {name} has no batch_size, so it is one row, or nothing tells how many it has. "
                "Make it with batch_size=[rows]."
            )
        return int(value.batch_size[0])

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
        stacked = getattr(value, "tensordicts", None)
        if stacked is not None:  # a lazy stack makes new tensors whenever it is asked for some
            for row, part in enumerate(stacked):
                yield from ((f"{row}.{path}", leaf) for path, leaf in self.leaves(part))
            return
        for key, leaf in value.items(include_nested=True, leaves_only=True):
            if isinstance(leaf, torch.Tensor):
                yield key if isinstance(key, str) else ".".join(key), leaf


def _map_tensordict(value: Any, fn: TensorFunction) -> Any:
    # A device of its own would move every new tensor back to it.
    new = value.apply(fn, device=None)
    return new if value.device is None else new.auto_device_()


_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
_TENSORDICTS = _TensorDicts()
# PackedSequence is a tuple, too: what has rows is asked for first.
TENSORS = _Tensors()
_BUILT_IN: Mapping[type, RowType] = {
    torch.Tensor: TENSORS,
    np.ndarray: _Arrays(),
    PackedSequence: _Packed(),
}
_registered: dict[type, RowType] = {}


class Kind(enum.Enum):
    """What can be done with a value: cut its rows, open it, or hand it on whole."""

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
"""Methods of what holds data, even if it can be called."""
_FIXED = frozenset(
    {object, *_BUILT_IN, Mapping, dict, list, tuple, str, bytes}
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
    if cls in _FIXED:
        raise ValueError(
            f"{cls.__name__} already has a meaning in a batch. Register a subclass of it, or "
            "declare single parts with batch_layout."
        )
    given = {"num_rows": num_rows, "take": take, "concat": concat, "map_tensors": map_tensors}
    for name, function in given.items():
        is_left_out = function is None and name in ("concat", "map_tensors")
        if not (is_left_out or callable(function)):
            raise TypeError(
                f"register_batch_type({cls.__name__}, {name}=...) needs a function, got "
                f"{function!r}. Pass a callable."
            )
    _registered[cls] = _Registered(num_rows, take, concat, map_tensors)
    _cached_kind.cache_clear()
    _cached_row_type.cache_clear()


@functools.lru_cache(maxsize=1024)
def _cached_row_type(cls: type) -> RowType | None:
    """Its own registration, its nearest base's, a known library's, or that of a built-in class."""
    own = next((_registered[base] for base in cls.__mro__ if base in _registered), None)
    if own is not None:
        return own
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in cls.__mro__}
    if "tensordict.TensorCollection" in names or hasattr(cls, "_is_tensorclass"):
        return _TENSORDICTS
    return next((_BUILT_IN[base] for base in cls.__mro__ if base in _BUILT_IN), None)


@functools.lru_cache(maxsize=1024)
def _cached_kind(cls: type) -> Kind:
    """The kind of all values of type `cls`."""
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
    """Whether values of type `cls` are there to be called: a graph that can be called holds data.

    On the class alone: every class answers to "__call__" through its metaclass.
    """
    if issubclass(cls, type | torch.nn.Module):
        return True
    names = {name for base in cls.__mro__ for name in vars(base)}
    return "__call__" in names and names.isdisjoint(_OF_DATA)


# Typed anew: mypy takes the argument of a cached function for any hashable, which type[Any] is not.
kind_of: Callable[[type], Kind] = _cached_kind
row_type_of: Callable[[type], RowType | None] = _cached_row_type


def _cut_nested(value: torch.Tensor, pieces: Pieces) -> list[torch.Tensor]:
    if value.layout is torch.jagged:
        return _cut_jagged(value, pieces)
    rows = value.unbind()
    return [torch.nested.as_nested_tensor([rows[i] for i in each]) for each in pieces.selections]


def _cut_jagged(value: Any, pieces: Pieces) -> list[torch.Tensor]:
    # The one dimension that has no number: its size is a symbol, bound to the offsets tensor.
    ragged_dim = next(i for i, size in enumerate(value.shape) if not isinstance(size, int))
    values, offsets, lengths = value.values(), value.offsets(), value.lengths()
    starts: list[int] = offsets.tolist()
    row_lengths: list[int] = (offsets.diff() if lengths is None else lengths).tolist()
    # Tensors that share offsets in the batch must share them in a microbatch, or torch takes
    # their ragged dimensions for different ones and refuses to add them.
    new = pieces.offsets.get(id(offsets))
    if new is None:
        new = [
            _piece_offsets(chosen, offsets, lengths, starts, row_lengths)
            for chosen in pieces.selections
        ]
        pieces.offsets[id(offsets)] = new
    found = []
    for chosen, (new_offsets, new_lengths) in zip(pieces.selections, new, strict=True):
        if isinstance(chosen, range):
            start, stop = starts[chosen.start], starts[chosen.stop]
            rows = values.narrow(ragged_dim - 1, start, stop - start)
        else:
            parts = [values.narrow(ragged_dim - 1, starts[i], row_lengths[i]) for i in chosen]
            rows = torch.cat(parts, dim=ragged_dim - 1)
        found.append(
            torch.nested.nested_tensor_from_jagged(
                rows, new_offsets, lengths=new_lengths, jagged_dim=ragged_dim
            )
        )
    return found


def _piece_offsets(
    chosen: Sequence[int],
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    starts: list[int],
    row_lengths: list[int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(chosen, range):
        start, stop = chosen.start, chosen.stop
        new_lengths = None if lengths is None else lengths[start:stop]
        return offsets[start : stop + 1] - starts[start], new_lengths
    ends = [0]
    for i in chosen:
        ends.append(ends[-1] + row_lengths[i])
    return torch.tensor(ends, dtype=offsets.dtype, device=offsets.device), None


def _cut_sparse(value: torch.Tensor, selections: Selections, dim: int) -> list[torch.Tensor]:
    whole = value.to_sparse(layout=torch.sparse_coo)
    chosen = (torch.as_tensor(list(each), device=value.device) for each in selections)
    return [whole.index_select(dim, rows).to_sparse(layout=value.layout) for rows in chosen]


_DEEPEST = 8  # mapping within a mapping that a tensor carries


def _select(value: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor, laid out in memory as a slice of it would be: in channels_last, say.

    >>> images = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    >>> _select(images, 0, torch.tensor([0, 2])).is_contiguous(memory_format=torch.channels_last)
    True
    """
    if value.is_contiguous():
        return value.index_select(dim, rows)
    # The dimension with the longest steps first; where it repeats itself, steps are of no length.
    steps = value.stride()
    order = sorted(range(value.dim()), key=lambda each: -steps[each] or -math.inf)
    chosen = value.permute(order).index_select(order.index(dim % value.dim()), rows)
    return chosen.permute([order.index(each) for each in range(value.dim())])


def _cut_subclass(
    value: torch.Tensor, pieces: Sequence[torch.Tensor], dim: int, selections: Selections
) -> list[torch.Tensor]:
    """Pieces of a tensor of a class of its own, as its own indexing gives them if that has to be.

    Raises:
        BatchError: an attribute holds rows, too, and its own indexing does not cut them.
    """
    rows, kind = value.shape[dim], type(value)
    held = dict(_attributes_with_rows(getattr(value, "__dict__", {}), rows))
    if not held or issubclass(kind, torch.nn.Parameter) or is_wrapper(kind):
        return _like_subclass(pieces, value)
    own = [_own_piece(value, chosen, dim, held) for chosen in selections]
    found = [piece for piece in own if piece is not None]
    if len(found) < len(own):
        raise BatchError(
            f"A {kind.__name__} in the batch has {rows} rows, and so has its attribute "
            f"{next(iter(held))!r}, which a slice of the tensor does not cut. Use "
            f"register_batch_type({kind.__name__}, num_rows=len, take=lambda value, start, stop: "
            "…), or put the attribute into the batch beside it."
        )
    return _like_subclass(found, value)


def _own_piece(
    value: torch.Tensor, chosen: Sequence[int], dim: int, held: Mapping[str, Any]
) -> Any | None:
    """What its own indexing gives for some rows, if that cuts its attributes with rows as well."""
    before = (slice(None),) * (dim % value.dim())
    is_slice = isinstance(chosen, range)
    index = slice(chosen[0], chosen[-1] + 1) if is_slice else torch.as_tensor(list(chosen))
    with ignoring_errors():  # of a class that knows fewer ways to index
        piece = value[(*before, index)] if before else value[index]
        cut = dict(_attributes_with_rows(vars(piece), len(chosen)))
        wanted = {
            path: [each[row] for row in chosen] if isinstance(each, list) else each[list(chosen)]
            for path, each in held.items()
        }
        if all(same_values(cut.get(path), each) for path, each in wanted.items()):
            return piece
    return None


def _attributes_with_rows(table: Any, rows: int, path: str = "") -> Iterator[tuple[str, Any]]:
    """Attributes, and what lies in mappings among them, that have as many entries as rows."""
    for name, each in table.items():
        inner = join_path(path, name)
        if isinstance(each, Mapping) and inner.count(".") < _DEEPEST:
            yield from _attributes_with_rows(each, rows, inner)
        elif (getattr(each, "ndim", 0) or isinstance(each, list)) and len(each) == rows:
            yield inner, each


def _like_subclass(pieces: Sequence[torch.Tensor], value: torch.Tensor) -> list[torch.Tensor]:
    """`pieces` of `value`, of its class and with its attributes, where torch has dropped them."""
    cls = type(value)
    if issubclass(cls, torch.nn.Parameter) or is_wrapper(cls):
        return list(pieces)
    found = []
    for piece in pieces:
        new = piece if isinstance(piece, cls) else piece.as_subclass(cls)
        for name, attribute in getattr(value, "__dict__", {}).items():
            if name not in vars(new):
                setattr(new, name, attribute)
        found.append(new)
    return found


def _rows_along(shape: Sequence[int], dim: int, path: str) -> int:
    """The size of dimension `dim`, with an error that tells what to declare where it is absent."""
    if not -len(shape) <= dim < len(shape):
        raise BatchError(
            f"{subject(path)} of shape {tuple(shape)} has no dimension {dim}, where batch_layout "
            f"says its rows lie. Declare its own: batch_layout={{'': {dim}, {path!r}: 0}}."
        )
    return shape[dim]


def join_path(path: str, key: object) -> str:
    """The path of the part `key` of what lies at `path`.

    >>> join_path("", 1), join_path("1", "boxes")
    ('1', '1.boxes')
    """
    return f"{path}.{key}" if path else str(key)


def or_shared(path: str) -> str:
    """The end of a remedy for a part that need not be cut; the whole batch must be."""
    if not path:
        return ""
    return f", or declare batch_layout={{{path!r}: 'shared'}} to give it whole to every microbatch"


def subject(path: str) -> str:
    """A path at the start of a sentence."""
    return repr(path) if path else "The batch"


def where(path: str) -> str:
    """A path as messages show it.

    >>> where(""), where("1.boxes")
    ('the batch', "'1.boxes'")
    """
    return repr(path) if path else "the batch"


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its dictionary and in slots.

    >>> state_of(types.SimpleNamespace(a=1))
    {'a': 1}
    """
    state = dict(getattr(value, "__dict__", ()))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                state[name] = getattr(value, name)
    return state
