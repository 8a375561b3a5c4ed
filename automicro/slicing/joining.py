"""Joining the outputs of microbatches: the inverse of cutting a batch."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from automicro.errors import BatchError
from automicro.slicing.containers import builder, join_path, open_container
from automicro.slicing.kinds import STRUCTURES, Kind, batch_type_of, kind_of
from automicro.slicing.ragged import concat_nested, concat_packed, concat_sparse

NOWHERE_ELSE: Mapping[str, int] = MappingProxyType({})


def concat_rows(parts: Sequence[Any], row_dims: Mapping[str, int] = NOWHERE_ELSE) -> Any:
    """Join what a model gave for each microbatch into what it gives for the whole batch.

    Tensors and arrays are joined along dimension 0, mappings, tuples and dataclasses part by part,
    lists end to end; None and equal texts stay. A number or a 0-d tensor (a mean, say) cannot be
    joined without knowing what it is, so it is an error.

    Args:
        parts: of each microbatch, in order.
        row_dims: where tensors have their rows, by path, if it is not dimension 0.

    Raises:
        BatchError: the outputs differ in structure, or hold something that has no rows.

    >>> concat_rows([{"logits": torch.zeros(2, 3)}, {"logits": torch.ones(1, 3)}])["logits"].shape
    torch.Size([3, 3])
    """
    if not parts:
        raise BatchError("There are no outputs to join. Give those of at least one microbatch.")
    return _concat(list(parts), "", row_dims)


def _concat(parts: list[Any], path: str, row_dims: Mapping[str, int]) -> Any:
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
        return _concat_arrays(parts, path, row_dims.get(path, 0))
    if kind is Kind.PACKED:
        return concat_packed(parts)
    if kind is Kind.REGISTERED:
        batch_type = batch_type_of(type(first))
        assert batch_type is not None
        if batch_type.concat is not None:
            return batch_type.concat(parts)
    if isinstance(first, list):
        return builder(first, ())([row for part in parts for row in part])
    if kind in STRUCTURES or kind is Kind.SEQUENCE:
        return _concat_structures(parts, path, row_dims)
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


def _concat_structures(parts: list[Any], path: str, row_dims: Mapping[str, int]) -> Any:
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
        _concat([part[key] for part in by_key], join_path(path, key), row_dims) for key in keys
    ]
    return builder(parts[0], keys)(joined)


def _named(path: str) -> str:
    return f"The output {path!r}" if path else "The output"
