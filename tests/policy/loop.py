"""A batch as the run loop of a step has it: sizes and levels are asked for until one fits."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from automicro.policy.policy import Outcome, Policy, cut_size


class Plan(NamedTuple):
    """How an attempt is made."""

    level: int
    size: int
    settings: Mapping[str, Any]


def fit(
    policy: Policy,
    num_rows: int,
    attempt: Callable[[Plan], Outcome],
    cost: float | None = None,
) -> tuple[Plan | None, list[Plan]]:
    """The plan of one batch that fitted, None for none, and the plans that did not.

    Whatever the policy: nothing is tried twice, nothing leads back to a lower level, all ends.
    """
    failed: list[Plan] = []
    while True:
        policy.level = policy.level_for(num_rows, cost)
        most = policy.propose(num_rows, cost)
        size = cut_size(num_rows, most, multiple_of=policy.multiple_of)
        plan = Plan(policy.level, size, dict(policy.settings))
        last = failed[-1] if failed else None
        is_as_before = last is not None and plan._replace(size=last.size) == last
        if last is not None and is_as_before and size >= last.size:
            assert size == last.size
            if not policy.climb(cost):
                return None, failed
            continue
        assert plan not in failed
        assert last is None or plan.level >= last.level
        outcome = attempt(plan)
        policy.record(outcome)
        if outcome.fits:
            return plan, failed
        failed.append(plan)
        assert len(failed) < 100


def fit_rows(
    policy: Policy, num_rows: int, most: int, cost: float | None = None
) -> tuple[int, list[int]]:
    """The size that fitted on a device that holds so many rows and measures nothing, and others."""

    def attempt(plan: Plan) -> Outcome:
        fits = plan.size <= most
        return Outcome(num_rows=num_rows, microbatch_size=plan.size, fits=fits, cost=cost)

    plan, failed = fit(policy, num_rows, attempt, cost)
    assert plan is not None
    return plan.size, [each.size for each in failed]
