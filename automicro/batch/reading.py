"""How many rows each part of a batch has, where that can be told.

A list may hold one element per row ("items") or parts that each hold all rows ("fields"), and
looking at it alone often cannot tell. So every part of a batch becomes a `Node` with the row
counts it allows, the counts of neighbours are intersected, and what remains decides.
"""

import types
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from automicro.batch.cutting import packed_num_rows
from automicro.batch.structure import (
    ANY,
    STRUCTURES,
    Kind,
    Node,
    agreement,
    batch_type_of,
    describe,
    join_path,
    kind_of,
    open_container,
    or_shared,
    subject,
    where,
)
from automicro.errors import BatchError

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


_LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


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
        if kind is Kind.TENSOR:
            return self._read_tensor(value, path, dim)
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
        return self._read_other_leaf(value, kind, path, dim)

    def _read_tensor(self, value: torch.Tensor, path: str, dim: int) -> Node:
        if value.is_nested:
            return Node(value, Kind.TENSOR, path, frozenset({value.size(0)}))
        if value.layout not in _LAYOUTS:
            raise BatchError(
                f"{subject(path)} is a tensor of layout {value.layout}, which cannot be cut into "
                "rows. Convert it to a dense, COO or CSR tensor, or wrap it in a class known to "
                f"register_batch_type{or_shared(path)}."
            )
        shape = value.shape
        if not shape:
            return Node(value, Kind.SHARED, path, ANY)
        return Node(value, Kind.TENSOR, path, frozenset({rows_along(shape, dim, path)}), dim)

    def _read_other_leaf(self, value: Any, kind: Kind, path: str, dim: int) -> Node:
        if kind is Kind.ARRAY:
            if value.ndim == 0:
                return Node(value, Kind.SHARED, path, ANY)
            return Node(value, kind, path, frozenset({rows_along(value.shape, dim, path)}), dim)
        if kind is Kind.PACKED:
            return Node(value, kind, path, frozenset({packed_num_rows(value)}))
        if kind is Kind.REGISTERED:
            batch_type = batch_type_of(type(value))
            assert batch_type is not None
            if dim and batch_type.has_dimensions:
                own = f", or declare batch_layout={{'': {dim}, {path!r}: 0}}" if path else ""
                raise BatchError(
                    f"{subject(path)} is a {type(value).__name__}, whose rows are dimension 0 of "
                    f"its batch_size, and batch_layout says dimension {dim}. Transpose it{own}."
                )
            return Node(value, kind, path, frozenset({batch_type.num_rows(value)}))
        raise unknown_type(value, path)

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
        if not declared and may_hold_rows(value):
            node.is_open = not must_hold_rows(value, is_root=not path)
            reading = self._earlier.get(path) if node.is_open else "items"
        node.may_be_items = reading == "items" or (reading is None and node.is_open)
        if node.may_be_items:
            refuse_iterators(value, path)
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
        if root.fields is None or root.fields == ANY or look_alike(root.value):
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
        return not (is_root and isinstance(value, tuple)) and are_samples(value)
    return kinds == {Kind.UNKNOWN}


def look_alike(value: Any) -> bool:
    """Whether a list holds three or more values that could be samples, by their equal shapes.

    A pair is what torch's collate makes of inputs and targets; images of one size are not.
    """
    if not isinstance(value, list) or len(value) < 3:
        return False
    first, *others = value
    if kind_of(type(first)) not in (Kind.TENSOR, Kind.ARRAY, Kind.REGISTERED):
        return False
    shape = getattr(first, "shape", None)
    return all(
        _signature(each) == _signature(first) and getattr(each, "shape", None) == shape
        for each in others
    )


def may_hold_rows(value: Any) -> bool:
    """Whether the elements are alike enough to be rows: of one type, tensors of one dtype too."""
    elements = [element for element in value if element is not None]
    if isinstance(value, tuple) and len({isinstance(e, str | bytes) for e in elements}) > 1:
        return False  # a text and its label are a sample
    if len({_signature(element) for element in elements}) > 1:
        return {kind_of(type(v)) for v in elements} in ({Kind.UNKNOWN}, {Kind.SHARED})
    return not elements or are_samples(elements)


def are_samples(elements: Sequence[Any]) -> bool:
    """Whether all elements are of one type and, if mappings, have a key in common."""
    if len({type(element) for element in elements}) > 1:
        return False
    if kind_of(type(elements[0])) is not Kind.MAPPING:
        return True
    return len(elements) == 1 or bool(set.intersection(*(set(element) for element in elements)))


def _signature(value: Any) -> tuple[Any, ...]:
    kind = kind_of(type(value))
    if kind is Kind.TENSOR or kind is Kind.ARRAY:
        return (type(value), value.dtype, value.ndim)
    if kind is Kind.SEQUENCE:
        return (type(value), type(value[0]) if value else None)
    return (type(value),)


def rows_along(shape: Sequence[int], dim: int, path: str) -> int:
    """The size of dimension `dim`, with an error that tells what to declare where it is absent."""
    if not -len(shape) <= dim < len(shape):
        raise BatchError(
            f"{subject(path)} of shape {tuple(shape)} has no dimension {dim}, where batch_layout "
            f"says its rows lie. Declare its own: batch_layout={{'': {dim}, {path!r}: 0}}."
        )
    return shape[dim]


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
