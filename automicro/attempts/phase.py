"""Training, or evaluation: sizes of its own, and what was learned of the model meanwhile."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from automicro.attempts.cut_rule import CutRule
from automicro.attempts.plan import Plan
from automicro.attempts.recollection import Recollection
from automicro.attempts.run import Finished, Spare, run_attempts
from automicro.attempts.trial import Sharing
from automicro.inputs import InputGuard, InputWatch
from automicro.memory import Meter, ResidentMemory
from automicro.observer import Narrator, Observer
from automicro.policy import Policy
from automicro.ranks import Agreement, OneRank, Ranks, telling
from automicro.reach import Reach
from automicro.slicing import Contents
from automicro.torch_private import is_uninitialized
from automicro.transaction import (
    BufferMemory,
    Buffers,
    Growth,
    Metrics,
    OwnGenerators,
    Part,
    RandomState,
    TensorCopy,
    Transaction,
    devices_of,
    flatten_metrics,
)

T = TypeVar("T")


class Phase:
    """Runs steps at the sizes of one policy, each as one transaction.

    Args:
        name: ``"train"`` or ``"eval"``.
        policy: proposes sizes.
        modules: everything that takes part.
        device: where they compute.
        strict_divisible: whether a batch must be a multiple of the size.
        repeatable: whether sizes may not depend on how long attempts took.
        observer: told of every attempt; None for nobody.
        recollection: of sizes that earlier runs found; None for none.
        ranks: that run steps together.
        reach: modules and generators that the caller's functions get at by themselves.
        buffers: what is known of the modules' buffers; both phases share it.

    Attributes:
        policy: as given.
        size: rows of the largest microbatch of the last batch; None before the first.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        modules: Sequence[nn.Module],
        device: torch.device,
        *,
        strict_divisible: bool = False,
        repeatable: bool = False,
        observer: Observer | None = None,
        recollection: Recollection | None = None,
        ranks: Ranks | None = None,
        reach: Reach | None = None,
        buffers: BufferMemory | None = None,
    ) -> None:
        self.policy = policy
        self.size: int | None = None
        self._name = name
        self._device = device
        self._ranks = ranks or OneRank()
        self._observer = observer
        self._recollection = recollection
        self._is_new = True
        self._rule = CutRule(strict_divisible=strict_divisible)
        self._reach = reach or Reach({"": modules})
        self._devices = devices_of([*modules, *self._reach.modules().values()], device)
        self._meter = Meter(self._devices, repeatable=repeatable)
        self._buffers = buffers or BufferMemory(modules, self._reach.modules)
        self._growth = Growth()
        self._inputs = InputGuard()

    def __repr__(self) -> str:
        size = "" if self.size is None else f", last {self.size} rows"
        return f"microbatch_size={self.policy!r}{size}, device={str(self._device)!r}"

    @property
    def adapts(self) -> bool:
        """Whether sizes may change."""
        return self.policy.adapts

    def state_dict(self) -> dict[str, Any]:
        """What was found, as plain values."""
        return {"policy": self.policy.state_dict(), "min_rows": self._rule.min_rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what was found earlier.

        Raises:
            ValueError: a state of another policy.
        """
        self.policy.load_state_dict(state["policy"])
        self._is_new = False
        self._rule.min_rows = state["min_rows"]

    def watch(self, batches: Sequence[Contents]) -> InputWatch:
        """Guard the batches of a step against a model that writes into its input."""
        return self._inputs.watch(batches, self._device)

    @property
    def min_rows(self) -> int:
        """The fewest rows of a slice."""
        return self._rule.min_rows

    def undoing(self) -> Transaction:
        """Undoes what a forward outside of the step's own changes: buffers, random numbers."""
        return Transaction(
            [Buffers(self._buffers), RandomState(self._devices, self._reach.generators)]
        )

    @contextlib.contextmanager
    def initializing(self) -> Iterator[None]:
        """Let modules take their shapes meanwhile, and nothing else change that is there already.

        Torch's own generator is left where it is: weights were drawn from it.
        """
        ready = [
            TensorCopy(buffer)
            for _, module in self._buffers.owners()
            for buffer in module.buffers(recurse=False)
            if not is_uninitialized(buffer)
        ]
        generators = OwnGenerators(self._reach.generators())
        generators.begin()
        try:
            yield
        finally:
            generators.roll_back()
            for copy in ready:
                copy.put_back()

    def buffers(self) -> Buffers:
        """The buffers of the modules, for one step."""
        return Buffers(self._buffers)

    def _random_state(self) -> RandomState:
        return RandomState(self._devices, self._reach.generators)

    def narrator(self) -> Narrator | None:
        """What tells of one step; None where nobody listens."""
        return None if self._observer is None else Narrator(self._observer, self._name)

    def run(
        self,
        attempt: Callable[[Plan], T],
        parts: Sequence[Part],
        *,
        batches: Sequence[Any],
        rows: Sequence[int],
        costs: Sequence[float],
        metrics: Any,
        measure_residents: Callable[[], ResidentMemory],
        narrator: Narrator | None,
        policy: Policy | None = None,
        accept: Callable[[T], bool] | None = None,
        denominators: Mapping[str, float] | None = None,
        wants_to_stop: bool = False,
        sharing: Sharing[T] | None = None,
        spare: Spare | None = None,
    ) -> Finished[T] | Agreement:
        """Run a step until it fits; see `run_attempts`.

        Args:
            attempt: does the work for the slices of a plan.
            parts: what it changes, besides random numbers and metrics.
            batches: of the step.
            rows: of each batch.
            costs: elements of one row of each batch.
            metrics: that it updates.
            measure_residents: what lies on the device at any size.
            narrator: tells of it.
            policy: in place of the phase's.
            accept: asked once it went through; False rolls it back.
            denominators: of the batches, for several ranks.
            wants_to_stop: whether this rank asks for the end of the run.
            sharing: what of the result is shared with other ranks.
            spare: rows for the fillers of a rank that has none.
        """
        recollection = self._recollection if self.adapts else None
        recalled_size: int | None = None
        if recollection is not None:
            recalled_size = recollection.look_up(
                batches[0] if batches else None,
                rows[0] if rows else 0,
                self.policy,
                is_new=self._is_new,
                row_cost=costs[0] if costs else None,
                ranks=self._ranks,
            )
        self._is_new = False
        self._reach.step()
        with telling(self._ranks):
            counted = Metrics(flatten_metrics(metrics), self._growth)
        finished = run_attempts(
            attempt,
            rows=rows,
            costs=costs,
            policy=policy or self.policy,
            rule=self._rule,
            transaction=Transaction(
                [
                    *parts,
                    self._random_state(),
                    counted,
                ]
            ),
            device=self._device,
            accept=accept,
            meter=self._meter if self.adapts else None,
            measure_residents=measure_residents,
            narrator=narrator,
            ranks=self._ranks,
            denominators=denominators,
            wants_to_stop=wants_to_stop,
            training=self._name == "train",
            sharing=sharing,
            spare=spare,
            last_size=self.size,
        )
        if isinstance(finished, Agreement):
            return finished
        self.size = finished.microbatch_size
        if recollection is not None:
            recollection.take_down(finished, costs)
        return dataclasses.replace(finished, recalled_size=recalled_size)
