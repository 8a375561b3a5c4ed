"""Containers of a batch: opened into parts, built again, and joined; and copies of objects."""

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from automicro.batch.types import (
    STRUCTURES,
    Kind,
    Pieces,
    RowType,
    join_path,
    kind_of,
    row_type_of,
    state_of,
)
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


NOWHERE_ELSE: Mapping[str, int] = MappingProxyType({})


def concat_rows(
    parts: Sequence[Any],
    row_dims: Mapping[str, int] = NOWHERE_ELSE,
    *,
    order: Sequence[int] | None = None,
) -> Any:
    """Join what a model gave for each microbatch into what it gives for the whole batch.

    Tensors and arrays are joined along dimension 0, mappings, tuples and dataclasses part by part,
    lists end to end; None and equal texts stay. A number or a 0-d tensor (a mean, say) cannot be
    joined without knowing what it is, so it is an error.

    Args:
        parts: of each microbatch, in order.
        row_dims: where tensors have their rows, by path, if it is not dimension 0.
        order: of each row of the result, its place among the rows of all parts; None where they
            are in order.

    Raises:
        BatchError: the outputs differ in structure, or hold something that has no rows.

    >>> concat_rows([{"logits": torch.zeros(2, 3)}, {"logits": torch.ones(1, 3)}])["logits"].shape
    torch.Size([3, 3])
    """
    if not parts:
        raise BatchError("There are no outputs to join. Give those of at least one microbatch.")
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
        if isinstance(error, torch.OutOfMemoryError) or (num_dims or 0) < 2:
            raise
        shapes = ", ".join(dict.fromkeys(str(tuple(part.shape)) for part in parts))
        raise BatchError(
            f"{_named(path)} has shapes that do not join along dimension {dim}: {shapes}. Pad the "
            "outputs to one size, or return a list with one entry per row."
        ) from error


def _in_order(joined: Any, order: Sequence[int] | None, path: str, dim: int = 0) -> Any:
    """The rows of all parts in the order of the batch.

    Raises:
        BatchError: it has not one entry for each row.
    """
    if order is None:
        return joined
    row_type = row_type_of(type(joined))
    num_rows = len(joined) if row_type is None else row_type.count(joined, dim, path)
    if num_rows != len(order):
        raise BatchError(
            f"{_named(path)} has not one entry for each of the {len(order)} rows, which were "
            "sorted by cost and cannot be put back into their order. Leave it out of the outputs, "
            "or count rows: microbatch_unit='rows'."
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
