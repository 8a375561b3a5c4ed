"""What became of a trial, and what is wrong about it."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field

from automicro.errors import OptimizerStepError, RollbackError, SampleTooLargeError
from automicro.torture.faults import Boom, Fault, FaultMode
from automicro.torture.states import differences, objects, replaced, result_values, values
from automicro.torture.trials import Reference, Trial, Trials

COMMITTED = "automicro: the batch was committed"
HALF_APPLIED = "half applied"

# Functions of automicro that may go on without what failed in them.
PROBE, DRY_RUN = "probe", "dry run of the optimizer"
ABSORBED = {
    "predict_step_memory": DRY_RUN,
    "look": PROBE,
    "look_at_evaluation": PROBE,
    "_unless_it_always_fails": "look at a metric",
    "_copy_totals": "copy to earlier gradients",
    "_finish_backward": "clean-up",
    "_try_roll_back": "rollback",
}


@dataclass
class Verdict:
    """What became of one plan.

    Attributes:
        outcome: what happened.
        faults: what is wrong about it; nothing, if all is well.
        survivors: storages of failed attempts that are alive.
        bytes_alive: more bytes than after the same call without faults.
    """

    outcome: str
    faults: list[str] = field(default_factory=list)
    survivors: int = 0
    bytes_alive: int = 0


def attempt(trials: Trials, plan: Sequence[Fault]) -> Verdict:
    """Run a plan of faults and compare everything."""
    trial = trials.disturb(plan)
    if not trial.mode.raised_at:
        return Verdict("not reached", [f"operation {plan[0].index} never ran"])
    if trial.raised is None:
        return _judge_success(trials, trial)
    if any(COMMITTED in note for note in getattr(trial.raised, "__notes__", ())):
        return _judge_committed(trials, trial, trial.raised)
    return _judge_refusal(trials, trial, trial.raised)


def _judge_success(trials: Trials, trial: Trial) -> Verdict:
    run, result, mode = trial.run, trial.result, trial.mode
    size, ooms = trials.first_size, 1
    if result is not None:
        size, ooms = result.microbatch_size, result.ooms
    clean = trials.reference(size)
    verdict = Verdict("recovered" if ooms else f"no attempt lost: {_absorbed_by(mode)}")
    if ooms:
        verdict.survivors = mode.survivors(_end_of_last_failed_attempt(mode))
        if _absorbed_by(mode) != PROBE:
            verdict.bytes_alive = mode.ledger.allocated_bytes - clean.allocated_bytes
    after = {**values(run), **result_values(result)}
    verdict.faults += [f"differs: {name}" for name in differences(clean.after_call, after)]
    changed = replaced(trial.before_objects, objects(run))
    if changed != clean.replaced:
        verdict.faults.append(f"other objects replaced: {changed}, not {clean.replaced}")
    if not all(isinstance(error, Boom) and _is_experiment(mode) for error in mode.foreign):
        verdict.faults.append(f"{mode.foreign} was swallowed")
    verdict.faults += _differs_later(clean, trials, trial)
    if verdict.survivors or verdict.bytes_alive > 0:
        verdict.faults.append(f"{verdict.survivors} storages, {verdict.bytes_alive} bytes alive")
    return verdict


def _differs_later(clean: Reference, trials: Trials, trial: Trial) -> list[str]:
    at_end = trials.scene.go_on(trial.run)
    return [f"differs later: {name}" for name in differences(clean.at_end, at_end)]


def _judge_committed(trials: Trials, trial: Trial, raised: BaseException) -> Verdict:
    # The call gave no result: the size is the one of the last attempt.
    lost = bool(trial.mode.out_of_memory)
    clean = trials.reference(trials.retry_size if lost else trials.first_size)
    verdict = Verdict("committed, then raised")
    if not any(raised is error for error in trial.mode.foreign):
        verdict.faults.append(f"raised {raised!r} in place of the error itself")
    verdict.faults += [
        f"differs: {name}"
        for name in differences(clean.after_call, values(trial.run))
        if not name.startswith("result")
    ]
    return verdict


def _judge_refusal(trials: Trials, trial: Trial, raised: BaseException) -> Verdict:
    run, mode = trial.run, trial.mode
    if isinstance(raised, OptimizerStepError) and HALF_APPLIED in str(raised):
        return _judge_half_applied(trials, trial)
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
    verdict.faults += [f"differs: {name}" for name in differences(trial.before, values(run))]
    changed = replaced(trial.before_objects, objects(run))
    verdict.faults += [f"replaced: {name}" for name in changed]
    _let_go(raised)
    verdict.survivors = 0 if mode.foreign else mode.survivors(mode.raised_at[-1])
    if verdict.survivors:
        verdict.faults.append(f"{verdict.survivors} storages alive")
    # And a second call goes through, as if nothing had been.
    with trials.scene.place():
        again = trials.scene.play(run)
    clean = trials.reference(again.microbatch_size if again is not None else trials.first_size)
    after = {**values(run), **result_values(again)}
    verdict.faults += [f"differs later: {name}" for name in differences(clean.after_call, after)]
    return verdict


def _judge_half_applied(trials: Trials, trial: Trial) -> Verdict:
    """A step may have changed anything it writes to; what comes before it only gradients."""
    verdict = Verdict(f"OptimizerStepError: {trials.scene.call} {HALF_APPLIED}")
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
    """Forget the frames of an error, as its handler does in the end.

    Those of functions with closures (the recomputation of a checkpoint is one) keep what is closed
    over even when they are cleared.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()


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
    return _absorbed_by(mode) in (DRY_RUN, PROBE)


def _absorbed_by(mode: FaultMode) -> str:
    """The innermost part of automicro around the last fault that may go on without it."""
    return next((ABSORBED[name] for name in reversed(mode.raised_in[-1]) if name in ABSORBED), "?")
