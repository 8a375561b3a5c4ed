"""Containers of a batch: opened into parts, and built again; and copies of objects."""

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

from automicro.batch.types import Kind, kind_of, state_of
from automicro.errors import BatchError
from automicro.memory.oom import Failure, classify

Builder = Callable[[Sequence[Any]], Any]


def open_container(value: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The keys and the parts of a container, in order.

    >>> open_container({"x": 1, "y": 2})
    (['x', 'y'], [1, 2])
    """
    if isinstance(value, dict | Mapping):
        keys = list(value)
        return keys, [value[key] for key in keys]
    if isinstance(value, tuple | list):
        return getattr(type(value), "_fields", range(len(value))), value
    keys = _field_names(value)
    return keys, [getattr(value, key) for key in keys]


def _field_names(value: Any) -> list[str]:
    """The fields of a dataclass, an attrs class or a namespace that are set."""
    if dataclasses.is_dataclass(value):
        fields: Sequence[Any] = dataclasses.fields(value)
    else:
        fields = getattr(type(value), "__attrs_attrs__", ())
        if not fields:
            return list(vars(value))
    # A field with init=False may not have been set.
    return [field.name for field in fields if hasattr(value, field.name)]


def builder(value: Any, keys: Sequence[Any]) -> Builder:
    """A function that turns parts in the order of `keys` into a container like `value`.

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


def elements_like(value: Any, elements: Sequence[Any]) -> Any:
    """A list or tuple of the type of `value`, with other elements."""
    if type(value) is list or type(value) is tuple:
        return elements if type(elements) is type(value) else type(value)(elements)
    like = _like_tuple if isinstance(value, tuple) else _like_list
    return like(value, elements)


def _like_tuple(value: Any, elements: Sequence[Any]) -> Any:
    cls = type(value)
    if hasattr(cls, "_make"):
        return cls._make(elements)
    if hasattr(cls, "n_sequence_fields"):  # what torch.max returns
        return cls(elements)
    new = tuple.__new__(cls, elements)  # a class may have a __new__ of its own
    if hasattr(new, "__dict__"):
        vars(new).update(vars(value))
    return new


def _like_list(value: Any, elements: Sequence[Any]) -> Any:
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
        # A plain copy shares the dict that such a class keeps its items in: assigning to the
        # copy would change the batch.
        for name, attribute in list(getattr(new, "__dict__", {}).items()):
            if isinstance(attribute, dict):
                new.__dict__[name] = copy.copy(attribute)
    for key, part in zip(keys, parts, strict=True):
        before = value[key]
        new[key] = part
        if not known and part is not before and value[key] is part:
            value[key] = before
            raise _cannot_build(value)
    return new


def _record_builder(value: Any, keys: Sequence[Any]) -> Builder:
    # What a cached property computed from all rows does not hold for some of them.
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
            object.__setattr__(new, key, part)
        return new

    return build


def _cannot_build(value: Any) -> BatchError:
    return BatchError(
        f"A {type(value).__name__} with other values could not be made from a copy of the one in "
        f"the batch. Use register_batch_type({type(value).__name__}, ...) to say how it is sliced."
    )


def row_encodings(value: Any, num_rows: int) -> Sequence[Any] | None:
    """The tokenizer's record of each row that a Hugging Face BatchEncoding carries, if it does."""
    if not isinstance(value, collections.UserDict):
        return None
    encodings = getattr(value, "encodings", None)
    if not isinstance(encodings, list) or len(encodings) != num_rows:
        return None
    return encodings


def with_encodings(value: Any, encodings: Sequence[Any]) -> Any:
    """`value` with other tokenizer records, other attributes kept."""
    new = type(value)(dict(value), encoding=encodings, n_sequences=value.n_sequences)
    for name, attribute in vars(value).items():
        if name not in vars(new):
            setattr(new, name, attribute)
    return new


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
"""Methods of a class whose values hold more than their attributes: a file, memory of C."""


def copy_object(value: Any) -> Any:
    """A copy that a forward may change, of an object that says how, or that is its attributes.

    Tensors, arrays and containers among the attributes are copied. Whatever holds more (an open
    image) is handed on as it is.

    >>> class Row:
    ...     words = ["a"]
    >>> copy_object(Row()) is Row(), copy_object(len) is len
    (False, True)
    """
    cls = type(value)
    if hasattr(cls, "__copy__"):
        return copy.copy(value)
    if not is_its_attributes(cls):
        return value
    try:
        new = copy.copy(value)
    except TypeError:  # it cannot be made
        return value
    for name, part in state_of(value).items():
        if isinstance(part, torch.Tensor):
            object.__setattr__(new, name, part.clone())
        elif isinstance(part, dict | list | set | bytearray | np.ndarray):
            object.__setattr__(new, name, part.copy())
    return new


@functools.lru_cache(maxsize=1024)
def _is_its_attributes(cls: type) -> bool:
    """Whether a value of a class is nothing but its attributes, so that a copy is as good."""
    is_function = issubclass(cls, types.FunctionType | types.BuiltinFunctionType | type)
    return not is_function and all(
        getattr(cls, name, None) is getattr(object, name, None) for name in _OF_ITS_OWN
    )


# Typed anew: mypy takes the argument of a cached function for any hashable, which type[Any] is not.
is_its_attributes: Callable[[type], bool] = _is_its_attributes
