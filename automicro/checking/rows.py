"""Select the rows of a batch that reveal most, and detect batches that show something new."""

import contextlib
import itertools
import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from automicro.batch.device import on_host
from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import Contents, tensor_leaves
from automicro.errors import BatchError

MOST_ROWS = 16
_LAST = 4096  # later batches are no longer examined for something new
_MOST_NEWS = 40  # checks out of turn
_MOST_CLASSES = 256
_CUTS_TRIED = 48
_READ_ROWS = 256  # of structures that are not plain tensors
_READ_VALUES = 512  # of each row


def telling_rows(
    layout: BatchLayout,
    batch: Any,
    num_rows: int,
    *,
    most: int = MOST_ROWS,
    seed: int = 0,
    multiple: int = 1,
    without: Collection[int] = (),
) -> list[list[int]]:
    """Return two uneven parts of a few rows that differ as much as possible."""
    groups = num_rows // multiple
    # A memory budget must not count these reads.
    with on_host():
        # A group counts as one row, because no batch is cut inside a group.
        kinds = [_by_group(each, multiple, groups) for each in varying(layout, batch, num_rows)]
    taken = {row // multiple for row in without}
    free = [each for each in range(groups) if each not in taken]
    # Values with few levels, such as counts, reveal more about a loss than unique values.
    values = [torch.unique(each[free]).numel() for each in kinds]
    kinds = [
        kinds[at] for at in sorted(range(len(kinds)), key=values.__getitem__) if values[at] > 1
    ]
    draw = random.Random(seed)  # not the caller's generator
    count = max(2, min(most // multiple, len(free)))
    # A wrong weight shows most at the extremes.
    orders = [[free[at] for at in each[free].argsort(stable=True).tolist()] for each in kinds]
    wanted = [order[place] for place in (0, -1, 1, -2) for order in orders if len(order) > 1]
    wanted = list(dict.fromkeys(wanted))[: count // 2 + 1 if seed else max(1, count - 2)]
    # A random choice covers differences that these values do not show.
    rest = [each for each in free if each not in wanted]
    chosen = sorted([*wanted, *draw.sample(rest, min(len(rest), count - len(wanted)))])
    small = max(1, min(5, len(chosen) // 3) - seed % 2)
    # Uneven, because a mean of means is correct for halves even if weights are wrong.
    cuts = [set(draw.sample(chosen, small)) for _ in range(_CUTS_TRIED)]
    # Python numbers, because tensors would need thousands of operations.
    scaled = [dict(zip(chosen, _standardised(each[chosen]), strict=True)) for each in kinds]

    def contrast(part: set[int]) -> float:
        others = [each for each in chosen if each not in part]
        gaps = (_mean(f, part) - _mean(f, others) for f in scaled)
        return min(map(abs, gaps), default=0.0)

    # Decided by the kind that differs least, so that no kind is even in both parts.
    best = max(cuts, key=contrast)
    parts = sorted(best), [each for each in chosen if each not in best]
    return [
        [row for each in part for row in range(each * multiple, (each + 1) * multiple)]
        for part in parts
    ]


def _standardised(values: Tensor) -> list[float]:
    scale = float(values.std()) or 1.0
    found: list[float] = ((values - values.mean()) / scale).tolist()
    return found


def _mean(values: Mapping[int, float], rows: Collection[int]) -> float:
    return math.fsum(values[row] for row in rows) / max(1, len(rows))


def _by_group(values: Tensor, multiple: int, groups: int) -> Tensor:
    return values[: groups * multiple].reshape(groups, multiple).sum(1)


def varying(layout: BatchLayout, batch: Any, num_rows: int) -> list[Tensor]:
    """Return row properties that a loss might weight by, each as one number per row."""
    # For floating point leaves, sums and zeros; for integers, how many equal the smallest value, a
    # common one or a rare one.
    found: list[Tensor] = []
    dims: Mapping[str, int] = {}
    with contextlib.suppress(BatchError):
        dims = layout.row_dims(batch)
    leaves = tensor_leaves(batch)
    for path, leaf in leaves:
        dim = dims.get(path)
        if dim is None or leaf.is_complex() or not leaf.numel() or leaf.shape[dim] != num_rows:
            continue
        flat = leaf.detach().movedim(dim, 0).reshape(num_rows, -1)
        # A sample of each row's values, because images have millions.
        flat = flat[:, :: max(1, flat.shape[1] // _READ_VALUES)].cpu()
        if flat.is_floating_point():
            # A NaN would make every ordering and mean meaningless.
            flat = flat.double().nan_to_num()
            found += [flat.sum(1), (flat == 0).sum(1)]
            continue
        values, places, counts = torch.unique(flat, return_inverse=True, return_counts=True)
        common = (places == counts.argmax()).sum(1)
        found += [(flat == values[0]).sum(1), common, counts[places].amin(1)]
    if len(dims) < len(leaves) and num_rows <= _READ_ROWS:
        rows = layout.split(batch, [1] * num_rows)
        sizes = [float(sum(leaf.numel() for _, leaf in tensor_leaves(row))) for row in rows]
        found.append(torch.tensor(sizes))
    return [each.double() for each in found]


class Forms:
    """Record of the forms of batches so far: types, words, classes, and ranges of integers.

    >>> forms = Forms()
    >>> [forms.is_new({"ids": torch.tensor(ids)}) for ids in ([1, 2], [2, 1], [0, 1])]
    [True, False, True]
    """

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._known: dict[str, set[int]] = {}
        self._num = self._news = 0

    def is_due(self, batch: Any) -> bool:
        """Count a batch; return whether it is the first, second, fourth, … or is new."""
        return self.is_new(batch) or not self._num & (self._num - 1)

    def is_new(self, batch: Any) -> bool:
        """Count a batch and return whether it shows something new. Reads integers on the host."""
        self._num += 1
        # If every batch is new, it might be for a counter, such as the number of the batch.
        if self._num > _LAST or self._news > _MOST_NEWS:
            return False
        form = _form_of(batch)
        is_new = form not in self._seen
        self._seen.add(form)
        with on_host():
            # Finding paths of tensors costs more than finding that none is readable.
            if any(map(_is_readable, Contents(batch).tensors)):
                for path, leaf in tensor_leaves(batch):
                    is_new |= _is_readable(leaf) and self._is_record(path, leaf.detach())
        self._news += is_new
        return is_new

    def _is_record(self, path: str, leaf: Tensor) -> bool:
        """Return whether integers exceed their known range or contain a new class."""
        low, high = (int(each) for each in leaf.aminmax())
        known = self._known.setdefault(path, {low, high})
        is_new = low < min(known) or high > max(known)
        is_per_row = leaf.dim() == 0 or leaf.numel() == len(leaf)
        if is_per_row and high - low < _MOST_CLASSES:
            classes = {*leaf.reshape(-1).tolist()}
            is_new |= not classes <= known and self._num > 1
            known |= classes
        known |= {low, high}
        return is_new


def _is_readable(leaf: Tensor) -> bool:
    """Return whether a tensor holds integers on the host."""
    if leaf.is_floating_point() or leaf.is_complex() or leaf.device.type != "cpu":
        return False
    return leaf.layout is torch.strided and not leaf.is_nested and leaf.numel() > 0


def _form_of(value: Any) -> Any:
    """Return keys, types, dimensions, words and flags of a batch, or types of long sequences."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim(), value.requires_grad
    if isinstance(value, Mapping):
        return tuple((repr(key), _form_of(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        is_long = len(value) > 8 or any(map(isinstance, value, itertools.repeat(str)))
        return type(value), tuple(map(type, value[:1]) if is_long else map(_form_of, value))
    return value if isinstance(value, str | bool | None) else type(value)


def is_telling(values: Sequence[float]) -> bool:
    """Return whether the losses of parts differ, so that a wrong weight would show."""
    return len(values) > 1 and max(values) - min(values) > 1e-5 * max(map(abs, values))
