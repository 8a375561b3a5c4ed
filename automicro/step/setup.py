"""The setup of a Microbatcher: its arguments, as its features have changed them."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from automicro.batch.layout import BatchLayout
from automicro.loss.passes import Computation, Mode
from automicro.modules import ModuleIndex
from automicro.policy.policy import Policy
from automicro.ranks.interface import OneRank, Ranks
from automicro.reach import Reach
from automicro.state.part import read_state
from automicro.step.fillers import SpareRows
from automicro.step.parts import SizedParts
from automicro.step.plan import ROWS, CutRule, Finished, ReadBatch
from automicro.transaction.rng import devices_of

Sort = Callable[[Sequence[ReadBatch], Mode], Sequence[ReadBatch]]
"""Returns the batches with their rows in another order."""


class Level(Protocol):
    """One way to compute the microbatches of an attempt."""

    @property
    def name(self) -> str: ...

    def describe(self) -> str:
        """Describe the level in one sentence."""

    def applied(self) -> AbstractContextManager[None]:
        """Return the context for forward and backward of all microbatches of an attempt."""


class Plain:
    """Level 0, at which everything that the backward needs is kept."""

    name = "plain"

    def describe(self) -> str:
        return "everything is kept"

    def applied(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Recollection(Protocol):
    """The sizes that one phase of a run takes from earlier runs, and saves for later ones."""

    def look_up(
        self, batch: ReadBatch | None, policy: Policy, *, is_new: bool, ranks: Ranks
    ) -> int | None:
        """Let a policy start from a remembered size; return its rows, or None if there is none."""

    def take_down(self, finished: Finished[Any]) -> None:
        """Remember the size of a step, once it is settled."""


class Unit:
    """The unit of sizes: here rows, in their original order."""

    name = ROWS
    is_rows = True

    def check(self, setup: "Setup") -> None:
        """Refuse a setup that does not go with the unit."""

    def check_policy(self, policy: Policy, argument: str) -> None:
        """Refuse a policy that does not go with the unit."""

    def rule(self, *, strict_divisible: bool) -> CutRule:
        """Return the rule that turns proposed sizes into slices."""
        return CutRule(strict_divisible=strict_divisible)


class Carrying:
    """The default, in which no state is carried from batch to batch; `Carry` replaces it."""

    carry_layout: BatchLayout | None = None
    is_on = False

    def __init__(self, layout: BatchLayout) -> None:
        self.layout = layout

    def beside(self, batch: Any, carry: Any) -> Any:
        """Return a batch with its state; None if a rank has no batch."""
        if carry is not None:
            raise ValueError(
                "carry=… was passed to a Microbatcher without Carry(…). Name the dimension of the "
                "state that holds the rows: features=[Carry(1)] for nn.LSTM"
            )
        return batch

    def refuse_several(self, batches: Iterable[Any]) -> None:
        """Refuse several batches with state, because each continues from the previous one."""

    def hiding(self, function: Any) -> Any:
        """Wrap functions of the caller so that they receive batches without state."""
        return function


@dataclass(kw_only=True, eq=False)
class Setup:
    """The setup of a Microbatcher. Features change it in `attach`; afterwards it is constant."""

    model: nn.Module  # without any wrapper
    modules: list[nn.Module]  # all that take part, the model first, with its wrapper
    device: torch.device
    batch_layout: int | Mapping[str, Any] = 0
    functions: dict[str, Any] = field(default_factory=dict)  # of the caller, by argument
    optimizer: torch.optim.Optimizer | None = None  # without any wrapper
    precision: str = "fp32"
    state: list[Any] = field(default_factory=list)  # additional objects that a step changes
    carrying: Carrying = field(init=False)
    parts: SizedParts = field(init=False)
    levels: Callable[["Setup"], Sequence[Level]] = lambda setup: [Plain()]
    levels_by_time: bool = False  # whether to use the fastest level, not the first that fits
    unit: Unit = field(default_factory=Unit)
    sorter: Callable[["Setup", Computation], Sort] | None = None  # makes what sorts rows
    strict_divisible: bool = False
    repeatable: bool = False  # whether sizes must not depend on the duration of attempts
    sums_in_float32: bool = True  # of gradients in half precision
    scales_for_ranks: bool = True  # whether losses are divided by the denominator of all ranks
    recollect: Callable[["Setup", str], Recollection] | None = None  # for a phase, by its name
    ranks: Ranks = field(default_factory=OneRank)

    def __post_init__(self) -> None:
        self.carrying = Carrying(BatchLayout(self.batch_layout))
        self.parts = SizedParts(self.modules)

    # The following is computed once, so read it only after all features have been attached.
    @functools.cached_property
    def reach(self) -> Reach:
        """Modules and generators that the modules and functions reach on their own."""
        return Reach(self._own_roots)

    @property
    def _own_roots(self) -> dict[str, Any]:
        named = {f"modules[{i}]" if i else "": m for i, m in enumerate(self.modules)}
        return named | self.functions

    @functools.cached_property
    def own_parts(self) -> list[Any]:
        """Additional state that the caller rolls back."""
        return read_state(self.state)[0]

    @functools.cached_property
    def roots(self) -> dict[str, Any]:
        """Modules, functions and other values, by name, whose state an attempt might change."""
        return self._own_roots | read_state(self.state)[1]

    @functools.cached_property
    def spare(self) -> SpareRows:
        """Rows for the fillers of a rank that has none."""
        return SpareRows(self.carrying.layout, self.ranks)

    @functools.cached_property
    def index(self) -> ModuleIndex:
        """The parameters, buffers and layers of the modules."""
        return ModuleIndex(self.modules, self.reach.modules)

    @functools.cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices that draw random numbers and compute, the main one first."""
        return devices_of([*self.modules, *self.reach.modules().values()], self.device)
