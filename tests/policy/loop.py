"""The retry loop of a step for one batch: ask for sizes and levels until one fits."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from automicro.policy.auto import cut_size
from automicro.policy.policy import Exploration, Outcome, Policy


class Plan(NamedTuple):
    """Level, size and settings of an attempt."""

    level: int
    size: int
    settings: Mapping[str, Any]


def fit(
    policy: Policy,
    num_rows: int,
    attempt: Callable[[Plan], Outcome],
    cost: float | None = None,
) -> tuple[Plan | None, list[Plan]]:
    """Return the plan that fitted, or None, and the plans that failed.

    For every policy: no plan is tried twice, levels never decrease, and the loop ends.
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
    """Return the fitting size and failed ones on a device of `most` rows without measurements."""

    def attempt(plan: Plan) -> Outcome:
        fits = plan.size <= most
        return Outcome(num_rows=num_rows, microbatch_size=plan.size, fits=fits, cost=cost)

    plan, failed = fit(policy, num_rows, attempt, cost)
    assert plan is not None
    return plan.size, [each.size for each in failed]


NOTHING = (-1, 0)


@dataclass
class Job:
    """A simulated job whose bytes and seconds per row depend on the level."""

    policy: Policy
    per_row: Sequence[float]
    seconds: Callable[[int, int], float] = lambda level, size: 1.0  # per row
    capacity: float = 16
    more: Callable[[Mapping[str, Any]], float] = lambda _: 0.0  # additional bytes, by settings
    has_clock: bool = True
    is_measured: bool = True
    noise: float = 0.003
    num_rows: int = 32
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    attempts: list[tuple[int, int]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)  # plans that fitted
    told: list[Exploration] = field(default_factory=list)

    @property
    def failures(self) -> int:
        return len(self.attempts) - len(self.plans)

    def batch(self, num_rows: int | None = None, cost: float | None = None) -> tuple[int, int]:
        """Return the level and size that fitted, or `NOTHING` with the policy restored."""
        rows, policy, learned = num_rows or self.num_rows, self.policy, self.policy.state_dict()
        found, _ = fit(policy, rows, lambda plan: self.attempt(rows, cost, plan), cost)
        if found is None:
            policy.load_state_dict(learned)
            return NOTHING
        if policy.exploration is not None and policy.exploration.is_news:
            self.told.append(policy.exploration)
        self.plans.append(found)
        return found[:2]

    def attempt(self, rows: int, cost: float | None, plan: Plan) -> Outcome:
        self.attempts.append(plan[:2])
        need = plan.size * (cost or 1.0) * self.per_row[plan.level] + self.more(plan.settings)
        seconds = rows * (cost or 1.0) * self.seconds(plan.level, plan.size)
        seconds *= math.exp(self.draw.gauss(0, self.noise))
        return Outcome(
            num_rows=rows,
            microbatch_size=plan.size,
            fits=need <= self.capacity,
            peak_bytes=1000 + math.ceil(need) if self.is_measured else None,
            resident_bytes=1000 if self.is_measured else None,
            capacity_bytes=1000 + int(self.capacity) if self.is_measured else None,
            seconds=seconds if self.has_clock else None,
            cost=cost,
            level=plan.level,
            settings=plan.settings,
        )

    def run(self, most: int = 120) -> "Job":
        """Run batches until the final choice is reported."""
        for _ in range(most):
            self.batch()
            if self.told and self.told[-1].ended is not None:
                return self
        return self
