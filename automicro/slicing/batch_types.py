"""Batch types: how values of a class are counted, cut, joined and mapped; those of libraries."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from automicro.errors import BatchError


@dataclass(frozen=True, kw_only=True)
class BatchType:
    """How values of a registered type are counted, sliced, joined and mapped.

    Attributes:
        leaves: gives its tensors by path; without it those among its attributes.
        has_dimensions: whether another dimension than 0 could be meant to hold its rows.
    """

    num_rows: Callable[[Any], int]
    take: Callable[[Any, int, int], Any]
    concat: Callable[[Sequence[Any]], Any] | None = None
    map_tensors: Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Any] | None = None
    leaves: Callable[[Any], Iterable[tuple[str, torch.Tensor]]] | None = None
    has_dimensions: bool = False


def batch_type_of_library(cls: type) -> BatchType | None:
    """How values of another library's class are cut; None where it is not known.

    By name, so that no library is imported for it.
    """
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in cls.__mro__}
    is_tensordict = "tensordict.TensorCollection" in names or hasattr(cls, "_is_tensorclass")
    return _TENSORDICT if is_tensordict else None


def _leaves(value: Any) -> list[tuple[str, torch.Tensor]]:
    stacked = getattr(value, "tensordicts", None)
    if stacked is not None:  # a lazy stack makes new tensors whenever it is asked for some
        parts = enumerate(stacked)
        return [(f"{row}.{path}", leaf) for row, part in parts for path, leaf in _leaves(part)]
    found = value.items(include_nested=True, leaves_only=True)
    return [
        (key if isinstance(key, str) else ".".join(key), leaf)
        for key, leaf in found
        if isinstance(leaf, torch.Tensor)
    ]


def _num_rows(value: Any) -> int:
    if not value.batch_size:
        name = type(value).__name__
        raise BatchError(
            f"A {name} has no batch_size, so it is one row, or nothing tells how many it has. "
            f"Make it with batch_size=[rows]."
        )
    rows: int = value.batch_size[0]
    return rows


def _map_tensors(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    # A device of its own would move every new tensor back to it.
    new = value.apply(fn, device=None)
    return new if value.device is None else new.auto_device_()


_TENSORDICT = BatchType(
    num_rows=_num_rows,
    take=lambda value, start, stop: value[start:stop],
    concat=lambda values: torch.cat(list(values), 0),
    map_tensors=_map_tensors,
    leaves=_leaves,
    has_dimensions=True,
)
