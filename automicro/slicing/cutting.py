"""Taking rows out of leaves: all of them in consecutive pieces, or a few by index."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from automicro.errors import BatchError
from automicro.slicing.batch_types import BatchType
from automicro.slicing.containers import elements_like
from automicro.slicing.ragged import (
    OffsetsCache,
    Selections,
    cut_nested,
    cut_packed,
    cut_sparse,
)
from automicro.torch_private import is_wrapper


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
        return pieces if type(value) is torch.Tensor else like_subclass(pieces, value)

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
        chosen = value.index_select(dim, torch.as_tensor(self.indices, device=value.device))
        return [chosen] if type(value) is torch.Tensor else like_subclass([chosen], value)

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


def like_subclass(pieces: Sequence[torch.Tensor], value: torch.Tensor) -> list[torch.Tensor]:
    """`pieces` of `value`, of its class and with its attributes, where torch has dropped them.

    Raises:
        BatchError: an attribute holds rows, too.
    """
    cls = type(value)
    if issubclass(cls, torch.nn.Parameter) or is_wrapper(cls):
        return list(pieces)
    attributes = getattr(value, "__dict__", {})
    rows = len(value) if value.dim() else 0
    for name, attribute in attributes.items():
        has_rows = getattr(attribute, "ndim", 0) or isinstance(attribute, list)
        if has_rows and not name.startswith("_") and len(attribute) == rows:
            raise BatchError(
                f"A {cls.__name__} in the batch has {rows} rows, and so has its attribute "
                f"{name!r}, which a slice of the tensor does not cut. Use register_batch_type("
                f"{cls.__name__}, num_rows=len, take=lambda value, start, stop: …), or put the "
                "attribute into the batch beside it."
            )
    found = []
    for piece in pieces:
        new = piece if isinstance(piece, cls) else piece.as_subclass(cls)
        for name, attribute in attributes.items():
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
