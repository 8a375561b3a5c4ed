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
from automicro.loss.averages import LossAverage
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
"""Returns the batches that were read, with their rows in another order."""


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
    """The unit of sizes: here rows, in their original order.

    Attributes:
        name: in the plural.
        is_rows: whether sizes are rows in their original order.
    """

    name = ROWS
    is_rows = True

    def check(self, setup: "Setup") -> None:
        """Refuse a setup that does not go with the unit.

        Raises:
            ValueError: the message has the remedy.
        """

    def check_policy(self, policy: Policy, argument: str) -> None:
        """Refuse a policy that does not go with the unit.

        Raises:
            ValueError: the message has the remedy.
        """

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
        """Return a batch with its state; None if a rank has no batch.

        Raises:
            ValueError: there is state, but no `Carry` says where its rows are.
        """
        if carry is not None:
            raise ValueError(
                "carry=… was given to a Microbatcher without Carry(…); name the dimension of "
                "the state that holds the rows: features=[Carry(1)] for nn.LSTM"
            )
        return batch

    def refuse_several(self, batches: Iterable[Any]) -> None:
        """Refuse several batches with state, because each continues from the previous one.

        Raises:
            ValueError: state is carried, and there are several batches.
        """

    def hiding(self, function: Any) -> Any:
        """Wrap functions of the caller so that they receive batches without state."""
        return function


@dataclass(kw_only=True, eq=False)
class Setup:
    """The setup of a Microbatcher. Features change it in `attach`; afterwards it is constant.

    Attributes:
        model: without any wrapper.
        modules: everything that takes part, the model first, with its wrapper.
        device: where they compute.
        batch_layout: as given to the `Microbatcher`.
        functions: of the caller, by the names of their arguments.
        optimizer: without any wrapper.
        precision: by name.
        state: additional objects with state that a step changes.
        carrying: the state that goes from batch to batch.
        parts: parts of the modules that have sizes of their own.
        levels: makes the levels at which microbatches can be computed.
        levels_by_time: whether to use the fastest level instead of the first that fits.
        unit: of sizes.
        sorter: makes the function that sorts the rows of batches; None if they keep their order.
        strict_divisible: whether a batch must be a multiple of the size.
        repeatable: whether sizes must not depend on the duration of attempts.
        sums_in_float32: whether gradients in half precision are summed in fp32.
        scales_for_ranks: whether losses are divided by the denominator of all ranks together.
        eval_loss_average: if it differs from that of training.
        recollect: makes the memory of the sizes of a phase, by its name; None for no memory.
        ranks: that run steps together.
    """

    model: nn.Module
    modules: list[nn.Module]
    device: torch.device
    batch_layout: int | Mapping[str, Any] = 0
    functions: dict[str, Any] = field(default_factory=dict)
    optimizer: torch.optim.Optimizer | None = None
    precision: str = "fp32"
    state: list[Any] = field(default_factory=list)
    carrying: Carrying = field(init=False)
    parts: SizedParts = field(init=False)
    levels: Callable[["Setup"], Sequence[Level]] = lambda setup: [Plain()]
    levels_by_time: bool = False
    unit: Unit = field(default_factory=Unit)
    sorter: Callable[["Setup", Computation], Sort] | None = None
    strict_divisible: bool = False
    repeatable: bool = False
    sums_in_float32: bool = True
    scales_for_ranks: bool = True
    eval_loss_average: LossAverage | None = None
    recollect: Callable[["Setup", str], Recollection] | None = None
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
        """Modules, functions and further values, by name, whose state an attempt might change."""
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
