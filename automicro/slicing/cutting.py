"""Taking rows out of leaves: all of them in consecutive pieces, or a few by index."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from automicro.errors import BatchError
from automicro.slicing.containers import elements_like
from automicro.slicing.kinds import BatchType
from automicro.slicing.ragged import (
    OffsetsCache,
    Selections,
    cut_nested,
    cut_packed,
    cut_sparse,
)


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
        if value.layout is torch.sparse_coo:
            return cut_sparse(value, self._ranges, dim)
        return value.split_with_sizes(self.sizes, dim)

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
        return cut_sparse(value, self._selections, dim)

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
