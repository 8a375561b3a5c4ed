"""Levels and other settings combined with sizes: which are tried and which are chosen."""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automicro.policy.auto import Halving
from automicro.policy.explore import Explore, FastestLevel
from automicro.policy.ladder import Ladder
from automicro.policy.policy import Fixed, Outcome, Policy, canonical_size, with_levels
from tests.policy.loop import Job
from tests.policy.machines import KINDS, LEVELS, LeveledMachine

TWO = ["plain", "recompute"]


def overhead(per_microbatch: float, per_row: Sequence[float]) -> Callable[[int, int], float]:
    return lambda level, size: per_row[level] + per_microbatch / size


def fastest(levels: Sequence[str] = TWO, policy: Policy | None = None, **more: Any) -> FastestLevel:
    return FastestLevel(Halving() if policy is None else policy, levels, **more)


# "auto": the largest size of each level


def test_recompute_with_larger_microbatches_is_chosen_and_reported() -> None:
    job = Job(fastest(), [8, 0.5], overhead(4, [1, 1.3])).run()
    assert job.batch() == (1, 32)
    said = str(job.told[-1])
    assert said.startswith("explored for ")
    assert ", sure enough: 32 rows, recompute, 2.1" in said
    assert not job.policy.compares_seconds


def test_level_without_larger_size_is_not_measured() -> None:
    """Offload alone fits the whole batch, so adding recompute gains nothing."""
    job = Job(fastest(LEVELS), [2, 4, 0.5, 0.25], overhead(4, [1, 1.3, 1.1, 1.4])).run()
    assert job.batch() == (2, 32)
    assert {level for level, *_ in job.plans} == {0, 1, 2}
    assert [level for level, *_ in race_of(job).arms] == ["plain", "offload"]


def race_of(job: Job) -> Any:
    policy = job.policy
    assert isinstance(policy, Explore)
    return policy._progress.race


def test_only_fitting_level_is_chosen_without_comparison() -> None:
    job = Job(fastest(LEVELS), [90, 40, 30, 1], overhead(4, [1, 1.3, 1.1, 1.4])).run()
    assert job.batch() == (3, 16)
    assert "nothing else fits: 16 rows, recompute + offload, " in str(job.told[-1])
    assert len(job.told) == 1


def test_policy_without_clock_only_climbs() -> None:
    job = Job(fastest(), [8, 0.5], overhead(4, [1, 1.3]), has_clock=False)
    assert [job.batch() for _ in range(60)][-1] == (0, 2)
    assert {level for level, *_ in job.plans} == {0}
    job.per_row = [80, 0.5]
    assert job.batch() == (1, 32)
    assert not job.told


def test_batchnorm_policy_only_climbs_with_notice() -> None:
    policy = fastest()
    policy.may_measure = False
    job = Job(policy, [8, 0.5], overhead(4, [1, 1.3])).run()
    assert {job.batch() for _ in range(30)} == {(0, 2)}
    assert "BatchNorm" in str(job.told[-1])
    job.per_row = [80, 0.5]
    assert job.batch() == (1, 32)


def test_policy_only_climbs_after_rehearsal() -> None:
    policy = fastest()
    job = Job(policy, [8, 0.5], overhead(4, [1, 1.3]))
    job.batch()
    policy.take_rehearsal()
    failures = job.failures
    assert {job.batch()[0] for _ in range(40)} == {0}
    assert job.failures == failures


def test_batches_fitting_whole_at_level_0_ignore_chosen_level() -> None:
    job = Job(fastest(), [8, 0.5], overhead(4, [1, 1.3])).run()
    assert job.batch(num_rows=2) == (0, 2)
    assert job.batch() == (1, 32)
    assert job.batch(num_rows=32, cost=0.05)[0] == 0


def test_long_rows_climb_while_short_rows_keep_fastest_level() -> None:
    job = Job(fastest(), [1, 0.1], overhead(0.01, [1, 1.3]), capacity=64)
    levels = []
    for number in range(150):
        level, _ = job.batch(cost=100.0 if number % 3 == 0 else 8.0)
        levels.append(level)
    assert levels[-3:] == [1, 0, 0]
    assert job.batch(cost=8.0) == (0, 8)


def test_suggested_level_is_final_choice() -> None:
    policy = fastest()
    assert policy.suggest(16, None, level=1)
    job = Job(policy, [8, 0.5], overhead(4, [1, 1.3]))
    assert job.batch()[0] == 1
    assert job.failures == 0
    assert not policy.compares_seconds
    with pytest.raises(ValueError, match="level=2, but there are 2"):
        policy.suggest(16, None, level=2)


def test_fixed_size_compares_levels() -> None:
    """The faster of two fitting levels is chosen."""
    job = Job(fastest(LEVELS, Fixed(4)), [8, 1, 2, 0.5], overhead(0, [1, 1.3, 1.1, 1.4])).run()
    assert job.batch() == (2, 4)
    assert not job.policy.adapts
    job = Job(fastest(LEVELS, Fixed(4)), [2, 1, 2, 0.5], overhead(0, [1, 1.3, 1.1, 1.4]))
    assert {job.batch() for _ in range(60)} == {(0, 4)}


def test_state_with_sizes_only_limits_first_proposal() -> None:
    for known in (Halving(), Ladder(Halving(), TWO)):
        known.record(Outcome(num_rows=32, microbatch_size=32, fits=False))
        for policy in (fastest(), Explore(), Explore().with_levels(TWO)):
            if known.levels == ("plain",) or policy.levels == known.levels:
                policy.load_state_dict(known.state_dict())
                assert policy.propose(32) == 16


# "explore": sizes and levels together


def test_higher_level_is_explored_only_where_lower_does_not_fit() -> None:
    job = Job(Explore().with_levels(TWO), [2, 0.5], overhead(1, [1, 1.3]))
    while race_of(job) is None:
        job.batch()
    sizes: dict[Any, list[Any]] = {}
    for level, size in race_of(job).arms:
        sizes.setdefault(level, []).append(size)
    assert sizes == {"plain": [8, 6, 4, 3, 2, 1], "recompute": [32, 16, 11]}


def test_additional_settings_are_searched_jointly() -> None:
    """Syncing only with the last microbatch and running the part in two slices is fastest."""

    def seconds(level: int, size: int) -> float:
        chosen = job.policy.settings
        sync = 0.5 if chosen["sync"] == "each" else 0.1
        return 1 + (2 + sync) / size + (0.3 if chosen["nested"] == 8 else 0.1)

    def more(chosen: Mapping[str, Any]) -> float:
        return float({8: 0, 2: 1, 1: 100}[chosen["nested"]])

    choices: dict[str, Sequence[float | str]] = {"sync": ["each", "last"], "nested": [8, 2, 1]}
    policy = Explore().with_levels(["plain"], choices)
    assert policy.settings == {"sync": "each", "nested": 8}
    job = Job(policy, [8], seconds, capacity=17, more=more)
    job.run(150).batch()
    assert job.plans[-1] == (0, 2, {"sync": "last", "nested": 2})
    assert "2 rows, sync last, nested 2, " in str(job.told[-1])
    assert job.failures <= 4 + 4, "what runs out of memory does so once with each size and sync"


def test_empty_choice_is_rejected() -> None:
    with pytest.raises(ValueError, match="sync has no value to choose"):
        Explore().with_levels(TWO, {"sync": []})


# Guarantees

POLICIES: Mapping[str, Callable[[], Policy]] = {
    "climbs": lambda: with_levels(Halving(), LEVELS, by_time=False),
    "auto": lambda: with_levels(Halving(), LEVELS, by_time=True),
    "explore": lambda: with_levels(Explore(max_steps=20), LEVELS, by_time=True),
    "all": lambda: with_levels(
        Explore(max_steps=20), LEVELS, by_time=True, choices={"sync": ["each", "last"]}
    ),
}


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_guarantees_hold_for_any_batches(name: str, data: st.DataObject) -> None:
    """The loop ends, failures are not repeated in a batch, and a loaded state continues exactly.

    Levels are left only when no smaller size remains: `Job` asserts this in every batch.
    """
    per_row = sorted(data.draw(st.lists(st.floats(0.01, 4), min_size=4, max_size=4)))[::-1]
    speeds = data.draw(st.lists(st.floats(0.5, 3), min_size=4, max_size=4))
    batches = data.draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 10)), min_size=1, max_size=40)
    )
    interrupted = data.draw(st.integers(0, len(batches) - 1))
    shrinks = data.draw(st.integers(0, len(batches)))
    capacity = 10 * per_row[-1] + data.draw(st.floats(0, 60))

    def job() -> Job:
        more = 0.1 * capacity
        return Job(
            POLICIES[name](),
            per_row,
            overhead(1, speeds),
            capacity=capacity,
            more=lambda chosen: more * (chosen.get("sync") == "last"),
        )

    one, other = job(), job()
    for number, (rows, cost) in enumerate(batches):
        if number == interrupted:
            other.policy.load_state_dict(json.loads(json.dumps(one.policy.state_dict())))
            other.draw.setstate(one.draw.getstate())
        if number == shrinks:
            one.capacity = other.capacity = max(10 * per_row[-1], capacity / 3)
        found = one.batch(rows, float(cost))
        if number >= interrupted:
            assert other.batch(rows, float(cost)) == found
            assert other.plans[-1] == one.plans[-1]
    assert json.dumps(other.policy.state_dict()) == json.dumps(one.policy.state_dict())


@pytest.mark.parametrize("name", POLICIES)
def test_ranks_make_identical_decisions_from_shared_measurements(name: str) -> None:
    """Each rank has its own batches and proposals; agreement and outcome are shared."""
    policies = [POLICIES[name]() for _ in range(3)]
    draw = random.Random(3)
    for _ in range(120):
        rows = [draw.choice([24, 32, 7]) for _ in policies]
        costs = [draw.choice([4.0, 8.0, 30.0]) for _ in policies]
        failed: tuple[int, int, Any] | None = None
        while True:
            batches = list(zip(policies, rows, costs, strict=True))
            for policy, own, cost in batches:
                policy.level = policy.level_for(own, cost)
            level = max(policy.level for policy in policies)
            sizes = [
                policy.propose(own, cost) for policy, own, cost in batches if policy.level == level
            ]
            for policy in policies:
                policy.level = level
            size = canonical_size(max(rows), min(sizes))
            [chosen] = {json.dumps(dict(policy.settings)) for policy in policies}
            plan = (level, size, chosen)
            if failed is not None and not (
                level > failed[0] or size < failed[1] or chosen != failed[2]
            ):
                assert {policy.climb(max(costs)) for policy in policies} == {True}
                continue
            need = size * max(costs) * [4, 1, 1.5, 0.3][level]
            outcome = Outcome(
                num_rows=max(rows),
                microbatch_size=size,
                fits=need <= 100,
                peak_bytes=1000 + int(need),
                resident_bytes=1000,
                capacity_bytes=1100,
                seconds=max(rows) * max(costs) * ([1, 1.3, 2, 2.5][level] + 4 / size),
                cost=max(costs),
                level=level,
                settings=json.loads(chosen),
            )
            for policy in policies:
                policy.record(outcome)
            assert len({json.dumps(policy.state_dict()) for policy in policies}) == 1
            if outcome.fits:
                break
            failed = plan


# Statistics


@dataclass(frozen=True)
class Choice:
    """The outcome of one job: step time at the choice, relative to the best."""

    kind: str
    of_largest: float
    of_all: float
    batches: int
    failures: int
    lost: float
    ended: bool


def choose(kind: str, seed: int, make: Callable[[], Policy]) -> Choice | None:
    machine, policy = LeveledMachine(kind, seed), make()
    fitting = {level: machine.largest(level) for level in range(len(LEVELS))}
    largest = {level: size for level, size in fitting.items() if size is not None}
    if not largest:
        return None
    batches, ended = 0, False
    for number in range(120):
        machine.batch(policy)
        told = policy.exploration
        if told is not None and told.ended is not None and not ended:
            batches, ended = number + 1, True
    plan = machine.batch(policy)
    chosen = machine.true_seconds(*plan)
    best = min(machine.true_seconds(*each) for each in largest.items())
    of_all = min(
        machine.true_seconds(level, canonical_size(machine.num_rows, size))
        for level, most in largest.items()
        for size in range(1, most + 1)
    )
    steps = sum(fits for *_, fits in machine.attempts)
    return Choice(
        kind=kind,
        of_largest=chosen / best,
        of_all=chosen / of_all,
        batches=batches,
        failures=len(machine.attempts) - steps,
        lost=machine.seconds / chosen - steps,
        ended=ended or plan == (0, machine.num_rows),
    )


def check_choices(seeds: range, make: Callable[[], Policy], *, is_largest: bool) -> None:
    found: list[Choice] = []
    for kind in KINDS:
        of_kind = [each for seed in seeds if (each := choose(kind, seed, make)) is not None]
        found += of_kind
        print(
            f"\n{kind}: {len(of_kind)} jobs, within 5 % "
            f"{sum(each.of_largest <= 1.05 for each in of_kind) / len(of_kind):.1%} of the largest "
            f"sizes, {sum(each.of_all <= 1.05 for each in of_kind) / len(of_kind):.1%} of all; "
            f"batches {sum(each.batches for each in of_kind) / len(of_kind):.1f}, at most "
            f"{max(each.batches for each in of_kind)}; attempts that failed "
            f"{sum(each.failures for each in of_kind) / len(of_kind):.1f}; lost "
            f"{sorted(each.lost for each in of_kind)[len(of_kind) // 2]:.1f} steps (median)",
            end="",
        )
        near = sum((each.of_largest if is_largest else each.of_all) <= 1.05 for each in of_kind)
        assert near >= 0.95 * len(of_kind), kind
    print(f"\n{len(found)} jobs:", Counter(each.ended for each in found))
    assert sum(each.of_largest <= 1.05 for each in found) >= 0.98 * len(found)
    assert all(each.ended for each in found)


def test_chosen_level_is_fastest_on_sample_of_jobs() -> None:
    check_choices(range(8), POLICIES["auto"], is_largest=True)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_chosen_level_is_fastest_on_hundreds_of_jobs() -> None:
    check_choices(range(100), POLICIES["auto"], is_largest=True)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_chosen_level_and_size_are_fastest_on_hundreds_of_jobs() -> None:
    check_choices(range(60), lambda: with_levels(Explore(), LEVELS, by_time=True), is_largest=False)
