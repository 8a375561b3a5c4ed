"""Propose, attempt, commit or roll back, until a batch fits or nothing smaller is left."""

import logging
from typing import Any, TypeVar

from automicro.attempts.giving_up import give_up_fixed, why_nothing_fits
from automicro.attempts.phase import Phase
from automicro.attempts.plan import (
    Finished,
    Plan,
    nothing_to_run,
    plan_alone,
    plan_together,
    propose_to,
)
from automicro.attempts.step import Step
from automicro.attempts.trial import Tried, Verdict, Work, try_once
from automicro.errors import SampleTooLargeError
from automicro.observer import bystander
from automicro.oom import empty_cache, first_line
from automicro.policy import Outcome
from automicro.ranks import telling
from automicro.slicing import describe_cut

logger = logging.getLogger("automicro.attempts")  # a name that does not move

T = TypeVar("T")


def run(step: Step, work: Work[T], phase: Phase) -> Finished[T]:
    """Attempt a step at ever smaller sizes, until it fits.

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
    last_size = phase.size
    tried: list[int] = []
    attempts = 0
    failure: BaseException | None = None
    while True:
        plan = _plan(step, phase)
        if plan.num_microbatches == 0:
            return Finished(result=None, plan=plan)
        size = plan.size
        if failure is not None and size >= tried[-1]:
            try:
                if not policy.adapts:
                    give_up_fixed(failure, plan.num_rows, tried[-1])
                text = why_nothing_fits(
                    plan.num_rows,
                    tried,
                    rule.min_rows,
                    work.residents(),
                    phase.device,
                    who=bystander(failure),
                )
                raise SampleTooLargeError(
                    f"{text} The last failure: {first_line(failure)}"
                ) from failure
            finally:
                failure = None  # it holds this frame: a cycle
                assert learned is not None
                policy.load_state_dict(learned)  # an impossible batch teaches nothing about others
        if failure is not None:
            logger.log(
                logging.WARNING if ranks.rank == 0 else logging.DEBUG,
                "out of memory, microbatch size %d → %d %s (%s)",
                tried[-1],
                size,
                "row" if size == 1 else "rows",
                describe_cut(sum(step.rows), size, plan.num_microbatches),
            )
            failure = None  # it holds this frame, which the next attempt may leave by an exception
        attempts += 1
        if last_size is not None and size > last_size:
            # Blocks that are kept for smaller microbatches cannot serve these.
            empty_cache(phase.device)
            last_size = None
        ranks.begin(plan.num_microbatches, training=phase.is_training)
        done = try_once(
            work,
            plan,
            phase,
            # On several ranks the rows of a slice are not what somebody fixed.
            can_recut=rule.min_rows == 1 and (policy.adapts or not ranks.is_alone),
            times=not phase.is_repeatable and policy.compares_seconds,
        )
        if done.verdict in (Verdict.NEEDS_TWO_ROWS, Verdict.STRAYED):
            if done.verdict is Verdict.NEEDS_TWO_ROWS:
                rule.min_rows = 2
            attempts -= 1  # not a question of memory: the same size again
            continue
        if done.verdict is Verdict.OUT_OF_MEMORY and learned is None:
            learned = policy.state_dict()
        policy.record(_outcome(done, plan, repeatable=phase.is_repeatable))
        if done.verdict is not Verdict.OUT_OF_MEMORY:
            assert done.result is not None
            finished = Finished(
                result=done.result,
                plan=plan,
                attempts=attempts,
                failed_sizes=tuple(tried),
                is_committed=done.verdict is Verdict.COMMITTED,
                measured=done.measured,
                recalled_size=recalled_size,
                grown_from=policy.grown_from,
            )
            phase.end(step, finished)
            return finished
        tried.append(size)
        failure = done.failure
        del done  # it holds the failure, too


def _plan(step: Step, phase: Phase) -> Plan:
    ranks, rule, spare = phase.ranks, phase.rule, phase.spare
    if ranks.is_alone:
        return plan_alone(step, rule)
    with telling(ranks):
        lacks_rows = spare is not None and spare.is_lacking
        proposal = propose_to(step, rule, training=phase.is_training, lacks_rows=lacks_rows)
    agreement = ranks.agree(proposal)
    if agreement.max_rows == 0:
        return nothing_to_run(stops=agreement.stops)
    if agreement.lender is not None and spare is not None:
        spare.pass_on(agreement.lender)
    with telling(ranks):
        return plan_together(step, rule, agreement, ranks)


def _outcome(done: Tried[T], plan: Plan, *, repeatable: bool) -> Outcome:
    measured = {} if done.measured is None else vars(done.measured)
    left_out = {"has_waited", "seconds"} if repeatable else {"has_waited"}
    return Outcome(
        num_rows=plan.num_rows,
        microbatch_size=plan.size,
        fits=done.verdict is not Verdict.OUT_OF_MEMORY,
        cost=plan.cost,
        **{name: value for name, value in measured.items() if name not in left_out},
    )
