"""Trials of one plan of faults each, and what came of them, counted."""

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from automicro import Halving, MemoryBudget, RollbackError, SampleTooLargeError
from automicro.errors import OptimizerStepError
from automicro.optimizer_step import step_optimizer
from automicro.policy import Outcome
from tests.torture.faults import Boom, Fault, FaultMode
from tests.torture.states import differences, objects, replaced, values
from tests.torture.subjects import FIRST_SIZE, ROWS, Run, build

STEPS_AFTER = 2
COMMITTED = "automicro: the batch was committed"


class Scripted:
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


@dataclass(frozen=True)
class Scene:
    """What is done, to whom, and after how many clean steps."""

    subject: str
    call: str = "backward"  # or "evaluate", "optimizer step"
    warm_steps: int = 1
    in_budget: bool = False

    def __str__(self) -> str:
        first = "" if self.warm_steps else ", first batch"
        return f"{self.subject}: {self.call}{first}{', in a budget' if self.in_budget else ''}"

    def place(self) -> contextlib.AbstractContextManager[object]:
        """Where the call runs: on the CPU, or on a device simulated there."""
        return MemoryBudget(None) if self.in_budget else contextlib.nullcontext()


@dataclass
class Verdict:
    """What became of one plan.

    ``outcome`` is what happened, ``faults`` what is wrong about it (nothing, if all is well).
    """

    outcome: str
    faults: list[str] = field(default_factory=list)
    survivors: int = 0
    bytes_alive: int = 0


@dataclass(frozen=True)
class Reference:
    """What a run without any fault gives, at the same sizes."""

    num_operations: int
    allocated_bytes: int
    after_call: dict[str, Any]
    replaced: list[str]
    at_end: dict[str, Any]


def prepare(scene: Scene, policy: Any) -> Run:
    """A run up to the call that is to be disturbed."""
    run = build(scene.subject, policy)
    for index in range(scene.warm_steps):
        run.microbatcher.backward(run.batches[index], metrics=run.metrics)
        run.optimizer.step()
        run.zero_grad()
    if scene.warm_steps and scene.subject == "replaced buffer":
        run.microbatcher.backward(run.batches[0], metrics=run.metrics)  # a gradient is there
    if scene.call == "optimizer step":
        run.microbatcher.backward(run.batches[1], metrics=run.metrics)
    return run


def call(scene: Scene, run: Run) -> Any:
    """The call that is disturbed."""
    batch = run.batches[scene.warm_steps]
    if scene.call == "backward":
        return run.microbatcher.backward(batch, metrics=run.metrics)
    if scene.call == "evaluate":
        return run.microbatcher.evaluate(batch, metrics=run.metrics, return_outputs=True)
    return step_optimizer(run.optimizer, next(run.model.parameters()).device)


def go_on(scene: Scene, run: Run) -> dict[str, Any]:
    """A few more steps, where anything that was left wrong would show."""
    if scene.call == "backward":
        run.optimizer.step()
    for index in range(STEPS_AFTER):
        run.zero_grad()
        run.microbatcher.backward(run.batches[2 + index], metrics=run.metrics)
        run.optimizer.step()
    return values(run)


@functools.cache
def reference(scene: Scene, size: int) -> Reference:
    """The clean run whose disturbed call, and all after it, use slices of this size."""
    training = scene.call == "backward"
    warm = scene.warm_steps + (scene.subject == "replaced buffer" and scene.warm_steps > 0)
    warm += scene.call == "optimizer step"
    sizes = [FIRST_SIZE] * warm + [size if training else FIRST_SIZE] * 9
    run = prepare(scene, Scripted(sizes))
    run.microbatcher._eval_policy = Scripted([size])
    before = objects(run)
    with scene.place(), FaultMode() as mode:
        result = call(scene, run)
    allocated = mode.ledger.allocated_bytes
    after = {**values(run), **_result_values(result)}
    changed = replaced(before, objects(run))
    return Reference(mode.num_operations, allocated, after, changed, go_on(scene, run))


def attempt(scene: Scene, plan: Sequence[Fault]) -> Verdict:
    """Run a plan of faults and compare everything."""
    for size in (FIRST_SIZE, 1):
        reference(scene, size)  # now: it sets the global generators
    run = prepare(scene, Halving(initial=FIRST_SIZE))
    run.microbatcher._eval_policy = Halving(initial=FIRST_SIZE)
    before, before_objects = values(run), objects(run)
    raised: BaseException | None = None
    result = None
    mode = FaultMode(plan)
    try:
        with scene.place(), mode:
            result = call(scene, run)
    except BaseException as error:
        raised = error
    if not mode.raised_at:
        return Verdict("not reached", [f"operation {plan[0].index} never ran"])
    if raised is None:
        return _judge_success(scene, run, result, mode, before_objects)
    if any(COMMITTED in note for note in getattr(raised, "__notes__", ())):
        return _judge_committed(scene, run, raised, mode, before_objects)
    return _judge_refusal(scene, run, raised, mode, before, before_objects)


def _judge_success(
    scene: Scene, run: Run, result: Any, mode: FaultMode, before: dict[str, object]
) -> Verdict:
    size = result.microbatch_size if result is not None else FIRST_SIZE
    ooms = result.ooms if result is not None else 1
    clean = reference(scene, size)
    verdict = Verdict("recovered" if ooms else f"no attempt lost: {_absorbed_by(mode)}")
    if ooms:
        verdict.survivors = mode.survivors(_end_of_last_failed_attempt(mode))
        if _absorbed_by(mode) != ABSORBED["look"]:
            verdict.bytes_alive = mode.ledger.allocated_bytes - clean.allocated_bytes
    after = {**values(run), **_result_values(result)}
    verdict.faults += [f"differs: {name}" for name in differences(clean.after_call, after)]
    changed = replaced(before, objects(run))
    if changed != clean.replaced:
        verdict.faults.append(f"other objects replaced: {changed}, not {clean.replaced}")
    if not all(isinstance(error, Boom) and _is_experiment(mode) for error in mode.foreign):
        verdict.faults.append(f"{mode.foreign} was swallowed")
    verdict.faults += [
        f"differs later: {name}" for name in differences(clean.at_end, go_on(scene, run))
    ]
    if verdict.survivors or verdict.bytes_alive > 0:
        verdict.faults.append(f"{verdict.survivors} storages, {verdict.bytes_alive} bytes alive")
    return verdict


def _judge_committed(
    scene: Scene, run: Run, raised: BaseException, mode: FaultMode, before: dict[str, object]
) -> Verdict:
    clean = reference(scene, run.microbatcher._policy.propose(ROWS))
    verdict = Verdict("committed, then raised")
    if not any(raised is error for error in mode.foreign):
        verdict.faults.append(f"raised {raised!r} in place of the error itself")
    after = values(run)
    verdict.faults += [
        f"differs: {name}"
        for name in differences(clean.after_call, after)
        if not name.startswith("result")
    ]
    return verdict


def _judge_refusal(
    scene: Scene,
    run: Run,
    raised: BaseException,
    mode: FaultMode,
    before: dict[str, Any],
    before_objects: dict[str, object],
) -> Verdict:
    if isinstance(raised, OptimizerStepError) and "half applied" in str(raised):
        return Verdict("OptimizerStepError: half applied")
    verdict = Verdict("state as before: " + type(raised).__name__)
    if mode.foreign:
        if not any(raised is error for error in mode.foreign):
            verdict.faults.append(f"raised {raised!r} in place of {mode.foreign}")
    elif isinstance(raised, RollbackError):
        verdict.outcome = "RollbackError"
        verdict.faults.append(f"cannot roll back: {raised}")
    elif (
        not isinstance(raised, SampleTooLargeError | OptimizerStepError) or len(mode.raised_at) < 2
    ):
        verdict.outcome = f"refused: {type(raised).__name__} at {mode.names[mode.raised_at[0]]}"
        verdict.faults.append("one fault is to be recovered from")
    verdict.faults += [f"differs: {name}" for name in differences(before, values(run))]
    verdict.faults += [f"replaced: {name}" for name in replaced(before_objects, objects(run))]
    verdict.survivors = 0 if mode.foreign else mode.survivors(mode.raised_at[-1])
    if verdict.survivors:
        verdict.faults.append(f"{verdict.survivors} storages alive")
    # And a second call goes through, as if nothing had been.
    with scene.place():
        again = call(scene, run)
    clean = reference(scene, again.microbatch_size if again is not None else FIRST_SIZE)
    after = {**values(run), **_result_values(again)}
    verdict.faults += [f"differs later: {name}" for name in differences(clean.after_call, after)]
    return verdict


ABSORBED = {
    "predict_step_memory": "dry run of the optimizer",
    "look": "probe",
    "_copy_totals": "copy to earlier gradients",
    "_finish_backward": "clean-up",
    "_try_roll_back": "rollback",
}


def _end_of_last_failed_attempt(mode: FaultMode) -> int:
    ends = [
        index
        for index, stack in zip(mode.raised_at, mode.raised_in, strict=True)
        if not any(name in ABSORBED for name in stack)
    ]
    return max(ends, default=0)


def _is_experiment(mode: FaultMode) -> bool:
    """Whether the last fault hit a trial of automicro's own, on stand-ins or in another mode.

    If the optimizer fails on stand-ins, nothing is reserved; if the model fails on two rows in
    evaluation mode, they are tried in training mode. Neither may end a training that works.
    """
    return _absorbed_by(mode) in (ABSORBED["predict_step_memory"], ABSORBED["look"])


def _absorbed_by(mode: FaultMode) -> str:
    """The innermost part of automicro around the last fault that may go on without it."""
    return next((ABSORBED[name] for name in reversed(mode.raised_in[-1]) if name in ABSORBED), "?")


def _result_values(result: Any) -> dict[str, Any]:
    if result is None:
        return {}
    found = {"result loss": result.loss.numpy().tobytes()}
    if getattr(result, "outputs", None) is not None:
        found["result outputs"] = result.outputs.numpy().tobytes()
    return found


def single_faults(scene: Scene, kinds: Iterable[str]) -> list[tuple[Fault, ...]]:
    """A fault before and after each operation."""
    count = reference(scene, FIRST_SIZE).num_operations
    return [
        (Fault(index, after, kind),)
        for kind in kinds
        for index in range(count)
        for after in (False, True)
    ]


def double_faults(
    scene: Scene, kinds: Iterable[str], num_first: int, seed: int = 0
) -> list[tuple[Fault, ...]]:
    """Out of memory at some operations, and another fault at each later one.

    The second lands in the clean-up, the rollback, and the retry at the smallest size.
    """
    count = reference(scene, FIRST_SIZE).num_operations
    draw = random.Random(f"{scene}{seed}")
    plans: list[tuple[Fault, ...]] = []
    for first in draw.sample(range(count), min(num_first, count)):
        retry = reference(scene, 1).num_operations
        after = draw.random() < 0.5
        plans += [
            (Fault(first, after), Fault(second, draw.random() < 0.5, kind))
            for kind in kinds
            for second in range(first + 1, first + retry)
        ]
    return plans


@dataclass
class Row:
    """One line of the table."""

    scene: str
    operations: int
    faults: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    bytes_alive: int = 0
    wrong: list[str] = field(default_factory=list)


def sweep(
    scene: Scene,
    title: str,
    plans: Sequence[tuple[Fault, ...]],
    try_plan: Callable[[Scene, Sequence[Fault]], Verdict] = attempt,
) -> Row:
    """Try every plan and add up."""
    row = Row(f"{scene}, {title}", reference(scene, FIRST_SIZE).num_operations)
    for plan in plans:
        verdict = try_plan(scene, plan)
        row.faults += len(plan)
        row.outcomes[verdict.outcome] += 1
        row.bytes_alive = max(row.bytes_alive, verdict.bytes_alive)
        if verdict.faults:
            row.wrong.append(f"{plan}: {verdict.outcome}: {'; '.join(verdict.faults)}")
    return row
