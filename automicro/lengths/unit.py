"""The unit of microbatch sizes: rows, or the cost of rows of varying length."""

# If rows have costs, the rows of a batch are sorted by them and packed into slices, and each slice
# is cut to its own longest row (`padding`). A policy then proposes a budget instead of a number of
# rows: the maximum cost of a slice with its padding, in whole units.
#
# A slice costs its number of rows times the cost of the longest. So for sorted rows, slices of
# neighbors are optimal. Of all cuts into such slices, `pack` finds the best by dynamic programming
# over the beginnings of slices. The same costs lead to the same slices on every machine.

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from automicro.batch.layout import BatchLayout
from automicro.batch.tensors import replace_tensors, tensor_leaves
from automicro.errors import BatchError
from automicro.lengths.padding import Group, Padding, cut_padding, restore_padding
from automicro.options import check_choice
from automicro.policy.policy import Policy
from automicro.step.plan import ROWS, Cut, CutRule, Finished, ReadBatch
from automicro.step.setup import Setup, Unit

Array = np.ndarray[Any, Any]
Combine = Callable[[Array], Array]
"""The cost of rows as a function of their lengths, from ``(..., lengths)`` to ``(...)``."""

# The most rows of a slice, which bounds the work for each row.
_MOST_BEGINNINGS = 1 << 14


def pack(lengths: Array, combine: Combine, budget: float, *, overhead: float = 0.0) -> list[int]:
    """Return the rows of each slice that minimize ``overhead · slices + padded costs``.

    >>> costs = np.array([[8], [8], [3], [2], [2]])
    >>> pack(costs, _sum, 16), pack(costs, _sum, 16, overhead=10)
    ([2, 1, 2], [2, 3])
    >>> frames_and_labels = np.array([[8, 1], [7, 3], [2, 9], [2, 2]])
    >>> pack(frames_and_labels, _product, 48, overhead=20)
    [2, 2]
    """
    # A row that costs more than the budget is alone in its slice. The order of the rows is kept: it
    # is optimal for a single length, but might not be for several.
    num_rows, first = len(lengths), 0
    least = np.zeros(num_rows + 1)  # of the slices up to each row
    begins = [0] * (num_rows + 1)
    longest = np.zeros_like(lengths)  # of the slices that begin at each row, so far
    for end in range(1, num_rows + 1):
        first = max(first, end - _MOST_BEGINNINGS)
        longest[first:end] = np.maximum(longest[first:end], lengths[end - 1])
        padded = np.arange(end - first, 0, -1) * combine(longest[first:end])
        # A beginning from which rows exceed the budget stays too early for all later ends. The last
        # beginning is that of a single row, which is allowed at any cost.
        too_long = int((padded[:-1] > budget).sum())
        first += too_long
        total = least[first:end] + overhead + padded[too_long:]
        best = int(total.argmin())  # the earliest of equals, for fewer slices
        least[end], begins[end] = total[best], first + best
    return _slices(begins)


def _slices(begins: list[int]) -> list[int]:
    end, sizes = len(begins) - 1, []
    while end:
        sizes.append(end - begins[end])
        end = begins[end]
    return sizes[::-1]


def without_lonely_rows(sizes: Sequence[int]) -> list[int]:
    """Return the slices with each slice of a single row joined to one of its neighbors.

    >>> without_lonely_rows([1, 1, 4, 1]), without_lonely_rows([1])
    ([2, 5], [1])
    """
    found: list[int] = []
    for size in sizes:
        if found and 1 in (size, found[-1]):
            found[-1] += size
        else:
            found.append(size)
    return found


# Steps that are skipped, because they compile, choose kernels and allocate memory.
_COLD = 2
# Steps after which the overhead is fitted.
_ENOUGH = 8
_MOST = 64
# Steps whose slices and padded costs are nearly proportional do not tell one from the other.
_APART = 0.05


@dataclass
class Overhead:
    """The fixed cost of a slice, fitted to the measured seconds of steps.

    >>> overhead = Overhead()
    >>> for slices, padded in [(1, 900)] * 2 + [(4, 900), (8, 700), (2, 1000), (6, 800)] * 2:
    ...     overhead.record(seconds=1e-3 * (50 * slices + padded), slices=slices, padded=padded)
    >>> round(overhead.of(average=128.0), 6)
    50.0
    """

    # Slices, padded cost and seconds of each measured step.
    steps: list[list[float]] = field(default_factory=list)

    @property
    def wants_seconds(self) -> bool:
        """Whether more steps should be measured for it."""
        return len(self.steps) < _MOST

    def of(self, average: float) -> float:
        """Return the overhead in the unit of costs: at first the cost of an average row."""
        if len(self.steps) < _ENOUGH:
            return average
        table = np.array(self.steps[_COLD:])
        sizes = np.linalg.norm(table, axis=0)
        found, _, rank, _ = np.linalg.lstsq(table[:, :2] / sizes[:2], table[:, 2], rcond=_APART)
        per_slice, per_cost = found / sizes[:2]
        # Noise can make rows seem free; then the overhead is meaningless, too.
        return max(0.0, float(per_slice / per_cost)) if rank == 2 and per_cost > 0 else average

    def record(self, *, seconds: float, slices: int, padded: float) -> None:
        """Learn from a step."""
        if self.wants_seconds:
            self.steps.append([slices, padded, seconds])


Cost: TypeAlias = Callable[[Any], float | tuple[float, ...]]
"""The cost of a row, from a batch of this one row; several lengths are multiplied."""

TOKENS, SECONDS = "tokens", "seconds"
_DURATIONS = ("seconds", "duration", "durations", "duration_seconds")
_OR_COST = "or a function that returns the cost of a batch of one row"


def _sum(lengths: Array) -> Array:
    return np.asarray(lengths.sum(-1))


def _product(lengths: Array) -> Array:
    return np.asarray(lengths.prod(-1))


@dataclass(frozen=True, eq=False)
class _SortedRows:
    """The rows of one batch, sorted by cost."""

    order: Array
    lengths: Array
    combine: Combine
    groups: Sequence[Group]
    output_dims: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """The number of rows of the batch."""
        return len(self.order)

    @functools.cached_property
    def extent(self) -> int:
        """The cost of the whole batch as one slice, in whole units."""
        return self._units([self.num_rows])[0]

    @functools.cached_property
    def average(self) -> float:
        """The average cost of a row."""
        return float(self.combine(self.lengths).mean())

    def pack(self, budget: int, *, overhead: float, min_rows: int = 1) -> list[int]:
        """Return the rows of each slice, with no slice over budget if possible."""
        sizes = pack(self.lengths, self.combine, budget, overhead=overhead)
        # BatchNorm in training refuses a single row; two rows might then exceed the budget.
        return sizes if min_rows == 1 else without_lonely_rows(sizes)

    def largest(self, sizes: Sequence[int]) -> int:
        """Return the cost of the most expensive of these slices, in whole units."""
        return max(self._units(sizes))

    def padded(self, sizes: Sequence[int]) -> float:
        """Return the total cost of all slices."""
        return sum(self._costs(sizes))

    def cut(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Return these microbatches, each without the padding that all of its rows share."""
        return [
            cut_padding(microbatch, self.groups, rows)
            for microbatch, rows in zip(microbatches, _slices_of(sizes), strict=True)
        ]

    def places(self) -> list[int]:
        """Return the position here of each row of the original batch."""
        found: list[int] = np.argsort(self.order).tolist()
        return found

    def restored(
        self, outputs: Sequence[Any], sizes: Sequence[int], *, fill: float = 0
    ) -> list[Any]:
        """Return the outputs of these slices, padded to the length of the whole batch."""
        if not self.groups:
            return list(outputs)
        rows = _slices_of(sizes)
        windows = {g.name: [g.window(each) for each in rows] for g in self.groups}
        padded = {group.name: group.padded for group in self.groups}
        restored: list[dict[int, Tensor]] = [{} for _ in outputs]
        for column in zip(*map(tensor_leaves, outputs), strict=False):
            path, tensors = column[0][0], [tensor for _, tensor in column]
            dims = length_dims(tensors, windows, self.output_dims.get(path, {}))
            for index, tensor in enumerate(tensors):
                places = {
                    dim: (windows[name][index][0], padded[name])
                    for dim, name in dims.items()
                    if tensor.shape[dim] < padded[name]
                }
                restored[index][id(tensor)] = restore_padding(tensor, places, fill=fill)
        return [replace_tensors(*each) for each in zip(outputs, restored, strict=True)]

    def _costs(self, sizes: Sequence[int]) -> list[float]:
        return [
            size * float(self.combine(self.lengths[rows].max(0)))
            for size, rows in zip(sizes, _slices_of(sizes), strict=True)
        ]

    def _units(self, sizes: Sequence[int]) -> list[int]:
        # A cost that is whole up to rounding must not count as one unit more.
        return [max(1, math.ceil(cost - 1e-6)) for cost in self._costs(sizes)]


def _slices_of(sizes: Sequence[int]) -> list[slice]:
    """Return slices of neighboring rows with these sizes.

    >>> _slices_of([2, 3])
    [slice(0, 2, None), slice(2, 5, None)]
    """
    stops = np.cumsum(sizes).tolist()
    return [slice(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def length_dims(
    tensors: Sequence[Tensor],
    windows: Mapping[str, Sequence[tuple[int, int]]],
    shown: Mapping[int, str] = MappingProxyType({}),
) -> dict[int, str]:
    """Return the dimensions of outputs that match the lengths of slices, with group names."""
    found: dict[int, str] = {}
    for dim in range(1, min(tensor.dim() for tensor in tensors)):
        own = [tensor.shape[dim] for tensor in tensors]
        for name, spans in windows.items():
            lengths = [stop - start for start, stop in spans]
            # A match with every slice could be chance, unless slices have several lengths or a
            # check has shown the dimension.
            if own == lengths and (len(set(own)) > 1 or shown.get(dim) == name):
                found.setdefault(dim, name)
    return found


def check_unit(unit: object) -> None:
    """Refuse an invalid unit.

    >>> check_unit("tokens")
    """
    if isinstance(unit, str):
        try:
            check_choice("microbatch_unit", unit, (ROWS, TOKENS, SECONDS))
        except ValueError as error:
            raise ValueError(f"{error}, {_OR_COST}") from None
    elif not callable(unit):
        raise TypeError(
            f"microbatch_unit={unit!r} is not a unit: give 'rows', 'tokens' (of padded texts), "
            f"'seconds' (of a tensor of that name, or 'durations'), {_OR_COST}"
        )


def unit_name(unit: str | Cost) -> str:
    """Return the name of the unit in messages, in the plural.

    >>> unit_name("tokens"), unit_name(len)
    ('tokens', 'units of cost')
    """
    return unit if isinstance(unit, str) else "units of cost"


@dataclass
class _PackingRule(CutRule):
    """Packs rows into slices that cost at most a given size."""

    overhead: Overhead = field(default_factory=Overhead)

    @property
    def wants_seconds(self) -> bool:
        return self.overhead.wants_seconds

    def cut_batch(self, batch: ReadBatch, size: int, *, multiple_of: int = 1) -> Cut:
        packing = batch.packing
        assert isinstance(packing, _SortedRows)
        overhead = self.overhead.of(packing.average)
        sizes = packing.pack(size, overhead=overhead, min_rows=self.min_rows)
        return Cut(sizes, batch.cost, packing)

    def learn(self, finished: Finished[Any]) -> None:
        measured = finished.measured
        # Without waiting for the device, the measured time is only that of submitting work.
        if measured is None or not measured.has_waited:
            return
        if finished.attempts > 1 or not finished.plan.cuts:
            return  # memory released after a failure must be allocated again, which takes time
        self.overhead.record(
            seconds=measured.seconds,
            slices=finished.plan.num_microbatches,
            padded=sum(
                cut.packing.padded(cut.sizes)
                for cut in finished.plan.cuts
                if isinstance(cut.packing, _SortedRows)
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        # State is written as JSON, which has no infinity.
        failed = None if math.isinf(self.failed) else self.failed
        learned = {"unit": self.unit, "overhead": asdict(self.overhead), "failed": failed}
        return super().state_dict() | learned

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "overhead" in state:
            self.overhead = Overhead(**state["overhead"])
            self.failed = math.inf if state["failed"] is None else state["failed"]


class CostUnit(Unit):
    """A unit in which rows have costs and are sorted by them.

    >>> import torch
    >>> unit = CostUnit("tokens", Padding(None), BatchLayout())
    >>> batch = {"input_ids": torch.arange(8).view(2, 4),
    ...          "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])}
    >>> packing = unit.packing(batch, unit.groups(batch, 2), 2, cuts=True)
    >>> packing.order.tolist(), packing.extent, packing.pack(3, overhead=0)
    ([1, 0], 6, [1, 1])
    """

    is_rows = False

    def __init__(self, unit: str | Cost, padding: Padding, layout: BatchLayout) -> None:
        self.name = unit_name(unit)
        self._cost = None if isinstance(unit, str) else unit
        self._layout = layout
        self.output_dims: dict[str, dict[int, str]] = {}  # filled by the check of padding
        self.padding = padding

    def check(self, setup: Setup) -> None:
        given = {"Carry": setup.carrying.is_on, "strict_divisible": setup.strict_divisible}
        for name in (name for name, is_on in given.items() if is_on):
            raise ValueError(
                f"microbatch_unit={self.name!r} sorts the rows of each batch and cuts them into "
                f"unequal slices, which {name} does not allow. Leave one of them out"
            )

    def check_policy(self, policy: Policy, argument: str) -> None:
        if policy.explores:
            raise ValueError(
                f"{argument}='explore' finds the fastest number of rows, but slices of "
                f"{self.name} are packed for the least time already. Pass {argument}='auto'"
            )
        if policy.multiple_of > 1:
            raise ValueError(
                f"{argument} has multiple_of={policy.multiple_of}, a number of rows, but its "
                f"sizes are counted in {self.name}. Leave multiple_of out"
            )

    def rule(self, *, strict_divisible: bool) -> CutRule:
        return _PackingRule(strict_divisible=strict_divisible, unit=self.name)

    def groups(self, batch: Any, num_rows: int) -> list[Group]:
        """Return the padded tensors of a batch; see `Padding.read`."""
        row_dims = self._layout.row_dims(batch)
        groups = self.padding.read(batch, num_rows, row_dims=row_dims)
        if self.name == TOKENS and not groups:
            raise BatchError(
                "microbatch_unit='tokens' counts the tokens of each row, but the batch has neither "
                "an attention_mask of shape (rows, length) nor a tensor of lengths. Name one, as "
                "in padding={'tokens': 'token_lengths'}, or use microbatch_unit='rows'"
            )
        return groups

    def packing(
        self, batch: Any, groups: Sequence[Group], num_rows: int, *, cuts: bool
    ) -> _SortedRows:
        """Return the rows of a batch, sorted by cost."""
        combine: Combine = _sum
        if self.name == TOKENS:
            # If padding stays, each row costs as much as the longest.
            lengths = [
                group.lengths if cuts else np.full(num_rows, group.padded) for group in groups
            ]
            table = np.stack(lengths, axis=1).astype(np.float64)
        elif self.name == SECONDS:
            table = self._seconds(batch, num_rows)[:, None]
        else:
            table, combine = self._costs(batch, num_rows)
        # Rows of equal cost keep their order.
        order = np.argsort(-combine(table), kind="stable")
        return _SortedRows(
            order=order,
            lengths=table[order],
            combine=combine,
            groups=[group.take(order) for group in groups] if cuts else [],
            output_dims=self.output_dims,
        )

    def _seconds(self, batch: Any, num_rows: int) -> Array:
        for path, tensor in tensor_leaves(batch):
            if path.rpartition(".")[2] in _DURATIONS and tensor.shape == (num_rows,):
                found: Array = tensor.detach().cpu().double().numpy()
                return _checked(found, "the batch's " + repr(path))
        raise BatchError(
            "microbatch_unit='seconds' reads the length of each row from a tensor called "
            "'seconds' or 'durations', but the batch has none with one number per row. Return "
            "it from the collate function, or pass a function of a row as microbatch_unit"
        )

    def _costs(self, batch: Any, num_rows: int) -> tuple[Array, Combine]:
        assert self._cost is not None
        found = [self._cost(row) for row in self._layout.split(batch, [1] * num_rows)]
        rows = [each if isinstance(each, tuple | list) else (each,) for each in found]
        try:
            table = np.array([[float(each) for each in row] for row in rows])
        except (TypeError, ValueError) as error:
            raise BatchError(
                f"microbatch_unit returned {found[0]!r} for a row. Return a number, or a tuple "
                "with the same number of lengths for every row, whose product is the cost"
            ) from error
        table = _checked(table, "microbatch_unit")
        costliest = float(_product(table).max())
        if costliest < 1:
            raise BatchError(
                f"microbatch_unit returned {costliest:.3g} for the costliest row of a batch, "
                "but budgets are whole numbers. Return the cost in a smaller unit"
            )
        return table, _product


def _checked(costs: Array, who: str) -> Array:
    wrong = costs[~(np.isfinite(costs) & (costs > 0))]
    if wrong.size:
        raise BatchError(f"{who} gives a cost of {wrong.flat[0]}; give positive, finite numbers")
    return costs


def refuse_inputs_with_gradients(batch: Any) -> None:
    """Refuse inputs that need a gradient: each slice's backward would go through the sorting."""
    for path, tensor in tensor_leaves(batch):
        if tensor.requires_grad:
            raise BatchError(
                f"{path or 'the batch'!r} requires a gradient, but rows that are sorted by cost "
                "are copies. Use microbatch_unit='rows', or detach it"
            )
