"""Reading and cutting whole batches: the rows of each part, declarations, ambiguous lists, pieces.

A list may hold one element per row ("items") or parts that each hold all rows ("fields"), and
often the list itself does not show which. So every part of a batch becomes a `Node` with the row
counts it allows, the counts of all parts are intersected, and the remaining one decides.
"""

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from automicro.batch.tensors import builder, open_container, tensor_leaves
from automicro.batch.types import (
    STRUCTURES,
    TENSORS,
    Kind,
    Pieces,
    join_path,
    kind_of,
    row_type_of,
    where,
)
from automicro.errors import BatchError, suggestion
from automicro.policy.policy import require_size

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


def balanced_sizes(num_rows: int, microbatch_size: int, *, min_rows: int = 1) -> list[int]:
    """Cut `num_rows` into the fewest microbatches of at most `microbatch_size` rows, balanced.

    >>> balanced_sizes(10, 4)
    [4, 3, 3]
    >>> balanced_sizes(5, 2, min_rows=2)
    [3, 2]
    """
    if num_rows < 1:
        raise BatchError(f"A batch of {num_rows} rows cannot be cut: give at least one row.")
    pieces = -(-num_rows // microbatch_size)
    if min_rows > 1:
        # A floor, because BatchNorm cannot train on one row. Pieces may exceed `microbatch_size`.
        pieces = min(pieces, max(1, num_rows // min_rows))
    # Balanced, because the largest piece decides the memory, and a small last one wastes a launch.
    # The larger ones come first and differ by one row, so that there are at most two shapes.
    small, larger = divmod(num_rows, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


_WORDS = ("shared", "items", "fields")


_MOST_PARTS = 16


def _plain_form(batch: Any) -> Any:
    """Return types, keys and shapes of a batch of dense tensors, which determine its rows."""
    kind = type(batch)
    if kind is torch.Tensor:
        # The rows of other tensors do not follow from their shape.
        is_dense = batch.layout is torch.strided and not batch.is_nested
        return (batch.shape, batch.dtype) if is_dense else None
    if kind is dict and len(batch) <= _MOST_PARTS:
        keys, parts = tuple(batch), batch.values()
    elif (kind is tuple or kind is list) and len(batch) <= _MOST_PARTS:
        keys, parts = (), batch
    else:
        return None
    forms = []
    for part in parts:
        form = _plain_form(part)
        if form is None:
            return None
        forms.append(form)
    return kind, keys, forms


class BatchLayout:
    """The layout of rows in batches: as declared, and as earlier batches resolved lists.

    >>> layout = BatchLayout({"mask": "shared"})
    >>> batch = {"x": torch.arange(3), "mask": torch.ones(1, 5)}
    >>> layout.num_rows(batch)
    3
    >>> [piece["x"].tolist() for piece in layout.split(batch, [2, 1])]
    [[0, 1], [2]]
    """

    def __init__(self, batch_layout: int | Mapping[str, int | str] = 0) -> None:
        self._dim, self._declared = _parse(batch_layout)
        self._decisions: Decisions = {}
        self._matched: set[str] = set()
        # The form of the last batch, its rows, and the dimensions in which its tensors are cut.
        self._known: tuple[Any, int, list[int | None]] | None = None
        # Whether the last batch is itself a list of rows, and not of parts.
        self.holds_rows = False

    def num_rows(self, batch: Any) -> int:
        """Return the number of rows of `batch`.

        Raises:
            BatchError: its parts disagree, are ambiguous, or hold no rows.
        """
        form = _plain_form(batch)
        if self._known is not None and form is not None and form == self._known[0]:
            return self._known[1]
        return self._read_anew(batch, form)[1]

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Cut `batch` into consecutive microbatches of `sizes` rows, which must sum to its rows.

        Containers keep their types; tensors and arrays are views into the batch.
        """
        form, known = _plain_form(batch), self._known
        # The fast path reads nothing; if the sizes are wrong, the slow path says why.
        if known and form is not None and form == known[0] and sum(sizes) == known[1]:
            return list(_cut_plain(batch, list(sizes), iter(known[2])))
        root, num_rows, decisions = self._read_anew(batch, form)
        if sum(sizes) != num_rows:
            raise BatchError(
                f"Microbatches of {list(sizes)} rows sum to {sum(sizes)}, but the batch has "
                f"{num_rows} rows. Compute the sizes from its own number of rows."
            )
        return list(_cut(root, Pieces.of_sizes(sizes), num_rows, decisions))

    def take_rows(self, batch: Any, indices: Sequence[int]) -> Any:
        """Return a copy of the rows at `indices`, in that order, as a batch."""
        root, num_rows, decisions = self._read(batch)
        if not indices or not all(0 <= index < num_rows for index in indices):
            raise BatchError(
                f"Rows {list(indices)} were requested from a batch of {num_rows} rows. Give at "
                f"least one index, each from 0 to {num_rows - 1}."
            )
        return _cut(root, Pieces([list(indices)]), num_rows, decisions)[0]

    def shared(self, batch: Any) -> list[torch.Tensor]:
        """Return the tensors that every slice receives whole; none for a batch of one row.

        >>> len(BatchLayout({"w": "shared"}).shared({"x": torch.ones(4, 2), "w": torch.ones(3)}))
        1
        """
        num_rows = self.num_rows(batch)
        if num_rows < 2:
            return []
        first, rest = map(tensor_leaves, self.split(batch, [1, num_rows - 1]))
        also = {id(tensor) for _, tensor in rest}
        return [tensor for _, tensor in first if id(tensor) in also]

    def row_dims(self, batch: Any) -> dict[str, int]:
        """Return the dimension of the rows of each plain tensor that is cut, by its path."""
        root, _, decisions = self._read(batch)
        return dict(_row_dims(root, decisions))

    def _read_anew(self, batch: Any, form: Any) -> tuple[Node, int, Decisions]:
        root, num_rows, decisions = self._read(batch)
        if form is not None and "items" not in decisions.values():
            self._known = form, num_rows, _plain_dims(root)
        return root, num_rows, decisions

    def _read(self, batch: Any) -> tuple[Node, int, Decisions]:
        if self._decisions:
            try:
                return self._read_with(batch, self._decisions)
            except BatchError:
                # The structure may have changed, so read this batch without earlier decisions.
                pass
        return self._read_with(batch, {})

    def _read_with(self, batch: Any, earlier: Decisions) -> tuple[Node, int, Decisions]:
        reader = Reader(self._declared, self._dim, earlier)
        try:
            root = reader.read(batch)
        except BatchError:
            # A mistyped path is the more likely cause of the error.
            self._check_declared(batch, {"", *self._matched, *_all_paths(batch, "")})
            raise
        self._matched |= reader.matched
        if len(self._matched) < len(self._declared):
            self._check_declared(batch, self._matched)
        counts = sorted(count for count in root.counts if count is not None)
        if len(counts) > 1:
            from automicro.batch.words import ambiguous

            raise ambiguous(root, counts)
        if not counts:
            raise BatchError(
                f"The batch ({type(batch).__name__}) holds nothing that has rows: no tensor or "
                "array of at least one dimension and no list. Check the output of the loader, or "
                "use register_batch_type for a class of your own."
            )
        if counts[0] == 0:
            raise BatchError(
                "The batch has no rows. Skip empty batches, or check the sampler and the dataset."
            )
        for node in reader.called:
            from automicro.batch.words import refuse_rows_in

            refuse_rows_in(node.value, counts[0], node.path)
        decisions: Decisions = {}
        shown: Decisions = {}
        decide(root, counts[0], decisions, shown)
        self._decisions.update(shown)
        self._known = None
        self.holds_rows = decisions.get("") == "items"
        return root, counts[0], decisions

    def _check_declared(self, batch: Any, found: set[str]) -> None:
        paths = _all_paths(batch, "")
        for path in sorted(self._declared.keys() - found):
            known = ", ".join(map(repr, paths[:20])) or "none"
            raise BatchError(
                f"batch_layout names {path!r}{_hint(path, paths)}, which is not a part of the "
                f"batch or is inside a list of rows. Parts of the batch: {known}. Correct the path "
                f"or remove it."
            )


def _hint(name: object, known: Collection[str]) -> str:
    return "" if name in known else suggestion(name, known)


def _parse(batch_layout: Any) -> tuple[int, dict[str, int | str]]:
    if isinstance(batch_layout, bool) or not isinstance(batch_layout, int | Mapping):
        raise TypeError(
            f"batch_layout must be a dimension or a mapping from paths, got {batch_layout!r} "
            f"({type(batch_layout).__name__}). Pass for example batch_layout=1 or "
            "batch_layout={'images': 'items'}."
        )
    if isinstance(batch_layout, int):
        return batch_layout, {}
    declared: dict[str, int | str] = {}
    for path, meaning in batch_layout.items():
        is_dim = isinstance(meaning, int) and not isinstance(meaning, bool)
        if not is_dim and (meaning not in _WORDS or (path == "" and meaning == "shared")):
            raise ValueError(
                f"batch_layout[{path!r}] is {meaning!r}{_hint(meaning, _WORDS)}. Give a dimension, "
                "'shared', 'items' or 'fields' (the batch as a whole cannot be 'shared')."
            )
        declared[str(path)] = meaning
    return 0, declared


def _all_paths(value: Any, path: str) -> list[str]:
    kind = kind_of(type(value))
    if kind not in STRUCTURES and kind is not Kind.SEQUENCE:
        return [path] if path else []
    paths = [path] if path else []
    for key, part in zip(*open_container(value), strict=True):
        paths += _all_paths(part, join_path(path, key))
    return paths


def _cut(node: Node, pieces: Pieces, num_rows: int, decisions: Decisions) -> Sequence[Any]:
    """Return the share of the value at `node` in each piece of the batch."""
    kind, value = node.kind, node.value
    if kind is Kind.ROWS:
        row_type = row_type_of(type(value))
        assert row_type is not None
        return row_type.cut(value, pieces, node.dim, node.path)
    if kind is Kind.SHARED:
        return [value] * len(pieces)
    if kind is Kind.SEQUENCE and decisions.get(node.path) == "items":
        return list(map(builder(value, ()), pieces.of(value)))
    columns = [_cut(child, pieces, num_rows, decisions) for child in node.children]
    rows = zip(*columns, strict=True) if columns else [()] * len(pieces)
    found = list(map(builder(value, node.keys), rows))
    # The tokenizer's record of each row, in a BatchEncoding of Hugging Face.
    records = getattr(value, "encodings", None) if kind is Kind.MAPPING else None
    if isinstance(records, list) and len(records) == num_rows:
        for piece, own in zip(found, pieces.of(records), strict=True):
            piece._encodings = own
    return found


def _plain_dims(node: Node) -> list[int | None]:
    """Return the dimension in which each tensor of a plain batch is cut; None if it is shared."""
    # In order, because the paths of two tensors can be the same text.
    if node.kind is Kind.ROWS:
        return [node.dim]
    if node.kind is Kind.SHARED:
        return [None] * len(tensor_leaves(node.value))
    return [dim for child in node.children for dim in _plain_dims(child)]


def _cut_plain(batch: Any, sizes: list[int], dims: Iterator[int | None]) -> Sequence[Any]:
    """Cut a batch whose `_plain_form` equals that of a batch cut before."""
    kind = type(batch)
    if kind is torch.Tensor:
        dim = next(dims)
        if dim is None:
            return [batch] * len(sizes)
        pieces: Sequence[Any] = batch.split_with_sizes(sizes, dim)
        return pieces
    parts = batch.values() if kind is dict else batch
    columns = [_cut_plain(part, sizes, dims) for part in parts]
    rows = zip(*columns, strict=True) if columns else [()] * len(sizes)
    if kind is dict:
        keys = tuple(batch)
        return [dict(zip(keys, row, strict=True)) for row in rows]
    return list(rows) if kind is tuple else list(map(list, rows))


def _row_dims(node: Node, decisions: Decisions) -> Iterator[tuple[str, int]]:
    if node.kind is Kind.ROWS:
        value: Any = node.value
        is_tensor = row_type_of(type(value)) is TENSORS and not value.is_nested
        if is_tensor and value.layout is torch.strided:
            yield node.path, node.dim % value.dim()
        return
    if node.kind is Kind.SEQUENCE and decisions.get(node.path) == "items":
        return
    for child in node.children:
        yield from _row_dims(child, decisions)


def num_rows(batch: Any, *, batch_layout: int | Mapping[str, int | str] = 0) -> int:
    """Return the number of rows of an optimization batch.

    Rows are dimension 0 of tensors and arrays, elements of lists, and sequences of packed and
    nested tensors; all rows share scalars, None, texts and 0-d tensors. `batch_layout` declares
    exceptions (see `split_batch`).

    Raises:
        BatchError: parts of the batch disagree, are ambiguous, or hold no rows.

    >>> num_rows({"x": torch.zeros(8, 3), "names": ["a"] * 8, "temperature": 0.5})
    8
    """
    return BatchLayout(batch_layout).num_rows(batch)


def split_batch(
    batch: Any, microbatch_size: int, *, batch_layout: int | Mapping[str, int | str] = 0
) -> list[Any]:
    """Cut an optimization batch into balanced microbatches of at most `microbatch_size` rows.

    Every container keeps its type, every row is in exactly one microbatch, and tensors are
    views into the batch.

    Args:
        batch: the batch.
        microbatch_size: most rows of a microbatch.
        batch_layout: the dimension of the rows in every tensor, or a mapping from paths such as
            ``"labels"`` or ``"1.boxes"`` (``""`` is the batch itself) to a dimension for the
            tensors at or below the path; ``"shared"``, given whole to every microbatch;
            ``"items"``, a list with one element per row; or ``"fields"``, a list of parts that
            each hold all rows.

    Raises:
        BatchError: parts of the batch disagree, are ambiguous, or hold no rows.
        TypeError: `microbatch_size` is not an int.
        ValueError: `microbatch_size` is smaller than 1.

    >>> batch = (torch.arange(10), list("abcdefghij"))
    >>> for x, names in split_batch(batch, 4):
    ...     print(x.tolist(), names)
    [0, 1, 2, 3] ['a', 'b', 'c', 'd']
    [4, 5, 6] ['e', 'f', 'g']
    [7, 8, 9] ['h', 'i', 'j']
    """
    size = require_size(microbatch_size, name="microbatch_size")
    layout = BatchLayout(batch_layout)
    return layout.split(batch, balanced_sizes(layout.num_rows(batch), size))
