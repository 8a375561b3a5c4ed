"""Trials of one scene: runs without faults to compare with, and one run for each plan."""

import contextlib
import functools
import gc
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from automicro.errors import OptimizerStepError, RollbackError, SampleTooLargeError, facts_of
from automicro.memory.budget import MemoryBudget
from automicro.optimizer.step import clip_gradients
from automicro.policy.auto import Halving
from automicro.policy.policy import Outcome, Policy
from tests.torture.engine.cuts import Cut, CutRecorder
from tests.torture.engine.faults import Boom, Fault, FaultMode
from tests.torture.engine.forks import can_fork, in_fork
from tests.torture.engine.subject import (
    MakeSubject,
    TortureRun,
    build,
    differences,
    objects,
    replaced,
    result_values,
    values,
    without_advice,
)

CALLS = ("backward", "evaluate", "unscale", "clip", "step")
# Number of batches, and of evaluations: probes are at 1, 2, 4 and 8, and comparisons with the whole
# batch at the first two that are split.
LOOKS_OVER_AFTER = 4
AFTER_THE_GRADIENT = ("unscale", "clip", "step")
STEPS_AFTER = 2
MOST_BATCHES = 9  # of a run, of training or of evaluation


class Scripted(Policy):
    """A policy that proposes scripted sizes, batch by batch."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Scripted":
        return self  # all levels follow the same script

    def follow(self, sizes: Sequence[int]) -> None:
        """Propose these sizes from now on."""
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
    """One call of a subject."""

    name: str
    make: MakeSubject
    call: str = "backward"
    warm_steps: int = 1
    warm_evaluations: int = 0
    in_budget: bool = False

    def __str__(self) -> str:
        first = "" if self.warm_steps else ", first batch"
        if self.call == "evaluate" and not self.warm_evaluations:
            first += ", first evaluation"
        return f"{self.name}: {self.call}{first}{', in a budget' if self.in_budget else ''}"

    @property
    def is_transaction(self) -> bool:
        """Whether a failed call is rolled back; other calls write in place."""
        return self.call not in AFTER_THE_GRADIENT

    @property
    def is_settled(self) -> bool:
        """Whether all probes are over, so that later calls consist of the same operations."""
        warm = self.warm_evaluations if self.call == "evaluate" else len(self._warm_batches)
        return self.is_transaction and warm >= LOOKS_OVER_AFTER

    def place(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of the call: the CPU, or a device simulated on it."""
        return MemoryBudget(None) if self.in_budget else contextlib.nullcontext()

    def clean_sizes(self, first_size: int, cuts: Sequence[Cut]) -> tuple[list[int], list[int]]:
        """Return the sizes of each training and evaluation batch, from the disturbed call on."""
        size = cuts[0].size
        sizes = [size] if self.call == "backward" else []
        sizes += [each.size for each in cuts[1:]]
        later = size if self.call == "backward" else first_size
        return sizes + [later] * MOST_BATCHES, [size] * MOST_BATCHES

    def prepare(self, policy: Policy, eval_policy: Policy) -> TortureRun:
        """Prepare a run up to the call to disturb."""
        run = build(self.make, policy, eval_policy)
        with without_advice():
            for index in self._warm_batches:
                run.microbatcher.backward(run.batches[index], metrics=run.metrics)
                run.step()
                run.zero_grad()
            if run.keeps_gradient and self.warm_steps > 0:
                run.microbatcher.backward(run.batches[0], metrics=run.metrics)
            if self.call in AFTER_THE_GRADIENT:
                run.microbatcher.backward(run.batches[1], metrics=run.metrics)
            for _ in range(self.warm_evaluations):
                self._evaluate(run)
        if self.call == "clip" and run.scaler is not None:
            run.scaler.unscale(run.optimizer)
        return run

    def play(self, run: TortureRun) -> Any:
        """Make the call to disturb."""
        device = next(run.model.parameters()).device
        with without_advice():
            if self.call == "backward":
                batch = run.batches[self.warm_steps]
                return run.microbatcher.backward(batch, metrics=run.metrics)
            if self.call == "evaluate":
                return self._evaluate(run)
        if self.call == "unscale" and run.scaler is not None:
            run.scaler.unscale(run.optimizer)
        elif self.call == "clip":
            clip_gradients(run.optimizer, run.clip_norm, device)
        else:
            run.step()
        return None

    def _evaluate(self, run: TortureRun) -> Any:
        batch = run.batches[self.warm_steps]
        return run.microbatcher.evaluate(batch, metrics=run.metrics, return_outputs=True)

    def go_on(self, run: TortureRun, cuts: Sequence[Cut] = ()) -> "End":
        """Run a few more steps, which would reveal any wrong state."""
        if self.call not in ("evaluate", "step"):
            run.step()
        found: list[Cut] = []
        with without_advice():
            for index in range(STEPS_AFTER):
                run.zero_grad()
                cut = cuts[index] if cuts else None
                with self.cutting(run, cut)() as noted:
                    run.microbatcher.backward(run.batches[2 + index], metrics=run.metrics)
                run.step()
                assert noted.cut is not None
                found.append(noted.cut)
        return End(values(run), tuple(found))

    def cutting(
        self, run: TortureRun, cut: Cut | None, count: Callable[[], int] = lambda: 0
    ) -> CutRecorder:
        """Record how a call is cut, or force a given level and given slices."""
        if cut is not None and cut.level:
            run.start_at(cut.level)
        return CutRecorder(None if cut is None else cut.parts, count)

    def draw(self, *seed: object) -> random.Random:
        """Return a separate random generator, the same in every process."""
        return random.Random(f"{self} {seed}")

    @property
    def _warm_batches(self) -> list[int]:
        settling = [0] * (LOOKS_OVER_AFTER - self.warm_steps) if self.warm_steps else []
        return [*settling, *range(self.warm_steps)]


@dataclass(frozen=True)
class End:
    """All values after a few more steps, and how these steps were cut."""

    values: dict[str, Any]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True)
class Reference:
    """The results of a run without faults that is cut in the same way."""

    num_operations: int
    num_extra: int
    allocated_bytes: int
    after_call: dict[str, Any]
    replaced: list[str]
    at_end: dict[str, Any]
    cut: Cut | None


@dataclass
class Trial:
    """A disturbed run, and its state before."""

    run: TortureRun
    mode: FaultMode
    before: dict[str, Any]
    before_objects: dict[str, object]
    noted: CutRecorder
    result: Any = None
    raised: BaseException | None = None


class Prepared:
    """A run up to the call to disturb, and the global state at that point."""

    def __init__(self, run: TortureRun, scripts: Sequence[Scripted] = ()) -> None:
        self.scripts = scripts
        self._run = run
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = torch.get_rng_state()

    def take(self) -> TortureRun:
        """Restore the global state and return the run; possible only once per process."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        return self._run


class Trials:
    """Repeated trials of one scene."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        subject = scene.make()
        self.first_size = subject.first_size
        self.retry_size = -(-subject.first_size // 2)
        self.can_be_smaller = subject.can_be_smaller
        self._first_level = subject.first_level
        self._references: dict[tuple[Cut, tuple[Cut, ...]], Reference] = {}
        self._prepared: Prepared | None = None
        self._clean: Prepared | None = None

    def reference(self, size: int) -> Reference:
        """Return the clean run with slices of this size, from the disturbed call on."""
        return self.reference_of(Cut(size, self._first_level))

    def reference_of(self, cut: Cut, later: Sequence[Cut] = ()) -> Reference:
        """Return the clean run with this cut of the disturbed call, and these cuts afterwards."""
        key = cut, tuple(later)
        if key not in self._references:
            run = functools.partial(self._run_reference, *key)
            self._references[key] = run() if self._clean is None else in_fork(run)
        return self._references[key]

    @property
    def num_operations(self) -> int:
        """The number of operations of the call without faults."""
        return self.reference(self.first_size).num_operations

    @property
    def num_extra(self) -> int:
        """The number of operations that belong to probes."""
        return self.reference(self.first_size).num_extra

    def get_ready(self) -> None:
        """Prepare one run for all further trials, if each can run in a fork."""
        if self._prepared is None:
            self.reference(self.first_size)  # its backward starts all threads
            gc.freeze()  # skips imported objects when automicro collects after each failure
            if can_fork():
                self._clean = self._prepare_clean()
                self._prepared = Prepared(self._prepare())
            self._learn_references()

    def attempt(self, plan: Sequence[Fault]) -> "TrialVerdict":
        """Run a plan of faults and compare everything."""
        prepared = self._prepared
        if prepared is None:
            return attempt(self, plan)
        known = set(self._references)

        def try_it() -> tuple[TrialVerdict, dict[Any, Reference]]:
            verdict = attempt(self, plan, prepared.take())
            new = {key: each for key, each in self._references.items() if key not in known}
            return verdict, new

        verdict, new = in_fork(try_it)
        self._references.update(new)
        return verdict

    def disturb(self, plan: Sequence[Fault], run: TortureRun | None = None) -> Trial:
        """Run a plan of faults in the given prepared run, or in a new one."""
        if run is None:
            self._learn_references()
            run = self._prepare()
        mode = FaultMode(plan)
        noted = self.scene.cutting(run, None, lambda: mode.num_operations)
        trial = Trial(run, mode, values(run), objects(run), noted)
        try:
            with self.scene.place(), trial.mode, noted():
                _count_reservation(run, trial.mode)
                trial.result = self.scene.play(run)
        except BaseException as error:
            trial.raised = error
        return trial

    def _learn_references(self) -> None:
        """Run the references before a run is prepared, because they seed the global generators."""
        for size in (self.first_size, self.retry_size):
            self.reference(size)

    def _prepare(self) -> TortureRun:
        return self.scene.prepare(self._policy(), self._policy())

    def _prepare_clean(self) -> "Prepared":
        scripts = tuple(Scripted([self.first_size] * MOST_BATCHES) for _ in range(2))
        return Prepared(self.scene.prepare(*scripts), scripts)

    def _policy(self) -> Halving:
        # On a device that counts memory, sizes would also grow without faults.
        return Halving(initial=self.first_size, refine=False)

    def _run_reference(self, cut: Cut, later: tuple[Cut, ...]) -> Reference:
        scene = self.scene
        cuts = [cut, *later]
        clean = self._clean or self._prepare_clean()
        run = clean.take()
        for script, sizes in zip(
            clean.scripts, scene.clean_sizes(self.first_size, cuts), strict=True
        ):
            script.follow(sizes)
        before = objects(run)
        with scene.place(), FaultMode() as mode, scene.cutting(run, cut)() as noted:
            _count_reservation(run, mode)
            result = scene.play(run)
        allocated_bytes = mode.ledger.allocated_bytes
        after = {**values(run), **result_values(result)}
        changed = replaced(before, objects(run))
        end = scene.go_on(run, later)
        return Reference(
            mode.num_operations,
            mode.num_extra,
            allocated_bytes,
            after,
            changed,
            end.values,
            noted.cut,
        )


def _count_reservation(run: TortureRun, mode: FaultMode) -> None:
    """Register existing placeholders, because a failed attempt replaces them."""
    if (reservation := run.microbatcher._engine.reservation) is not None:
        mode.ledger.see(reservation._placeholders, [])


HALF_APPLIED = "half applied"

# Functions of automicro that may continue after a failure inside them.
PROBE, DRY_RUN, OF_A_METRIC = "probe", "dry run of the optimizer", "check of a metric"
ABSORBED = {
    "predict_step_memory": DRY_RUN,
    "few_rows": PROBE,
    "whole": PROBE,
    "outputs": PROBE,
    "_look_at_padding": PROBE,
    "differing": OF_A_METRIC,
    "once_more": "retrying once",
    "_copy_totals": "copy to earlier gradients",
    "_finish_backward": "clean-up",
}

# Functions that compute a slice of a part.
_OF_A_SLICE = {"loss_and_gradients", "compute_part", "_through_stages"}


@dataclass
class TrialVerdict:
    """The result of one plan."""

    outcome: str
    faults: list[str] = field(default_factory=list)
    survivors: int = 0
    bytes_alive: int = 0


def attempt(trials: Trials, plan: Sequence[Fault], run: TortureRun | None = None) -> TrialVerdict:
    """Run a plan of faults and compare everything."""
    trial = trials.disturb(plan, run)
    if not trial.mode.raised_at:
        return TrialVerdict("not reached", [f"operation {plan[0].index} never ran"])
    if trial.raised is None:
        return _judge_success(trials, trial)
    if facts_of(trial.raised).is_committed:
        return _judge_committed(trials, trial, trial.raised)
    return _judge_refusal(trials, trial, trial.raised)


def _judge_success(trials: Trials, trial: Trial) -> TrialVerdict:
    run, result, mode = trial.run, trial.result, trial.mode
    ooms = 1 if result is None else result.ooms
    after = {**values(run), **result_values(result)}
    changed = replaced(trial.before_objects, objects(run))
    bytes_alive = mode.ledger.allocated_bytes
    end = trials.scene.go_on(run)
    clean = trials.reference_of(trial.noted.cut or Cut(trials.first_size), end.cuts)
    if ooms:
        verdict = TrialVerdict("recovered")
    elif result.attempts > 1:
        verdict = TrialVerdict("recovered: the part is smaller")
    else:
        verdict = TrialVerdict(f"no attempt lost: {_absorbed_by(mode)}")
    if ooms or result.attempts > 1:
        verdict.survivors = mode.survivors(_end_of_last_failed_attempt(trial))
        if _absorbed_by(mode) != PROBE:
            verdict.bytes_alive = bytes_alive - clean.allocated_bytes
    verdict.faults += [f"differs: {name}" for name in differences(clean.after_call, after)]
    if clean.cut != trial.noted.cut:
        verdict.faults.append(f"{trial.noted.cut} is compared with {clean.cut}")
    if changed != clean.replaced:
        verdict.faults.append(f"other objects replaced: {changed}, not {clean.replaced}")
    if not all(isinstance(error, Boom) and _is_experiment(mode) for error in mode.foreign):
        verdict.faults.append(f"{mode.foreign} was swallowed")
    verdict.faults += [f"differs later: {name}" for name in differences(clean.at_end, end.values)]
    if verdict.survivors or verdict.bytes_alive > 0:
        verdict.faults.append(f"{verdict.survivors} storages, {verdict.bytes_alive} bytes alive")
    if ooms and _can_stay(trials, mode):
        verdict.faults.append("microbatches are smaller, and the slices of a part could be")
    return verdict


def _can_stay(trials: Trials, mode: FaultMode) -> bool:
    """Return whether the only fault was in a slice of a part with several rows."""
    if len(mode.raised_at) > 1 or not _is_in_slice(mode.raised_in[0]):
        return False
    cut = trials.reference(trials.first_size).cut
    every = cut.parts or () if cut else ()
    return min(every, default=1) > 1


def _is_in_slice(stack: Sequence[str]) -> bool:
    """Return whether an operation belonged to a slice of a part, which can be split further."""
    return not _OF_A_SLICE.isdisjoint(stack)


def _judge_committed(trials: Trials, trial: Trial, raised: BaseException) -> TrialVerdict:
    # The call returned no result, so the cut of its last attempt counts.
    after = values(trial.run)  # before other runs seed the global generators
    clean = trials.reference_of(trial.noted.cut or Cut(trials.first_size))
    verdict = TrialVerdict("committed, then raised")
    if not any(raised is error for error in trial.mode.foreign):
        verdict.faults.append(f"raised {raised!r} in place of the error itself")
    verdict.faults += [
        f"differs: {name}"
        for name in differences(clean.after_call, after)
        if not name.startswith("result")
    ]
    return verdict


def _judge_refusal(trials: Trials, trial: Trial, raised: BaseException) -> TrialVerdict:
    run, mode = trial.run, trial.mode
    if isinstance(raised, OptimizerStepError) and HALF_APPLIED in str(raised):
        return _judge_half_applied(trials, trial)
    verdict = TrialVerdict("state as before: " + type(raised).__name__)
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
    verdict.faults += [f"differs: {name}" for name in differences(trial.before, values(run))]
    changed = replaced(trial.before_objects, objects(run))
    verdict.faults += [f"replaced: {name}" for name in changed]
    _let_go(raised)
    verdict.survivors = 0 if mode.foreign else mode.survivors(mode.raised_at[-1])
    if verdict.survivors:
        verdict.faults.append(f"{verdict.survivors} storages alive")
    # A second call must succeed as if nothing had happened.
    with trials.scene.place(), trials.scene.cutting(run, None)() as noted:
        again = trials.scene.play(run)
    after = {**values(run), **result_values(again)}  # before other runs seed the global generators
    clean = trials.reference_of(noted.cut or Cut(trials.first_size))
    verdict.faults += [f"differs later: {name}" for name in differences(clean.after_call, after)]
    return verdict


def _judge_half_applied(trials: Trials, trial: Trial) -> TrialVerdict:
    """A failed step may have changed all its outputs; a failure before it only gradients."""
    verdict = TrialVerdict(f"OptimizerStepError: {trials.scene.call} {HALF_APPLIED}")
    may_change: tuple[str, ...] = ("parameter", "optimizer")
    if trials.scene.call in ("unscale", "clip"):
        may_change = ("gradient",)
    elif trial.run.scaler is not None:
        may_change += ("gradient", "scaler")
    verdict.faults += [
        f"differs: {name}"
        for name in differences(trial.before, values(trial.run))
        if not name.startswith(may_change)
    ]
    return verdict


def _let_go(error: BaseException | None) -> None:
    """Forget the frames of an error, as its handler does in the end."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


def _end_of_last_failed_attempt(trial: Trial) -> int:
    """Return the last operation of failed attempts, whose storages must all be freed."""
    mode, begun_at = trial.mode, trial.noted.begun_at
    ends = [
        index
        for index, stack in zip(mode.raised_at, mode.raised_in, strict=True)
        if _absorbing(stack) is None and (not begun_at or index < begun_at[-1])
    ]
    return max(ends, default=0)


def _is_experiment(mode: FaultMode) -> bool:
    """Return whether the last fault hit an experiment of automicro, such as a dry run."""
    return _absorbed_by(mode) in (DRY_RUN, PROBE, OF_A_METRIC)


def _absorbed_by(mode: FaultMode) -> str:
    """Return the innermost function of automicro that may continue after the last fault."""
    return _absorbing(mode.raised_in[-1]) or "?"


def _absorbing(stack: Sequence[str]) -> str | None:
    # A probe of a part belongs to an attempt; what may fail in it is listed separately.
    is_in_attempt = "fit" in stack and "attempt" in stack[stack.index("fit") :]
    for name in reversed(stack):
        if name in ABSORBED and not (is_in_attempt and ABSORBED[name] == PROBE):
            return ABSORBED[name]
    return None
