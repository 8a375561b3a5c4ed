"""Which rows of a batch can tell one average from another."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from automicro.probe.columns import Column
from automicro.slicing import tensor_leaves

MAX_PAIRS = 4
MAX_GROUPS = 2
GROUP_ROWS = 8
MAX_ROWS = 256  # as many rows are read, spread over the batch


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Pairs and groups of rows, the most telling first.

    Attributes:
        pairs: indices of two rows each.
        can_tell: whether some pair differs in what a mean over tokens would count, or no such
            mean is possible. On equal rows it looks like a mean over samples, so later batches
            are worth a look.
        groups: indices of more rows, cut unevenly into a part that counts little and one that
            counts much. Unlike two rows, a group tells a sum from a weighted mean of which most
            weights are zero or one.
    """

    pairs: Sequence[tuple[int, int]]
    can_tell: bool
    groups: Sequence[tuple[Sequence[int], Sequence[int]]] = ()


def telling_pairs(
    rows_of: Callable[[Sequence[int]], Sequence[Any]],
    num_rows: int,
    num_leaves: int,
    find_targets: Callable[[Any], Any],
) -> Pairs:
    """Rows that differ in what a loss may count: targets, padding, weights, boxes, classes.

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
    first = [Column(targets)] if targets else []
    shown = first + [Column(column) for column in _columns(leaves)]
    found = [pair for each in first for pair in each.different_counts() + each.different_classes()]
    found += [pair for each in shown for pair in each.different_counts()]
    found += [pair for each in shown for pair in each.different_classes()]
    pairs = [(indices[one], indices[other]) for one, other in found]
    pairs.append((0, num_rows - 1))
    # Of rows in lists there are more tensors in the batch than in a row.
    is_ragged = len(leaves[0]) != num_leaves or any(each.is_ragged for each in shown)
    could_tell = is_ragged or any(each.has_positions or each.is_all_ones for each in shown)
    if targets and shown[0].has_positions:
        can_tell = shown[0].is_ragged or shown[0].ignores_unevenly
    else:
        can_tell = not could_tell or any(each.can_tell for each in shown)
    groups = [
        ([indices[row] for row in low], [indices[row] for row in high])
        for low, high in _groups([each.counts for each in shown], len(rows))
    ]
    return Pairs(
        pairs=list(dict.fromkeys(pairs))[:MAX_PAIRS],
        can_tell=can_tell,
        groups=tuple(groups[:MAX_GROUPS]),
    )


def _groups(columns: Sequence[Sequence[float]], num_rows: int) -> list[tuple[list[int], list[int]]]:
    """Parts of groups, by the columns in which rows differ most."""
    if num_rows < 3:
        return []  # no uneven cut
    different = sorted((each for each in columns if each), key=_spread, reverse=True)
    groups = [_cut_group(each) for each in different or [range(num_rows)]]
    return [group for place, group in enumerate(groups) if group not in groups[:place]]


def _spread(counts: Sequence[float]) -> float:
    return (max(counts) - min(counts)) / max(counts)


def _cut_group(counts: Sequence[float]) -> tuple[list[int], list[int]]:
    """Rows that count little and rows that count much; some weight in both, where there is."""
    ordered = sorted(range(len(counts)), key=lambda row: counts[row])
    num_rows = min(GROUP_ROWS, len(ordered))
    num_low = max(1, num_rows * 3 // GROUP_ROWS)
    counted = [row for row in ordered if counts[row]]
    # A part of no weight has the loss zero, with which a sum and a weighted mean look alike.
    some = counted[len(counted) // 2 if num_low > 1 else 0]
    others = [row for row in ordered if row != some]
    high = others[num_low - num_rows :]
    return [*others[: num_low - 1], some], high


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
