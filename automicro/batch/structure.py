"""The structure of a batch: its kinds of value, its containers, its parts."""

import argparse
import collections
import copy
import dataclasses
import datetime
import enum
import functools
import numbers
import pathlib
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from automicro.errors import BatchError
from automicro.memory.oom import Failure, classify


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


class Kind(enum.Enum):
    """What can be done with a value: slice it, open it, or hand it on whole."""

    TENSOR = "tensor"
    ARRAY = "array"
    PACKED = "packed sequence"
    REGISTERED = "registered type"
    MAPPING = "mapping"
    RECORD = "record"
    NAMED_TUPLE = "named tuple"
    SEQUENCE = "list or tuple"
    SHARED = "shared"
    UNKNOWN = "unknown"


STRUCTURES = frozenset({Kind.MAPPING, Kind.RECORD, Kind.NAMED_TUPLE})
"""Kinds whose parts always hold all rows, never one row each."""


_registered: dict[type, BatchType] = {}

_WHOLE_TEXTS = (str, bytes, bytearray, torch.Size)
_SHARED_TYPES = (
    numbers.Number,
    np.generic,
    enum.Enum,
    type(None),
    type(Ellipsis),
    slice,
    torch.device,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    pathlib.PurePath,
    uuid.UUID,
)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_OF_DATA = frozenset({"__len__", "__iter__", "__getitem__", "to", "num_rows", "batch_size"})
"""Methods of what holds data, even if it can be called."""

_BUILT_IN = frozenset(
    {object, torch.Tensor, np.ndarray, PackedSequence, Mapping, dict, list, tuple, str, bytes}
    | {int, float, bool, complex, type(None)}
)


def register_batch_type(
    cls: type,
    *,
    num_rows: Callable[[Any], int],
    take: Callable[[Any, int, int], Any],
    concat: Callable[[Sequence[Any]], Any] | None = None,
    map_tensors: Callable[[Any, Callable[[torch.Tensor], torch.Tensor]], Any] | None = None,
) -> None:
    """Teach the slicing a type of your own, and its subclasses.

    `num_rows(value)` counts rows and `take(value, start, stop)` gives those rows as a value of
    the same type. `concat(values)` is the inverse of `take`. `map_tensors(value, fn)` gives a copy
    with `fn` applied to each tensor; without it the tensors among the attributes are mapped.

    Raises:
        TypeError: `cls` is not a class or one of the functions cannot be called.
        ValueError: `cls` is a built-in container or leaf, whose meaning is fixed.

    >>> class Graphs:
    ...     def __init__(self, names):
    ...         self.names = names
    >>> register_batch_type(
    ...     Graphs,
    ...     num_rows=lambda graphs: len(graphs.names),
    ...     take=lambda graphs, start, stop: Graphs(graphs.names[start:stop]),
    ... )
    """
    checked: object = cls
    if not isinstance(checked, type):
        raise TypeError(f"register_batch_type needs a class, got {cls!r}. Pass the type itself.")
    if cls in _BUILT_IN:
        raise ValueError(
            f"{cls.__name__} already has a meaning in a batch. Register a subclass of it, or "
            "declare single parts with batch_layout."
        )
    required: dict[str, Any] = {"num_rows": num_rows, "take": take}
    optional = {"concat": concat, "map_tensors": map_tensors}
    given = {name: function for name, function in optional.items() if function is not None}
    for name, function in (required | given).items():
        if not callable(function):
            raise TypeError(
                f"register_batch_type({cls.__name__}, {name}=...) needs a function, got "
                f"{function!r}. Pass a callable."
            )
    _registered[cls] = BatchType(
        num_rows=num_rows, take=take, concat=concat, map_tensors=map_tensors
    )
    _cached_kind.cache_clear()
    _cached_batch_type.cache_clear()


@functools.lru_cache(maxsize=1024)
def _cached_batch_type(cls: type) -> BatchType | None:
    """The registration that holds for `cls`: its own, its nearest base's, or a known library's."""
    own = next((_registered[base] for base in cls.__mro__ if base in _registered), None)
    return own or batch_type_of_library(cls)


@functools.lru_cache(maxsize=1024)
def _cached_kind(cls: type) -> Kind:
    """The kind of all values of type `cls`."""
    if _cached_batch_type(cls) is not None:
        return Kind.REGISTERED
    # Order matters: PackedSequence and torch.Size are tuples, ModelOutput is also a dataclass.
    ordered: tuple[tuple[Kind, type | tuple[type, ...]], ...] = (
        (Kind.TENSOR, torch.Tensor),
        (Kind.ARRAY, np.ndarray),
        (Kind.PACKED, PackedSequence),
        (Kind.SHARED, _WHOLE_TEXTS),
        (Kind.MAPPING, (Mapping, types.MappingProxyType)),
    )
    for kind, classes in ordered:
        if issubclass(cls, classes):
            return kind
    if dataclasses.is_dataclass(cls) or hasattr(cls, "__attrs_attrs__"):
        return Kind.RECORD
    if issubclass(cls, _NAMESPACES):
        return Kind.RECORD
    if issubclass(cls, tuple) and (hasattr(cls, "_fields") or hasattr(cls, "n_sequence_fields")):
        return Kind.NAMED_TUPLE
    if issubclass(cls, list | tuple):
        return Kind.SEQUENCE
    return Kind.SHARED if issubclass(cls, _SHARED_TYPES) or _is_function(cls) else Kind.UNKNOWN


def _is_function(cls: type) -> bool:
    """Whether values of type `cls` are there to be called: a graph that can be called holds data.

    On the class alone: every class answers to "__call__" through its metaclass.
    """
    if issubclass(cls, type | torch.nn.Module):
        return True
    names = {name for base in cls.__mro__ for name in vars(base)}
    return "__call__" in names and names.isdisjoint(_OF_DATA)


# Typed anew: mypy takes the argument of a cached function for any hashable, which type[Any] is not.
kind_of: Callable[[type], Kind] = _cached_kind
batch_type_of: Callable[[type], BatchType | None] = _cached_batch_type


Builder = Callable[[Sequence[Any]], Any]


def join_path(path: str, key: object) -> str:
    """The path of the part `key` of what lies at `path`.

    >>> join_path("", 1), join_path("1", "boxes")
    ('1', '1.boxes')
    """
    return f"{path}.{key}" if path else str(key)


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


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its dictionary and in slots.

    >>> state_of(types.SimpleNamespace(a=1))
    {'a': 1}
    """
    state = dict(getattr(value, "__dict__", ()))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                state[name] = getattr(value, name)
    return state


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


Counts = frozenset[int | None]
ANY: Counts = frozenset({None})
"""The counts of what holds no rows: None stands for "whatever the others have"."""


class Node:
    """One part of a batch: its value, where it lies, and the row counts it allows.

    A list or tuple may allow two readings: `may_be_items`, and `fields`, the counts that its parts
    agree on (None where they do not). It is open if nothing but the rest of the batch can tell.
    """

    __slots__ = (
        "children",
        "counts",
        "dim",
        "fields",
        "is_open",
        "keys",
        "kind",
        "may_be_items",
        "path",
        "reason",
        "value",
    )

    def __init__(self, value: Any, kind: Kind, path: str, counts: Counts, dim: int = 0) -> None:
        self.value = value
        self.kind = kind
        self.path = path
        self.counts = counts
        self.dim = dim
        self.keys: Sequence[Any] = ()
        self.children: Sequence[Node] = ()
        self.fields: Counts | None = None
        self.may_be_items = False
        self.is_open = False
        self.reason = ""


def common_counts(first: Counts, second: Counts) -> Counts:
    """The row counts that both allow.

    >>> common_counts(frozenset({2, 8}), frozenset({8}))
    frozenset({8})
    """
    if first == second:
        return first
    free_first, free_second = None in first, None in second
    common = {
        count
        for count in first | second
        if (count in first or free_first) and (count in second or free_second)
    }
    return frozenset(common)


def agreement(nodes: Iterable[Node]) -> Counts:
    """The row counts that all `nodes` allow.

    Raises:
        BatchError: there is none; the message names two leaves that disagree.
    """
    counts = ANY
    seen: list[Node] = []
    for node in nodes:
        if node.counts is not ANY and node.counts != counts:
            common = common_counts(counts, node.counts)
            if not common:
                raise _disagreement(seen, node)
            counts = common
        seen.append(node)
    return counts


def _disagreement(before: Sequence[Node], node: Node) -> BatchError:
    opponents = [other for other in before if not common_counts(other.counts, node.counts)]
    others = opponents or [other for other in before if other.counts != ANY]
    first = _witness(others[0], node.counts)
    second = _witness(node, first.counts)
    text = f"The rows of the batch do not agree: {describe(first)}, but {describe(second)}."
    single = next((leaf for leaf in (first, second) if leaf.counts == {1}), None)
    if single is not None:
        return BatchError(
            f"{text} A single row beside more is ambiguous: declare "
            f"batch_layout={{{single.path!r}: 'shared'}} if every microbatch should get "
            f"{where(single.path)} whole, or give it as many rows as the rest."
        )
    for leaf, other in ((second, first), (first, second)):
        if _are_offsets(leaf, other):
            return BatchError(
                f"{text} {where(leaf.path)} seems to say where each row begins in "
                f"{where(other.path)}, as nn.EmbeddingBag takes it, so neither can be cut without "
                "the other: give a list of one tensor per row and join it in the forward, or hold "
                "both in a class of your own and register_batch_type it."
            )
    return BatchError(
        f"{text} Give both the same number of rows, or declare what holds no rows "
        f"(batch_layout={{{second.path!r}: 'shared'}})"
        f"{_or_dimension(first, second) or _or_list(first, second)}."
    )


def _are_offsets(leaf: Node, other: Node) -> bool:
    """Whether integers are places in another leaf, from its begin on, in order."""
    values, pieces = leaf.value, other.value
    if any(
        type(each) is not torch.Tensor or each.device.type != "cpu" for each in (values, pieces)
    ):
        return False
    if values.dim() != 1 or values.is_floating_point() or not 1 < len(values) < len(pieces):
        return False
    places: list[int] = values.tolist()
    return places[0] == 0 and places == sorted(places) and places[1] < places[-1] <= len(pieces)


def _arrays_first(first: Node, second: Node) -> Iterator[tuple[Node, Node]]:
    """Each leaf that has dimensions, the later one first, with the other."""
    for leaf, other in ((second, first), (first, second)):
        if leaf.kind in (Kind.TENSOR, Kind.ARRAY) and not getattr(leaf.value, "is_nested", False):
            yield leaf, other


def _or_dimension(first: Node, second: Node) -> str:
    """The end of a remedy, where one of two leaves has the other's rows in another dimension."""
    for leaf, other in _arrays_first(first, second):
        for dim, size in enumerate(leaf.value.shape):
            if size in other.counts and size not in leaf.counts:
                return f", or which dimension does (batch_layout={{{leaf.path!r}: {dim}}})"
    return ""


def _or_list(first: Node, second: Node) -> str:
    """The end of a remedy, where each row of one leaf may have several of the other: its images."""
    for leaf, other in _arrays_first(first, second):
        counts, fewer = [list(filter(None, each.counts)) for each in (leaf, other)]
        if counts and fewer and min(counts) >= 2 * max(fewer):
            return (
                f"; if each row has several of {where(leaf.path)} (its images, or their patches), "
                "give a list of one tensor per row and join it in the forward"
            )
    return ""


def _witness(node: Node, against: Counts) -> Node:
    """The leaf inside `node` that rules the counts `against` out."""
    if not node.children or node.may_be_items:
        return node
    holding = [child for child in node.children if child.counts != ANY]
    ruling_out = [child for child in holding if not common_counts(child.counts, against)]
    return _witness((ruling_out or holding)[0], against)


def describe(leaf: Node) -> str:
    """A leaf in words, with its path, its rows and its shape."""
    value = leaf.value
    if isinstance(value, torch.Tensor) and not value.is_nested:
        what = f"tensor of shape {tuple(value.shape)}"
    elif isinstance(value, np.ndarray):
        what = f"array of shape {value.shape}"
    elif leaf.kind is Kind.SEQUENCE:
        what = f"{type(value).__name__} of {len(value)} elements"
    else:
        what = type(value).__name__
    if leaf.reason:
        what += f"; not read as parts: {leaf.reason}"
    counts = [count for count in leaf.counts if count is not None]
    rows = " or ".join(f"{count}" for count in sorted(counts))
    return f"{where(leaf.path)} has {rows} row{'s' * (counts != [1])} ({what})"


def or_shared(path: str) -> str:
    """The end of a remedy for a part that need not be cut; the whole batch must be."""
    if not path:
        return ""
    return f", or declare batch_layout={{{path!r}: 'shared'}} to give it whole to every microbatch"


def subject(path: str) -> str:
    """A path at the start of a sentence."""
    return repr(path) if path else "The batch"


def where(path: str) -> str:
    """A path as messages show it.

    >>> where(""), where("1.boxes")
    ('the batch', "'1.boxes'")
    """
    return repr(path) if path else "the batch"
