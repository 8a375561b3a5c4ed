"""Rows taken out of the leaves of a batch, and outputs joined again.

Where rows are chosen, `selections` are those of each piece: a ``range`` for neighbours, else a list
of indices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    unpack_sequence,
)

from automicro.batch.structure import (
    STRUCTURES,
    BatchType,
    Kind,
    batch_type_of,
    builder,
    elements_like,
    join_path,
    kind_of,
    open_container,
)
from automicro.errors import BatchError
from automicro.memory.oom import ignoring_errors
from automicro.torch_private import is_wrapper
from automicro.values import same_values

Selections = Sequence[Sequence[int]]
# Offsets of the pieces, by the identity of the offsets of the whole.
OffsetsCache = dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]]


def packed_num_rows(value: PackedSequence) -> int:
    """The number of sequences in a PackedSequence."""
    return int(value.batch_sizes[0])


def cut_packed(value: PackedSequence, selections: Selections) -> list[PackedSequence]:
    """Pieces of a PackedSequence. Rows count in the caller's order, not the sorted one."""
    padded, lengths = pad_packed_sequence(value, batch_first=True)
    pieces = []
    for selection in selections:
        rows = torch.as_tensor(list(selection))
        piece_lengths = lengths[rows]
        if isinstance(selection, range):
            piece = padded[selection.start : selection.stop]
        else:
            piece = padded.index_select(0, rows.to(padded.device))
        # Sequences that were packed as sorted carry no indices, and stay so where they can.
        in_order = value.sorted_indices is None and bool(torch.all(piece_lengths.diff() <= 0))
        pieces.append(
            pack_padded_sequence(piece, piece_lengths, batch_first=True, enforce_sorted=in_order)
        )
    return pieces


def concat_packed(values: Sequence[PackedSequence]) -> PackedSequence:
    """The rows of all of `values` as one PackedSequence."""
    rows = [row for value in values for row in unpack_sequence(value)]
    lengths = [len(row) for row in rows]
    unsorted = any(value.sorted_indices is not None for value in values)
    in_order = not unsorted and lengths == sorted(lengths, reverse=True)
    return pack_sequence(rows, enforce_sorted=in_order)


def cut_nested(
    value: torch.Tensor, selections: Selections, cache: OffsetsCache
) -> list[torch.Tensor]:
    """Pieces of a nested tensor, of the same layout."""
    if value.layout is torch.jagged:
        return _cut_jagged(value, selections, cache)
    rows = value.unbind()
    return [torch.nested.as_nested_tensor([rows[i] for i in chosen]) for chosen in selections]


def concat_nested(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all of `values` as one nested tensor of the same layout."""
    rows = [row for value in values for row in value.unbind()]
    return torch.nested.as_nested_tensor(rows, layout=values[0].layout)


def _cut_jagged(value: Any, selections: Selections, cache: OffsetsCache) -> list[torch.Tensor]:
    # The one dimension that has no number: its size is a symbol, bound to the offsets tensor.
    ragged_dim = next(i for i, size in enumerate(value.shape) if not isinstance(size, int))
    values, offsets, lengths = value.values(), value.offsets(), value.lengths()
    starts: list[int] = offsets.tolist()
    row_lengths: list[int] = (offsets.diff() if lengths is None else lengths).tolist()
    # Tensors that share offsets in the batch must share them in a microbatch, or torch takes
    # their ragged dimensions for different ones and refuses to add them.
    pieces_offsets = cache.get(id(offsets))
    if pieces_offsets is None:
        pieces_offsets = [
            _piece_offsets(chosen, offsets, lengths, starts, row_lengths) for chosen in selections
        ]
        cache[id(offsets)] = pieces_offsets
    pieces = []
    for chosen, (new_offsets, new_lengths) in zip(selections, pieces_offsets, strict=True):
        if isinstance(chosen, range):
            start, stop = starts[chosen.start], starts[chosen.stop]
            rows = values.narrow(ragged_dim - 1, start, stop - start)
        else:
            parts = [values.narrow(ragged_dim - 1, starts[i], row_lengths[i]) for i in chosen]
            rows = torch.cat(parts, dim=ragged_dim - 1)
        pieces.append(
            torch.nested.nested_tensor_from_jagged(
                rows, new_offsets, lengths=new_lengths, jagged_dim=ragged_dim
            )
        )
    return pieces


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


def cut_sparse(value: torch.Tensor, selections: Selections, dim: int) -> list[torch.Tensor]:
    """Pieces of a sparse COO, CSR or CSC tensor, of the same layout."""
    whole = value.to_sparse(layout=torch.sparse_coo)
    return [
        whole.index_select(dim, torch.as_tensor(list(chosen), device=value.device)).to_sparse(
            layout=value.layout
        )
        for chosen in selections
    ]


def concat_sparse(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all of `values` as one sparse tensor of the same layout."""
    joined = torch.cat([value.to_sparse(layout=torch.sparse_coo) for value in values])
    return joined.to_sparse(layout=values[0].layout)


_DEEPEST = 8  # mapping within a mapping that a tensor carries


class Cutter(Protocol):
    """Gives the pieces of each kind of leaf, `count` of them."""

    @property
    def count(self) -> int:
        """The number of pieces."""
        ...

    def tensor(self, value: torch.Tensor, dim: int) -> Sequence[Any]:
        """Pieces of a tensor along `dim`."""
        ...

    def array(self, value: np.ndarray[Any, Any], dim: int) -> Sequence[Any]:
        """Pieces of a numpy array along `dim`."""
        ...

    def elements(self, value: Any) -> Sequence[Any]:
        """Pieces of a list or tuple with one element per row."""
        ...

    def packed(self, value: PackedSequence) -> Sequence[Any]:
        """Pieces of a PackedSequence."""
        ...

    def registered(self, value: Any, batch_type: BatchType, path: str) -> Sequence[Any]:
        """Pieces of a value of a registered type."""
        ...


class ConsecutivePieces:
    """Cuts rows into pieces of the given sizes. Tensors and arrays are views, not copies."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.count = len(self.sizes)
        stops = list(accumulate(self.sizes))
        self._ranges = [
            range(stop - size, stop) for size, stop in zip(self.sizes, stops, strict=True)
        ]
        self._offsets: OffsetsCache = {}

    def tensor(self, value: torch.Tensor, dim: int) -> Sequence[Any]:
        """Pieces of a tensor along `dim`."""
        if value.is_nested:
            return cut_nested(value, self._ranges, self._offsets)
        if value.layout is not torch.strided:
            return cut_sparse(value, self._ranges, dim)
        pieces: Sequence[Any] = value.split_with_sizes(self.sizes, dim)
        return (
            pieces
            if type(value) is torch.Tensor
            else _cut_subclass(value, pieces, dim, self._ranges)
        )

    def array(self, value: np.ndarray[Any, Any], dim: int) -> Sequence[Any]:
        """Pieces of a numpy array along `dim`."""
        before: tuple[Any, ...] = (slice(None),) * (dim % value.ndim)
        return [value[(*before, slice(piece.start, piece.stop))] for piece in self._ranges]

    def elements(self, value: Any) -> Sequence[Any]:
        """Pieces of a list or tuple with one element per row."""
        return [elements_like(value, value[piece.start : piece.stop]) for piece in self._ranges]

    def packed(self, value: PackedSequence) -> Sequence[Any]:
        """Pieces of a PackedSequence."""
        return cut_packed(value, self._ranges)

    def registered(self, value: Any, batch_type: BatchType, path: str) -> Sequence[Any]:
        """Pieces of a value of a registered type."""
        return [_take(value, batch_type, piece.start, piece.stop, path) for piece in self._ranges]


class ChosenRows:
    """Takes the rows of the given indices, in their order, as one piece. Copies."""

    count = 1

    def __init__(self, indices: Sequence[int]) -> None:
        self.indices = list(indices)
        self._selections: Selections = [self.indices]
        self._offsets: OffsetsCache = {}

    def tensor(self, value: torch.Tensor, dim: int) -> Sequence[Any]:
        """Pieces of a tensor along `dim`."""
        if value.is_nested:
            return cut_nested(value, self._selections, self._offsets)
        if value.layout is not torch.strided:
            return cut_sparse(value, self._selections, dim)
        chosen = _select(value, dim, torch.as_tensor(self.indices, device=value.device))
        if type(value) is torch.Tensor:
            return [chosen]
        return _cut_subclass(value, [chosen], dim, self._selections)

    def array(self, value: np.ndarray[Any, Any], dim: int) -> Sequence[Any]:
        """Pieces of a numpy array along `dim`."""
        return [value.take(self.indices, axis=dim)]

    def elements(self, value: Any) -> Sequence[Any]:
        """Pieces of a list or tuple with one element per row."""
        chosen = [value[index] for index in self.indices]
        return [elements_like(value, chosen)]

    def packed(self, value: PackedSequence) -> Sequence[Any]:
        """Pieces of a PackedSequence."""
        return cut_packed(value, self._selections)

    def registered(self, value: Any, batch_type: BatchType, path: str) -> Sequence[Any]:
        """Pieces of a value of a registered type."""
        first = self.indices[0]
        if self.indices == list(range(first, first + len(self.indices))):
            return [_take(value, batch_type, first, first + len(self.indices), path)]
        if batch_type.concat is None:
            name = type(value).__name__
            raise BatchError(
                f"Rows {self.indices} of '{path}' ({name}) are not neighbours and {name} has no "
                f"way to join rows. Give register_batch_type({name}, ..., concat=...)."
            )
        rows = [_take(value, batch_type, i, i + 1, path) for i in self.indices]
        return [batch_type.concat(rows)]


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
        return like_subclass(pieces, value)
    own = [_own_piece(value, chosen, dim, held) for chosen in selections]
    found = [piece for piece in own if piece is not None]
    if len(found) < len(own):
        raise BatchError(
            f"A {kind.__name__} in the batch has {rows} rows, and so has its attribute "
            f"{next(iter(held))!r}, which a slice of the tensor does not cut. Use "
            f"register_batch_type({kind.__name__}, num_rows=len, take=lambda value, start, stop: "
            "…), or put the attribute into the batch beside it."
        )
    return like_subclass(found, value)


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


def like_subclass(pieces: Sequence[torch.Tensor], value: torch.Tensor) -> list[torch.Tensor]:
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


def _take(value: Any, batch_type: BatchType, start: int, stop: int, path: str) -> Any:
    piece = batch_type.take(value, start, stop)
    rows = batch_type.num_rows(piece)
    if rows != stop - start:
        name = type(value).__name__
        raise BatchError(
            f"take({name}, {start}, {stop}) of '{path}' gave {rows} rows instead of "
            f"{stop - start}. Correct the functions given to register_batch_type({name}, ...)."
        )
    return piece


NOWHERE_ELSE: Mapping[str, int] = MappingProxyType({})


def concat_rows(
    parts: Sequence[Any],
    row_dims: Mapping[str, int] = NOWHERE_ELSE,
    *,
    order: Sequence[int] | None = None,
) -> Any:
    """Join what a model gave for each microbatch into what it gives for the whole batch.

    Tensors and arrays are joined along dimension 0, mappings, tuples and dataclasses part by part,
    lists end to end; None and equal texts stay. A number or a 0-d tensor (a mean, say) cannot be
    joined without knowing what it is, so it is an error.

    Args:
        parts: of each microbatch, in order.
        row_dims: where tensors have their rows, by path, if it is not dimension 0.
        order: of each row of the result, its place among the rows of all parts; None where they
            are in order.

    Raises:
        BatchError: the outputs differ in structure, or hold something that has no rows.

    >>> concat_rows([{"logits": torch.zeros(2, 3)}, {"logits": torch.ones(1, 3)}])["logits"].shape
    torch.Size([3, 3])
    """
    if not parts:
        raise BatchError("There are no outputs to join. Give those of at least one microbatch.")
    return _concat(list(parts), "", row_dims, order)


def _concat(
    parts: list[Any], path: str, row_dims: Mapping[str, int], order: Sequence[int] | None
) -> Any:
    first = parts[0]
    types = {type(part) for part in parts}
    if len(types) > 1:
        names = ", ".join(sorted(cls.__name__ for cls in types))
        raise BatchError(
            f"{_named(path)} has different types in different microbatches ({names}). Return the "
            "same structure for every microbatch."
        )
    kind = kind_of(type(first))
    if kind is Kind.TENSOR or kind is Kind.ARRAY:
        dim = row_dims.get(path, 0)
        return _in_order(_concat_arrays(parts, path, dim), order, path, dim)
    if kind is Kind.PACKED:
        return _in_order(concat_packed(parts), order, path)
    if kind is Kind.REGISTERED:
        batch_type = batch_type_of(type(first))
        assert batch_type is not None
        if batch_type.concat is not None:
            return _in_order(batch_type.concat(parts), order, path)
    if isinstance(first, list):
        rows = [row for part in parts for row in part]
        return builder(first, ())(_in_order(rows, order, path))
    if kind in STRUCTURES or kind is Kind.SEQUENCE:
        return _concat_structures(parts, path, row_dims, order)
    if first is None:
        return None
    numeric = isinstance(first, int | float | complex | np.generic)
    if kind is Kind.SHARED and not numeric and all(part == first for part in parts):
        return first
    raise BatchError(
        f"{_named(path)} is of type {type(first).__name__}, which has no rows to join. Return only "
        "values with one entry per row, or register_batch_type(..., concat=...) for a type of "
        "your own."
    )


def _concat_arrays(parts: list[Any], path: str, dim: int) -> Any:
    if any(part.ndim == 0 for part in parts):
        raise BatchError(
            f"{_named(path)} is a 0-d {type(parts[0]).__name__} for each microbatch, which cannot "
            "be joined: a mean and a sum would join differently. Return one value per row, or "
            "leave it out of the outputs."
        )
    try:
        if isinstance(parts[0], np.ma.MaskedArray):
            return np.ma.concatenate(parts)  # type: ignore[no-untyped-call]
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        if parts[0].layout not in (torch.strided, torch.jagged):
            return concat_sparse(parts)
        return concat_nested(parts) if parts[0].is_nested else torch.cat(parts, dim)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError) or parts[0].ndim < 2:
            raise
        shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
        raise BatchError(
            f"{_named(path)} has shapes that do not join along dimension {dim}: {shapes}. Pad the "
            "outputs to one size, or return a list with one entry per row."
        ) from error


def _in_order(joined: Any, order: Sequence[int] | None, path: str, dim: int = 0) -> Any:
    """The rows of all parts in the order of the batch.

    Raises:
        BatchError: it has not one entry for each row.
    """
    if order is None:
        return joined
    kind = kind_of(type(joined))
    num_rows = -1
    if kind is Kind.TENSOR:
        num_rows = joined.size(dim)
    elif kind is Kind.PACKED:
        num_rows = packed_num_rows(joined)
    elif kind is Kind.ARRAY or isinstance(joined, list):
        num_rows = len(joined)
    if num_rows != len(order):
        raise BatchError(
            f"{_named(path)} has not one entry for each of the {len(order)} rows, which were "
            "sorted by cost and cannot be put back into their order. Leave it out of the outputs, "
            "or count rows: microbatch_unit='rows'."
        )
    rows = ChosenRows(order)
    if kind is Kind.TENSOR:
        return rows.tensor(joined, dim)[0]
    if kind is Kind.PACKED:
        return rows.packed(joined)[0]
    return rows.array(joined, 0)[0] if kind is Kind.ARRAY else [joined[index] for index in order]


def _concat_structures(
    parts: list[Any], path: str, row_dims: Mapping[str, int], order: Sequence[int] | None
) -> Any:
    opened = [open_container(part) for part in parts]
    keys = list(opened[0][0])
    for other, _ in opened:
        if set(other) != set(keys):
            raise BatchError(
                f"{_named(path)} has different parts in different microbatches: {keys} and "
                f"{list(other)}. Return the same structure for every microbatch."
            )
    by_key = [dict(zip(names, values, strict=True)) for names, values in opened]
    joined = [
        _concat([part[key] for part in by_key], join_path(path, key), row_dims, order)
        for key in keys
    ]
    return builder(parts[0], keys)(joined)


def _named(path: str) -> str:
    return f"The output {path!r}" if path else "The output"
