"""What a batch is made of, beside its structure: tensors, what costs memory, what may change."""

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from automicro.slicing.containers import open_container
from automicro.slicing.kinds import STRUCTURES, Kind, kind_of
from automicro.slicing.objects import is_its_attributes, state_of
from automicro.slicing.tensors import PLAIN, tensor_leaves

_MOST_VALUES = 64
"""So many values are looked at inside of one object: it may refer to a whole dataset."""

_DEEPEST = 4


class Contents:
    """All that lies in one batch.

    Attributes:
        tensors: that can be reached by opening containers.
        inner_tensors: inside of objects that nothing tells how to open, and that are not copied
            with all that they hold.
        num_elements: of tensors and arrays, characters of texts, plain values; an object of which
            nothing is known counts as one.
    """

    __slots__ = ("inner_tensors", "num_elements", "tensors")

    def __init__(self, batch: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.inner_tensors: list[torch.Tensor] = []
        self.num_elements = 0
        self._look(batch)

    def _look(self, value: Any) -> None:
        cls = type(value)
        if cls is torch.Tensor:
            self.tensors.append(value)
            self.num_elements += value.numel()
        elif cls is tuple or cls is list:
            if len(value) > 4 and PLAIN.issuperset(map(type, value)):
                self.num_elements += sum(map(_elements_of_plain, value))
                return
            for part in value:
                self._look(part)
        elif cls is dict:
            for part in value.values():
                self._look(part)
        elif cls in PLAIN:
            self.num_elements += _elements_of_plain(value)
        else:
            self._look_by_kind(value, kind_of(cls))

    def _look_by_kind(self, value: Any, kind: Kind) -> None:
        if kind in STRUCTURES or kind is Kind.SEQUENCE:
            for part in open_container(value)[1]:
                self._look(part)
        elif kind is Kind.ARRAY and value.dtype == object:
            for part in value.flat:
                self._look(part)
        elif kind is Kind.ARRAY:
            self.num_elements += value.size
        elif kind is Kind.UNKNOWN:
            self._look_inside(value)
        elif kind is not Kind.SHARED:
            for _, tensor in tensor_leaves(value):
                self.tensors.append(tensor)
                self.num_elements += _num_elements(tensor)

    def _look_inside(self, value: Any) -> None:
        found = 0
        is_copied = is_its_attributes(type(value)) and not hasattr(type(value), "__copy__")
        for part in _values_inside(value):
            if isinstance(part, torch.Tensor):
                if not is_copied:
                    self.inner_tensors.append(part)
                found += _num_elements(part)
            elif isinstance(part, np.ndarray):
                found += part.size
            elif isinstance(part, str):
                found += len(part)
        self.num_elements += found or _pixels(value) or 1


def _values_inside(value: Any) -> Iterator[Any]:
    """Values that an object holds, those of its containers and of objects in it included."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    seen = {id(value)}
    while waiting and len(seen) <= _MOST_VALUES:
        current, depth = waiting.pop()
        for part in _parts(current):
            if id(part) in seen or isinstance(part, type | torch.nn.Module | types.ModuleType):
                continue
            seen.add(id(part))
            yield part
            if depth < _DEEPEST and type(part) not in PLAIN:
                waiting.append((part, depth + 1))


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())[:_MOST_VALUES]
    if isinstance(value, list | tuple):
        return list(value[:_MOST_VALUES])
    if isinstance(value, torch.Tensor | np.ndarray):
        return []
    return list(state_of(value).values())


def _elements_of_plain(value: Any) -> int:
    if value is None:
        return 0
    return len(value) if isinstance(value, str | bytes) else 1


def _num_elements(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.jagged:
        values: Any = tensor.values()
        return int(values.numel())
    return int(tensor.numel())


def _pixels(value: Any) -> int:
    """Of an image or whatever else has a size: width times height."""
    size = vars(type(value)).get("size") or getattr(type(value), "size", None)
    if size is None and "size" not in getattr(value, "__dict__", {}):
        return 0
    found = getattr(value, "size", None)
    if not isinstance(found, tuple) or not all(isinstance(each, int) for each in found):
        return 0
    return int(np.prod(found))
