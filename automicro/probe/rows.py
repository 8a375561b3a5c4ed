"""Which rows of a batch can tell one average from another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.slicing import tensor_leaves
from automicro.weighting import IGNORED

MAX_PAIRS = 4
MAX_ROWS = 256  # as many rows are read, spread over the batch


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs of rows, the most telling first.

    Attributes:
        pairs: indices of two rows each.
        can_tell: whether some pair differs in what a mean over tokens would count, or no such
            mean is possible. On equal rows it looks like a mean over samples, so later batches
            are worth a look.
    """

    pairs: Sequence[tuple[int, int]]
    can_tell: bool


def telling_pairs(
    rows_of: Callable[[Sequence[int]], Sequence[Any]],
    num_rows: int,
    num_leaves: int,
    find_targets: Callable[[Any], Any],
) -> Pairs:
    """Pairs of rows that differ in what a loss may count: targets, padding, boxes, classes.

    Args:
        rows_of: the rows at these indices, ascending from 0, each as a batch of its own.
        num_rows: rows of the batch, at least two.
        num_leaves: tensors in the batch.
        find_targets: finds the targets in a batch.
    """
    indices = range(0, num_rows, -(-num_rows // MAX_ROWS))
    rows = rows_of(indices)
    leaves = [dict(tensor_leaves(row)) for row in rows]
    targets = _targets(rows, find_targets)
    first = [_Counts(targets)] if targets else []
    shown = first + [_Counts(column) for column in _columns(leaves)]
    found = [pair for each in first for pair in each.different_counts() + each.different_classes()]
    found += [pair for each in shown for pair in each.different_counts()]
    found += [pair for each in shown for pair in each.different_classes()]
    pairs = [(indices[one], indices[other]) for one, other in found]
    pairs.append((0, num_rows - 1))
    # Of rows in lists there are more tensors in the batch than in a row.
    is_ragged = len(leaves[0]) != num_leaves or any(each.is_ragged for each in shown)
    could_tell = is_ragged or any(each.has_positions for each in shown)
    if targets and shown[0].has_positions:
        can_tell = shown[0].is_ragged or shown[0].ignores_unevenly
    else:
        can_tell = not could_tell or any(each.can_tell for each in shown)
    return Pairs(pairs=list(dict.fromkeys(pairs))[:MAX_PAIRS], can_tell=can_tell)


class _Counts:
    """What one tensor of a batch holds in each of its rows."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        rows = [row.values() if row.is_nested else row for row in rows]
        self._sizes = [row.numel() for row in rows]
        self._ignored: list[int] = []
        self._zeros: list[int] = []
        self._first: list[int] = []
        if any(row.is_sparse or row.is_complex() for row in rows):
            return
        self._zeros = _read([(row == 0).sum() for row in rows])
        if not rows[0].is_floating_point():
            self._ignored = _read([(row == IGNORED).sum() for row in rows])
            self._first = _read([row.reshape(-1)[:1].sum() for row in rows])

    @property
    def is_ragged(self) -> bool:
        """Whether rows differ in size."""
        return len(set(self._sizes)) > 1

    @property
    def has_positions(self) -> bool:
        """Whether a row holds several integers, of which some may not count."""
        return bool(self._ignored) and max(self._sizes, default=0) > 1

    @property
    def ignores_unevenly(self) -> bool:
        """Whether rows differ in how many targets are ignored."""
        return len(set(self._ignored)) > 1

    @property
    def can_tell(self) -> bool:
        """Whether rows differ in how many positions may count."""
        return self.is_ragged or (self.has_positions and bool(self.different_counts()))

    def different_counts(self) -> list[tuple[int, int]]:
        """Rows that differ in their targets that are ignored, in size or in padding."""
        if any(self._ignored):
            # Of a row whose every target is ignored, a mean is not a number: better are others.
            some = [row for row, size in enumerate(self._sizes) if self._ignored[row] < size]
            pairs = _extremes(self._ignored, some) or _extremes(self._ignored)
        else:
            pairs = []
        return pairs + _extremes(self._sizes) + (_extremes(self._zeros) if self._is_mask else [])

    def different_classes(self) -> list[tuple[int, int]]:
        """Rows that begin with different integers, as targets of different classes do."""
        return _extremes(self._first)

    @property
    def _is_mask(self) -> bool:
        return bool(self._zeros) and max(self._sizes, default=0) > 1


def _extremes(counts: Sequence[int], among: Sequence[int] | None = None) -> list[tuple[int, int]]:
    rows: Sequence[int] = range(len(counts)) if among is None else among
    if not counts or not rows:
        return []
    low = min(rows, key=lambda row: counts[row])
    high = max(rows, key=lambda row: counts[row])
    return [(low, high)] if counts[low] != counts[high] else []


def _read(counts: Sequence[Tensor]) -> list[int]:
    # At once: each value read by itself would wait for the device.
    values: list[int] = torch.stack([count.long() for count in counts]).tolist()
    return values


def _targets(rows: Sequence[Any], find_targets: Callable[[Any], Any]) -> list[Tensor]:
    try:
        targets = [find_targets(row) for row in rows]
    except (ValueError, IndexError):
        return []
    return targets if all(isinstance(each, Tensor) for each in targets) else []


def _columns(leaves: Sequence[Mapping[str, Tensor]]) -> Iterator[list[Tensor]]:
    for path in leaves[0]:
        if all(path in row for row in leaves):
            yield [row[path] for row in leaves]
