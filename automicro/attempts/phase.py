"""Training, or evaluation: sizes of its own, and what was learned of the model meanwhile."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from automicro.attempts.cut_rule import CutRule
from automicro.attempts.plan import Finished
from automicro.attempts.recollection import Recollection
from automicro.attempts.step import Step
from automicro.inputs import InputGuard, InputWatch
from automicro.memory import Meter, use_libraries
from automicro.module_index import ModuleIndex
from automicro.observer import Narrator, Observer
from automicro.policy import Policy
from automicro.ranks import OneRank, Ranks, telling
from automicro.reach import Reach
from automicro.slicing import Contents
from automicro.torch_private import is_uninitialized
from automicro.transaction import (
    BufferMemory,
    Buffers,
    Growth,
    Metrics,
    OwnGenerators,
    RandomState,
    TensorCopy,
    Transaction,
    devices_of,
    flatten_metrics,
)


class Spare(Protocol):
    """Rows that a rank runs fillers on."""

    @property
    def is_lacking(self) -> bool:
        """Whether this rank has none."""

    def pass_on(self, lender: int) -> None:
        """Give those of one rank to all that have none. All ranks call it."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What training and evaluation have in common.

    Attributes:
        modules: everything that takes part.
        device: where they compute.
        ranks: that run steps together.
        reach: modules and generators that the caller's functions get at by themselves.
        spare: rows for the fillers of a rank that has none; None where there are no ranks.
        observer: told of every attempt; None for nobody.
        repeatable: whether sizes may not depend on how long attempts took.
    """

    modules: Sequence[nn.Module]
    device: torch.device
    ranks: Ranks = field(default_factory=OneRank)
    reach: Reach = field(default_factory=lambda: Reach({}))
    spare: Spare | None = None
    observer: Observer | None = None
    repeatable: bool = False

    @functools.cached_property
    def index(self) -> ModuleIndex:
        """All that the modules hold."""
        return ModuleIndex(self.modules, self.reach.modules)

    @functools.cached_property
    def buffers(self) -> BufferMemory:
        """What is known of the modules' buffers."""
        return BufferMemory(self.index)

    @functools.cached_property
    def devices(self) -> tuple[torch.device, ...]:
        """All that draw and compute, the main one first."""
        return devices_of([*self.modules, *self.reach.modules().values()], self.device)


class Phase:
    """Training, or evaluation: its sizes, and what outlives its steps.

    Args:
        name: ``"train"`` or ``"eval"``.
        policy: proposes sizes.
        shared: with the other phase.
        strict_divisible: whether a batch must be a multiple of the size.
        recollection: of sizes that earlier runs found; None for none.

    Attributes:
        policy: as given.
        size: rows of the largest microbatch of the last batch; None before the first.
        rule: turns sizes into slices.
        device: where the modules compute.
        ranks: that run steps together.
        reach: as shared.
        spare: as shared.
        is_training: whether gradients are computed.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        shared: Shared,
        *,
        strict_divisible: bool = False,
        recollection: Recollection | None = None,
    ) -> None:
        self.policy = policy
        self.size: int | None = None
        self.rule = CutRule(strict_divisible=strict_divisible)
        self.device, self.ranks = shared.device, shared.ranks
        self.reach, self.spare = shared.reach, shared.spare
        self.is_training = name == "train"
        self.is_repeatable = shared.repeatable
        self._meter = Meter(
            shared.devices,
            repeatable=shared.repeatable,
            left_free=shared.ranks.communication_share,
        )
        self._name = name
        self._shared = shared
        self._recollection = recollection
        self._is_new = True
        self._has_run = False
        self._growth = Growth()
        self._inputs = InputGuard()

    def __repr__(self) -> str:
        size = "" if self.size is None else f", last {self.size} rows"
        return f"microbatch_size={self.policy!r}{size}, device={str(self.device)!r}"

    @property
    def adapts(self) -> bool:
        """Whether sizes may change."""
        return self.policy.adapts

    @property
    def meter(self) -> Meter | None:
        """What measures attempts, where sizes may change."""
        return self._meter if self.adapts else None

    def state_dict(self) -> dict[str, Any]:
        """What was found, as plain values."""
        return {"policy": self.policy.state_dict(), "min_rows": self.rule.min_rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was found earlier.

        Raises:
            ValueError: a state of another policy.
        """
        self.policy.load_state_dict(state["policy"])
        self._is_new = False
        self.rule.min_rows = state["min_rows"]

    def watch(self, batches: Sequence[Contents]) -> InputWatch:
        """Guard the batches of a step against a model that writes into its input."""
        return self._inputs.watch(batches, self.device)

    def undoing(self) -> Transaction:
        """Undoes what a forward outside of the step's own changes: buffers, random numbers."""
        return Transaction([Buffers(self._shared.buffers), self.random_state()])

    @contextlib.contextmanager
    def initializing(self) -> Iterator[None]:
        """Let modules take their shapes meanwhile, and nothing else change that is there already.

        Torch's own generator is left where it is: weights were drawn from it.
        """
        ready = [
            TensorCopy(buffer)
            for _, module in self._shared.index.owners
            for buffer in module.buffers(recurse=False)
            if not is_uninitialized(buffer)
        ]
        generators = OwnGenerators(self.reach.generators())
        generators.begin()
        try:
            yield
        finally:
            generators.roll_back()
            for copy in ready:
                copy.put_back()

    def buffers(self) -> Buffers:
        """The buffers of the modules, for a step that begins with an index of them."""
        return Buffers(self._shared.buffers, is_fresh=True)

    def random_state(self) -> RandomState:
        """Every generator that a step may draw from."""
        return RandomState(self._shared.devices, self.reach.generators)

    def narrator(self) -> Narrator | None:
        """What tells of one step; None where nobody listens."""
        observer = self._shared.observer
        return None if observer is None else Narrator(observer, self._name)

    def metrics(self, metrics: Any) -> Metrics:
        """What is updated with the rows of one step."""
        with telling(self.ranks):
            return Metrics(flatten_metrics(metrics), self._growth)

    def begin(self, step: Step) -> int | None:
        """A step is about to be attempted; the rows that it starts from, if an earlier run says."""
        recalled: int | None = None
        if self._recollection is not None and self.adapts:
            first = step.batches[0] if step.batches else None
            recalled = self._recollection.look_up(
                first, self.policy, is_new=self._is_new, ranks=self.ranks
            )
        if not self._has_run:
            self._has_run = True
            use_libraries(self._shared.devices, self._shared.modules)
        self._is_new = False
        self.reach.step()
        return recalled

    def end(self, step: Step, finished: Finished[Any]) -> None:
        """It is done: learn from it."""
        self.size = finished.microbatch_size
        if self._recollection is not None and self.adapts:
            self._recollection.take_down(finished, step.costs)
