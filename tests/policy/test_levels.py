"""Levels and other settings combined with sizes: which are tried and which are chosen."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


@pytest.mark.parametrize("why", ["no clock", "BatchNorm", "a rehearsal"])
def test_policy_that_may_not_measure_only_climbs(why: str) -> None:
    job = Job(fastest(), [8, 0.5], overhead(4, [1, 1.3]), has_clock=why != "no clock")
    job.policy.may_measure = why != "BatchNorm"
    if why == "a rehearsal":
        job.batch()
        job.policy.take_rehearsal()
    assert [job.batch() for _ in range(60)][-1] == (0, 2)
    assert {level for level, _ in job.attempts} == {0}
    job.per_row = [80, 0.5]
    assert job.batch() == (1, 32)
    told = list(map(str, job.told))
    assert len(told) == (why == "BatchNorm")
    assert all("BatchNorm" in each and 'batchnorm="ignore"' in each for each in told)


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


class Choice(NamedTuple):
    """Step time at the choice of one job, relative to the best; and what it took."""

    of_largest: float
    of_all: float
    failures: int
    ended: bool


def choose(kind: str, seed: int, make: Callable[[], Policy]) -> Choice | None:
    machine, policy = LeveledMachine(kind, seed), make()
    fitting = {level: machine.largest(level) for level in range(len(LEVELS))}
    largest = {level: size for level, size in fitting.items() if size is not None}
    if not largest:
        return None
    ended = False
    for _ in range(120):
        machine.batch(policy)
        told = policy.exploration
        ended = ended or (told is not None and told.ended is not None)
    plan = machine.batch(policy)
    chosen = machine.true_seconds(*plan)
    of_all = min(
        machine.true_seconds(level, canonical_size(machine.num_rows, size))
        for level, most in largest.items()
        for size in range(1, most + 1)
    )
    return Choice(
        of_largest=chosen / min(machine.true_seconds(*each) for each in largest.items()),
        of_all=chosen / of_all,
        failures=sum(not fits for *_, fits in machine.attempts),
        ended=ended or plan == (0, machine.num_rows),
    )


def check_choices(seeds: range, make: Callable[[], Policy], *, is_largest: bool) -> None:
    found: list[Choice] = []
    for kind in KINDS:
        of_kind = [each for seed in seeds if (each := choose(kind, seed, make)) is not None]
        found += of_kind
        near_largest = sum(each.of_largest <= 1.05 for each in of_kind) / len(of_kind)
        near_all = sum(each.of_all <= 1.05 for each in of_kind) / len(of_kind)
        failures = sum(each.failures for each in of_kind) / len(of_kind)
        print(
            f"{kind}: {len(of_kind)} jobs, within 5 % {near_largest:.1%} of the largest sizes, "
            f"{near_all:.1%} of all; {failures:.1f} failed attempts"
        )
        assert (near_largest if is_largest else near_all) >= 0.95, kind
    assert sum(each.of_largest <= 1.05 for each in found) >= 0.98 * len(found)
    assert all(each.ended for each in found)


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("auto", 8),
        pytest.param("auto", 100, marks=[pytest.mark.sweep, pytest.mark.timeout(1200)]),
        pytest.param("explore all", 60, marks=[pytest.mark.sweep, pytest.mark.timeout(1200)]),
    ],
)
def test_choice_is_fastest_on_simulated_jobs(name: str, seeds: int) -> None:
    make = POLICIES.get(name, lambda: with_levels(Explore(), LEVELS, by_time=True))
    check_choices(range(seeds), make, is_largest=name == "auto")
