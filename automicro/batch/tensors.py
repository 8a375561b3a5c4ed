"""Containers of a batch, opened into parts and rebuilt; its tensors, and copies of objects."""

import collections
import copy
import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from automicro.batch.types import STRUCTURES, Kind, TensorFunction, join_path, kind_of, row_type_of
from automicro.errors import BatchError
from automicro.memory.oom import Failure, classify
from automicro.values import attributes_of

Builder = Callable[[Sequence[Any]], Any]


def open_container(value: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the keys and the parts of a container, in order.

    >>> open_container({"x": 1, "y": 2})
    (['x', 'y'], [1, 2])
    """
    # dict first, which avoids the slow check against the abstract class.
    if isinstance(value, dict | Mapping):
        keys = list(value)
        return keys, [value[key] for key in keys]
    if isinstance(value, tuple | list):
        return getattr(type(value), "_fields", range(len(value))), value
    keys = _field_names(value)
    return keys, [getattr(value, key) for key in keys]


def _field_names(value: Any) -> list[str]:
    """Return the fields of a dataclass, an attrs class or a namespace that are set."""
    if dataclasses.is_dataclass(value):
        fields: Sequence[Any] = dataclasses.fields(value)
    else:
        fields = getattr(type(value), "__attrs_attrs__", ())
        if not fields:
            return list(vars(value))
    # A field with init=False may be unset.
    return [field.name for field in fields if hasattr(value, field.name)]


def builder(value: Any, keys: Sequence[Any]) -> Builder:
    """Return a function that turns parts in the order of `keys` into a container like `value`.

    >>> builder({"x": 1}, ["x"])([5])
    {'x': 5}
    """
    cls = type(value)
    if cls is tuple or cls is list:
        return cls
    if cls is dict or cls is collections.OrderedDict:
        return lambda parts: cls(zip(keys, parts, strict=True))
    kind = kind_of(cls)
    if kind is Kind.MAPPING:
        return _mapping_builder(value, keys)
    if kind is Kind.RECORD:
        return _record_builder(value, keys)
    if isinstance(value, tuple):
        return functools.partial(_like_tuple, value)
    return functools.partial(_like_list, value)


def _like_tuple(value: Any, elements: Sequence[Any]) -> Any:
    cls = type(value)
    # Named tuples provide `_make`, because their __new__ may have another signature.
    if hasattr(cls, "_make"):
        return cls._make(elements)
    if hasattr(cls, "n_sequence_fields"):  # such as the result of torch.max
        return cls(elements)
    new = tuple.__new__(cls, elements)  # bypasses a __new__ of the class
    if hasattr(new, "__dict__"):
        vars(new).update(vars(value))
    return new


def _like_list(value: Any, elements: Sequence[Any]) -> Any:
    # A copy, because the constructor of a subclass may need arguments.
    new = copy.copy(value)
    new[:] = elements
    return new


def _mapping_builder(value: Any, keys: Sequence[Any]) -> Builder:
    if isinstance(value, types.MappingProxyType):
        return lambda parts: types.MappingProxyType(dict(zip(keys, parts, strict=True)))
    if isinstance(value, MutableMapping):
        return functools.partial(_like_mutable_mapping, value, keys)

    def build(parts: Sequence[Any]) -> Any:
        try:
            # Immutable mappings can only be constructed, usually from a dict.
            return type(value)(dict(zip(keys, parts, strict=True)))
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            raise _cannot_build(value) from error

    return build


def _like_mutable_mapping(value: Any, keys: Sequence[Any], parts: Sequence[Any]) -> Any:
    new = copy.copy(value)
    known = isinstance(value, dict | collections.UserDict)
    if not known:
        # A shallow copy shares the dict in which the class keeps its items: assigning to the copy
        # would change the batch.
        for name, attribute in list(getattr(new, "__dict__", {}).items()):
            if isinstance(attribute, dict):
                new.__dict__[name] = copy.copy(attribute)
    for key, part in zip(keys, parts, strict=True):
        # Test the assignment, because a copy may share hidden state with the original.
        before = value[key]
        new[key] = part
        if not known and part is not before and value[key] is part:
            value[key] = before
            raise _cannot_build(value)
    return new


def _record_builder(value: Any, keys: Sequence[Any]) -> Builder:
    # A cached property that was computed from all rows is wrong for some of them.
    stale = [
        name
        for name in getattr(value, "__dict__", {})
        if isinstance(getattr(type(value), name, None), functools.cached_property)
    ]

    def build(parts: Sequence[Any]) -> Any:
        new = copy.copy(value)
        for name in stale:
            new.__dict__.pop(name, None)
        for key, part in zip(keys, parts, strict=True):
            # Bypass the class, which may be frozen.
            object.__setattr__(new, key, part)
        return new

    return build


def _cannot_build(value: Any) -> BatchError:
    return BatchError(
        f"A {type(value).__name__} in the batch could not be copied with other values. Use "
        f"register_batch_type({type(value).__name__}, ...) to define how it is sliced."
    )


_OF_ITS_OWN = (
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
    "__del__",
    "__enter__",
    "__next__",
)
"""Methods of classes whose values hold more than attributes, such as a file or C memory."""


def copy_object(value: Any) -> Any:
    """Copy an object that defines its copy, or consists of its attributes; return others as is.

    >>> class Row:
    ...     words = ["a"]
    >>> copy_object(Row()) is Row(), copy_object(len) is len
    (False, True)
    """
    # A forward may change the copy, so tensors, arrays and containers among its attributes are
    # copied. Objects that hold more, such as an open image, are returned as they are.
    cls = type(value)
    if hasattr(cls, "__copy__"):
        return copy.copy(value)
    if not is_its_attributes(cls):
        return value
    try:
        new = copy.copy(value)
    except TypeError:  # the class does not allow copies
        return value
    for name, part in attributes_of(value).items():
        if isinstance(part, torch.Tensor):
            # Bypass the class, which may refuse or check assignments.
            object.__setattr__(new, name, part.clone())
        elif isinstance(part, dict | list | set | bytearray | np.ndarray):
            object.__setattr__(new, name, part.copy())
    return new


@functools.lru_cache(maxsize=1024)
def _is_its_attributes(cls: type) -> bool:
    """Whether a value of a class consists only of its attributes, so that a copy is equivalent."""
    is_function = issubclass(cls, types.FunctionType | types.BuiltinFunctionType | type)
    return not is_function and all(
        getattr(cls, name, None) is getattr(object, name, None) for name in _OF_ITS_OWN
    )


# Annotated again, because mypy expects a Hashable for a cached function, and type[Any] is not one.
is_its_attributes: Callable[[type], bool] = _is_its_attributes


PLAIN = frozenset({str, int, float, bool, type(None), bytes, complex})
"""Types of immutable values."""


def map_tensors(batch: Any, fn: TensorFunction, *, isolate: bool = False) -> Any:
    """Return the same structure with `fn` applied to every tensor in it, including shared ones.

    >>> map_tensors({"x": torch.ones(2), "name": "a"}, lambda tensor: tensor + 1)
    {'x': tensor([2., 2.]), 'name': 'a'}
    """
    # Containers are new ones of the same type; other values are returned as they are. `isolate`
    # copies arrays and objects, too (see `copy_object`).
    cls = type(batch)
    if cls is torch.Tensor:
        return fn(batch)
    if cls is tuple or cls is list:
        # A list of thousands of tokens is handled at once, not element by element.
        if len(batch) > 4 and PLAIN.issuperset(map(type, batch)):
            return batch if cls is tuple else batch.copy()
        return cls(
            [
                fn(part) if type(part) is torch.Tensor else map_tensors(part, fn, isolate=isolate)
                for part in batch
            ]
        )
    if cls is dict:
        return {key: map_tensors(part, fn, isolate=isolate) for key, part in batch.items()}
    kind = kind_of(cls)
    if kind is Kind.ROWS:
        return _map_rows(batch, fn, isolate)
    if kind in STRUCTURES or kind is Kind.SEQUENCE:
        keys, parts = open_container(batch)
        return builder(batch, keys)([map_tensors(part, fn, isolate=isolate) for part in parts])
    return copy_object(batch) if isolate and kind is Kind.UNKNOWN else batch


def replace_tensors(batch: Any, others: Mapping[int, torch.Tensor]) -> Any:
    """Replace tensors in a structure, by their ids.

    >>> tensor = torch.ones(2)
    >>> replace_tensors([tensor, 3], {id(tensor): torch.zeros(1)})
    [tensor([0.]), 3]
    """
    return map_tensors(batch, lambda tensor: others.get(id(tensor), tensor))


def _copy_array(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Copy an array within its class, unless it is read-only.

    >>> _copy_array(np.arange(2)).tolist()
    [0, 1]
    """
    if not array.flags.writeable:
        return array
    new = array.copy()
    # The copy holds the same objects, which a forward may change.
    if array.dtype == object:
        for index, value in np.ndenumerate(array):
            new[index] = map_tensors(value, torch.clone, isolate=True)
    return new


def _map_rows(value: Any, fn: TensorFunction, isolate: bool) -> Any:
    if isinstance(value, np.ndarray):
        return _copy_array(value) if isolate else value
    new = row_type_of(type(value)).map(value, fn)  # type: ignore[union-attr]
    if new is not None:
        return new
    new = copy.copy(value)
    for name, attribute in attributes_of(value).items():
        mapped = map_tensors(attribute, fn, isolate=isolate)
        # Attributes of other kinds stay shared, as they do in any copy.
        if mapped is not attribute:
            object.__setattr__(new, name, mapped)
    return new


def tensor_leaves(batch: Any, path: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return all tensors in `batch` with their paths.

    >>> [path for path, _ in tensor_leaves({"x": torch.ones(2), "y": (torch.ones(2), "a")})]
    ['x', 'y.0']
    """
    if type(batch) is torch.Tensor:
        return [(path, batch)]
    kind = kind_of(type(batch))
    if kind is Kind.ROWS:
        own = row_type_of(type(batch)).leaves(batch)  # type: ignore[union-attr]
        if own is not None:
            return [(join_path(path, key) if key else path, leaf) for key, leaf in own]
        attributes = attributes_of(batch)
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


# The most values that are read inside one object, because it may refer to a whole dataset.
_MOST_VALUES = 64


class Contents:
    """Everything in one batch.

    Attributes:
        tensors: those that can be reached by opening containers.
        inner_tensors: those inside opaque objects, which are not copied with the object.
        num_elements: of tensors and arrays, characters of texts, and plain values; an opaque
            object counts as one.
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
                if type(part) is torch.Tensor:
                    self.tensors.append(part)
                    self.num_elements += part.numel()
                else:
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
        elif kind is Kind.ROWS and isinstance(value, np.ndarray):
            if value.dtype != object:
                self.num_elements += value.size
            for part in value.flat if value.dtype == object else ():
                self._look(part)
        elif kind is Kind.UNKNOWN:
            self._look_inside(value)
        elif kind is not Kind.SHARED:
            for _, tensor in tensor_leaves(value):
                self.tensors.append(tensor)
                self.num_elements += _num_elements(tensor)

    def _look_inside(self, value: Any) -> None:
        """Count the values in an opaque object, its containers and its inner objects."""
        found = 0
        # Tensors in an object that is copied are copied with it, and need no version check.
        is_copied = is_its_attributes(type(value)) and not hasattr(type(value), "__copy__")
        # Objects may have cyclic references.
        waiting, seen = [value], {id(value)}
        while waiting and len(seen) <= _MOST_VALUES:
            held = waiting.pop()
            if not isinstance(held, list | tuple):
                held = (held if isinstance(held, dict) else attributes_of(held)).values()
            for part in itertools.islice(held, _MOST_VALUES):
                if id(part) in seen or isinstance(part, type | torch.nn.Module | types.ModuleType):
                    continue
                seen.add(id(part))
                if isinstance(part, torch.Tensor):
                    self.inner_tensors += () if is_copied else (part,)
                    found += _num_elements(part)
                elif isinstance(part, np.ndarray):
                    found += part.size
                elif isinstance(part, str):
                    found += len(part)
                elif type(part) not in PLAIN:
                    waiting.append(part)
        # At least 1, because a batch of objects of unknown size still grows with its rows.
        self.num_elements += found or 1


def _elements_of_plain(value: Any) -> int:
    if value is None:
        return 0
    return len(value) if isinstance(value, str | bytes) else 1


def _num_elements(tensor: torch.Tensor) -> int:
    if tensor.layout is torch.jagged:
        values: Any = tensor.values()
        return int(values.numel())
    return int(tensor.numel())
