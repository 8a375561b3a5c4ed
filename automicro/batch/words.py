"""Messages about a batch that cannot be read: which parts disagree, and what to declare."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from automicro.batch.layout import ANY, Counts, Node
from automicro.batch.types import Kind, or_shared, subject, where
from automicro.errors import BatchError


def disagreement(before: Sequence[Node], node: Node) -> BatchError:
    """Return the error for a part whose rows differ from those before it."""
    opponents = [other for other in before if not other.counts_with(node.counts)]
    others = opponents or [other for other in before if other.counts != ANY]
    first = _witness(others[0], node.counts)
    second = _witness(node, first.counts)
    text = f"The rows of the batch do not agree: {_describe(first)}, but {_describe(second)}."
    single = next((leaf for leaf in (first, second) if leaf.counts == {1}), None)
    if single is not None:
        return BatchError(
            f"{text} A single row next to several is ambiguous: declare "
            f"batch_layout={{{single.path!r}: 'shared'}} if every microbatch should get "
            f"{where(single.path)} whole, or give it the same number of rows."
        )
    return BatchError(
        f"{text} Give both the same number of rows (as a list of one tensor per row, if rows have "
        "several entries), or declare the one that holds no rows "
        f"(batch_layout={{{second.path!r}: 'shared'}}){_or_dimension(first, second)}."
    )


def _or_dimension(first: Node, second: Node) -> str:
    """Complete a remedy if one leaf has the other's rows in another dimension."""
    for leaf, other in ((second, first), (first, second)):
        value = leaf.value
        is_array = isinstance(value, torch.Tensor | np.ndarray) and leaf.kind is Kind.ROWS
        if not is_array or getattr(value, "is_nested", False):
            continue
        for dim, size in enumerate(value.shape):
            if size in other.counts and size not in leaf.counts:
                return f", or the dimension that does (batch_layout={{{leaf.path!r}: {dim}}})"
    return ""


def _witness(node: Node, against: Counts) -> Node:
    """Return the leaf inside `node` that rules out the counts `against`."""
    if not node.children or node.may_be_items:
        return node
    holding = [child for child in node.children if child.counts != ANY]
    ruling_out = [child for child in holding if not child.counts_with(against)]
    return _witness((ruling_out or holding)[0], against)


def _describe(leaf: Node) -> str:
    """Describe a leaf with its path, its rows and its shape."""
    value, what = leaf.value, type(leaf.value).__name__
    if isinstance(value, torch.Tensor | np.ndarray) and not getattr(value, "is_nested", False):
        what = f"{what} of shape {tuple(value.shape)}"
    elif leaf.kind is Kind.SEQUENCE:
        what = f"{what} of {len(value)} elements"
    counts = sorted(count for count in leaf.counts if count is not None)
    rows = " or ".join(map(str, counts))
    return f"{where(leaf.path)} has {rows} row{'s' * (counts != [1])} ({what})"


def unknown_type(value: Any, path: str) -> BatchError:
    """Return the error for a value of an unknown type, with the code that registers it."""
    name = type(value).__name__
    remedy = f"Make a list, a dict or a tensor of its rows, or use {_registration(name)}"
    if isinstance(value, torch.utils.data.DataLoader):
        remedy = "Pass its batches one by one: for batch in loader: …"
    elif isinstance(value, Iterator):
        remedy = "It can be read only once, and a retry reads it again: make a list of it"
    return BatchError(
        f"{subject(path)} is of type {name}, and how to cut that into rows is unknown. "
        f"{remedy}{or_shared(path)}."
    )


def refuse_rows_in(value: Any, num_rows: int, path: str) -> None:
    """Refuse to share a callable object that nevertheless holds as many rows as the batch."""
    for name, part in getattr(value, "__dict__", {}).items():
        is_data = isinstance(part, torch.Tensor | np.ndarray) and part.ndim
        if is_data and len(part) == num_rows > 1:
            cls = type(value).__name__
            raise BatchError(
                f"{subject(path)} is of type {cls}, which is callable, but its {name!r} has "
                f"{num_rows} rows, as many as the batch. Use {_registration(cls)}{or_shared(path)}."
            )


def _registration(name: str) -> str:
    """Return the code that registers a class."""
    return (
        f"register_batch_type({name}, num_rows=lambda value: …, take=lambda value, start, stop: …)"
    )


def ambiguous(root: Node, counts: Sequence[int]) -> BatchError:
    """Return the error for a batch with several possible row counts."""
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
        f"one element per row ('items') or parts that each hold all rows ('fields', as a "
        f"DataLoader's own collate makes): {_describe(node)}. Declare which: {declarations}."
    )


def _walk(node: Node) -> list[Node]:
    return [node, *(inner for child in node.children for inner in _walk(child))]
