"""Which rows of a batch can tell one average from another, and what they have yet to show."""

import math
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import tensor_leaves
from automicro.errors import BatchError
from automicro.loss.averages import IGNORED

MAX_ROWS = 16
_PART_ROWS = 5
_CLASSES_AT_ONCE = 8
_READ_ROWS = 256  # of structures that are no plain tensors, spread over the batch
_CUTS_TRIED = 48


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that a loss may count, row by row.

    Attributes:
        path: of the tensor.
        kind: ``"valid"`` (targets that are not ignored), ``"nonzero"``, ``"tail"`` (equal values
            at the end, as padding is), ``"weight"``, ``"size"``, or ``"class"``.
        values: shape (rows,), float64, on the host.
    """

    path: str
    kind: str
    values: Tensor

    @property
    def varies(self) -> bool:
        """Whether rows differ in it."""
        return bool(self.values.numel()) and float(self.values.min()) != float(self.values.max())

    def of(self, rows: Sequence[int]) -> Tensor:
        """Those of some rows."""
        return self.values[list(rows)]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Rows to look at, in two uneven parts.

    Attributes:
        small: indices of the one part.
        large: of the other.
        pending: what rows did not differ in, although a loss may count it: later batches are worth
            a look. Paths and kinds.
        classes: which classes are among the rows, by path.
    """

    small: Sequence[int]
    large: Sequence[int]
    pending: frozenset[tuple[str, str]] = frozenset()
    classes: Mapping[str, frozenset[float]] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """All of them."""
        return [*self.small, *self.large]


def choose_rows(
    layout: BatchLayout,
    batch: Any,
    num_rows: int,
    *,
    most: int = MAX_ROWS,
    met: Mapping[str, Iterable[float]] | None = None,
    seed: int = 0,
) -> Choice:
    """Rows that differ in what a loss may count: classes, ignored targets, padding, weights.

    Args:
        layout: of the batch.
        batch: as a whole.
        num_rows: of it, at least two.
        most: rows to choose.
        met: classes that earlier looks have seen, by path; others come first.
        seed: of the cut; another one leads to parts of other sizes, too.
    """
    features = read_features(layout, batch, num_rows)
    rows = _telling(features, num_rows, most, met or {})
    small, large = _cut(features, rows, seed)
    chosen = small + large
    pending = {
        (each.path, each.kind)
        for each in features
        if each.kind != "class" and not _varies_among(each, chosen)
    }
    classes = {
        each.path: frozenset(each.of(chosen).tolist()) for each in features if each.kind == "class"
    }
    return Choice(small=small, large=large, pending=frozenset(pending), classes=classes)


def other_rows(choice: Choice, num_rows: int) -> Choice | None:
    """As many rows as were chosen, all others than these; None where there are not as many.

    >>> other_rows(Choice(small=[0], large=[1, 7]), 8)
    Choice(small=[2], large=[4, 6], pending=frozenset(), classes={})
    """
    count, chosen = len(choice.rows), set(choice.rows)
    rest = [row for row in range(num_rows) if row not in chosen]
    if len(rest) < count:
        return None
    rows = [rest[index * (len(rest) - 1) // (count - 1)] for index in range(count)]
    return Choice(small=rows[: len(choice.small)], large=rows[len(choice.small) :])


def _varies_among(feature: Feature, rows: Sequence[int]) -> bool:
    values = feature.of(rows)
    return float(values.min()) != float(values.max())


def read_features(
    layout: BatchLayout, batch: Any, num_rows: int, *, only: Collection[str] | None = None
) -> list[Feature]:
    """What a loss may count in each row, of every tensor of a batch, or of some by path."""
    try:
        dims = layout.row_dims(batch)
    except BatchError:
        dims = {}
    found: list[Feature] = []
    ragged = only is not None and "" in only
    for path, leaf in layout.leaves(batch):
        if only is not None and path not in only:
            continue
        dim = dims.get(path)
        if dim is None or leaf.is_complex() or leaf.shape[dim] != num_rows:
            # Rows in lists and ragged tensors; what is shared shows the same for every row.
            ragged = True
            continue
        flat = leaf.detach().movedim(dim, 0).reshape(num_rows, -1)
        found += _features_of(path, flat)
    if ragged:
        found += _features_of_rows(layout, batch, num_rows, known={each.path for each in found})
    return found


def _features_of(path: str, flat: Tensor) -> list[Feature]:
    """Those of a plain tensor of shape (rows, values in a row)."""
    if not flat.shape[1]:
        return []
    found: dict[str, Tensor] = {}
    if flat.is_floating_point():
        if bool((flat >= 0).all()):
            found["weight"] = flat.sum(1, dtype=torch.float32)
    elif flat.shape[1] == 1:
        found["class"] = flat[:, 0]
        found["valid"] = (flat[:, 0] != IGNORED).long()
    else:
        found["valid"] = (flat != IGNORED).sum(1)
        found["nonzero"] = (flat != 0).sum(1)
        found["tail"] = _tails(flat)
    features = [
        Feature(path=path, kind=kind, values=values.to("cpu", torch.float64))
        for kind, values in found.items()
    ]
    # One target a row that is never ignored is a class and no more.
    return [
        each
        for each in features
        if not (each.kind == "valid" and "class" in found and not each.varies)
    ]


def _tails(flat: Tensor) -> Tensor:
    """How many values at the end of each row are equal, or at its begin where these are more."""
    last = (flat == flat[:, -1:]).flip(1).long().cumprod(1).sum(1)
    first = (flat == flat[:, :1]).long().cumprod(1).sum(1)
    return torch.maximum(last, first)


def _features_of_rows(
    layout: BatchLayout, batch: Any, num_rows: int, known: set[str]
) -> list[Feature]:
    """Those of rows that have to be taken one by one."""
    step = -(-num_rows // _READ_ROWS)
    indices = range(0, num_rows, step)
    sizes: list[int] = []
    for index in indices:
        sizes += [1, min(step, num_rows - index) - 1]
    pieces = layout.split(batch, [size for size in sizes if size])
    singles = pieces if step == 1 else _every_first(pieces, sizes)
    leaves = [dict(tensor_leaves(row)) for row in singles]
    if not leaves or not leaves[0]:
        return []
    found = []
    counts = [float(sum(leaf.numel() for leaf in row.values())) for row in leaves]
    found.append(_spread_out("", "size", counts, num_rows, step))
    for path in leaves[0]:
        rows = [row.get(path) for row in leaves]
        tensors = [_plain(row) for row in rows if isinstance(row, Tensor)]
        if path in known or len(tensors) < len(rows) or tensors[0].is_floating_point():
            continue
        valid = [float((row != IGNORED).sum()) for row in tensors]
        found.append(_spread_out(path, "valid", valid, num_rows, step))
        if all(row.numel() == 1 for row in tensors):
            classes = [float(row.reshape(())) for row in tensors]
            found.append(_spread_out(path, "class", classes, num_rows, step))
    return found


def _plain(row: Tensor) -> Tensor:
    if row.layout is torch.sparse_coo:
        row = row.coalesce()  # rows that were cut are not
    return row if row.layout is torch.strided and not row.is_nested else row.values()


def _every_first(pieces: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    remaining = iter(pieces)
    singles = []
    for one, more in zip(sizes[::2], sizes[1::2], strict=True):
        assert one == 1
        singles.append(next(remaining))
        if more:
            next(remaining)
    return singles


def _spread_out(path: str, kind: str, values: list[float], num_rows: int, step: int) -> Feature:
    """Rows that were not read are taken for the one before them, and never chosen first."""
    read = torch.tensor(values, dtype=torch.float64)
    return Feature(path=path, kind=kind, values=read.repeat_interleave(step)[:num_rows])


def _telling(
    features: Sequence[Feature], num_rows: int, most: int, met: Mapping[str, Iterable[float]]
) -> list[int]:
    rows: list[int] = []
    for each in features:
        if each.kind == "class":
            rows += _rows_of_classes(each.values, set(met.get(each.path, ())))
    varying = [each.values.sort(stable=True).indices.tolist() for each in features if each.varies]
    for order in varying:
        rows += [order[0], order[-1]]
    for order in varying:
        rows += order[-3:-1]  # where few rows weigh something, one of them shows no mean
    count = min(most, num_rows)
    rows += [index * (num_rows - 1) // max(1, count - 1) for index in range(count)]
    rows += range(num_rows if num_rows <= most else 0)
    return sorted(list(dict.fromkeys(rows))[:count])


def _rows_of_classes(values: Tensor, met: set[float]) -> list[int]:
    """One row of each class: those not met before come first, of these the rarest."""
    classes, counts = torch.unique(values, return_counts=True)
    order = sorted(
        zip(classes.tolist(), counts.tolist(), strict=True),
        key=lambda each: (each[0] in met, each[1]),
    )
    return [int((values == each).nonzero()[0]) for each, _ in order[:_CLASSES_AT_ONCE]]


def _cut(
    features: Sequence[Feature], rows: Sequence[int], seed: int
) -> tuple[list[int], list[int]]:
    """Two uneven parts, as different as can be in everything in which rows differ."""
    num_small = max(1, min(_PART_ROWS, len(rows) // 3) - seed % 2)
    draw = random.Random(seed)  # not the caller's
    best: tuple[list[int], list[int]] | None = None
    best_score = -1.0
    # Numbers of Python's: of sixteen rows, thousands of operations on tensors would be as many
    # places at which memory can run out, and take longer than the look itself.
    varying = [
        (each.kind, dict(zip(rows, each.of(rows).tolist(), strict=True)))
        for each in features
        if _varies_among(each, rows)
    ]
    for _ in range(_CUTS_TRIED):
        small = sorted(draw.sample(list(rows), num_small))
        large = [row for row in rows if row not in small]
        score = min((_difference(*each, small, large) for each in varying), default=1.0)
        if score > best_score:
            best, best_score = (small, large), score
    assert best is not None
    return best


def _difference(
    kind: str, values: Mapping[int, float], small: Sequence[int], large: Sequence[int]
) -> float:
    one, other = [values[row] for row in small], [values[row] for row in large]
    if kind != "class" and not (any(one) and any(other)):
        return 0.0  # a part that counts nothing has no loss to compare
    spread = max(values.values()) - min(values.values())
    return abs(math.fsum(one) / len(one) - math.fsum(other) / len(other)) / spread
