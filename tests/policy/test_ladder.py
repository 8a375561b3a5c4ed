"""Levels: when they are left, what each of them learns, and at which a batch begins."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automicro.policy.auto import Halving
from automicro.policy.ladder import Ladder
from automicro.policy.policy import Fixed, Outcome, Policy
from tests.policy.loop import Plan, fit

LEVELS = ["plain", "recompute", "recompute + offload"]


@dataclass
class Device:
    """A run loop, and a device on which a row costs other bytes at each level."""

    policy: Policy
    capacity: int
    per_row: Sequence[float]
    is_measured: bool = True
    attempts: list[tuple[int, int]] = field(default_factory=list)  # (level, size)

    def batch(self, num_rows: int, cost: float | None = None) -> tuple[int, int] | None:
        """The level and size that fitted; None for none."""
        learned = self.policy.state_dict()

        def attempt(plan: Plan) -> Outcome:
            self.attempts.append((plan.level, plan.size))
            need = math.ceil(plan.size * (cost or 1.0) * self.per_row[plan.level])
            return Outcome(
                num_rows=num_rows,
                microbatch_size=plan.size,
                fits=need <= self.capacity,
                peak_bytes=100 + need if self.is_measured else None,
                resident_bytes=100 if self.is_measured else None,
                capacity_bytes=100 + self.capacity if self.is_measured else None,
                cost=cost,
                level=plan.level,
            )

        plan, _ = fit(self.policy, num_rows, attempt, cost)
        if plan is None:
            self.policy.load_state_dict(learned)
        return plan and plan[:2]

    def failures(self, num_rows: int, cost: float | None = None) -> int:
        """Of one batch."""
        before = len(self.attempts)
        return len(self.attempts) - before - 1 if self.batch(num_rows, cost) else -1


def ladder(policy: Policy | None = None, levels: Sequence[str] = LEVELS) -> Ladder:
    return Ladder(Halving() if policy is None else policy, levels)


def test_a_batch_that_fits_at_no_level_teaches_nothing() -> None:
    device = Device(ladder(), 8, [10, 9, 8.5])
    before = device.policy.state_dict()
    assert device.batch(16) is None
    assert {level for level, _ in device.attempts} == {0, 1, 2}
    assert device.policy.state_dict() == before


def test_costs_in_between_are_tried_in_the_lower_half_only() -> None:
    device = Device(ladder(Fixed(1)), 100, [10, 1, 1])  # plain up to a cost of 10
    assert device.batch(4, cost=40.0) == (1, 1)
    tried = []
    for cost in (30.0, 21.0, 20.0, 11.0, 9.0, 12.0, 10.0):
        before = len(device.attempts)
        assert device.batch(4, cost=cost) == (int(cost > 10), 1)
        tried.append(device.attempts[before][0])
    # 20 fails, being half of 40; 11 is above half of that; 9 fits, and 12 is within (9 + 20) / 2.
    assert tried == [1, 1, 0, 1, 0, 0, 0]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 1000))
@settings(max_examples=200, deadline=None)
def test_trials_of_costs_fail_no_more_often_than_their_logarithm(
    costs: list[int], most: int
) -> None:
    device = Device(ladder(Fixed(1), LEVELS[:2]), most, [1, 0])
    for cost in costs:
        assert device.batch(4, cost=float(cost)) is not None
    assert len(device.attempts) - len(costs) <= 11


def test_a_level_is_tried_again_when_the_device_can_give_what_it_lacked() -> None:
    device = Device(ladder(), 8, [10, 1, 1])
    for _ in range(40):
        assert (device.batch(16) or (0, 0))[0] == 1
    device.capacity = 200
    for _ in range(3):
        found = device.batch(16)
    assert found == (0, 16)


def test_where_nothing_explains_it_a_level_is_tried_again_after_many_batches() -> None:
    device = Device(ladder(levels=LEVELS[:2]), 8, [10, 1], is_measured=False)
    tried = []
    for number in range(2000):
        before = len(device.attempts)
        device.batch(16)
        if device.attempts[before][0] == 0:
            tried.append(number)
    assert len(tried) <= 4
    device.capacity = 1000
    for _ in range(4000):
        found = device.batch(16)
    assert found == (0, 16)


def test_after_a_rehearsal_no_level_is_tried_where_it_has_not_fitted() -> None:
    device = Device(ladder(), 100, [10, 1, 1])
    device.batch(16, cost=8.0)
    device.batch(16, cost=50.0)
    device.policy.take_rehearsal()
    before = len(device.attempts)
    assert (device.batch(16, cost=8.0) or (9, 0))[0] == 0
    assert (device.batch(16, cost=11.0) or (9, 0))[0] == 1
    assert len(device.attempts) == before + 2


def test_a_remembered_level_is_where_it_starts() -> None:
    policy = ladder()
    assert policy.suggest(4, 10.0, level=1)
    device = Device(policy, 100, [11, 1, 1])
    assert device.batch(16, cost=10.0) == (1, 4)
    assert len(device.attempts) == 1
    with pytest.raises(ValueError, match="level=3, but there are 3"):
        policy.suggest(4, 10.0, level=3)


@pytest.mark.parametrize("levels", [[], ["plain", "plain"]])
def test_levels_have_names(levels: list[str]) -> None:
    with pytest.raises(ValueError, match="each level needs a unique name"):
        Ladder(Halving(), levels)


def test_a_policy_that_cannot_be_copied_is_named() -> None:
    class Stubborn(Halving):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("no")

    with pytest.raises(TypeError, match=r"cannot be copied \(no\)"):
        Ladder(Stubborn(), LEVELS)


def test_the_state_of_a_policy_without_levels_is_that_of_level_0() -> None:
    plain = Halving()
    plain.record(Outcome(num_rows=8, microbatch_size=8, fits=False))
    policy = ladder()
    policy.load_state_dict(plain.state_dict())
    assert policy.propose(8) == 4


def test_a_damaged_state_changes_nothing() -> None:
    device = Device(ladder(), 8, [10, 1, 1])
    device.batch(16)
    before = device.policy.state_dict()
    damages: list[dict[str, Any]] = [
        {"levels": None},
        {"levels": {"plain": {}}},
        {"batches": None},
        {"kind": "Explore"},
    ]
    for damage in damages:
        with pytest.raises(ValueError, match="state"):
            device.policy.load_state_dict({**before, **damage})
    assert device.policy.state_dict() == before
