"""A step, the plan of an attempt, and its outcome."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from automicro.batch.layout import balanced_sizes
from automicro.batch.tensors import Contents
from automicro.errors import BatchError
from automicro.memory.device import Measured
from automicro.policy.policy import Exploration, Policy, require_size
from automicro.ranks.interface import Agreement

ROWS = "rows"
"""The unit of sizes, unless rows have costs."""


class _Packing(Protocol):
    """The rows of a batch, reordered by cost."""

    @property
    def extent(self) -> int: ...

    def largest(self, sizes: Sequence[int]) -> int:
        """Return the cost of the costliest slice, in whole units."""

    def cut(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
        """Cut microbatches of these rows, and remove padding that all rows of a microbatch have."""

    def restored(
        self, outputs: Sequence[Any], sizes: Sequence[int], *, fill: float = 0
    ) -> list[Any]:
        """Pad the outputs of these slices to the lengths that the whole batch would have given."""

    def places(self) -> list[int]:
        """Return the place here of each row of the original batch."""


class ReadBatch(NamedTuple):
    """One batch, read once."""

    batch: Any  # as the caller passed it
    num_rows: int
    cost: float | None = None  # elements of one row, on average
    contents: Contents = Contents(())
    packing: _Packing | None = None  # None if rows keep their order

    @property
    def extent(self) -> int:
        """The size of the batch for a policy: its rows, or their cost as one slice."""
        return self.num_rows if self.packing is None else self.packing.extent

    @property
    def row_cost(self) -> float | None:
        """The cost of one row: the average, or of the costliest row if rows are sorted by cost."""
        return self.cost if self.packing is None else self.packing.largest([1])


@dataclass(kw_only=True)
class Step:
    """One optimization batch, the same for every attempt."""

    batches: Sequence[ReadBatch]  # count as one; empty if the data of this rank have run out
    policy: Policy
    denominators: Mapping[str, float] = field(default_factory=dict)  # of losses, for several ranks
    wants_to_stop: bool = False

    raw: list[Any] = field(init=False)
    rows: list[int] = field(init=False)

    def __post_init__(self) -> None:
        batches = self.batches
        # Computed once and not at each attempt, because a step may have many batches.
        self.raw = [each.batch for each in batches]
        self.rows = [each.num_rows for each in batches]


@dataclass
class CutRule:
    """The rule that cuts batches into slices of a proposed size.

    >>> CutRule().cut(10, 4), CutRule().cut(50, 16, multiple_of=8)
    ([4, 3, 3], [16, 16, 16, 2])
    """

    strict_divisible: bool = False
    min_rows: int = 1  # of a slice; 2 if BatchNorm refuses a single row
    unit: str = ROWS
    failed: float = math.inf  # the smallest size that ran out of memory, if rows have costs

    @property
    def wants_seconds(self) -> bool:
        """Whether it learns from the duration of attempts."""
        return False

    def cut_batch(self, batch: ReadBatch, size: int, *, multiple_of: int = 1) -> "Cut":
        """Cut a batch into slices of at most a size."""
        return Cut(self.cut(batch.num_rows, size, multiple_of=multiple_of), batch.cost)

    def learn(self, finished: "Finished[Any]") -> None:
        """Learn from a finished step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state, as plain values."""
        return {"min_rows": self.min_rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a learned state."""
        unit = state.get("unit", ROWS)
        if unit != self.unit:
            raise ValueError(
                f"the sizes of this state are in {unit}, but those of this run in {self.unit}. "
                "Pass the microbatch_unit that it was saved with, or do not load the state"
            )
        self.min_rows = state["min_rows"]

    def cut(self, num_rows: int, size: int, *, multiple_of: int = 1) -> list[int]:
        """Return the rows of each slice, the largest first."""
        if not self.strict_divisible:
            # Any other size, such as a batch smaller than one unit, is cut evenly.
            if multiple_of > 1 and size % multiple_of == 0:
                return _whole_units(num_rows, size // multiple_of, multiple_of)
            return balanced_sizes(num_rows, size, min_rows=self.min_rows)
        if num_rows % size:
            raise BatchError(
                f"strict_divisible=True: a batch of {num_rows} rows is not a multiple of "
                f"microbatch_size={size} (remainder {num_rows % size}). Use a multiple of it "
                "(drop_last=True in the data loader), or leave strict_divisible out: a smaller "
                "last slice is exact, too"
            )
        return [size] * (num_rows // size)

    def largest_divisor(self, num_rows: int, size: int) -> int:
        """Return the largest size of at most ``size`` rows that divides the batch."""
        return next(each for each in range(size, 0, -1) if num_rows % each == 0)


def _whole_units(num_rows: int, most_units: int, unit: int) -> list[int]:
    """Return balanced slices of whole units of rows, of which the last unit may be short."""
    units = -(-num_rows // unit)
    sizes = [each * unit for each in balanced_sizes(units, most_units)]
    # Slices come largest first, so the last one is the smallest.
    sizes[-1] -= units * unit - num_rows
    return sizes


T = TypeVar("T")


@dataclass(slots=True)
class Cut:
    """The cut of one batch into slices of neighboring rows.

    >>> cut = Cut([4, 3, 3], 10.0)
    >>> cut.num_rows, cut.largest, cut.is_split, cut.leaves_one_alone
    (10, 4, True, False)
    """

    sizes: Sequence[int]  # rows of each slice; the first is the largest, unless rows are packed
    row_cost: float | None = None  # on average
    packing: _Packing | None = None

    num_rows: int = field(init=False)
    largest: int = field(init=False)  # rows of the largest slice, or its cost
    extent: int = field(init=False)  # for a policy: rows of the batch, or their cost as one slice
    is_split: bool = field(init=False)

    def __post_init__(self) -> None:
        # Computed once, because a step reads each of them several times.
        sizes, packing = self.sizes, self.packing
        self.num_rows = self.extent = sum(sizes)
        self.is_split = len(sizes) > 1
        if packing is None:
            self.largest = sizes[0]
        else:
            self.largest, self.extent = packing.largest(sizes), packing.extent

    @property
    def leaves_one_alone(self) -> bool:
        """Whether one of several slices has a single row."""
        return self.is_split and min(self.sizes) == 1


class Plan(NamedTuple):
    """The plan of one attempt."""

    # The largest batch represents the step for the policy; on a single rank, the batch with the
    # largest slice.
    cuts: list[Cut]  # of each batch of this rank; empty if no rank has any row
    size: int  # of the largest slice on any rank
    num_microbatches: int  # that every rank runs
    extent: int  # size of the batch that represents the step
    cost: float | None  # of one row of that batch
    num_global_rows: int
    stops: bool
    unit: str = ROWS
    is_measuring: bool = False  # whether slices are smaller than necessary, only to measure memory
    agreement: Agreement | None = None  # with the other ranks
    proposed: int = 0  # by the policy; a single row may exceed it, a balanced cut stay below
    level: int = 0
    settings: Mapping[str, float | str] = MappingProxyType({})  # other choices of the policy

    @property
    def most(self) -> int:
        """The limit of slices; the size exceeds it if a single row costs more."""
        return self.size if self.unit == ROWS else min(self.size, self.proposed)

    def needs_less_than(self, other: "Plan") -> bool:
        """Whether it needs less memory: by smaller slices, a higher level, or other settings."""
        # A higher level takes less memory at the same size.
        if self.level != other.level:
            return self.level > other.level
        # After a failure, other settings need less memory, such as smaller slices of a part.
        if self.settings != other.settings:
            return True
        # If sizes are costs, more slices are smaller slices, even if the largest one stays.
        if self.unit != ROWS and self.num_microbatches > other.num_microbatches:
            return True
        return self.size < other.size

    @property
    def row_cost(self) -> float | None:
        """The cost of one row for `Policy.climb`; if sizes are costs, that of the largest slice."""
        return self.cost if self.unit == ROWS else float(self.size)

    @property
    def leaves_one_alone(self) -> bool:
        """Whether one of several slices, or a filler, has a single row."""
        # Fillers have a single row, too.
        has_fillers = self.num_microbatches > sum(map(len, map(_SIZES, self.cuts)))
        return has_fillers or any(cut.leaves_one_alone for cut in self.cuts)

    @property
    def totals(self) -> Mapping[str, float] | None:
        """The divisors of the losses of all ranks; None on a single rank."""
        return None if self.agreement is None else self.agreement.denominators


class Finished(NamedTuple, Generic[T]):
    """The outcome of a step, and the number of attempts it took."""

    # `StepResult` documents the fields of the same names.
    result: T | None  # None if no rank had any row and nothing ran
    plan: Plan  # of the last attempt
    nested_sizes: Mapping[str, int]
    attempts: int = 0
    failed_sizes: tuple[int, ...] = ()
    is_committed: bool = False
    measured: Measured | None = None
    recalled_size: int | None = None
    grown_from: int | None = None
    exploration: Exploration | None = None
    level_name: str = "plain"
    nested_ooms: int = 0

    @property
    def counts(self) -> dict[str, Any]:
        """Counts of rows, slices and attempts for results, by the names of their fields."""
        plan = self.plan
        return {
            "num_samples": sum(map(_NUM_ROWS, plan.cuts)),
            "num_global_samples": plan.num_global_rows,
            "microbatch_size": plan.size,
            "microbatch_unit": plan.unit,
            "num_microbatches": plan.num_microbatches,
            "attempts": self.attempts,
            "failed_sizes": self.failed_sizes,
            "recalled_size": self.recalled_size,
            "is_measuring": plan.is_measuring,
            "grown_from": self.grown_from,
            "exploration": self.exploration,
            "stops": plan.stops,
            "peak_bytes": None if self.measured is None else self.measured.peak_bytes,
            "level": self.level_name,
            "nested_sizes": self.nested_sizes,
            "nested_ooms": self.nested_ooms,
        }


_SIZES, _NUM_ROWS, _LARGEST = map(operator.attrgetter, ("sizes", "num_rows", "largest"))


def plan_alone(step: Step, rule: CutRule) -> Plan:
    """Return the plan of a single process."""
    policy = step.policy
    # Set the level before the sizes: the proposal of a policy depends on its level.
    policy.level = level_for(step)
    sizes = [propose(each, policy, rule) for each in step.batches]
    unit = policy.multiple_of  # read after the proposal, because a policy may choose both
    cuts: list[Cut] = []
    is_measuring = False
    for each, size in zip(step.batches, sizes, strict=True):
        cuts.append(rule.cut_batch(each, size, multiple_of=unit))
        is_measuring = is_measuring or policy.is_measuring(each.extent, each.cost)
    # The batch with the largest slice, in elements, represents the step.
    widest = max(cuts, key=lambda cut: (cut.largest * (cut.row_cost or 1), cut.num_rows))
    return Plan(
        cuts=cuts,
        # Whether an attempt fits is decided by the largest slice of all batches.
        size=max(map(_LARGEST, cuts)),
        num_microbatches=sum(map(len, map(_SIZES, cuts))),
        extent=widest.extent,
        cost=widest.row_cost,
        num_global_rows=sum(step.rows),
        stops=step.wants_to_stop,
        unit=rule.unit,
        is_measuring=is_measuring,
        proposed=max(sizes),
        level=policy.level,
        settings=policy.settings,
    )


def level_for(step: Step) -> int:
    """Return the highest level that any batch of the step starts at."""
    if len(step.policy.levels) == 1:
        return 0
    levels = [step.policy.level_for(each.extent, each.row_cost) for each in step.batches]
    return max(levels, default=0)


def propose(batch: ReadBatch, policy: Policy, rule: CutRule) -> int:
    """Return the size that a policy proposes for a batch."""
    extent = batch.extent
    size = policy.propose(extent) if batch.cost is None else policy.propose(extent, batch.cost)
    # The usual proposal, an int, passes at once; anything else is converted, or an error names it.
    if type(size) is not int or size < 1:
        size = require_size(size, name=f"the proposal of {policy!r} for {extent} {rule.unit}")
    # `cut` refuses a fixed size that does not divide the batch; an adaptive one is lowered instead.
    if rule.strict_divisible and policy.adapts:
        size = rule.largest_divisor(extent, min(size, extent))
    return size
