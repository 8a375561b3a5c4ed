"""Trials of one scene: runs without faults to compare with, and one run for each plan."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automicro.policy import Halving
from automicro.torture.faults import Fault, FaultMode
from automicro.torture.scene import Scene
from automicro.torture.states import objects, replaced, result_values, values
from automicro.torture.subject import Run, check_subject


@dataclass(frozen=True)
class Reference:
    """What a run without any fault gives, at the same sizes."""

    num_operations: int
    allocated_bytes: int
    after_call: dict[str, Any]
    replaced: list[str]
    at_end: dict[str, Any]


@dataclass
class Trial:
    """A run that was disturbed, and what was there before."""

    run: Run
    mode: FaultMode
    before: dict[str, Any]
    before_objects: dict[str, object]
    result: Any = None
    raised: BaseException | None = None


class Trials:
    """One scene, tried again and again.

    Args:
        scene: what is done to whom.
    """

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        subject = check_subject(scene.make())
        self.first_size = subject.first_size
        self.retry_size = -(-subject.first_size // 2)
        self._keeps_gradient = subject.keeps_gradient
        self.reference = functools.cache(self._run_reference)

    @property
    def num_operations(self) -> int:
        """Operations of the call without any fault."""
        return self.reference(self.first_size).num_operations

    def disturb(self, plan: Sequence[Fault]) -> Trial:
        """Run a plan of faults."""
        for size in (self.first_size, self.retry_size):
            self.reference(size)  # now: it sets the global generators
        run = self.scene.prepare(self._policy(), self._policy())
        trial = Trial(run, FaultMode(plan), values(run), objects(run))
        try:
            with self.scene.place(), trial.mode:
                _count_reservation(run, trial.mode)
                trial.result = self.scene.play(run)
        except BaseException as error:
            trial.raised = error
        return trial

    def _policy(self) -> Halving:
        # On a device that counts its memory, sizes would also grow, without any fault.
        return Halving(initial=self.first_size, refine=False, grow=False)

    def _run_reference(self, size: int) -> Reference:
        """The clean run whose disturbed call, and all after it, use slices of this size."""
        scene = self.scene
        run = scene.prepare(*scene.clean_policies(self.first_size, size, self._keeps_gradient))
        before = objects(run)
        with scene.place(), FaultMode() as mode:
            _count_reservation(run, mode)
            result = scene.play(run)
        allocated_bytes = mode.ledger.allocated_bytes
        after = {**values(run), **result_values(result)}
        changed = replaced(before, objects(run))
        at_end = scene.go_on(run)
        return Reference(mode.num_operations, allocated_bytes, after, changed, at_end)


def _count_reservation(run: Run, mode: FaultMode) -> None:
    """Know the placeholders that are there: an attempt that fails gives them back and takes new."""
    mode.ledger.see(run.microbatcher._setup.reservation._placeholders, [])
