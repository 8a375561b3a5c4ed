"""Rows of values other than dense tensors and arrays: ragged tensors, classes of a user."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from automicro.batch.types import (
    BUILT_IN,
    TENSORS,
    Pieces,
    RowType,
    TensorFunction,
    forget_lookups,
    join_path,
    registered,
    subject,
)
from automicro.errors import BatchError
from automicro.torch_private import is_wrapper


class Registered(RowType):
    """Values of a class given to `register_batch_type`."""

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
                    f"Rows {list(rows)} of '{path}' ({name}) are not neighbors, and {name} has no "
                    f"way to join rows. Pass register_batch_type({name}, ..., concat=...)."
                )
            return self._concat([self._chosen(value, [row], path) for row in rows])
        # Counted again, because with a wrong piece the weights would not match the rows.
        stop = start + len(rows)
        piece = self._take(value, start, stop)
        found = self._num_rows(piece)
        if found != stop - start:
            raise BatchError(
                f"take({name}, {start}, {stop}){f' of {path!r}' * bool(path)} returned {found} "
                f"rows instead of {stop - start}. Correct the functions given to "
                f"register_batch_type({name}, ...)."
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


_FIXED = frozenset(
    {object, *BUILT_IN, PackedSequence, Mapping, dict, list, tuple, str, bytes}
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
    """Define how values of a class of your own, and of its subclasses, are sliced.

    Args:
        cls: the class.
        num_rows: ``num_rows(value)`` counts rows.
        take: ``take(value, start, stop)`` returns these rows as a value of the same type.
        concat: ``concat(values)`` is the inverse of ``take``.
        map_tensors: ``map_tensors(value, fn)`` returns a copy with ``fn`` applied to each tensor;
            by default the tensors among the attributes are mapped.

    Raises:
        TypeError: `cls` is not a class.
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
    # Some code opens or cuts these without looking them up.
    if cls in _FIXED:
        raise ValueError(
            f"{cls.__name__} already has a meaning in a batch. Register a subclass of it, or "
            "declare single parts with batch_layout."
        )
    registered[cls] = Registered(num_rows, take, concat, map_tensors)
    forget_lookups()


class _Packed(RowType):
    """Packed sequences. Rows are in the caller's order, not in the sorted one."""

    def count(self, value: Any, dim: int, path: str) -> int:
        return int(value.batch_sizes[0])

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        rows = unpack_sequence(value)
        chosen = ([rows[row] for row in selection] for selection in pieces.selections)
        return [_packed(each, is_sorted=value.sorted_indices is None) for each in chosen]

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        # By rows, because each part was sorted separately.
        rows = [row for value in values for row in unpack_sequence(value)]
        return _packed(rows, is_sorted=all(value.sorted_indices is None for value in values))

    def map(self, value: Any, fn: TensorFunction) -> Any:
        data = fn(value.data)
        # Indices are not data: they move to its device, but keep their dtype and values.
        waits = data.device.type == "cpu"
        order, inverse = (
            None if each is None else each.to(data.device, non_blocking=not waits)
            for each in (value.sorted_indices, value.unsorted_indices)
        )
        return PackedSequence(data, value.batch_sizes, order, inverse)

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
        return [("data", value.data)]


def _packed(rows: list[torch.Tensor], *, is_sorted: bool) -> PackedSequence:
    # Sequences that were packed as sorted have no indices; keep that form if possible.
    in_order = is_sorted and all(len(one) >= len(two) for one, two in itertools.pairwise(rows))
    return pack_sequence(rows, enforce_sorted=in_order)


class _TensorDicts(Registered):
    """Tensordicts, recognized without importing their library."""

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
                f"{subject(path)} is a {name}, whose rows are dimension 0 of its batch_size, but "
                f"batch_layout says dimension {dim}. Transpose it{own}."
            )
        if not value.batch_size:
            raise BatchError(
                f"A {name} has no batch_size, so its number of rows is unknown. Create it with "
                "batch_size=[rows]."
            )
        return int(value.batch_size[0])

    def leaves(self, value: Any) -> Iterable[tuple[str, torch.Tensor]]:
        stacked = getattr(value, "tensordicts", None)
        if stacked is not None:  # a lazy stack makes new tensors on every access
            for row, part in enumerate(stacked):
                yield from ((f"{row}.{path}", leaf) for path, leaf in self.leaves(part))
            return
        for key, leaf in value.items(include_nested=True, leaves_only=True):
            if isinstance(leaf, torch.Tensor):
                yield key if isinstance(key, str) else ".".join(key), leaf


def _map_tensordict(value: Any, fn: TensorFunction) -> Any:
    # A tensordict with a device would move every new tensor back to it.
    new = value.apply(fn, device=None)
    return new if value.device is None else new.auto_device_()


class _Others(RowType):
    """Nested and sparse tensors, and subclasses of tensors."""

    def cut(self, value: Any, pieces: Pieces, dim: int, path: str) -> Sequence[Any]:
        if value.is_nested:
            return _cut_nested(value, pieces)
        if value.layout is not torch.strided:
            return _cut_sparse(value, pieces, dim)
        return _cut_subclass(value, TENSORS.cut_dense(value, pieces, dim), dim)

    def concat(self, values: Sequence[Any], dim: int) -> Any:
        layout = values[0].layout
        if values[0].is_nested:
            rows = [row for value in values for row in value.unbind()]
            return torch.nested.as_nested_tensor(rows, layout=layout)
        # Compressed layouts cannot be concatenated.
        joined = torch.cat([each.to_sparse(layout=torch.sparse_coo) for each in values])
        return joined.to_sparse(layout=layout)

    def map(self, value: Any, fn: TensorFunction) -> Any:
        new = fn(value)
        return new if new is value else _like_subclass([new], value)[0]


ROW_TYPES = {"packed": _Packed(), "tensordict": _TensorDicts(), "tensor": _Others()}


def _cut_nested(value: torch.Tensor, pieces: Pieces) -> list[torch.Tensor]:
    if value.layout is torch.jagged:
        return _cut_jagged(value, pieces)
    rows = value.unbind()
    return [torch.nested.as_nested_tensor([rows[i] for i in each]) for each in pieces.selections]


def _cut_jagged(value: Any, pieces: Pieces) -> list[torch.Tensor]:
    # The only dimension without a number: its size is a symbol, bound to the offsets tensor.
    ragged_dim = next(i for i, size in enumerate(value.shape) if not isinstance(size, int))
    values, offsets, lengths = value.values(), value.offsets(), value.lengths()
    starts = offsets.tolist()
    own = (offsets.diff() if lengths is None else lengths).tolist()
    # Tensors that share offsets in the batch must share them in a microbatch. Otherwise torch
    # treats their ragged dimensions as different and refuses to add them.
    new = pieces.offsets.setdefault(id(offsets), [])
    if not new:
        for chosen in pieces.selections:
            if lengths is None and isinstance(chosen, range):  # waits for no device
                new.append(offsets[chosen.start : chosen.stop + 1] - starts[chosen.start])
            else:
                ends = list(itertools.accumulate((own[row] for row in chosen), initial=0))
                new.append(torch.tensor(ends, dtype=offsets.dtype, device=offsets.device))
    found = []
    for chosen, new_offsets in zip(pieces.selections, new, strict=True):
        first, last = chosen[0], chosen[-1]
        if lengths is None and isinstance(chosen, range):  # a view
            spans = [(starts[first], starts[last + 1] - starts[first])]
        else:
            spans = [(starts[row], own[row]) for row in chosen]
        parts = [values.narrow(ragged_dim - 1, *span) for span in spans]
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, dim=ragged_dim - 1)
        found.append(
            torch.nested.nested_tensor_from_jagged(rows, new_offsets, jagged_dim=ragged_dim)
        )
    return found


def _cut_sparse(value: torch.Tensor, pieces: Pieces, dim: int) -> list[torch.Tensor]:
    whole = value.to_sparse(layout=torch.sparse_coo)
    chosen = (torch.as_tensor(list(each), device=value.device) for each in pieces.selections)
    return [whole.index_select(dim, rows).to_sparse(layout=value.layout) for rows in chosen]


_DEEPEST = 8  # nested mappings among the attributes of a tensor


def _cut_subclass(value: torch.Tensor, cut: Sequence[torch.Tensor], dim: int) -> list[torch.Tensor]:
    """Return slices in the class of a tensor, unless attributes have rows that slicing keeps."""
    rows, kind = value.shape[dim], type(value)
    held = next(_attributes_with_rows(getattr(value, "__dict__", {}), rows), None)
    if held is None or issubclass(kind, torch.nn.Parameter) or is_wrapper(kind):
        return _like_subclass(cut, value)
    raise BatchError(
        f"A {kind.__name__} in the batch has {rows} rows, and so has its attribute {held!r}, which "
        f"slicing the tensor does not cut. Use register_batch_type({kind.__name__}, num_rows=len, "
        "take=lambda value, start, stop: …), or put the attribute into the batch next to it."
    )


def _attributes_with_rows(table: Any, rows: int, path: str = "") -> Iterator[str]:
    """Yield paths of attributes, including items of mappings, that have one entry per row."""
    for name, each in table.items():
        inner = join_path(path, name)
        if isinstance(each, Mapping) and inner.count(".") < _DEEPEST:
            yield from _attributes_with_rows(each, rows, inner)
        elif (getattr(each, "ndim", 0) or isinstance(each, list)) and len(each) == rows:
            yield inner


def _like_subclass(pieces: Sequence[torch.Tensor], value: torch.Tensor) -> list[torch.Tensor]:
    """Return `pieces` in the class of `value` and with its attributes, if torch dropped them."""
    cls = type(value)
    if issubclass(cls, torch.nn.Parameter) or is_wrapper(cls):
        return list(pieces)
    found = []
    for piece in pieces:
        new = piece if isinstance(piece, cls) else piece.as_subclass(cls)
        # Torch keeps the class in most operations, but loses attributes.
        for name, attribute in getattr(value, "__dict__", {}).items():
            if name not in vars(new):
                setattr(new, name, attribute)
        found.append(new)
    return found
