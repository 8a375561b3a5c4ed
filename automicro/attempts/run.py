"""Propose, attempt, commit or roll back, until a batch fits or nothing smaller is left."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from automicro.attempts.cut_rule import CutRule
from automicro.attempts.giving_up import give_up_fixed, why_nothing_fits
from automicro.attempts.plan import Bid, Plan, plan_alone, plan_together, propose_to
from automicro.attempts.trial import Sharing, Tried, Verdict, try_once
from automicro.errors import SampleTooLargeError
from automicro.memory import Measured, Meter, ResidentMemory
from automicro.observer import Narrator, bystander
from automicro.oom import empty_cache, first_line
from automicro.policy import Outcome, Policy
from automicro.ranks import Agreement, OneRank, Ranks, telling
from automicro.slicing import describe_cut
from automicro.transaction import Transaction

logger = logging.getLogger("automicro.attempts")  # a name that does not move

T = TypeVar("T")


class Spare(Protocol):
    """Rows that a rank runs fillers on."""

    @property
    def is_lacking(self) -> bool:
        """Whether this rank has none."""

    def pass_on(self, lender: int) -> None:
        """Give those of one rank to all that have none. All ranks call it."""


@dataclass(frozen=True, kw_only=True)
class Finished(Generic[T]):
    """What came of a step, and how many attempts it took.

    Attributes:
        result: of the attempt that succeeded.
        plan: what the last attempt ran.
        attempts: how many were made.
        failed_sizes: rows of the largest slice of each attempt that ran out of memory.
        is_committed: False where it was not accepted, and was rolled back.
        measured: what the last attempt took, where somebody measured.
        recalled_size: rows that an earlier run found, where the step was the first to use them.
        grown_from: rows that had been known to fit, where the step was the first with more.
    """

    result: T
    plan: Plan
    attempts: int
    failed_sizes: tuple[int, ...]
    is_committed: bool
    measured: Measured | None = None
    recalled_size: int | None = None
    grown_from: int | None = None

    @property
    def cuts(self) -> list[list[int]]:
        """Rows of each slice of each batch."""
        return self.plan.cuts

    @property
    def microbatch_size(self) -> int:
        """Rows of the largest slice."""
        return self.plan.size

    @property
    def counts(self) -> dict[str, Any]:
        """What results tell of rows, slices and attempts, by the names of their fields."""
        return {
            "num_samples": sum(map(sum, self.cuts)),
            "num_global_samples": self.plan.num_global_rows,
            "microbatch_size": self.microbatch_size,
            "num_microbatches": self.plan.num_microbatches,
            "attempts": self.attempts,
            "failed_sizes": self.failed_sizes,
            "recalled_size": self.recalled_size,
            "is_measuring": self.plan.is_measuring,
            "grown_from": self.grown_from,
            "stops": self.plan.stops,
        }


def run_attempts(
    attempt: Callable[[Plan], T],
    *,
    rows: Sequence[int],
    policy: Policy,
    rule: CutRule,
    transaction: Transaction,
    device: torch.device,
    costs: Sequence[float | None] | None = None,
    accept: Callable[[T], bool] | None = None,
    meter: Meter | None = None,
    measure_residents: Callable[[], ResidentMemory] | None = None,
    narrator: Narrator | None = None,
    ranks: Ranks | None = None,
    denominators: Mapping[str, float] | None = None,
    wants_to_stop: bool = False,
    training: bool = True,
    sharing: Sharing[T] | None = None,
    spare: Spare | None = None,
    last_size: int | None = None,
) -> Finished[T] | Agreement:
    """Attempt a step at the sizes that a policy proposes until one fits.

    Gives what was agreed on where no rank has any row, and does nothing.

    Args:
        attempt: does the work for the slices of a plan. Runs inside a transaction.
        rows: of each batch that the step takes; usually it is one.
        policy: proposes sizes and learns from each outcome.
        rule: turns sizes into slices.
        transaction: begun, and committed or rolled back, once per attempt.
        device: where the work runs, for giving its memory back.
        costs: of one row of each batch, for the policy; None where they are not known.
        accept: asked once an attempt went through; False rolls it back, and that is the end.
        meter: measures each attempt, for the policy, which a repeatable one does not tell how long
            they took.
        measure_residents: what lies there at any size, for saying why none fits.
        narrator: tells of every attempt.
        ranks: that take part.
        denominators: of the batches' losses by name, for several ranks.
        wants_to_stop: whether this rank asks for the end of the run.
        training: whether gradients are computed.
        sharing: what of the result is shared with other ranks.
        spare: rows for the fillers of a rank that has none.
        last_size: rows of the largest microbatch of the step before; None before the first.

    Raises:
        SampleTooLargeError: the smallest size ran out of memory. As with any other exception, the
            state is as it was before.
        RollbackError: the state could not be put back.
    """
    learned: dict[str, Any] | None = None
    ranks = ranks or OneRank()
    is_repeatable = meter is not None and meter.is_repeatable
    bid = Bid(
        rows=rows,
        costs=[None] * len(rows) if costs is None else costs,
        denominators=denominators or {},
        wants_to_stop=wants_to_stop,
        training=training,
    )
    tried: list[int] = []
    attempts = 0
    failure: BaseException | None = None
    while True:
        plan = _plan(bid, ranks, policy, rule, spare)
        if isinstance(plan, Agreement):
            return plan
        size = plan.size
        if failure is not None and size >= tried[-1]:
            try:
                if not policy.adapts:
                    give_up_fixed(failure, plan.num_rows, tried[-1])
                residents = None if measure_residents is None else measure_residents()
                text = why_nothing_fits(
                    plan.num_rows,
                    tried,
                    rule.min_rows,
                    residents,
                    device,
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
                describe_cut(sum(rows), size, plan.num_microbatches),
            )
            failure = None  # it holds this frame, which the next attempt may leave by an exception
        attempts += 1
        if last_size is not None and size > last_size:
            empty_cache(device)  # blocks that are kept for smaller microbatches cannot serve these
            last_size = None
        ranks.begin(plan.num_microbatches, training=training)
        done = try_once(
            attempt,
            plan,
            transaction=transaction,
            device=device,
            # On several ranks the rows of a slice are not what somebody fixed.
            can_recut=rule.min_rows == 1 and (policy.adapts or not ranks.is_alone),
            accept=accept,
            meter=meter,
            times=not is_repeatable and policy.compares_seconds,
            narrator=narrator,
            ranks=ranks,
            sharing=sharing,
        )
        if done.verdict in (Verdict.NEEDS_TWO_ROWS, Verdict.STRAYED):
            if done.verdict is Verdict.NEEDS_TWO_ROWS:
                rule.min_rows = 2
            attempts -= 1  # not a question of memory: the same size again
            continue
        if done.verdict is Verdict.OUT_OF_MEMORY and learned is None:
            learned = policy.state_dict()
        policy.record(_outcome(done, plan, repeatable=is_repeatable))
        if done.verdict is not Verdict.OUT_OF_MEMORY:
            assert done.result is not None
            return Finished(
                result=done.result,
                plan=plan,
                attempts=attempts,
                failed_sizes=tuple(tried),
                is_committed=done.verdict is Verdict.COMMITTED,
                measured=done.measured,
                grown_from=policy.grown_from,
            )
        tried.append(size)
        failure = done.failure
        del done  # it holds the failure, too


def _plan(
    bid: Bid, ranks: Ranks, policy: Policy, rule: CutRule, spare: Spare | None
) -> Plan | Agreement:
    if ranks.is_alone:
        return plan_alone(bid, policy, rule)
    with telling(ranks):
        lacks_rows = spare is not None and spare.is_lacking
        proposal = propose_to(bid, policy, rule, lacks_rows=lacks_rows)
    agreement = ranks.agree(proposal)
    if agreement.max_rows == 0:
        return agreement
    if agreement.lender is not None and spare is not None:
        spare.pass_on(agreement.lender)
    with telling(ranks):
        return plan_together(bid, agreement, ranks, policy, rule)


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
