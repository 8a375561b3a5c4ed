"""What one loss averages over: rows, targets, whatever a function counts, or nothing."""

import itertools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Protocol, TypeAlias

import torch
from numpy import ndarray
from torch import Tensor

from automicro.errors import LossError
from automicro.torch_private import version_of

Weight: TypeAlias = float | Tensor

IGNORED = -100  # torch's and transformers' default `ignore_index`
REMEDY = (
    "pass loss_average='samples', 'tokens' or 'none' (a sum), or a callable that gives the number "
    "that a microbatch's loss was divided by"
)


class Average(Protocol):
    """What one loss averages over."""

    @property
    def is_known(self) -> bool:
        """Whether it was declared or read off, not assumed."""

    def describe(self) -> str:
        """What the loss is taken for, in words that complete "the loss is …"."""

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        """One denominator per microbatch, or None where the loss is a sum."""


class Samples:
    """A mean over rows."""

    def __init__(self, *, is_known: bool = True) -> None:
        self.is_known = is_known

    def describe(self) -> str:
        return "a mean over samples"

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        return sizes


class Sum:
    """A sum: nothing was divided, so nothing needs a weight."""

    is_known = True

    def describe(self) -> str:
        return "a sum"

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        return None


class Counted:
    """A mean over whatever the caller's function counts in a microbatch."""

    is_known = True

    def __init__(self, count: Callable[[Any], float | Tensor]) -> None:
        self._count = count

    def describe(self) -> str:
        return f"a mean over what {getattr(self._count, '__name__', self._count)!s} counts"

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        counts: list[Any] = [self._count(microbatch) for microbatch in microbatches]
        if all(isinstance(count, Tensor) and count.numel() == 1 for count in counts):
            # One read for the whole batch, however many microbatches it is cut into.
            counts = torch.stack([count.detach().reshape(()) for count in counts]).tolist()
        elif any(isinstance(count, Tensor) for count in counts):
            counts = [
                count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
                for count in counts
            ]
        for count in counts:
            if not isinstance(count, Real) or not math.isfinite(count) or count < 0:
                raise LossError(
                    f"the loss_average callable gave {count!r} for a microbatch; it must give one "
                    "number of zero or more: what the microbatch's loss was divided by"
                )
        return [count if isinstance(count, int) else float(count) for count in counts]


class Tokens:
    """A mean over the targets that are not ignored, weighted by class where the loss does so.

    Args:
        targets: finds the targets in a batch, a tensor of any shape with rows first.
        ignore_index: the target that does not count.
        class_weight: shape (classes,), the loss's ``weight``.
        shift: how many leading positions of each row have no prediction (1 for a causal language
            model that shifts its labels itself).
    """

    is_known = True

    def __init__(
        self,
        targets: Callable[[Any], Any],
        *,
        ignore_index: int = IGNORED,
        class_weight: Tensor | None = None,
        shift: int = 0,
    ) -> None:
        self._targets = targets
        self._ignore_index = ignore_index
        self._class_weight = class_weight
        self._shift = shift
        self._weight_there: tuple[Tensor, torch.device, int] | None = None

    def describe(self) -> str:
        counted = "targets" if self._class_weight is None else "class weights of the targets"
        shifted = f", the first {self._shift} of each row left out" if self._shift else ""
        return f"a mean over the {counted} that are not {self._ignore_index}{shifted}"

    def denominators(
        self, batch: Any, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> Sequence[Weight] | None:
        targets = self._targets(batch)
        if isinstance(targets, ndarray):
            raise LossError(
                "the loss is a mean over targets, and the batch's targets are a NumPy array; "
                "convert to tensors in the dataset or the data loader's collate_fn "
                "(torch.from_numpy)"
            )
        if not isinstance(targets, Tensor) or targets.dim() == 0:
            raise LossError(
                "the loss is a mean over targets, but the batch's targets are "
                f"{type(targets).__name__}, not a tensor with a dimension; {REMEDY}"
            )
        if targets.is_floating_point() or targets.is_complex():
            return sizes  # class probabilities or regression: every row counts the same
        if targets.is_nested or not self._has_rows_first(targets, microbatches, sizes):
            return [_number(self._count(self._targets(part)).sum()) for part in microbatches]
        per_row = self._count(targets).reshape(targets.shape[0], -1).sum(1)
        if per_row.device.type == "cpu":
            counts = per_row.tolist()
            ends = itertools.accumulate(sizes)
            return [sum(counts[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
        return [_number(part.sum()) for part in torch.split(per_row, list(sizes))]

    def _has_rows_first(
        self, targets: Tensor, microbatches: Sequence[Any], sizes: Sequence[int]
    ) -> bool:
        if targets.shape[0] != sum(sizes):
            return False
        # There may be as many positions as rows: only a cut tells these dimensions apart.
        return len(sizes) == 1 or self._targets(microbatches[0]).shape[0] == sizes[0]

    def _count(self, targets: Tensor) -> Tensor:
        if targets.is_nested:
            targets = targets.values()
        elif self._shift:
            targets = targets[..., self._shift :]
        counted = targets != self._ignore_index
        if self._class_weight is None:
            return counted
        weight = self._weight_on(targets.device, self._class_weight)
        return torch.where(counted, weight[targets.where(counted, 0)], 0)

    def _weight_on(self, device: torch.device, weight: Tensor) -> Tensor:
        """The class weights where the targets lie; brought there once, as that may wait."""
        if weight.device == device:
            return weight.detach().to(_float64(device))
        there, version = self._weight_there, version_of(weight)
        if there is None or there[1:] != (device, version):
            copy = weight.detach().to(device, _float64(device))
            there = self._weight_there = copy, device, version
        return there[0]


def _number(count: Tensor) -> Weight:
    """A count as a Python number, or as a float64 tensor where reading it would synchronise."""
    if count.device.type == "cpu":
        return count.item()
    return count.to(_float64(count.device))


def _float64(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
