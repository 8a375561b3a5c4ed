"""What is done, to whom, and after how many clean steps."""

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automicro.memory import MemoryBudget
from automicro.optimization import clip_gradients
from automicro.policy import Outcome, Policy
from automicro.torture.states import values
from automicro.torture.subject import MakeSubject, Run, build, without_advice

CALLS = ("backward", "evaluate", "unscale", "clip", "step")
_LOOKS_OVER_AFTER = 3  # batches, and the one that is counted: looks are at 1, 2 and 4
AFTER_THE_GRADIENT = ("unscale", "clip", "step")
STEPS_AFTER = 2


class Scripted(Policy):
    """A policy that proposes what is written down, batch by batch."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return self._sizes[0]

    def record(self, outcome: Outcome) -> None:
        self._sizes = self._sizes[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"sizes": self._sizes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sizes = state["sizes"]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One call of a subject.

    Attributes:
        name: of the subject.
        make: builds it.
        call: ``"backward"``, ``"evaluate"``, ``"unscale"`` (of a loss scaler), ``"clip"`` (gradient
            clipping) or ``"step"``.
        warm_steps: clean steps before it, each with a batch of its own; before these, where there
            are any, some on the first batch until the probe's looks are over.
        in_budget: whether it runs on a simulated device.
    """

    name: str
    make: MakeSubject
    call: str = "backward"
    warm_steps: int = 1
    in_budget: bool = False

    def __str__(self) -> str:
        first = "" if self.warm_steps else ", first batch"
        return f"{self.name}: {self.call}{first}{', in a budget' if self.in_budget else ''}"

    @property
    def is_transaction(self) -> bool:
        """Whether the call is undone as a whole; the others write in place."""
        return self.call not in AFTER_THE_GRADIENT

    def place(self) -> contextlib.AbstractContextManager[object]:
        """Where the call runs: on the CPU, or on a device simulated there."""
        return MemoryBudget(None) if self.in_budget else contextlib.nullcontext()

    def clean_policies(
        self, first_size: int, size: int, keeps_gradient: bool
    ) -> tuple[Policy, Policy]:
        """For training and evaluation without faults: smaller from the disturbed call on."""
        batches_before = len(self._warm_batches) + self._has_gradient(keeps_gradient)
        batches_before += self.call in AFTER_THE_GRADIENT
        later = size if self.call == "backward" else first_size
        return Scripted([first_size] * batches_before + [later] * 9), Scripted([size] * 9)

    def prepare(self, policy: Policy, eval_policy: Policy) -> Run:
        """A run up to the call that is to be disturbed."""
        run = build(self.make, policy, eval_policy)
        with without_advice():
            for index in self._warm_batches:
                run.microbatcher.backward(run.batches[index], metrics=run.metrics)
                run.step()
                run.zero_grad()
            if self._has_gradient(run.keeps_gradient):
                run.microbatcher.backward(run.batches[0], metrics=run.metrics)
            if self.call in AFTER_THE_GRADIENT:
                run.microbatcher.backward(run.batches[1], metrics=run.metrics)
        if self.call == "clip" and run.scaler is not None:
            run.scaler.unscale(run.optimizer)
        return run

    def play(self, run: Run) -> Any:
        """The call that is disturbed."""
        batch = run.batches[self.warm_steps]
        device = next(run.model.parameters()).device
        with without_advice():
            if self.call == "backward":
                return run.microbatcher.backward(batch, metrics=run.metrics)
            if self.call == "evaluate":
                return run.microbatcher.evaluate(batch, metrics=run.metrics, return_outputs=True)
        if self.call == "unscale" and run.scaler is not None:
            run.scaler.unscale(run.optimizer)
        elif self.call == "clip":
            clip_gradients(run.optimizer, run.clip_norm, device)
        else:
            run.step()
        return None

    def go_on(self, run: Run) -> dict[str, Any]:
        """A few more steps, where anything that was left wrong would show."""
        if self.call not in ("evaluate", "step"):
            run.step()
        with without_advice():
            for index in range(STEPS_AFTER):
                run.zero_grad()
                run.microbatcher.backward(run.batches[2 + index], metrics=run.metrics)
                run.step()
        return values(run)

    def draw(self, *seed: object) -> random.Random:
        """Chance of its own, the same in every process."""
        return random.Random(f"{self} {seed}")

    @property
    def _warm_batches(self) -> list[int]:
        settling = [0] * _LOOKS_OVER_AFTER if self.warm_steps else []
        return [*settling, *range(self.warm_steps)]

    def _has_gradient(self, keeps_gradient: bool) -> bool:
        return keeps_gradient and self.warm_steps > 0
