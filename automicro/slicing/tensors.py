"""Every tensor in a batch: changing each of them, listing them."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from automicro.slicing.containers import builder, join_path, open_container
from automicro.slicing.cutting import like_subclass
from automicro.slicing.kinds import STRUCTURES, Kind, batch_type_of, kind_of
from automicro.slicing.objects import copy_object

TensorFunction = Callable[[torch.Tensor], torch.Tensor]

PLAIN = frozenset({str, int, float, bool, type(None), bytes, complex})
"""Types of values that nothing can change."""


def map_tensors(batch: Any, fn: TensorFunction, *, isolate: bool = False) -> Any:
    """The same structure with `fn` applied to every tensor in it, shared ones too.

    Containers are new ones of the same type; what is not a tensor is handed on as it is. With
    `isolate` arrays are copied, and so are objects (see `copy_object`).

    >>> map_tensors({"x": torch.ones(2), "name": "a"}, lambda tensor: tensor + 1)
    {'x': tensor([2., 2.]), 'name': 'a'}
    """
    cls = type(batch)
    if cls is torch.Tensor:
        return fn(batch)
    if cls is tuple or cls is list:
        if len(batch) > 4 and PLAIN.issuperset(map(type, batch)):
            return batch if cls is tuple else batch.copy()
        return cls([map_tensors(part, fn, isolate=isolate) for part in batch])
    if cls is dict:
        return {key: map_tensors(part, fn, isolate=isolate) for key, part in batch.items()}
    kind = kind_of(cls)
    if kind is Kind.SHARED:
        return batch
    if kind is Kind.TENSOR:
        return _map_subclass(batch, fn)
    if kind is Kind.ARRAY:
        return copy_array(batch) if isolate else batch
    if kind in STRUCTURES or kind is Kind.SEQUENCE:
        keys, parts = open_container(batch)
        return builder(batch, keys)([map_tensors(part, fn, isolate=isolate) for part in parts])
    if kind is Kind.PACKED:
        return _map_packed(batch, fn)
    if kind is Kind.REGISTERED:
        return _map_registered(batch, fn, isolate)
    return copy_object(batch) if isolate else batch


def copy_array(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """A copy that can be written to, of the same class; what nobody can write to is not copied.

    >>> copy_array(np.arange(2)).tolist()
    [0, 1]
    """
    if not array.flags.writeable:
        return array
    new = array.copy()
    if array.dtype == object:
        for index, value in np.ndenumerate(array):
            new[index] = map_tensors(value, torch.clone, isolate=True)
    return new


def _map_subclass(value: torch.Tensor, fn: TensorFunction) -> torch.Tensor:
    new = fn(value)
    return new if new is value else like_subclass([new], value)[0]


def _map_packed(value: PackedSequence, fn: TensorFunction) -> PackedSequence:
    data = fn(value.data)
    # Indices are not data: they follow to its device, and keep their dtype and their values.
    order, inverse = (
        None if indices is None else indices.to(data.device, non_blocking=data.device.type != "cpu")
        for indices in (value.sorted_indices, value.unsorted_indices)
    )
    return PackedSequence(data, value.batch_sizes, order, inverse)


def _map_registered(value: Any, fn: TensorFunction, isolate: bool) -> Any:
    batch_type = batch_type_of(type(value))
    assert batch_type is not None
    if batch_type.map_tensors is not None:
        return batch_type.map_tensors(value, fn)
    if isinstance(value, torch.Tensor):
        return fn(value)
    new = copy.copy(value)
    for name, attribute in list(getattr(value, "__dict__", {}).items()):
        mapped = map_tensors(attribute, fn, isolate=isolate)
        if mapped is not attribute:
            object.__setattr__(new, name, mapped)
    return new


def tensor_leaves(batch: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """All tensors in `batch` with their paths.

    >>> [path for path, _ in tensor_leaves({"x": torch.ones(2), "y": (torch.ones(2), "a")})]
    ['x', 'y.0']
    """
    kind = kind_of(type(batch))
    if kind is Kind.TENSOR:
        return [(path, batch)]
    if kind is Kind.PACKED:
        return [(join_path(path, "data"), batch.data)]
    if kind is Kind.REGISTERED:
        if isinstance(batch, torch.Tensor):
            return [(path, batch)]
        batch_type = batch_type_of(type(batch))
        if batch_type is not None and batch_type.leaves is not None:
            return [(join_path(path, key), leaf) for key, leaf in batch_type.leaves(batch)]
        attributes = getattr(batch, "__dict__", {})
        keys, parts = list(attributes), list(attributes.values())
    elif kind in STRUCTURES or kind is Kind.SEQUENCE:
        keys, parts = (list(opened) for opened in open_container(batch))
    else:
        return []
    return [
        leaf
        for key, part in zip(keys, parts, strict=True)
        for leaf in tensor_leaves(part, join_path(path, key))
    ]
