"""Microbatch size policies: fixed sizes, halving and their states."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automicro.policy.auto import Halving
from automicro.policy.policy import Fixed, Outcome, Policy, canonical_size, make_policy
from tests.policy.loop import fit_rows

ROWS = st.integers(1, 2000)


# Outcome


def test_outcome_rejects_impossible_slice_sizes() -> None:
    cases: list[Any] = [0, -1, 11]
    for size in cases:
        with pytest.raises(ValueError, match=rf"10 rows cannot have slices of {size}: give"):
            Outcome(num_rows=10, microbatch_size=size, fits=True)


# Canonical sizes


@given(num_rows=ROWS, size=ROWS)
def test_canonical_size_is_largest_slice_of_cut(num_rows: int, size: int) -> None:
    canonical = canonical_size(num_rows, size)
    assert 1 <= canonical <= min(size, num_rows)
    assert math.ceil(num_rows / canonical) == math.ceil(num_rows / size)
    assert canonical_size(num_rows, canonical) == canonical


# Halving


@given(batches=st.lists(ROWS, min_size=1, max_size=20), cap=ROWS)
def test_halving_shares_limit_across_batch_sizes(batches: list[int], cap: int) -> None:
    policy = Halving()
    failures: list[int] = []
    for num_rows in batches:
        size, failed = fit_rows(policy, num_rows, cap)
        assert size <= cap
        assert not failed or size > cap / 2
        failures += failed
    assert failures == sorted(set(failures), reverse=True)
    assert len(failures) <= math.ceil(math.log2(max(batches)))
    assert policy.propose(max(batches)) >= min(max(batches), cap) / 4


# Both


def test_propose_rejects_batch_without_rows() -> None:
    for policy, num_rows in itertools.product((Fixed(4), Fixed(None), Halving()), (0, -3)):
        with pytest.raises(ValueError, match=rf"for {num_rows} rows: give a batch with rows"):
            policy.propose(num_rows)


def test_state_of_other_policy_is_rejected() -> None:
    cases: list[Any] = [
        (Fixed(4), Halving().state_dict(), "a Fixed policy .* state of 'Halving'"),
        (Halving(), Fixed(4).state_dict(), "a Halving policy .* state of 'Fixed'"),
        (Halving(), {}, "a Halving policy .* state of 'no known'"),
    ]
    for policy, state, named in cases:
        with pytest.raises(ValueError, match=f"{named}.*: use the policy that wrote it"):
            policy.load_state_dict(state)


def test_damaged_state_is_rejected_without_changes() -> None:
    cases: list[Any] = [
        ({"kind": "Halving"}, ValueError, r"is damaged \(KeyError\('learned'\)\): give"),
        ({"kind": "Halving", "learned": []}, ValueError, "is damaged .*: give what"),
    ]
    for state, error, said in cases:
        policy = Halving(initial=16)
        with pytest.raises(error, match=said):
            policy.load_state_dict(state)
        assert policy.propose(64) == 16


def test_invalid_sizes_are_rejected() -> None:
    cases: list[Any] = [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
    for value, error in cases:
        with pytest.raises(error, match=f"microbatch_size is {value}.*: give"):
            Fixed(value)
        with pytest.raises(error, match=f"initial is {value}.*: give"):
            Halving(initial=value)


# make_policy


class Thirds(Policy):
    """A policy written by a user."""

    def propose(self, num_rows: int, cost: float | None = None) -> int:
        return max(1, num_rows // 3)


def test_make_policy_accepts_user_values() -> None:
    cases: list[Any] = [
        (8, Fixed, 8),
        (np.int64(8), Fixed, 8),
        (None, Fixed, 30),
        ("auto", Halving, 30),
        (Halving(initial=6), Halving, 6),
        (Thirds(), Thirds, 10),
    ]
    for value, kind, proposed in cases:
        policy = make_policy(value)
        assert isinstance(policy, kind)
        assert policy is value or not isinstance(value, Policy)
        assert policy.propose(30) == proposed


def test_make_policy_error_lists_accepted_values() -> None:
    cases: list[Any] = [
        (0, ValueError, "microbatch_size=0 is not a size"),
        (-1, ValueError, "microbatch_size=-1 is not a size"),
        (1.5, TypeError, "microbatch_size=1.5 is not a size"),
        (True, TypeError, "microbatch_size=True is not a size"),
        ([4], TypeError, r"microbatch_size=\[4\] is not a size"),
        ("many", ValueError, "microbatch_size='many' is not a size"),
        ("exploring", ValueError, "microbatch_size='exploring' is not a size"),
    ]
    for value, error, said in cases:
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
    """A policy with the right methods but without the base class."""

    def propose(self, num_rows: int) -> int:
        return num_rows // 4


def test_make_policy_error_names_required_base_class() -> None:
    with pytest.raises(TypeError, match=r"Quarters.*Derive its class from automicro\.Policy"):
        make_policy(Quarters())  # type: ignore[arg-type]
