"""The number of rows that each part of a batch has, as far as it can be determined.

A list may hold one element per row ("items") or parts that each hold all rows ("fields"), and
often the list itself does not show which. So every part of a batch becomes a `Node` with the row
counts it allows, the counts of all parts are intersected, and the remaining one decides.
"""

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from automicro.batch.tensors import open_container
from automicro.batch.types import (
    STRUCTURES,
    Kind,
    join_path,
    kind_of,
    row_type_of,
    where,
)
from automicro.errors import BatchError

Counts = frozenset[int | None]
ANY: Counts = frozenset({None})
"""The counts of a part without rows: None stands for "the same as the others"."""


@dataclass(slots=True)
class Node:
    """One part of a batch: its value, its path, and the row counts it allows."""

    value: Any
    kind: Kind
    path: str
    counts: Counts
    dim: int = 0
    keys: Sequence[Any] = ()
    children: "Sequence[Node]" = ()
    # A list or tuple may allow two readings. `fields` has the counts that its parts agree on, or
    # None if they disagree. It is open if only the rest of the batch can decide.
    fields: Counts | None = None
    may_be_items: bool = False
    is_open: bool = False

    def counts_with(self, others: Counts) -> Counts:
        """Return the row counts that both this part and others allow."""
        # Most parts agree at once.
        if others == self.counts:
            return others
        is_free, are_free = None in self.counts, None in others
        return frozenset(
            count
            for count in self.counts | others
            if (count in self.counts or is_free) and (count in others or are_free)
        )


def agreement(nodes: Iterable[Node]) -> Counts:
    """Return the row counts that all `nodes` allow."""
    counts = ANY
    seen: list[Node] = []
    for node in nodes:
        # By identity first: a batch may have thousands of shared values.
        if node.counts is not ANY and node.counts != counts:
            common = node.counts_with(counts)
            if not common:
                from automicro.batch.words import disagreement

                raise disagreement(seen, node)
            counts = common
        seen.append(node)
    return counts


def holds_itself() -> BatchError:
    """Return the error for a batch that contains itself."""
    return BatchError(
        "a container in the batch holds itself, so reading the batch never ends; leave it out, or "
        "put it into an object of a class of your own, which is not opened"
    )


_ONCE = (types.GeneratorType, map, zip, filter, enumerate)


def _refuse_iterators(rows: Sequence[Any], path: str) -> None:
    """Refuse rows that can be read only once, because a retry reads them again."""
    if rows and isinstance(rows[0], _ONCE):
        raise BatchError(
            f"The rows of {path!r} are of type {type(rows[0]).__name__}, which can be read only "
            "once, and a retry reads them again. Make lists of them in the dataset."
        )


class Reader:
    """A reader of one batch that uses declarations and the decisions of earlier batches."""

    def __init__(
        self, declared: Mapping[str, int | str], dim: int, earlier: Mapping[str, str]
    ) -> None:
        self._declared = declared
        self._dim = dim
        self._earlier = earlier
        self.matched: set[str] = set()
        self.called: list[Node] = []  # callable objects, which might hold data nevertheless

    def read(self, batch: Any) -> Node:
        """Return the batch as a node."""
        return self._read(batch, "", self._dim)

    def _read(self, value: Any, path: str, dim: int) -> Node:
        declared = self._declared.get(path) if self._declared else None
        if declared is not None:
            self.matched.add(path)
            # A dimension applies to all parts below, which are still read.
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
            # An error names them if they hold as many rows as the batch.
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
        from automicro.batch.words import unknown_type

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
        # An empty list inside a batch is an empty part; as the batch itself it has no rows.
        if not value and not declared:
            node.fields = ANY if path else frozenset({0})
            node.counts = node.fields
            return node
        # Declarations take precedence, then the elements themselves, then earlier batches.
        reading = declared or reading_of(value, is_root=not path)
        node.is_open = reading is None
        reading = reading or self._earlier.get(path)
        node.may_be_items = reading != "fields"
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
        if not path and self._is_anchored(node):
            node.may_be_items = node.is_open = False
        node.counts = node.fields or frozenset()
        if node.may_be_items:
            node.counts |= {len(value)}
        return node

    @staticmethod
    def _is_anchored(root: Node) -> bool:
        """Whether the parts of a root list show that they hold all rows."""
        # At least one part must be sure of its count. In a list, another list is no proof, because
        # samples that were not collated are a list of lists, too.
        if root.fields is None or root.fields == ANY:
            return False
        is_tuple = isinstance(root.value, tuple)
        # A list of three or more tensors of one shape almost always holds samples, not columns.
        shapes = {getattr(each, "shape", None) for each in root.value}
        if not is_tuple and len(root.value) > 2 and None not in shapes and len(shapes) == 1:
            return False  # samples of one shape, such as images
        return any(
            len(child.counts) == 1
            and child.counts != ANY
            and (is_tuple or child.kind is not Kind.SEQUENCE)
            for child in root.children
        )


def reading_of(value: Any, *, is_root: bool) -> str | None:
    """Return how the elements show a list is read: "items" or "fields"; else None.

    >>> reading_of([{"x": 1}, {"x": 2}], is_root=True), reading_of([1, {}], is_root=True)
    ('items', 'fields')
    """
    # Samples are items: mappings with a common key and records (unless a tuple of them is the
    # batch), texts, values in a list, opaque objects. Elements of different kinds are fields.
    # None stands for a missing element, and shows nothing about the others.
    elements = [element for element in value if element is not None]
    kinds = {kind_of(type(element)) for element in elements}
    texts = {isinstance(element, str | bytes) for element in elements}
    is_tuple = isinstance(value, tuple)
    if is_tuple and len(texts) > 1:
        return "fields"  # a text and its label are a sample
    if kinds == {Kind.UNKNOWN}:
        return "items"
    if kinds <= {Kind.SHARED}:
        return "items" if is_root or not is_tuple or texts == {True} else None
    # Rows are of one kind; columns seldom are.
    if len({_signature(element) for element in elements}) > 1:
        return "fields"
    is_several = kinds == {Kind.MAPPING} and len(elements) > 1
    # Mappings without a common key are named columns, not rows of one form.
    if is_several and not set.intersection(*map(set, elements)):
        return "fields"
    return "items" if kinds <= STRUCTURES and not (is_root and is_tuple) else None


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
    """Fix the reading of every list below `node`; `shown` receives those that this batch proves."""
    if node.kind is Kind.SEQUENCE:
        fields = node.fields or frozenset()
        as_items = node.may_be_items and len(node.value) == num_rows
        # The numbers of rows and parts are equal: a wrong choice would silently train on wrong
        # rows.
        if as_items and num_rows in fields:
            raise BatchError(
                f"The {type(node.value).__name__} at {where(node.path)} can be read in two ways: "
                f"one element for each of the {num_rows} rows, or {len(node.value)} parts that "
                f"each hold all {num_rows} rows. Declare batch_layout={{{node.path!r}: 'items'}} "
                f"or batch_layout={{{node.path!r}: 'fields'}}."
            )
        reading = "items" if as_items else "fields"
        decisions[node.path] = reading
        # Plain values in a tuple (fields of any count) allow both readings, so they prove nothing.
        if node.is_open and not (as_items and None in fields):
            shown[node.path] = reading
        if as_items:
            return
    for child in node.children:
        if child.children or child.may_be_items:
            decide(child, num_rows, decisions, shown)
