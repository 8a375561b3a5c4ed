"""What to say of a value that nothing tells how to cut."""

import types
from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np
import torch

from automicro.errors import BatchError
from automicro.slicing.nodes import or_shared, subject

_ONCE = (types.GeneratorType, map, zip, filter, enumerate)
_TABLES = ("pandas", "polars", "pyarrow", "datasets", "xarray", "modin", "cudf")
_GRAPHS = (
    "register_batch_type(torch_geometric.data.Batch, num_rows=lambda batch: batch.num_graphs, "
    "take=lambda batch, start, stop: torch_geometric.data.Batch.from_data_list("
    "batch[start:stop]), map_tensors=lambda batch, fn: copy.copy(batch).apply(fn))"
)


def unknown_type(value: Any, path: str) -> BatchError:
    """The error for a value of a type that nothing tells how to cut, with what to write."""
    cls = type(value)
    name = cls.__name__
    text = f"{subject(path)} is of type {name}, and how to cut that into rows is not known."
    libraries = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if isinstance(value, Iterator):
        remedy = "It can be read only once, and a retry reads it again: make a list of it"
    elif isinstance(value, Set):
        remedy = "A set has no order: make a sorted list of it"
    elif libraries & set(_TABLES):
        remedy = (
            "Turn it into a dict of arrays or tensors, one for each column, or use "
            f"register_batch_type({name}, num_rows=len, take=lambda value, start, stop: …)"
        )
    elif "torch_geometric" in libraries and hasattr(value, "num_graphs"):
        remedy = f"Use {_GRAPHS}"
    elif isinstance(value, Sequence) or _is_like_a_list(cls):
        remedy = f"Make a list of it, or use {_registration(name)}"
    else:
        remedy = f"Use {_registration(name)}"
    return BatchError(f"{text} {remedy}{or_shared(path)}.")


def refuse_iterators(rows: Sequence[Any], path: str) -> None:
    """Refuse rows that can be read only once: a failed attempt would leave nothing for the next.

    Raises:
        BatchError: one of them is a generator, or another iterator.
    """
    if rows and isinstance(rows[0], _ONCE):
        raise BatchError(
            f"The rows of {path!r} are of type {type(rows[0]).__name__}, which can be read only "
            "once, and a retry reads them again. Make lists of them in the dataset."
        )


def refuse_rows_in(value: Any, num_rows: int, path: str) -> None:
    """Refuse to share an object that can be called, but holds rows all the same.

    Raises:
        BatchError: one of its attributes has as many rows as the batch.
    """
    for name, part in getattr(value, "__dict__", {}).items():
        is_data = isinstance(part, torch.Tensor | np.ndarray) and part.ndim
        if is_data and len(part) == num_rows > 1:
            cls = type(value).__name__
            raise BatchError(
                f"{subject(path)} is of type {cls}, which can be called, and its {name!r} has "
                f"{num_rows} rows, as many as the batch. Use {_registration(cls)}{or_shared(path)}."
            )


def _registration(name: str) -> str:
    return (
        f"register_batch_type({name}, num_rows=lambda value: …, take=lambda value, start, stop: …)"
    )


def _is_like_a_list(cls: type) -> bool:
    return all(hasattr(cls, method) for method in ("__getitem__", "__len__", "append"))
