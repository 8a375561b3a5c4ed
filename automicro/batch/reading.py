"""How many rows each part of a batch has, where that can be told.

A list may hold one element per row ("items") or parts that each hold all rows ("fields"), and
looking at it alone often cannot tell. So every part of a batch becomes a `Node` with the row
counts it allows, the counts of neighbours are intersected, and what remains decides.
"""

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from automicro.batch.structure import open_container
from automicro.batch.types import (
    STRUCTURES,
    Kind,
    join_path,
    kind_of,
    or_shared,
    row_type_of,
    subject,
    where,
)
from automicro.errors import BatchError

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


def _common_counts(first: Counts, second: Counts) -> Counts:
    """The row counts that both allow.

    >>> _common_counts(frozenset({2, 8}), frozenset({8}))
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
            common = _common_counts(counts, node.counts)
            if not common:
                raise _disagreement(seen, node)
            counts = common
        seen.append(node)
    return counts


def _disagreement(before: Sequence[Node], node: Node) -> BatchError:
    opponents = [other for other in before if not _common_counts(other.counts, node.counts)]
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
        is_array = isinstance(leaf.value, torch.Tensor | np.ndarray) and leaf.kind is Kind.ROWS
        if is_array and not getattr(leaf.value, "is_nested", False):
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
    ruling_out = [child for child in holding if not _common_counts(child.counts, against)]
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


@contextlib.contextmanager
def refusing_cycles() -> Iterator[None]:
    """Refuse a batch that holds itself.

    Raises:
        BatchError: reading it has no end.
    """
    try:
        yield
    except RecursionError as error:
        raise BatchError(
            "a container in the batch holds itself, so that reading the batch has no end; leave it "
            "out, or put it into an object of a class of your own, which is not opened"
        ) from error


_ONCE = (types.GeneratorType, map, zip, filter, enumerate)
_TABLES = ("pandas", "polars", "pyarrow", "datasets", "xarray", "modin", "cudf")
_GRAPHS = (
    "register_batch_type(torch_geometric.data.Batch, num_rows=lambda batch: batch.num_graphs, "
    "take=lambda batch, start, stop: torch_geometric.data.Batch.from_data_list("
    "batch[start:stop]), map_tensors=lambda batch, fn: copy.copy(batch).apply(fn))"
)


def _unknown_type(value: Any, path: str) -> BatchError:
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


def _refuse_iterators(rows: Sequence[Any], path: str) -> None:
    """Refuse rows that can be read only once: a failed attempt would leave nothing for the next."""
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


class Reader:
    """Reads one batch under declarations and under what earlier batches showed."""

    def __init__(
        self, declared: Mapping[str, int | str], dim: int, earlier: Mapping[str, str]
    ) -> None:
        self._declared = declared
        self._dim = dim
        self._earlier = earlier
        self.matched: set[str] = set()
        self.called: list[Node] = []  # objects that can be called, and may hold data all the same

    def read(self, batch: Any) -> Node:
        """The batch as a node.

        Raises:
            BatchError: its parts disagree, or one of them cannot be cut into rows.
        """
        return self._read(batch, "", self._dim)

    def _read(self, value: Any, path: str, dim: int) -> Node:
        declared = self._declared.get(path) if self._declared else None
        if declared is not None:
            self.matched.add(path)
            if isinstance(declared, int):
                dim = declared
                declared = None
            elif declared == "shared":
                return Node(value, Kind.SHARED, path, ANY)
        kind = kind_of(type(value))
        if declared is not None and kind is not Kind.SEQUENCE:
            raise BatchError(
                f"batch_layout says {declared!r} for {where(path)}, which is a "
                f"{type(value).__name__}. Only a list or a tuple can be read as 'items' or "
                "'fields'; remove the entry or correct its path."
            )
        if kind is Kind.ROWS:
            rows = row_type_of(type(value)).count(value, dim, path)  # type: ignore[union-attr]
            if rows is None:
                return Node(value, Kind.SHARED, path, ANY)
            return Node(value, kind, path, frozenset({rows}), dim)
        if kind is Kind.SHARED:
            node = Node(value, kind, path, ANY)
            if callable(value) and not isinstance(value, type | torch.nn.Module):
                self.called.append(node)
            return node
        if kind in STRUCTURES:
            node = Node(value, kind, path, ANY, dim)
            self._read_children(node)
            node.counts = agreement(node.children)
            return node
        if kind is Kind.SEQUENCE:
            return self._read_sequence(value, path, dim, declared)
        raise _unknown_type(value, path)

    def _read_children(self, node: Node) -> None:
        keys, values = open_container(node.value)
        node.keys = keys
        node.children = [
            self._read(value, join_path(node.path, key), node.dim)
            for key, value in zip(keys, values, strict=True)
        ]

    def _read_sequence(self, value: Any, path: str, dim: int, declared: str | None) -> Node:
        node = Node(value, Kind.SEQUENCE, path, ANY, dim)
        if not value and not declared:
            node.fields = ANY if path else frozenset({0})
            node.counts = node.fields
            return node
        reading = declared
        if not declared and _may_hold_rows(value):
            node.is_open = not must_hold_rows(value, is_root=not path)
            reading = self._earlier.get(path) if node.is_open else "items"
        node.may_be_items = reading == "items" or (reading is None and node.is_open)
        if node.may_be_items:
            _refuse_iterators(value, path)
        if reading == "items":
            node.counts = frozenset({len(value)})
            return node
        try:
            self._read_children(node)
            node.fields = agreement(node.children)
        except BatchError as error:
            if not path and isinstance(value, tuple):
                raise BatchError(
                    f"{error} If each element is one row, declare batch_layout={{'': 'items'}}."
                ) from None
            if not node.may_be_items:
                raise
            node.children = ()
            sentence = str(error).partition(". ")[0]
            node.reason = sentence.removeprefix("The rows of the batch do not agree: ")
        if not path and self._is_anchored(node):
            node.may_be_items = node.is_open = False
        node.counts = node.fields or frozenset()
        if node.may_be_items:
            node.counts |= {len(value)}
        return node

    @staticmethod
    def _is_anchored(root: Node) -> bool:
        """Whether the parts of a root list show by themselves that they hold all rows.

        Some part must be sure of its count. For a list, another list is no proof: samples that
        were not collated are a list of lists too.
        """
        if root.fields is None or root.fields == ANY or _look_alike(root.value):
            return False
        nested_counts = isinstance(root.value, tuple)
        return any(
            len(child.counts) == 1
            and child.counts != ANY
            and (nested_counts or child.kind is not Kind.SEQUENCE)
            for child in root.children
        )


def must_hold_rows(value: Any, *, is_root: bool) -> bool:
    """Whether a list or tuple can only hold one element per row.

    So do samples that were not collated (mappings with a key in common, records of one type),
    plain values in a list, texts in a tuple (torch's collate makes those), and unknown objects.
    """
    kinds = {kind_of(type(element)) for element in value}
    if kinds == {Kind.SHARED}:
        return is_root or isinstance(value, list) or all(isinstance(v, str | bytes) for v in value)
    if kinds <= STRUCTURES:
        return not (is_root and isinstance(value, tuple)) and _are_samples(value)
    return kinds == {Kind.UNKNOWN}


def _look_alike(value: Any) -> bool:
    """Whether a list holds three or more values that could be samples, by their equal shapes."""
    if not isinstance(value, list) or len(value) < 3:
        return False
    first, *others = value
    if kind_of(type(first)) is not Kind.ROWS or isinstance(first, PackedSequence):
        return False
    shape = getattr(first, "shape", None)
    return all(
        _signature(each) == _signature(first) and getattr(each, "shape", None) == shape
        for each in others
    )


def _may_hold_rows(value: Any) -> bool:
    """Whether the elements are alike enough to be rows: of one type, tensors of one dtype too."""
    elements = [element for element in value if element is not None]
    if isinstance(value, tuple) and len({isinstance(e, str | bytes) for e in elements}) > 1:
        return False  # a text and its label are a sample
    if len({_signature(element) for element in elements}) > 1:
        return {kind_of(type(v)) for v in elements} in ({Kind.UNKNOWN}, {Kind.SHARED})
    return not elements or _are_samples(elements)


def _are_samples(elements: Sequence[Any]) -> bool:
    """Whether all elements are of one type and, if mappings, have a key in common."""
    if len({type(element) for element in elements}) > 1:
        return False
    if kind_of(type(elements[0])) is not Kind.MAPPING:
        return True
    return len(elements) == 1 or bool(set.intersection(*(set(element) for element in elements)))


def _signature(value: Any) -> tuple[Any, ...]:
    kind = kind_of(type(value))
    if kind is Kind.ROWS and isinstance(value, torch.Tensor | np.ndarray):
        return (type(value), value.dtype, value.ndim)
    if kind is Kind.SEQUENCE:
        return (type(value), type(value[0]) if value else None)
    return (type(value),)


Decisions = dict[str, str]
"""The reading of lists by path: "items" or "fields"."""


def decide(node: Node, num_rows: int, decisions: Decisions, shown: Decisions) -> None:
    """Fix the reading of every list below `node`; `shown` gets those that this batch proves."""
    if node.kind is Kind.SEQUENCE:
        fields = node.fields or frozenset()
        as_items = node.may_be_items and len(node.value) == num_rows
        if as_items and num_rows in fields:
            raise BatchError(
                f"The {type(node.value).__name__} at {where(node.path)} can be read in two ways: "
                f"one element for each of the {num_rows} rows, or {len(node.value)} parts that "
                f"each hold all {num_rows} rows. Declare batch_layout={{{node.path!r}: 'items'}} "
                f"or batch_layout={{{node.path!r}: 'fields'}}."
            )
        reading = "items" if as_items else "fields"
        decisions[node.path] = reading
        # Plain values in a tuple (fields of any count) could be read both ways: no proof.
        if node.is_open and not (as_items and None in fields):
            shown[node.path] = reading
        if as_items:
            return
    for child in node.children:
        if child.children or child.may_be_items:
            decide(child, num_rows, decisions, shown)


def ambiguous(root: Node, counts: Sequence[int]) -> BatchError:
    """The error for a batch that can have any of the row counts `counts`."""
    node = next(node for node in _walk(root) if node.may_be_items and node.fields)
    ways: dict[str, list[str]] = {"items": [], "fields": []}
    for count in counts:
        ways["items" if count == len(node.value) else "fields"].append(str(count))
    declarations = ", ".join(
        f"batch_layout={{{node.path!r}: {word!r}}} for {' or '.join(found)} rows"
        for word, found in ways.items()
        if found
    )
    return BatchError(
        f"The batch can be read with {' or '.join(map(str, counts))} rows, because a list can hold "
        f"one element per row ('items') or parts that each hold all rows ('fields'): "
        f"{describe(node)}. Declare which: {declarations}{_hint(node)}."
    )


def _hint(node: Node) -> str:
    if node.path or not isinstance(node.value, list):
        return ""
    return " (a DataLoader's own collate makes lists of parts)"


def _walk(node: Node) -> list[Node]:
    return [node, *(inner for child in node.children for inner in _walk(child))]
