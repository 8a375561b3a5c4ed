"""Propose, attempt, commit or roll back, until a batch fits or nothing smaller is left."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch

from automicro.attempts.cut_rule import CutRule
from automicro.attempts.giving_up import give_up_fixed, why_nothing_fits
from automicro.attempts.trial import Tried, Verdict, try_once
from automicro.errors import SampleTooLargeError
from automicro.memory import Measured, Meter, ResidentMemory
from automicro.observer import Narrator
from automicro.oom import first_line
from automicro.policy import Fixed, Outcome, Policy
from automicro.slicing import describe_cut
from automicro.transaction import Transaction

logger = logging.getLogger("automicro.attempts")  # a name that does not move

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Finished(Generic[T]):
    """What came of a step, and how many attempts it took.

    Attributes:
        result: of the attempt that succeeded.
        cuts: rows of each slice of each batch.
        attempts: how many were made.
        failed_sizes: rows of the largest slice of each attempt that ran out of memory.
        is_committed: False where it was not accepted, and was rolled back.
        measured: what the last attempt took, where somebody measured.
        recalled_size: rows that an earlier run found, where the step was the first to use them.
    """

    result: T
    cuts: list[list[int]]
    attempts: int
    failed_sizes: tuple[int, ...]
    is_committed: bool
    measured: Measured | None = None
    recalled_size: int | None = None

    @property
    def microbatch_size(self) -> int:
        """Rows of the largest slice."""
        return _largest(self.cuts)

    @property
    def counts(self) -> dict[str, Any]:
        """What results tell of rows, slices and attempts, by the names of their fields."""
        return {
            "num_samples": sum(map(sum, self.cuts)),
            "microbatch_size": self.microbatch_size,
            "num_microbatches": sum(map(len, self.cuts)),
            "attempts": self.attempts,
            "failed_sizes": self.failed_sizes,
            "recalled_size": self.recalled_size,
        }


def run_attempts(
    attempt: Callable[[list[list[int]]], T],
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
) -> Finished[T]:
    """Attempt a step at the sizes that a policy proposes until one fits.

    Args:
        attempt: does the work for slices of these rows, a list for each batch. Runs inside a
            transaction.
        rows: of each batch that the step takes; usually it is one.
        policy: proposes sizes and learns from each outcome.
        rule: turns sizes into slices.
        transaction: begun, and committed or rolled back, once per attempt.
        device: where the work runs, for giving its memory back.
        costs: of one row of each batch, for the policy; None where they are not known.
        accept: asked once an attempt went through; False rolls it back, and that is the end.
        meter: measures each attempt, for the policy.
        measure_residents: what lies there at any size, for saying why none fits.
        narrator: tells of every attempt.

    Raises:
        SampleTooLargeError: the smallest size ran out of memory. As with any other exception, the
            state is as it was before.
        RollbackError: the state could not be put back.
    """
    learned = policy.state_dict()
    row_costs = [None] * len(rows) if costs is None else list(costs)
    tried: list[int] = []
    attempts = 0
    failure: BaseException | None = None
    while True:
        cuts = [_cut(policy, rule, *each) for each in zip(rows, row_costs, strict=True)]
        size = _largest(cuts)
        if failure is not None and size >= tried[-1]:
            try:
                if isinstance(policy, Fixed):
                    give_up_fixed(failure, max(rows), tried[-1])
                residents = None if measure_residents is None else measure_residents()
                text = why_nothing_fits(max(rows), tried, rule.min_rows, residents, device)
                raise SampleTooLargeError(
                    f"{text} The last failure: {first_line(failure)}"
                ) from failure
            finally:
                failure = None  # it holds this frame: a cycle
                policy.load_state_dict(learned)  # an impossible batch teaches nothing about others
        if failure is not None:
            logger.warning(
                "out of memory, microbatch size %d → %d %s (%s)",
                tried[-1],
                size,
                "row" if size == 1 else "rows",
                describe_cut(sum(rows), size, sum(map(len, cuts))),
            )
            failure = None  # it holds this frame, which the next attempt may leave by an exception
        attempts += 1
        done = try_once(
            attempt,
            cuts,
            transaction=transaction,
            device=device,
            can_recut=rule.min_rows == 1 and not isinstance(policy, Fixed),
            accept=accept,
            meter=meter,
            narrator=narrator,
        )
        if done.verdict is Verdict.NEEDS_TWO_ROWS:
            rule.min_rows = 2
            attempts -= 1  # not a question of memory: the same size, cut differently
            continue
        policy.record(_outcome(done, cuts, row_costs))
        if done.verdict is not Verdict.OUT_OF_MEMORY:
            assert done.result is not None
            return Finished(
                result=done.result,
                cuts=cuts,
                attempts=attempts,
                failed_sizes=tuple(tried),
                is_committed=done.verdict is Verdict.COMMITTED,
                measured=done.measured,
            )
        tried.append(size)
        failure = done.failure
        del done  # it holds the failure, too


def _largest(cuts: Sequence[Sequence[int]]) -> int:
    return max(sizes[0] for sizes in cuts)


def _outcome(
    done: Tried[T], cuts: Sequence[Sequence[int]], costs: Sequence[float | None]
) -> Outcome:
    """The batch with the largest slice, in elements, speaks for the step."""
    sizes, cost = max(
        zip(cuts, costs, strict=True), key=lambda each: (each[0][0] * (each[1] or 1), sum(each[0]))
    )
    return Outcome(
        num_rows=sum(sizes),
        microbatch_size=sizes[0],
        fits=done.verdict is not Verdict.OUT_OF_MEMORY,
        cost=cost,
        **({} if done.measured is None else asdict(done.measured)),
    )


def _cut(policy: Policy, rule: CutRule, num_rows: int, cost: float | None) -> list[int]:
    size = policy.propose(num_rows) if cost is None else policy.propose(num_rows, cost)
    if not size >= 1:
        raise ValueError(f"{policy!r} proposed {size} rows; a policy must propose at least one")
    if rule.strict_divisible and not isinstance(policy, Fixed):
        size = rule.largest_divisor(num_rows, min(size, num_rows))
    return rule.cut(num_rows, size, multiple_of=getattr(policy, "multiple_of", 1))
