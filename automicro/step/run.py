"""Propose, attempt, commit or roll back, until a batch fits or nothing smaller is left."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

import torch

from automicro.batch.layout import describe_cut
from automicro.errors import PeerStoppedError, SampleTooLargeError, add_note, facts_of
from automicro.memory.device import allocated_bytes, peak_bytes
from automicro.memory.oom import empty_cache, first_line
from automicro.memory.residents import ResidentMemory
from automicro.policy.policy import Outcome, Policy
from automicro.ranks.interface import announcing_failure
from automicro.rungs.levels import NESTED
from automicro.step.attempt import Tried, Verdict, Work, try_once
from automicro.step.events import bystander
from automicro.step.phase import Phase
from automicro.step.plan import (
    Finished,
    Plan,
    Step,
    nothing_to_run,
    plan_alone,
    plan_together,
    propose_to,
)
from automicro.step.unit import ROWS
from automicro.units import format_bytes

_LESS_BESIDE = (
    "let it compute and keep less on the device (detach and move to the host what it keeps)",
    "take it out",
    "a larger device",
)


_WOULD_BE_SMALLER = 'microbatch_size="auto" would try smaller ones'
_ENCODERS_WOULD = (
    "a loss that compares rows needs all of them, but its encoders may have smaller sizes of their "
    'own (microbatch_size="auto" in Contrastive), and the batch fewer rows'
)


def give_up_fixed(failure: BaseException, plan: Plan, size: int, *, is_whole: bool) -> NoReturn:
    """Raise the out-of-memory error of a size that never changes, with what would.

    Args:
        failure: the error.
        plan: of the attempt.
        size: that it had.
        is_whole: whether batches have to stay whole.

    Raises:
        BaseException: the failure.
        SampleTooLargeError: it happened on another rank.
    """
    smaller = _ENCODERS_WOULD if is_whole else _WOULD_BE_SMALLER
    if isinstance(failure, PeerStoppedError):
        who = "another rank" if failure.culprit is None else f"rank {failure.culprit}"
        raise SampleTooLargeError(
            f"the microbatch size is fixed, and {_of(size, plan)} do not fit on {who}; "
            f"{smaller}. The state is as before the step.{_reports(failure)}"
        ) from failure
    beside = bystander(failure)
    if beside is not None:
        add_note(
            failure,
            f"automicro: memory ran out in {beside}, while {_of(size, plan)} were "
            f"computed. The state is as before the step. What helps:{_listed(_LESS_BESIDE)}"
            f"{_reports(failure, before=_NEXT_LINE)}",
        )
        raise failure
    all_rows = f"the whole batch of {plan.extent} {plan.unit} does"
    what = all_rows if size == plan.extent else f"{_of(size, plan)} do"
    add_note(
        failure,
        f"automicro: the microbatch size is fixed, and {what} "
        f"not fit; {smaller}. The state is as before the step.{_reports(failure)}",
    )
    raise failure


_NEXT_LINE = "\n"


def _listed(remedies: Iterable[str]) -> str:
    return "".join(f"\n- {each}" for each in remedies)


def _reports(failure: BaseException, before: str = " ") -> str:
    """A sentence on the files that were written of a failure; empty where there is none."""
    written = facts_of(failure).reports
    return f"{before}More in {', '.join(written)} (automicro doctor reads it)." if written else ""


def _of(size: int, plan: Plan) -> str:
    return f"{size} {plan.unit} of {plan.extent}"


def why_nothing_fits(
    plan: Plan,
    tried: Sequence[int],
    min_rows: int,
    residents: ResidentMemory | None,
    device: torch.device,
    *,
    who: str | None = None,
    levels: Sequence[str] = ("plain",),
    helps: Sequence[str] = (),
) -> str:
    """What there is to say where the smallest size ran out of memory: a line each, and a list.

    Args:
        plan: of the last attempt.
        tried: sizes, in order.
        min_rows: the fewest rows of a slice.
        residents: what lies on the device at any size.
        device: where the work ran.
        who: the callback or metric in which memory ran out at the last size; None for neither.
        levels: of the policy, of which the last was tried last.
        helps: words for what makes the same rows need less.
    """
    # A size may have been tried twice, the second time cut into slices of two rows.
    listed = f"(tried: {', '.join(map(str, dict.fromkeys(tried)))})"
    unit, extent = plan.unit, plan.extent
    at_last = f", not even with {levels[plan.level]}" if plan.level else ""
    text = f"a microbatch of {tried[-1]} of {extent} {unit} does not fit{at_last}, and "
    state = "\nThe state is as before the step. What helps:"
    if who is not None:
        return (
            f"memory ran out in {who}, with every size {listed} of {extent} {unit}, so that fewer "
            f"rows do not help.{state}{_listed(_LESS_BESIDE)}"
        )
    less_state = ["an optimizer with less state"] if _has_state(residents) else []
    shared = residents is not None and residents.shared_inputs > 0
    less_shared = ["less in the parts of the batch that are shared by all rows"] * shared
    if residents is not None and residents.limit is not None and residents.leaves_nothing:
        other = ["a smaller model", "a higher limit", "a larger device"]
        return (
            f"{text}no size can {listed}: {residents} come to {format_bytes(residents.total)} "
            f"without any row, and the limit is {format_bytes(residents.limit)}.{state}"
            f"{_listed([*less_shared, *less_state, *other])}"
        )
    floor = ", because BatchNorm cannot train on one row" * (tried[-1] > 1 < min_rows)
    alone = "" if unit == ROWS else ": it has a single row"
    text += f"there is no smaller one{floor}{alone} {listed}."
    facts = []
    peak, allocated = peak_bytes(device), allocated_bytes(device)
    if peak is not None:
        facts.append(f"Peak memory on {device} was {format_bytes(peak)}.")
    if allocated is not None:
        facts.append(f"Between attempts {format_bytes(allocated)} were allocated.")
    if residents is not None and residents.total:
        limit = f" of {format_bytes(residents.limit)}" if residents.limit is not None else ""
        facts.append(f"Every size needs {format_bytes(residents.total)}{limit} for {residents}.")
    # Where more than half is taken without any row, it is not the samples that are large.
    smaller = ["shorter or smaller samples"]
    if _is_mostly_taken(residents):
        smaller = [] if shared else ["a smaller model"]
    told = "\n" + " ".join(facts) if facts else ""
    remedies = [*less_shared, *smaller, *helps, *less_state, "a larger device"]
    return f"{text}{told}{state}{_listed(remedies)}"


# What helps besides fewer rows, by level or precision: in words, and as an option. A level switches
# on what comes before, too.
_HELPS = {
    "recompute": ("activation checkpointing", "when_too_large={}"),
    "offload": ("host memory for what waits for the backward", "when_too_large={}"),
    NESTED: (
        "outputs and their loss in slices",
        "when_too_large={}, or automicro.split where the model is none of transformers'",
    ),
    "bf16": ("half precision", "precision='bf16'"),
}


def what_helps(level: str | None) -> list[str]:
    """Words for what makes the same rows need less; `automicro.plan` says how many bytes.

    Args:
        level: at which it does not fit; None in evaluation, which has no backward.

    >>> what_helps("plain")[0]
    "activation checkpointing (when_too_large='recompute')"
    """
    on = [] if level in (None, "plain") else str(level).split(" + ")
    return [
        f"{how} ({option.format([*on, name] if on else repr(name))})"
        for name, (how, option) in _HELPS.items()
        if name not in on and (level is not None or name == "bf16")
    ]


def _is_mostly_taken(residents: ResidentMemory | None) -> bool:
    if residents is None or residents.limit is None:
        return False
    return residents.total > residents.limit / 2


def _has_state(residents: ResidentMemory | None) -> bool:
    return residents is not None and residents.optimizer_state > 0


logger = logging.getLogger("automicro.attempts")  # a name that does not move

T = TypeVar("T")


def run(step: Step, work: Work[T], phase: Phase) -> Finished[T]:
    """Attempt a step at ever smaller sizes, then at the next level, until it fits.

    Where no rank has any row nothing is attempted, and there is no result.

    Args:
        step: what it brings at any size.
        work: what an attempt does.
        phase: that it belongs to.

    Raises:
        SampleTooLargeError: the smallest size ran out of memory. As with any other exception, the
            state is as it was before.
        RollbackError: the state could not be put back.
    """
    policy, rule, ranks = step.policy, phase.rule, phase.ranks
    recalled_size = phase.begin(step)
    learned: dict[str, Any] | None = None
    whole_fits_below = dict(ranks.whole_fits_below)
    last_size = phase.size
    tried: list[int] = []
    attempts = 0
    failure: BaseException | None = None
    failed: Plan | None = None  # the last one
    while True:
        plan = _plan(step, phase)
        if plan.num_microbatches == 0:
            return Finished(result=None, plan=plan)
        size = plan.size
        is_same = failed is not None and not plan.needs_less_than(failed)
        if (
            failed is not None
            and is_same
            and plan.proposed < failed.proposed
            and plan.size > rule.min_rows
        ):
            # It is the same cut: the slices that would be smaller have less than this.
            policy.record(_failing(plan))
            failed = plan
            continue
        if failure is not None and failed is not None and is_same:
            if phase.cuts_whole_parts():
                failure = failed = None
            elif policy.climb(failed.row_cost):
                continue  # it proposes anew, one level up
            else:
                try:
                    if not policy.adapts:
                        give_up_fixed(failure, plan, tried[-1], is_whole=phase.compares_rows)
                    text = why_nothing_fits(
                        plan,
                        tried,
                        rule.min_rows,
                        work.residents(),
                        phase.device,
                        who=bystander(failure),
                        levels=policy.levels,
                        helps=what_helps(policy.levels[plan.level] if phase.is_training else None),
                    )
                    raise SampleTooLargeError(
                        f"{text}\nThe last failure: {first_line(failure)}{_reports(failure)}"
                    ) from failure
                finally:
                    failure = None  # it holds this frame: a cycle
                    assert learned is not None
                    # An impossible batch teaches nothing about others.
                    policy.load_state_dict(learned)
                    ranks.whole_fits_below = whole_fits_below
        if failure is not None:
            logger.log(
                logging.WARNING if ranks.rank == 0 else logging.DEBUG,
                "out of memory, microbatch size %d → %d %s%s (%s)",
                tried[-1],
                plan.most,
                plan.unit.removesuffix("s") if plan.most == 1 else plan.unit,
                f", {policy.levels[plan.level]}" if plan.level else "",
                describe_cut(sum(step.rows), size, plan.num_microbatches, unit=plan.unit),
            )
            failure = None  # it holds this frame, which the next attempt may leave by an exception
        attempts += 1
        if last_size is not None and size > last_size:
            # Blocks that are kept for smaller microbatches cannot serve these.
            empty_cache(phase.device)
            last_size = None
        if plan.num_microbatches > len(plan.cuts):
            with announcing_failure(ranks):
                work.look(plan)
        ranks.begin(plan.num_microbatches, training=phase.is_training)
        done = try_once(
            work,
            plan,
            phase,
            # On several ranks the rows of a slice are not what somebody fixed.
            can_recut=rule.min_rows == 1 and (policy.adapts or not ranks.is_alone),
            times=not phase.is_repeatable and (policy.compares_seconds or phase.fits_overhead),
        )
        if done.verdict is Verdict.SMALLER_PART:
            continue  # the same size: the policy has nothing to learn from it
        if done.verdict in (Verdict.NEEDS_TWO_ROWS, Verdict.STRAYED):
            if done.verdict is Verdict.NEEDS_TWO_ROWS:
                rule.min_rows = 2
            attempts -= 1  # not a question of memory: the same size again
            continue
        if done.verdict is Verdict.OUT_OF_MEMORY and ranks.drop_whole_gradients():
            logger.log(
                logging.WARNING if ranks.rank == 0 else logging.DEBUG,
                "out of memory, microbatch size %d again, gradients reduced with each microbatch",
                size,
            )
            tried.append(size)
            del done  # it holds the failure
            continue
        if done.verdict is Verdict.OUT_OF_MEMORY and learned is None:
            learned = policy.state_dict()
        if plan.unit != ROWS and done.verdict is Verdict.OUT_OF_MEMORY:
            rule.failed = min(rule.failed, size)
        if type(policy).record is not Policy.record:  # else nobody learns from it
            if size > plan.most and size >= rule.failed:
                # A row fits, or not, that is larger than slices of others that did not.
                is_lost = done.verdict is Verdict.OUT_OF_MEMORY
                policy.record(replace(_failing(plan), fits=not is_lost))
            else:
                policy.record(_outcome(done, plan, repeatable=phase.is_repeatable))
        if done.verdict is not Verdict.OUT_OF_MEMORY:
            assert done.result is not None
            nested_sizes, nested_ooms = phase.nested_counts()
            finished = Finished(
                result=done.result,
                plan=plan,
                attempts=attempts,
                failed_sizes=tuple(tried),
                is_committed=done.verdict is Verdict.COMMITTED,
                measured=done.measured,
                recalled_size=recalled_size,
                grown_from=policy.grown_from,
                exploration=policy.exploration,
                level_name=policy.levels[plan.level],
                nested_sizes=nested_sizes,
                nested_ooms=nested_ooms,
            )
            phase.end(finished)
            return finished
        tried.append(size)
        failed, failure = plan, done.failure
        del done  # it holds the failure, too


def _plan(step: Step, phase: Phase) -> Plan:
    ranks, rule, spare = phase.ranks, phase.rule, phase.spare
    if ranks.is_alone:
        plan = plan_alone(step, rule)
        if plan.settings:
            phase.arrange(plan.settings)
        return plan
    with announcing_failure(ranks):
        lacks_rows = spare is not None and spare.is_lacking
        proposal = propose_to(step, rule, training=phase.is_training, lacks_rows=lacks_rows)
        phase.arrange(step.policy.settings)
    agreement = ranks.agree(proposal)
    if agreement.max_extent == 0:
        return nothing_to_run(stops=agreement.stops)
    if agreement.donor is not None and spare is not None:
        spare.pass_on(agreement.donor)
    with announcing_failure(ranks):
        return plan_together(step, rule, agreement, ranks)


def _failing(plan: Plan) -> Outcome:
    """That slices of what was proposed do not fit."""
    return Outcome(
        num_rows=plan.extent,
        microbatch_size=plan.most,
        fits=False,
        cost=plan.cost,
        level=plan.level,
        settings=plan.settings,
    )


def _outcome(done: Tried[T], plan: Plan, *, repeatable: bool) -> Outcome:
    took = done.measured
    return Outcome(
        num_rows=plan.extent,
        microbatch_size=plan.size,
        fits=done.verdict is not Verdict.OUT_OF_MEMORY,
        cost=plan.cost,
        peak_bytes=None if took is None else took.peak_bytes,
        resident_bytes=None if took is None else took.resident_bytes,
        capacity_bytes=None if took is None else took.capacity_bytes,
        seconds=None if took is None or repeatable else took.seconds,
        alloc_retries=None if took is None else took.alloc_retries,
        level=plan.level,
        settings=plan.settings,
    )
