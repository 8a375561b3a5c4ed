"""The "explore" policy: which sizes it tries, when it ends, and how reliable its choice is."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from automicro.policy.explore import Explore, cuts
from automicro.policy.policy import Exploration
from tests.policy.loop import Job
from tests.policy.machines import Machine, step


def fastest_at_8(_: int, size: float) -> float:
    return 1 + 0.15 * abs(math.log2(size / 8))


def job_of(policy: Explore, seconds: Callable[[int, int], float], **more: Any) -> Job:
    """Return a job on a device without noise that fits any size."""
    return Job(policy, [1], seconds, capacity=10**9, is_measured=False, noise=0.0, **more)


def test_cuts_follow_one_two_three_four_six_eight() -> None:
    assert cuts(48, 48) == [48, 24, 16, 12, 8, 6, 4, 3, 2, 1]
    assert cuts(48, 16) == [16, 12, 8, 6, 4, 3, 2, 1]
    assert cuts(1, 1) == [1]


def test_max_steps_ends_exploration_at_best_size() -> None:
    job = job_of(Explore(max_steps=5), fastest_at_8).run()
    assert job.told[-1].ended == "max_steps=5"
    assert job.told[-1].steps == 5
    assert job.batch() == (0, job.told[-1].microbatch_size)


def test_varying_costs_are_compared_per_row_and_cost() -> None:
    """Half of the batches have rows twice as long, with equally many elements per microbatch."""
    job = job_of(Explore(), lambda *_: 1.0)
    for number in range(61):
        cost = 64.0 if number % 2 else 128.0
        job.seconds = lambda _, size, cost=cost: fastest_at_8(0, size * cost / 128)  # type: ignore[misc]
        job.batch(cost=cost)
    assert (job.batch(cost=64.0)[1], job.batch(cost=128.0)[1]) == (16, 8)


class Ended(NamedTuple):
    """The end of an exploration."""

    last: Exploration
    claims: list[tuple[int, bool]]  # confidence, and whether within 1 % of the best
    regret: float


def explore(seed: int) -> Ended | None:
    machine, policy = Machine(seed), Explore()
    told: list[Exploration] = []
    while not told or told[-1].ended is None:
        step(machine, policy)
        if policy.exploration is not None and policy.exploration.is_news:
            told.append(policy.exploration)
        if not told and not policy.compares_seconds:
            return None  # only one size exists
    assert policy.plain.propose(machine.num_rows) == machine.most_rows  # limit is found
    sizes = cuts(machine.num_rows, machine.most_rows)
    best = min(map(machine.true_seconds, sizes))

    def regret(exploration: Exploration) -> float:
        return machine.true_seconds(exploration.microbatch_size) / best - 1

    claims = [(each.confidence, regret(each) <= 0.01) for each in told]
    return Ended(told[-1], claims, regret(told[-1]))


def check_promises(seeds: range, *, claims_hold: tuple[float, float]) -> None:
    ended = [found for found in map(explore, seeds) if found is not None]
    claims = [claim for each in ended for claim in each.claims]
    print(f"\n{len(ended)} explorations", Counter(each.last.ended for each in ended))
    for at in range(0, 100, 10):
        held = [is_so for confidence, is_so in claims if at <= confidence < at + 10]
        print(f"claims at {at} to {at + 9}: {sum(held)} of {len(held)} held")
    at_90 = [is_so for confidence, is_so in claims if 88 <= confidence <= 92]
    assert sum(each.regret <= 0.02 for each in ended) >= 0.95 * len(ended)
    assert max(each.last.steps for each in ended) <= 60
    assert claims_hold[0] <= sum(at_90) / len(at_90) <= claims_hold[1]
    assert sum(each.last.confidence >= 80 for each in ended) >= 0.5 * len(ended)


def test_choice_and_confidence_hold_on_sample_of_machines() -> None:
    check_promises(range(20), claims_hold=(0.7, 1.0))


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_choice_and_confidence_hold_on_two_thousand_machines() -> None:
    check_promises(range(2000), claims_hold=(0.86, 0.95))
