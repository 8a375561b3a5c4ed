"""Memory levels: when the policy leaves them, what each one learns, and where a batch begins."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automicro.policy.auto import Halving
from automicro.policy.ladder import Ladder
from automicro.policy.policy import Fixed, Outcome, Policy
from tests.policy.loop import NOTHING, Job

LEVELS = ["plain", "recompute", "recompute + offload"]


def ladder(policy: Policy | None = None, levels: Sequence[str] = LEVELS) -> Ladder:
    return Ladder(Halving() if policy is None else policy, levels)


def test_batch_that_fits_at_no_level_leaves_state_unchanged() -> None:
    job = Job(ladder(), [10, 9, 8.5], capacity=8, has_clock=False)
    before = job.policy.state_dict()
    assert job.batch(16) == NOTHING
    assert {level for level, _ in job.attempts} == {0, 1, 2}
    assert job.policy.state_dict() == before


def test_intermediate_costs_are_tried_in_lower_half_only() -> None:
    # Plain fits up to a cost of 10.
    job = Job(ladder(Fixed(1)), [10, 1, 1], capacity=100, has_clock=False)
    assert job.batch(4, cost=40.0) == (1, 1)
    tried = []
    for cost in (30.0, 21.0, 20.0, 11.0, 9.0, 12.0, 10.0):
        before = len(job.attempts)
        assert job.batch(4, cost=cost) == (int(cost > 10), 1)
        tried.append(job.attempts[before][0])
    # 20 is half of 40 and fails. 11 is above half of 20. 9 fits, and 12 is below (9 + 20) / 2.
    assert tried == [1, 1, 0, 1, 0, 0, 0]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 1000))
@settings(max_examples=200, deadline=None)
def test_failed_cost_trials_grow_logarithmically(costs: list[int], most: int) -> None:
    job = Job(ladder(Fixed(1), LEVELS[:2]), [1, 0], capacity=most, has_clock=False)
    for cost in costs:
        assert job.batch(4, cost=float(cost)) != NOTHING
    assert len(job.attempts) - len(costs) <= 11


@pytest.mark.parametrize("is_measured", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_level_is_retried_when_capacity_grows(is_measured: bool) -> None:
    most, later = (40, 3) if is_measured else (2000, 4000)
    job = Job(
        ladder(levels=LEVELS[:2]), [10, 1], capacity=8, has_clock=False, is_measured=is_measured
    )
    tried = 0
    for _ in range(most):
        before = len(job.attempts)
        assert job.batch(16)[0] == 1
        tried += job.attempts[before][0] == 0
    assert tried <= 4
    job.capacity = 1000
    for _ in range(later):
        found = job.batch(16)
    assert found == (0, 16)


def test_rehearsal_stops_retries_of_failed_levels() -> None:
    job = Job(ladder(), [10, 1, 1], capacity=100, has_clock=False)
    job.batch(16, cost=8.0)
    job.batch(16, cost=50.0)
    job.policy.take_rehearsal()
    before = len(job.attempts)
    assert job.batch(16, cost=8.0)[0] == 0
    assert job.batch(16, cost=11.0)[0] == 1
    assert len(job.attempts) == before + 2


def test_suggested_level_is_starting_point() -> None:
    policy = ladder()
    assert policy.suggest(4, 10.0, level=1)
    job = Job(policy, [11, 1, 1], capacity=100, has_clock=False)
    assert job.batch(16, cost=10.0) == (1, 4)
    assert len(job.attempts) == 1
    with pytest.raises(ValueError, match="level=3, but there are 3"):
        policy.suggest(4, 10.0, level=3)


def test_uncopyable_policy_raises_type_error() -> None:
    class Stubborn(Halving):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no")

    with pytest.raises(TypeError, match=r"cannot be copied \(no\)"):
        Ladder(Stubborn(), LEVELS)


def test_state_without_levels_loads_into_level_0() -> None:
    plain = Halving()
    plain.record(Outcome(num_rows=8, microbatch_size=8, fits=False))
    policy = ladder()
    policy.load_state_dict(plain.state_dict())
    assert policy.propose(8) == 4


def test_damaged_state_is_rejected_without_changes() -> None:
    job = Job(ladder(), [10, 1, 1], capacity=8, has_clock=False)
    job.batch(16)
    before = job.policy.state_dict()
    damages: list[Any] = [
        {"levels": None},
        {"levels": {"plain": {}}},
        {"batches": None},
        {"kind": ""},
    ]
    for damage in damages:
        with pytest.raises(ValueError, match="state"):
            job.policy.load_state_dict({**before, **damage})
    assert job.policy.state_dict() == before
