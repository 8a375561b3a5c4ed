"""Messages about a batch that cannot be read: which parts disagree, and what to declare."""

from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np
import torch

from automicro.batch.reading import ANY, Counts, Node
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
    for leaf, other in ((second, first), (first, second)):
        if _are_offsets(leaf, other):
            return BatchError(
                f"{text} {where(leaf.path)} seems to hold the offsets of the rows in "
                f"{where(other.path)}, as for nn.EmbeddingBag, so neither can be cut without the "
                "other: give a list of one tensor per row and join it in the forward, or hold both "
                "in a class of your own and register it with register_batch_type."
            )
    return BatchError(
        f"{text} Give both the same number of rows, or declare the one that holds no rows "
        f"(batch_layout={{{second.path!r}: 'shared'}})"
        f"{_or_dimension(first, second) or _or_list(first, second)}."
    )


def _are_offsets(leaf: Node, other: Node) -> bool:
    """Whether integers are ascending offsets into another leaf, starting at 0."""
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
    """Yield each leaf that has dimensions with the other one, starting with the later leaf."""
    for leaf, other in ((second, first), (first, second)):
        is_array = isinstance(leaf.value, torch.Tensor | np.ndarray) and leaf.kind is Kind.ROWS
        if is_array and not getattr(leaf.value, "is_nested", False):
            yield leaf, other


def _or_dimension(first: Node, second: Node) -> str:
    """Complete a remedy if one leaf has the other's rows in another dimension."""
    for leaf, other in _arrays_first(first, second):
        for dim, size in enumerate(leaf.value.shape):
            if size in other.counts and size not in leaf.counts:
                return f", or the dimension that does (batch_layout={{{leaf.path!r}: {dim}}})"
    return ""


def _or_list(first: Node, second: Node) -> str:
    """Complete a remedy if each row of one leaf may have several of the other, such as images."""
    for leaf, other in _arrays_first(first, second):
        counts, fewer = [list(filter(None, each.counts)) for each in (leaf, other)]
        if counts and fewer and min(counts) >= 2 * max(fewer):
            return (
                f"; if each row has several of {where(leaf.path)} (its images, or their patches), "
                "give a list of one tensor per row and join it in the forward"
            )
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


_TABLES = ("pandas", "polars", "pyarrow", "datasets", "xarray", "modin", "cudf")
_GRAPHS = (
    "register_batch_type(torch_geometric.data.Batch, num_rows=lambda batch: batch.num_graphs, "
    "take=lambda batch, start, stop: torch_geometric.data.Batch.from_data_list("
    "batch[start:stop]), map_tensors=lambda batch, fn: copy.copy(batch).apply(fn))"
)


def unknown_type(value: Any, path: str) -> BatchError:
    """Return the error for a value of an unknown type, with the code that registers it."""
    cls = type(value)
    name = cls.__name__
    text = f"{subject(path)} is of type {name}, and how to cut that into rows is unknown."
    libraries = {base.__module__.partition(".")[0] for base in cls.__mro__}
    if not path and isinstance(value, torch.utils.data.DataLoader):
        return BatchError(f"{text} Pass its batches one by one: for batch in loader: …")
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


def _is_like_a_list(cls: type) -> bool:
    return all(hasattr(cls, method) for method in ("__getitem__", "__len__", "append"))


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
        f"one element per row ('items') or parts that each hold all rows ('fields'): "
        f"{_describe(node)}. Declare which: {declarations}{_hint(node)}."
    )


def _hint(node: Node) -> str:
    if node.path or not isinstance(node.value, list):
        return ""
    return " (a DataLoader's own collate makes lists of parts)"


def _walk(node: Node) -> list[Node]:
    return [node, *(inner for child in node.children for inner in _walk(child))]
