"""The parts of a batch, and what their row counts have in common."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from automicro.errors import BatchError
from automicro.slicing.kinds import Kind

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
    return BatchError(
        f"{text} Give both the same number of rows, or declare what holds no rows "
        f"(batch_layout={{{second.path!r}: 'shared'}}){_or_dimension(first, second)}."
    )


def _or_dimension(first: Node, second: Node) -> str:
    """The end of a remedy, where one of two leaves has the other's rows in another dimension."""
    for leaf, other in ((second, first), (first, second)):
        if leaf.kind not in (Kind.TENSOR, Kind.ARRAY) or getattr(leaf.value, "is_nested", False):
            continue
        for dim, size in enumerate(leaf.value.shape):
            if size in other.counts and size not in leaf.counts:
                return f", or which dimension does (batch_layout={{{leaf.path!r}: {dim}}})"
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
