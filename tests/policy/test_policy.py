"""How large a microbatch should be."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automicro.policy.auto import Halving
from automicro.policy.choose import make_policy
from automicro.policy.policy import Fixed, Outcome, Policy, canonical_size

ROWS = st.integers(1, 2000)


def run_batch(policy: Policy, num_rows: int, cap: int) -> tuple[int, list[int]]:
    """Attempt one batch on a device that holds ``cap`` rows: the size that fitted, those not."""
    failures: list[int] = []
    while True:
        size = canonical_size(num_rows, policy.propose(num_rows))
        fits = size <= cap
        policy.record(Outcome(num_rows=num_rows, microbatch_size=size, fits=fits))
        if fits:
            return size, failures
        failures.append(size)
        assert len(failures) < 100, "the policy goes round in circles"


# Outcome


@pytest.mark.parametrize("size", [0, -1, 11])
def test_outcome_refuses_slices_that_the_batch_cannot_have(size: int) -> None:
    with pytest.raises(ValueError, match=rf"10 rows cannot have slices of {size}: give"):
        Outcome(num_rows=10, microbatch_size=size, fits=True)


# The cut that a size stands for


@given(num_rows=ROWS, size=ROWS)
def test_a_size_stands_for_its_largest_slice(num_rows: int, size: int) -> None:
    canonical = canonical_size(num_rows, size)
    assert 1 <= canonical <= min(size, num_rows)
    assert math.ceil(num_rows / canonical) == math.ceil(num_rows / size)
    assert canonical_size(num_rows, canonical) == canonical


# Fixed


def test_fixed_does_not_learn_from_failures() -> None:
    policy = Fixed(8)
    policy.record(Outcome(num_rows=32, microbatch_size=8, fits=False))
    assert policy.propose(32) == 8


# Halving


@given(num_rows=ROWS, cap=ROWS)
def test_halving_ends_above_half_of_what_fits_in_few_failures(num_rows: int, cap: int) -> None:
    size, failures = run_batch(Halving(), num_rows, cap)
    assert size <= cap
    assert size == num_rows or size > cap / 2
    assert len(failures) <= math.ceil(math.log2(num_rows))
    assert failures == sorted(set(failures), reverse=True)


@given(batches=st.lists(ROWS, min_size=1, max_size=20), cap=ROWS)
def test_halving_learns_once_for_batches_of_any_rows(batches: list[int], cap: int) -> None:
    policy = Halving()
    failures: list[int] = []
    for num_rows in batches:
        _, failed = run_batch(policy, num_rows, cap)
        failures += failed
    assert failures == sorted(set(failures), reverse=True)
    assert len(failures) <= math.ceil(math.log2(max(batches)))
    assert policy.propose(max(batches)) >= min(max(batches), cap) / 4
    assert policy.state_dict()["limit"] is None or policy.state_dict()["limit"] > cap / 2


# Both


@pytest.mark.parametrize("policy", [Fixed(4), Fixed(None), Halving()])
@pytest.mark.parametrize("num_rows", [0, -3])
def test_no_size_is_proposed_for_a_batch_without_rows(policy: Policy, num_rows: int) -> None:
    with pytest.raises(ValueError, match=rf"for {num_rows} rows: give a batch with rows"):
        policy.propose(num_rows)


@given(failures=st.lists(ROWS, max_size=5), initial=st.none() | st.integers(1, 100), num_rows=ROWS)
def test_halving_continues_from_a_state_that_went_through_json(
    failures: list[int], initial: int | None, num_rows: int
) -> None:
    policy, resumed = Halving(initial=initial), Halving()
    for size in failures:
        policy.record(Outcome(num_rows=size, microbatch_size=size, fits=False))
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert resumed.propose(num_rows) == policy.propose(num_rows)
    assert resumed.state_dict() == policy.state_dict()


@pytest.mark.parametrize(
    ("policy", "state", "named"),
    [
        (Fixed(4), Halving().state_dict(), "a Fixed policy .* state of 'Halving'"),
        (Halving(), Fixed(4).state_dict(), "a Halving policy .* state of 'Fixed'"),
        (Halving(), {}, "a Halving policy .* state of 'no known'"),
    ],
)
def test_the_state_of_another_policy_is_refused(
    policy: Policy, state: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=f"{named}.*: use the policy that wrote it"):
        policy.load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ({"kind": "Halving"}, ValueError, r"is damaged \(KeyError\('learned'\)\): give"),
        ({"kind": "Halving", "learned": []}, ValueError, "is damaged .*: give what"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    state: dict[str, Any], error: type[Exception], said: str
) -> None:
    policy = Halving(initial=16)
    with pytest.raises(error, match=said):
        policy.load_state_dict(state)
    assert policy.propose(64) == 16


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_senseless_sizes_are_refused_by_name(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"microbatch_size is {value}.*: give"):
        Fixed(value)
    with pytest.raises(error, match=f"initial is {value}.*: give"):
        Halving(initial=value)


# make_policy


class Thirds(Policy):
    """A policy that somebody else wrote."""

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return max(1, num_rows // 3)


@pytest.mark.parametrize(
    ("value", "kind", "proposed"),
    [
        (8, Fixed, 8),
        (np.int64(8), Fixed, 8),
        (None, Fixed, 30),
        ("auto", Halving, 30),
        (Halving(initial=6), Halving, 6),
        (Thirds(), Thirds, 10),
    ],
)
def test_make_policy_reads_what_users_write(value: Any, kind: type, proposed: int) -> None:
    policy = make_policy(value)
    assert isinstance(policy, kind)
    assert policy.propose(30) == proposed


def test_make_policy_hands_a_policy_through() -> None:
    policy = Thirds()
    assert make_policy(policy) is policy


@pytest.mark.parametrize(
    ("value", "error", "said"),
    [
        (0, ValueError, "microbatch_size=0 is not a size"),
        (-1, ValueError, "microbatch_size=-1 is not a size"),
        (1.5, TypeError, "microbatch_size=1.5 is not a size"),
        (True, TypeError, "microbatch_size=True is not a size"),
        ([4], TypeError, r"microbatch_size=\[4\] is not a size"),
        ("many", ValueError, "microbatch_size='many' is not a size"),
        ("exploring", ValueError, "microbatch_size='exploring' is not a size"),
    ],
)
def test_make_policy_refuses_the_rest_and_lists_what_it_takes(
    value: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        make_policy(value)
    for accepted in (
        "an int of at least 1",
        '"auto"',
        '"explore"',
        "None (the whole batch)",
        "a policy",
    ):
        assert accepted in str(raised.value)


class Quarters:
    """A policy by its methods alone."""

    def propose(self, num_rows: int) -> int:
        return num_rows // 4


def test_make_policy_names_the_class_that_a_policy_derives_from() -> None:
    with pytest.raises(TypeError, match=r"Quarters.*Derive its class from automicro\.Policy"):
        make_policy(Quarters())  # type: ignore[arg-type]
