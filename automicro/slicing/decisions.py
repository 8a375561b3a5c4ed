"""Choosing one reading of every list in a batch, or saying why that would be a guess."""

from collections.abc import Sequence

from automicro.errors import BatchError
from automicro.slicing.kinds import Kind
from automicro.slicing.nodes import Node, describe, where

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
