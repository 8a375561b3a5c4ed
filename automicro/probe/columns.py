"""What one tensor of a batch holds in each of its rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from automicro.weighting import IGNORED


class Column:
    """Counts and weights of one tensor, row by row."""

    def __init__(self, rows: Sequence[Tensor]) -> None:
        rows = [row.values() if row.is_nested else row for row in rows]
        self._sizes = [row.numel() for row in rows]
        self._ignored: list[int] = []
        self._zeros: list[int] = []
        self._first: list[int] = []
        self._sums: list[float] = []
        self.is_all_ones = False
        if any(row.layout is not torch.strided or row.is_complex() for row in rows):
            return
        self._zeros = _read([(row == 0).sum() for row in rows])
        is_floating = rows[0].is_floating_point()
        if not is_floating:
            self._ignored = _read([(row == IGNORED).sum() for row in rows])
            self._first = _read([row.reshape(-1)[:1].sum() for row in rows])
        if any(_read([(row < 0).sum() for row in rows])):
            return
        # Of integers only those like a mask: a class or a token is no weight.
        if is_floating or not any(_read([(row > 1).sum() for row in rows])):
            self._sums = torch.stack([row.sum(dtype=torch.float32) for row in rows]).tolist()
        if is_floating and self._sums == self._sizes:
            self.is_all_ones = not any(_read([(row != 1).sum() for row in rows]))

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

    @property
    def counts(self) -> Sequence[float]:
        """What a loss may divide a row's part by, or empty where rows do not differ in it."""
        counted = [size - out for size, out in zip(self._sizes, self._ignored, strict=False)]
        filled = [size - zero for size, zero in zip(self._sizes, self._zeros, strict=False)]
        found: list[Sequence[float]] = [counted, self._sums, self._sizes]
        if self._is_mask:
            found.append(filled)
        return next((each for each in found if len(set(each)) > 1), ())

    def different_counts(self) -> list[tuple[int, int]]:
        """Rows that differ in their targets that are ignored, in size, in padding or weight."""
        if any(self._ignored):
            # Of a row whose every target is ignored, a mean is not a number: better are others.
            some = [row for row, size in enumerate(self._sizes) if self._ignored[row] < size]
            pairs = _extremes(self._ignored, some) or _extremes(self._ignored)
        else:
            pairs = []
        pairs += _extremes(self._sizes)
        return pairs + (_extremes(self._zeros) if self._is_mask else _extremes(self._sums))

    def different_classes(self) -> list[tuple[int, int]]:
        """Rows that begin with different integers, as targets of different classes do."""
        return _extremes(self._first)

    @property
    def _is_mask(self) -> bool:
        return bool(self._zeros) and max(self._sizes, default=0) > 1


def _extremes(counts: Sequence[float], among: Sequence[int] | None = None) -> list[tuple[int, int]]:
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
