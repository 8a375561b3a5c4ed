"""Joining the outputs of microbatches into those of the whole batch."""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automicro.batch.tensors import builder, open_container
from automicro.batch.types import STRUCTURES, Kind, Pieces, RowType, join_path, kind_of, row_type_of
from automicro.errors import BatchError

NOWHERE_ELSE: Mapping[str, int] = MappingProxyType({})


def concat_rows(
    parts: Sequence[Any],
    row_dims: Mapping[str, int] = NOWHERE_ELSE,
    *,
    order: Sequence[int] | None = None,
) -> Any:
    """Join the outputs of all microbatches into those of the whole batch.

    >>> concat_rows([{"logits": torch.zeros(2, 3)}, {"logits": torch.ones(1, 3)}])["logits"].shape
    torch.Size([3, 3])
    """
    # Tensors and arrays are joined along dimension 0, mappings, tuples and dataclasses part by
    # part, lists end to end; None and equal texts stay. A number or a 0-d tensor is an error:
    # whether it is a mean or a sum is unknown.
    if not parts:
        raise BatchError("There are no outputs to join. Pass those of at least one microbatch.")
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
    kind, row_type = kind_of(type(first)), row_type_of(type(first))
    if row_type is not None and row_type.can_concat:
        dim = row_dims.get(path, 0)
        return _in_order(_joined(row_type, parts, path, dim), order, path, dim)
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


def _joined(row_type: RowType, parts: list[Any], path: str, dim: int) -> Any:
    num_dims = getattr(parts[0], "ndim", None)
    if num_dims is not None and any(part.ndim == 0 for part in parts):
        raise BatchError(
            f"{_named(path)} is a 0-d {type(parts[0]).__name__} for each microbatch, which cannot "
            "be joined: a mean and a sum would join differently. Return one value per row, or "
            "leave it out of the outputs."
        )
    try:
        return row_type.concat(parts, dim)
    except (RuntimeError, ValueError) as error:
        # Running out of memory is not the fault of the shapes.
        if isinstance(error, torch.OutOfMemoryError) or (num_dims or 0) < 2:
            raise
        shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
        raise BatchError(
            f"{_named(path)} has shapes that do not join along dimension {dim}: {shapes}. Pad the "
            "outputs to one size, or return a list with one entry per row."
        ) from error


def _in_order(joined: Any, order: Sequence[int] | None, path: str, dim: int = 0) -> Any:
    """Restore the order of the batch in the rows of all parts."""
    if order is None:
        return joined
    row_type = row_type_of(type(joined))
    # Counted again, because outputs may have another number of rows than the batch.
    num_rows = len(joined) if row_type is None else row_type.count(joined, dim, path)
    if num_rows != len(order):
        raise BatchError(
            f"{_named(path)} does not have one entry for each of the {len(order)} rows, so their "
            "order, which was sorted by cost, cannot be restored. Leave it out of the outputs, or "
            "count rows: microbatch_unit='rows'."
        )
    rows = Pieces([order])
    return (rows.of(joined) if row_type is None else row_type.cut(joined, rows, dim, path))[0]


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


def outputs_with_rows(outputs: Any) -> Any:
    """Return outputs without their losses and cache, which have no rows to be joined.

    Example:
        >>> import torch
        >>> list(outputs_with_rows({"loss": torch.tensor(1.0), "logits": torch.zeros(4, 2)}))
        ['logits']
    """
    if not isinstance(outputs, Mapping):
        return outputs
    # A cache would be the largest output, and no later batch would use it.
    kept = {
        name: value
        for name, value in outputs.items()
        if name != "past_key_values" and not (isinstance(value, Tensor) and value.dim() == 0)
    }
    # A Hugging Face ModelOutput forbids removing keys from it.
    is_record = dataclasses.is_dataclass(outputs)
    kind: Any = type(outputs) if is_record else dict
    return outputs if len(kept) == len(outputs) else kind(**kept)
