"""The "explore" policy: which sizes it tries, when it ends, and how reliable its choice is."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from automicro.policy.auto import Halving
from automicro.policy.explore import Explore, cuts
from automicro.policy.policy import Exploration, Outcome, make_policy
from tests.policy.loop import Job
from tests.policy.machines import Machine, step


def fastest_at_8(_: int, size: float) -> float:
    return 1 + 0.15 * abs(math.log2(size / 8))


def job_of(policy: Explore, seconds: Callable[[int, int], float], **more: Any) -> Job:
    """Return a job on a device without noise that fits any size."""
    return Job(policy, [1], seconds, capacity=10**9, is_measured=False, noise=0.0, **more)


def test_explore_keyword_creates_policy() -> None:
    policy = make_policy("explore")
    assert isinstance(policy, Explore)
    assert policy.adapts
    assert policy.explores
    assert not Halving.explores


def test_invalid_options_are_rejected() -> None:
    cases: list[Any] = [
        ({"max_steps": 0}, ValueError, "max_steps is 0"),
        ({"max_steps": 1.5}, TypeError, "max_steps is 1.5"),
        ({"max_minutes": 5}, TypeError, "no argument max_minutes. Limit exploring by max_steps"),
        ({"initial": 0}, ValueError, "initial is 0"),
        ({"multiple_of": 0}, ValueError, "multiple_of is 0"),
    ]
    for options, error, said in cases:
        with pytest.raises(error, match=said):
            Explore(**options)


def test_cuts_follow_one_two_three_four_six_eight() -> None:
    assert cuts(48, 48) == [48, 24, 16, 12, 8, 6, 4, 3, 2, 1]
    assert cuts(48, 16) == [16, 12, 8, 6, 4, 3, 2, 1]
    assert cuts(1, 1) == [1]


def test_similar_sizes_are_measured_alternately() -> None:
    """Similar sizes are measured alternately, so that drift favors neither."""
    job = job_of(Explore(), lambda _, size: 1.0 if size > 8 else 2.0).run()
    changes = sum(one != other for one, other in itertools.pairwise(job.attempts))
    assert changes >= len(job.told) // 2


def test_max_steps_ends_exploration_at_best_size() -> None:
    job = job_of(Explore(max_steps=5), fastest_at_8).run()
    assert job.told[-1].ended == "max_steps=5"
    assert job.told[-1].steps == 5
    assert job.batch() == (0, job.told[-1].microbatch_size)


def test_explore_without_clock_behaves_like_auto() -> None:
    policy = Explore()
    for _ in range(10):
        assert policy.propose(32) == 32
        policy.record(Outcome(num_rows=32, microbatch_size=32, fits=True))
    assert policy.exploration is None


def test_explore_is_disabled_with_notice_for_batchnorm() -> None:
    policy = Explore()
    policy.may_measure = False
    job = job_of(policy, fastest_at_8).run()
    assert set(job.attempts) == {(0, 32)}
    assert "BatchNorm" in str(job.told[-1])
    assert 'batchnorm="ignore"' in str(job.told[-1])


def test_single_row_batch_is_not_explored() -> None:
    job = job_of(Explore(), lambda *_: 1.0, num_rows=1).run(5)
    assert not job.told
    assert not job.policy.compares_seconds


def test_varying_costs_are_compared_per_row_and_cost() -> None:
    """Half of the batches have rows twice as long, with equally many elements per microbatch."""
    job = job_of(Explore(), lambda *_: 1.0)
    for number in range(61):
        cost = 64.0 if number % 2 else 128.0
        job.seconds = lambda _, size, cost=cost: fastest_at_8(0, size * cost / 128)  # type: ignore[misc]
        job.batch(cost=cost)
    assert (job.batch(cost=64.0)[1], job.batch(cost=128.0)[1]) == (16, 8)


# Reliability on simulated machines


@dataclass(frozen=True)
class ExplorationOutcome:
    """The outcome of one exploration."""

    last: Exploration
    claims: list[tuple[int, bool]]  # confidence, and whether within 1 % of the best
    regret: float


def explore(seed: int) -> ExplorationOutcome | None:
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
    return ExplorationOutcome(told[-1], claims, regret(told[-1]))


def check_promises(seeds: range, *, claims_hold: tuple[float, float]) -> None:
    ended = [found for found in map(explore, seeds) if found is not None]
    claims = [claim for each in ended for claim in each.claims]
    print(f"\n{len(ended)} explorations, {sum(e.last.steps for e in ended) / len(ended):.1f} steps")
    for low, high in [(0, 40), (40, 60), (60, 80), (80, 88), (88, 93), (93, 96), (96, 100)]:
        held = [is_so for confidence, is_so in claims if low <= confidence < high]
        if held:
            print(
                f"claims at {low:2}…{high - 1}: {sum(held) / len(held):.1%} of {len(held):,} held"
            )
    print(Counter(each.last.ended for each in ended))
    print(f"within 2 %: {sum(each.regret <= 0.02 for each in ended) / len(ended):.1%}")
    print(f"ended at 80 or more: {sum(e.last.confidence >= 80 for e in ended) / len(ended):.1%}")
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
