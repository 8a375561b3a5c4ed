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
"""From batches as they were read to the same batches with their rows in another order."""


class Level(Protocol):
    """One way to compute the microbatches of an attempt."""

    @property
    def name(self) -> str: ...

    def describe(self) -> str:
        """Describe it in one sentence."""

    def applied(self) -> AbstractContextManager[None]:
        """Around forward and backward of all microbatches of an attempt."""


class Plain:
    """Level 0, at which everything that the backward needs is kept."""

    name = "plain"

    def describe(self) -> str:
        return "everything is kept"

    def applied(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class Recollection(Protocol):
    """Sizes that one phase of a run takes from earlier runs, and leaves for later ones."""

    def look_up(
        self, batch: ReadBatch | None, policy: Policy, *, is_new: bool, ranks: Ranks
    ) -> int | None:
        """Let a policy start from what is remembered: the rows; None where nothing is."""

    def take_down(self, finished: Finished[Any]) -> None:
        """Remember the size of a step, once it is settled."""


class Unit:
    """The unit of sizes: here rows, as they come.

    Attributes:
        name: in the plural.
        is_rows: whether rows are as they come.
    """

    name = ROWS
    is_rows = True

    def check(self, setup: "Setup") -> None:
        """Refuse what does not go with it.

        Raises:
            ValueError: the message has the remedy.
        """

    def check_policy(self, policy: Policy, argument: str) -> None:
        """Refuse a policy that does not go with it.

        Raises:
            ValueError: the message has the remedy.
        """

    def rule(self, *, strict_divisible: bool) -> CutRule:
        """The rule that turns proposed sizes into slices."""
        return CutRule(strict_divisible=strict_divisible)


class Carrying:
    """No state goes from batch to batch, unless `Carry` puts another class in this one's place.

    Attributes:
        layout: as given.
        carry_layout: of the state; None where there is none.
        is_on: whether there is state.
    """

    carry_layout: BatchLayout | None = None
    is_on = False

    def __init__(self, layout: BatchLayout) -> None:
        self.layout = layout

    def beside(self, batch: Any, carry: Any) -> Any:
        """A batch with its state; None where a rank has no batch.

        Raises:
            ValueError: there is state, and nothing was said of its rows.
        """
        if carry is not None:
            raise ValueError(
                "carry=… was given to a Microbatcher without Carry(…); say in which "
                "dimension the state has its rows: features=[Carry(1)] for nn.LSTM"
            )
        return batch

    def refuse_several(self, batches: Iterable[Any]) -> None:
        """Refuse batches that are to be taken as one, unless they are one with its state.

        Raises:
            ValueError: each of them begins where the one before ended.
        """

    def hiding(self, function: Any) -> Any:
        """A function of the caller's, or several by name; it gets batches without their state."""
        return function


@dataclass(kw_only=True, eq=False)
class Setup:
    """The setup of a Microbatcher. Features change it in `attach`; from then on it stays.

    Attributes:
        model: inside of any wrapper.
        modules: everything that takes part, the model first, wrapped as it was given.
        device: where they compute.
        batch_layout: as the `Microbatcher` has it.
        functions: of the caller, by the names of their arguments.
        optimizer: inside of any wrapper.
        precision: by name.
        state: further state that a step changes.
        carrying: state that goes from batch to batch.
        parts: of the modules that have sizes of their own.
        levels: makes the levels at which microbatches can be computed.
        levels_by_time: whether the fastest level is wanted, and not the first that fits.
        unit: of sizes.
        sorter: makes what sorts the rows of batches; None where they stay as they come.
        strict_divisible: whether a batch must be a multiple of the size.
        repeatable: whether sizes may not depend on how long attempts took.
        sums_in_float32: whether gradients in half precision add up in fp32.
        scales_for_ranks: whether losses are divided by what those of all ranks count.
        eval_loss_average: if it is another than in training.
        recollect: makes what remembers the sizes of a phase, by its name; None for nothing.
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

    # What follows is found once, so it is to be read only when all features are attached.
    @functools.cached_property
    def reach(self) -> Reach:
        """Modules and generators that the modules and functions get at by themselves."""
        return Reach(self._own_roots)

    @property
    def _own_roots(self) -> dict[str, Any]:
        named = {f"modules[{i}]" if i else "": m for i, m in enumerate(self.modules)}
        return named | self.functions

    @functools.cached_property
    def own_parts(self) -> list[Any]:
        """Further state that the caller puts back."""
        return read_state(self.state)[0]

    @functools.cached_property
    def roots(self) -> dict[str, Any]:
        """Modules, functions and further values, by name, whose state an attempt may change."""
        return self._own_roots | read_state(self.state)[1]

    @functools.cached_property
    def spare(self) -> SpareRows:
        """Rows for the fillers of a rank that has none."""
        return SpareRows(self.carrying.layout, self.ranks)

    @functools.cached_property
    def index(self) -> ModuleIndex:
        """All that the modules hold."""
        return ModuleIndex(self.modules, self.reach.modules)

    @functools.cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """All that draw and compute, the main one first."""
        return devices_of([*self.modules, *self.reach.modules().values()], self.device)
