"""The sizes that a step tries, and what is learned from each attempt."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from automicro.errors import SampleTooLargeError, facts_of
from automicro.memory.device import Measured
from automicro.memory.oom import empty_cache, first_line
from automicro.policy.policy import Outcome, Policy
from automicro.ranks.interface import Status, announcing_failure
from automicro.step.phase import Phase
from automicro.step.plan import ROWS, Finished, Plan, Step, plan_alone

if TYPE_CHECKING:
    from automicro.memory.residents import ResidentMemory

logger = logging.getLogger("automicro.attempts")

T = TypeVar("T")


class Sizes:
    """The sizes of one step: each plan needs less memory than those that failed."""

    def __init__(self, step: Step, phase: Phase) -> None:
        self._step, self._phase, self._policy = step, phase, step.policy
        self.meter = phase.meter
        self._recalled_size = phase.begin(step)
        # A copy that `_give_up` restores: an impossible batch teaches nothing about others.
        self._whole_fits_below = dict(phase.ranks.whole_fits_below)
        self._last_size = phase.size
        self._learned: dict[str, Any] | None = None  # state of the policy before the first failure
        self._tried: list[int] = []
        self._attempts = 0
        self._failed: Plan | None = None  # the last one
        self._failure: BaseException | None = None

    def plan(self, residents: "Callable[[], ResidentMemory | None]") -> Plan:
        """Return the plan to try next."""
        # If no smaller size is left, parts that ran whole are cut. Then the next level is tried,
        # which takes less memory. Then there is nothing left to try.
        while True:
            plan, failed = _plan(self._step, self._phase), self._failed
            if plan.num_microbatches == 0:
                return plan
            if failed is None or plan.needs_less_than(failed):
                break
            if plan.proposed < failed.proposed and plan.size > self._phase.rule.min_rows:
                # The cut stayed the same, so record that this proposal does not fit either.
                self._policy.record(_outcome(plan, plan.most))
                self._failed = plan
            elif self._failure is None:
                # Nothing has failed since the last plan, which is only cut again, for example
                # without single rows.
                break
            elif self._phase.cuts_whole_parts():
                # Try the same size again: it needs less memory with its parts in slices.
                self._failure = self._failed = None
                break
            elif not self._policy.climb(failed.row_cost):
                self._give_up(plan, residents())
        if self._failure is not None:
            logger.log(
                self._loudness,
                "automicro: out of memory at microbatch size %d: retrying with %d%s (%s)",
                self._tried[-1],
                plan.most,
                f" and {self._policy.levels[plan.level]}" if plan.level else "",
                _describe(plan, sum(self._step.rows)),
            )
            self._failure = None  # if the next attempt raised, its frames would stay alive
        if self._last_size is not None and plan.size > self._last_size:
            # Cached blocks of smaller microbatches are too small for these.
            empty_cache(self._phase.device)
            self._last_size = None
        return plan

    @property
    def can_recut(self) -> bool:
        """Whether slices of a single row can be avoided; on several ranks even at a fixed size."""
        phase = self._phase
        adapts = self._policy.adapts or not phase.ranks.is_alone
        return phase.rule.min_rows == 1 and adapts

    @property
    def compares_seconds(self) -> bool:
        """Whether the meter waits for the device."""
        phase = self._phase
        return not phase.is_repeatable and (self._policy.compares_seconds or phase.fits_overhead)

    def fail(self, plan: Plan, failure: BaseException | None, measured: Measured | None) -> None:
        """Record an attempt that ran out of memory."""
        self._attempts += 1
        self._tried.append(plan.size)
        # Unreduced gradients took memory: without them the same size may fit.
        if self._phase.ranks.drop_whole_gradients():
            logger.log(
                self._loudness,
                "automicro: out of memory at microbatch size %d: retrying with gradients reduced "
                "after each microbatch",
                plan.size,
            )
            return
        if self._learned is None:
            self._learned = self._policy.state_dict()
        if plan.unit != ROWS:
            self._phase.rule.failed = min(self._phase.rule.failed, plan.size)
        self._record(plan, measured, fits=False)
        self._failed, self._failure = plan, failure

    def repeat(self, status: Status) -> None:
        """Record that the same size should be tried again."""
        if status is Status.TWO_ROWS:
            self._phase.rule.min_rows = 2
        if status is Status.SMALLER_PART:  # the other statuses do not concern memory
            self._attempts += 1

    def succeed(
        self, plan: Plan, result: T, is_committed: bool, measured: Measured | None
    ) -> Finished[T]:
        """Record an attempt that succeeded, and finish the step."""
        self._record(plan, measured, fits=True)
        nested_sizes, nested_ooms = self._phase.nested_counts()
        finished = Finished(
            result=result,
            plan=plan,
            attempts=self._attempts + 1,
            failed_sizes=tuple(self._tried),
            is_committed=is_committed,
            measured=measured,
            recalled_size=self._recalled_size,
            grown_from=self._policy.grown_from,
            exploration=self._policy.exploration,
            level_name=self._policy.levels[plan.level],
            nested_sizes=nested_sizes,
            nested_ooms=nested_ooms,
        )
        self._phase.end(finished)
        if finished.grown_from is not None and self._phase.ranks.rank == 0:
            logger.info(
                "automicro: more rows fit: size %d instead of %d", plan.size, finished.grown_from
            )
        return finished

    def _record(self, plan: Plan, took: Measured | None, *, fits: bool) -> None:
        if type(self._policy).record is Policy.record:  # the policy learns nothing
            return
        size = plan.size
        if size >= self._phase.rule.failed and size > plan.most:
            # A single row costs more than slices of other rows that failed, so the outcome is about
            # the limit of slices and not about the cost of this row.
            size, took = plan.most, None
        outcome = _outcome(plan, size, took, fits=fits, repeatable=self._phase.is_repeatable)
        self._policy.record(outcome)

    @property
    def _loudness(self) -> int:
        return logging.DEBUG if self._phase.ranks.rank else logging.WARNING

    def _give_up(self, plan: Plan, residents: "ResidentMemory | None") -> NoReturn:
        from automicro.step.words import give_up_fixed, reports_of, what_helps, why_nothing_fits

        policy, phase, failure = self._policy, self._phase, self._failure
        assert failure is not None
        # The guard against splitting BatchNorm replaces the policy by one for whole batches.
        is_held = policy is not phase.policy
        assert self._learned is not None
        try:
            if not policy.adapts:
                give_up_fixed(
                    failure,
                    plan,
                    self._tried[-1],
                    compares_rows=phase.compares_rows,
                    is_held=is_held,
                )
            text = why_nothing_fits(
                plan,
                self._tried,
                phase.rule.min_rows,
                residents,
                phase.device,
                who=facts_of(failure).bystander,
                levels=policy.levels,
                helps=what_helps(policy.levels[plan.level] if phase.is_training else None),
            )
            raise SampleTooLargeError(
                f"{text}\nThe last failure: {first_line(failure)}{reports_of(failure)}"
            ) from failure
        finally:
            self._failure = failure = None  # break the reference cycle with the traceback
            # An impossible batch teaches nothing about others.
            policy.load_state_dict(self._learned)
            phase.ranks.whole_fits_below = self._whole_fits_below


def _plan(step: Step, phase: Phase) -> Plan:
    ranks, rule, spare = phase.ranks, phase.rule, phase.spare
    if ranks.is_alone:
        plan = plan_alone(step, rule)
        if plan.settings:
            phase.arrange(plan.settings)
        return plan
    from automicro.step.agreement import nothing_to_run, plan_together, propose_to

    with announcing_failure(ranks):
        proposal = propose_to(step, rule, training=phase.is_training, lacks_rows=spare.is_lacking)
        phase.arrange(step.policy.settings)
    agreement = ranks.agree(proposal)
    if agreement.max_extent == 0:
        return nothing_to_run(stops=agreement.stops)
    if agreement.donor is not None:
        spare.pass_on(agreement.donor)
    with announcing_failure(ranks):
        return plan_together(step, rule, agreement, ranks)


def _describe(plan: Plan, num_rows: int) -> str:
    number, most = plan.num_microbatches, plan.most
    up_to = "" if plan.unit == ROWS and number * most == num_rows else "up to "
    unit = plan.unit.removesuffix("s") if most == 1 else plan.unit
    return f"{number} microbatch{'es' * (number > 1)} of {up_to}{most} {unit}"


def _outcome(
    plan: Plan,
    size: int,
    took: Measured | None = None,
    *,
    fits: bool = False,
    repeatable: bool = False,
) -> Outcome:
    """Return the outcome of a size: whether it fit, with its peak memory and time."""
    return Outcome(
        num_rows=plan.extent,
        microbatch_size=size,
        fits=fits,
        peak_bytes=took and took.peak_bytes,
        resident_bytes=took and took.resident_bytes,
        capacity_bytes=took and took.capacity_bytes,
        # Seconds differ from run to run, and sizes would follow them.
        seconds=None if repeatable else took and took.seconds,
        cost=plan.cost,
        alloc_retries=took and took.alloc_retries,
        level=plan.level,
        settings=plan.settings,
    )
