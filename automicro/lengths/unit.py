"""The unit of microbatch sizes: rows, or the cost of rows of varying length.

Where rows have costs, those of a batch are sorted by them, packed into slices, and each slice is
cut to its own longest row (`padding`). A policy then proposes a budget: what a slice may cost with
its padding, in whole units, takes the place of its rows.

A slice costs its number of rows times the cost of the longest, so that rows that are sorted and
cut into neighbours leave nothing to gain by another grouping. Of all such cuts `pack` finds the
best, by dynamic programming over where a slice begins. The same costs lead to the same slices
everywhere.
"""

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
"""The cost of a row from its lengths: from ``(..., lengths)`` to ``(...)``."""

# A slice has at most so many rows, which bounds the work for each row.
_MOST_BEGINNINGS = 1 << 14


def pack(lengths: Array, combine: Combine, budget: float, *, overhead: float = 0.0) -> list[int]:
    """The rows of each slice, where ``overhead · slices + padded costs`` are least.

    A row that costs more than the budget is alone in its slice. The order of the rows is kept: of
    one length, sorted, no other grouping is better; of several lengths another order may be.

    >>> costs = np.array([[8], [8], [3], [2], [2]])
    >>> pack(costs, _sum, 16), pack(costs, _sum, 16, overhead=10)
    ([2, 1, 2], [2, 3])
    >>> frames_and_labels = np.array([[8, 1], [7, 3], [2, 9], [2, 2]])
    >>> pack(frames_and_labels, _product, 48, overhead=20)
    [2, 2]
    """
    num_rows, first = len(lengths), 0
    least = np.zeros(num_rows + 1)  # of the slices up to each row
    begins = [0] * (num_rows + 1)
    longest = np.zeros_like(lengths)  # of the slices that begin at each row, so far
    for end in range(1, num_rows + 1):
        first = max(first, end - _MOST_BEGINNINGS)
        longest[first:end] = np.maximum(longest[first:end], lengths[end - 1])
        padded = np.arange(end - first, 0, -1) * combine(longest[first:end])
        # A beginning from which rows are too many for the budget is so for all later ends, too.
        # The last is that of a single row, which is allowed whatever it costs.
        too_long = int((padded[:-1] > budget).sum())
        first += too_long
        total = least[first:end] + overhead + padded[too_long:]
        best = int(total.argmin())  # of equals the earliest, for fewer slices
        least[end], begins[end] = total[best], first + best
    return _slices(begins)


def _slices(begins: list[int]) -> list[int]:
    end, sizes = len(begins) - 1, []
    while end:
        sizes.append(end - begins[end])
        end = begins[end]
    return sizes[::-1]


def without_lonely_rows(sizes: Sequence[int]) -> list[int]:
    """The same slices, with none of one row: it goes into the slice before it, of longer rows.

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


# Steps that are left out, because they compile, and look for kernels and memory.
_COLD = 2
# Steps after which the overhead is taken from what was measured, and no clock is needed any more.
_ENOUGH = 8
_MOST = 64
# How much of the spread of the slices' number the padded cost may not explain.
_APART = 0.01


@dataclass
class Overhead:
    """The fixed cost of a slice, fitted from the seconds of steps.

    A step takes ``seconds = slope · (overhead · slices + padded cost)``, by least squares over
    the steps that were measured. Until they tell, it is the cost of an average row.

    >>> overhead = Overhead()
    >>> for slices, padded in [(1, 900)] * 2 + [(4, 900), (8, 700), (2, 1000), (6, 800)] * 2:
    ...     overhead.record(seconds=1e-3 * (50 * slices + padded), slices=slices, padded=padded)
    >>> round(overhead.of(average=128.0), 6)
    50.0
    """

    steps: int = 0
    # Slices², slices · padded, padded², seconds · slices, seconds · padded.
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    fitted: float | None = None

    @property
    def wants_seconds(self) -> bool:
        """Whether more steps should be measured for it."""
        return self.steps < _MOST

    def of(self, average: float) -> float:
        """In the unit of costs."""
        return average if self.fitted is None else self.fitted

    def record(self, *, seconds: float, slices: int, padded: float) -> None:
        """Learn from a step."""
        self.steps += 1
        if self.steps <= _COLD or self.steps > _MOST:
            return
        terms = slices**2, slices * padded, padded**2, seconds * slices, seconds * padded
        self.sums = [total + term for total, term in zip(self.sums, terms, strict=True)]
        if self.steps < _ENOUGH:
            return
        a, b, c, d, e = self.sums
        determinant = a * c - b * b
        if determinant <= _APART * a * c:
            return  # all steps were alike
        per_slice, per_cost = (c * d - b * e) / determinant, (a * e - b * d) / determinant
        # Noise may tell that rows cost nothing, and then it tells nothing of slices, either.
        if per_cost > 0:
            self.fitted = max(0.0, per_slice / per_cost)


Cost: TypeAlias = Callable[[Any], float | tuple[float, ...]]
"""The cost of a row, from a batch of this one row; several lengths stand for their product."""

TOKENS, SECONDS = "tokens", "seconds"
_DURATIONS = ("seconds", "duration", "durations", "duration_seconds")
_OR_COST = "or a function from a batch of one row to what it costs"


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
        """Of the batch."""
        return len(self.order)

    @functools.cached_property
    def extent(self) -> int:
        """The cost of the whole batch as one slice, in whole units."""
        return self._units([self.num_rows])[0]

    @functools.cached_property
    def average(self) -> float:
        """Cost of a row."""
        return float(self.combine(self.lengths).mean())

    def pack(self, budget: int, *, overhead: float, min_rows: int = 1) -> list[int]:
        """The rows of each slice, none of which costs more than a budget."""
        sizes = pack(self.lengths, self.combine, budget, overhead=overhead)
        # BatchNorm in training refuses a single row; two may then cost more than the budget.
        return sizes if min_rows == 1 else without_lonely_rows(sizes)

    def largest(self, sizes: Sequence[int]) -> int:
        """The cost of the costliest of these slices, in whole units."""
        return max(self._units(sizes))

    def padded(self, sizes: Sequence[int]) -> float:
        """The cost of all slices together."""
        return sum(self._costs(sizes))

    def cut(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Microbatches of these rows, each without the padding that all of its rows have."""
        if not self.groups:
            return list(microbatches)
        return [
            cut_padding(microbatch, self.groups, rows)
            for microbatch, rows in zip(microbatches, _slices_of(sizes), strict=True)
        ]

    def places(self) -> list[int]:
        """Of each row of the batch as it came, its place here."""
        found: list[int] = np.argsort(self.order).tolist()
        return found

    def restored(
        self, outputs: Sequence[Any], sizes: Sequence[int], *, fill: float = 0
    ) -> list[Any]:
        """Outputs of these slices, padded with a number to the length of the whole batch."""
        if not self.groups:
            return list(outputs)
        rows = _slices_of(sizes)
        windows = {g.name: [g.window(each) for each in rows] for g in self.groups}
        padded = {group.name: group.padded for group in self.groups}
        leaves = [tensor_leaves(output) for output in outputs]
        dims = {
            path: length_dims(
                [tensor for _, tensor in column], windows, self.output_dims.get(path, {})
            )
            for column in zip(*leaves, strict=False)
            for path, _ in column[:1]
        }
        whole = []
        for index, (output, own) in enumerate(zip(outputs, leaves, strict=True)):
            restored: dict[int, Tensor] = {}
            for path, tensor in own:
                places = {
                    dim: (windows[name][index][0], padded[name])
                    for dim, name in dims.get(path, {}).items()
                    if tensor.shape[dim] < padded[name]
                }
                if places:
                    restored[id(tensor)] = restore_padding(tensor, places, fill=fill)
            whole.append(replace_tensors(output, restored))
        return whole

    def _costs(self, sizes: Sequence[int]) -> list[float]:
        return [
            size * float(self.combine(self.lengths[rows].max(0)))
            for size, rows in zip(sizes, _slices_of(sizes), strict=True)
        ]

    def _units(self, sizes: Sequence[int]) -> list[int]:
        # A cost that is whole but for rounding is not to count as one unit more.
        return [max(1, math.ceil(cost - 1e-6)) for cost in self._costs(sizes)]


def _slices_of(sizes: Sequence[int]) -> list[slice]:
    """Neighbouring rows, as many as these.

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
    """The dimensions of outputs that are as long as their slices, each with the group's name."""
    found: dict[int, str] = {}
    for dim in range(1, min(tensor.dim() for tensor in tensors)):
        own = [tensor.shape[dim] for tensor in tensors]
        for name, spans in windows.items():
            lengths = [stop - start for start, stop in spans]
            # As long as its slice in each of them: by chance, unless slices have several lengths,
            # or a look has shown it.
            if own == lengths and (len(set(own)) > 1 or shown.get(dim) == name):
                found.setdefault(dim, name)
    return found


def check_unit(unit: object) -> None:
    """Refuse what sizes cannot be counted in.

    Raises:
        TypeError: neither a word nor a function.
        ValueError: an unknown word.

    >>> check_unit("tokens")
    """
    if isinstance(unit, str):
        try:
            check_choice("microbatch_unit", unit, (ROWS, TOKENS, SECONDS))
        except ValueError as error:
            raise ValueError(f"{error}, {_OR_COST}") from None
    elif not callable(unit):
        raise TypeError(
            f"microbatch_unit={unit!r} is no unit: give 'rows', 'tokens' (of padded texts), "
            f"'seconds' (of a tensor of that name, or 'durations'), {_OR_COST}"
        )


def unit_name(unit: str | Cost) -> str:
    """The name of the unit in messages, in the plural.

    >>> unit_name("tokens"), unit_name(len)
    ('tokens', 'units of cost')
    """
    return unit if isinstance(unit, str) else "units of cost"


@dataclass
class _PackingRule(CutRule):
    """Packs rows into slices that cost no more than a size."""

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
        # Without waiting only the time was measured in which work was handed to the device.
        if measured is None or not measured.has_waited:
            return
        if finished.attempts > 1 or not finished.cuts:
            return  # memory that was given back is asked for anew
        self.overhead.record(
            seconds=measured.seconds,
            slices=finished.plan.num_microbatches,
            padded=sum(
                cut.packing.padded(cut.sizes)
                for cut in finished.cuts
                if isinstance(cut.packing, _SortedRows)
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        # Plain values are written as JSON, which has no infinity.
        failed = None if math.isinf(self.failed) else self.failed
        learned = {"unit": self.unit, "overhead": asdict(self.overhead), "failed": failed}
        return super().state_dict() | learned

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "overhead" in state:
            self.overhead = Overhead(**state["overhead"])
            self.failed = math.inf if state["failed"] is None else state["failed"]


class CostUnit(Unit):
    """A unit in which rows have costs, by which they are sorted.

    Attributes:
        padding: as given.
        output_dims: see `_SortedRows`; filled by the check of padding.

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
        self.output_dims: dict[str, dict[int, str]] = {}
        self.padding = padding

    def check(self, setup: Setup) -> None:
        given = {"Carry": setup.carrying.is_on, "strict_divisible": setup.strict_divisible}
        for name in (name for name, is_on in given.items() if is_on):
            raise ValueError(
                f"microbatch_unit={self.name!r} sorts the rows of each batch and cuts them into "
                f"unequal slices, which does not go with {name}; leave one of them out"
            )

    def check_policy(self, policy: Policy, argument: str) -> None:
        if policy.explores:
            raise ValueError(
                f"{argument}='explore' looks for the fastest number of rows, and slices of "
                f"{self.name} are packed for the least time already; say {argument}='auto'"
            )
        if policy.multiple_of > 1:
            raise ValueError(
                f"{argument} has multiple_of={policy.multiple_of}, a number of rows, and sizes are "
                f"{self.name}; leave it out"
            )

    def rule(self, *, strict_divisible: bool) -> CutRule:
        return _PackingRule(strict_divisible=strict_divisible, unit=self.name)

    def groups(self, batch: Any, num_rows: int) -> list[Group]:
        """The padded tensors of a batch; see `Padding.read`.

        Raises:
            BatchError: it cannot be told, or tokens are counted and nothing tells their number.
        """
        row_dims = self._layout.row_dims(batch)
        groups = self.padding.read(batch, num_rows, row_dims=row_dims)
        if self.name == TOKENS and not groups:
            raise BatchError(
                "microbatch_unit='tokens' counts the tokens of each row, and nothing in the batch "
                "tells them: it has no attention_mask of (rows, length), rows first, and no tensor "
                "of lengths; name one, as in padding={'tokens': 'token_lengths'}, give a function "
                "from a batch of one row to its cost, or count 'rows'"
            )
        return groups

    def packing(
        self, batch: Any, groups: Sequence[Group], num_rows: int, *, cuts: bool
    ) -> _SortedRows:
        """The rows of a batch, sorted.

        Raises:
            BatchError: the cost of a row is no positive number.
        """
        combine: Combine = _sum
        if self.name == TOKENS:
            # Where padding stays, each row costs what the longest does.
            lengths = [
                group.lengths if cuts else np.full(num_rows, group.padded) for group in groups
            ]
            table = np.stack(lengths, axis=1).astype(np.float64)
        elif self.name == SECONDS:
            table = self._seconds(batch, num_rows)[:, None]
        else:
            table, combine = self._costs(batch, num_rows)
        # Rows of equal cost stay in their order.
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
            "microbatch_unit='seconds' reads how long each row is from a tensor called 'seconds' "
            "or 'durations', and the batch has none of one number per row; let the collate "
            "function give it, or give a function of your own, as in microbatch_unit=lambda row: "
            "row['audio_lengths'].item() / 16_000"
        )

    def _costs(self, batch: Any, num_rows: int) -> tuple[Array, Combine]:
        assert self._cost is not None
        found = [self._cost(row) for row in self._layout.split(batch, [1] * num_rows)]
        rows = [each if isinstance(each, tuple | list) else (each,) for each in found]
        try:
            table = np.array([[float(each) for each in row] for row in rows])
        except (TypeError, ValueError) as error:
            raise BatchError(
                f"microbatch_unit gave {found[0]!r} for a row; return a number, or a tuple of as "
                "many lengths for every row, whose product is the cost"
            ) from error
        table = _checked(table, "microbatch_unit")
        costliest = float(_product(table).max())
        if costliest < 1:
            raise BatchError(
                f"microbatch_unit gave {costliest:.3g} for the costliest row of a batch, and "
                "budgets are whole numbers; return the cost in a smaller unit, 1000 times as much, "
                "say"
            )
        return table, _product


def _checked(costs: Array, who: str) -> Array:
    wrong = costs[~(np.isfinite(costs) & (costs > 0))]
    if wrong.size:
        raise BatchError(
            f"{who} tells a cost of {wrong.flat[0]} for a row; every row costs a positive, finite "
            "number"
        )
    return costs


def refuse_inputs_with_gradients(batch: Any) -> None:
    """Refuse what cannot be sorted: each slice's backward would go through the sorting again.

    Raises:
        BatchError: a tensor of the batch gathers a gradient.
    """
    for path, tensor in tensor_leaves(batch):
        if tensor.requires_grad:
            raise BatchError(
                f"{path or 'the batch'!r} gathers a gradient of its own, and rows that are sorted "
                "by cost are copies; count 'rows' with microbatch_unit, or detach it"
            )
