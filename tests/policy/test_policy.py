"""Microbatch size policies: fixed sizes, halving and their states."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automicro.policy.auto import Halving
from automicro.policy.explore import Explore
from automicro.policy.ladder import Ladder
from automicro.policy.policy import Fixed, Outcome, Policy, canonical_size, make_policy
from tests.policy.loop import fit_rows

ROWS = st.integers(1, 2000)


@given(num_rows=ROWS, size=ROWS)
def test_canonical_size_is_largest_slice_of_cut(num_rows: int, size: int) -> None:
    canonical = canonical_size(num_rows, size)
    assert 1 <= canonical <= min(size, num_rows)
    assert math.ceil(num_rows / canonical) == math.ceil(num_rows / size)
    assert canonical_size(num_rows, canonical) == canonical


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
        ("explore", Explore, 30),
        (Halving(initial=6), Halving, 6),
        (Thirds(), Thirds, 10),
    ]
    for value, kind, proposed in cases:
        policy = make_policy(value)
        assert isinstance(policy, kind)
        assert policy is value or not isinstance(value, Policy)
        assert policy.propose(30) == proposed
        assert policy.explores is (kind is Explore)
        assert policy.adapts is (kind is not Fixed)


class Quarters:
    """A policy with the right methods but without the base class."""

    def propose(self, num_rows: int) -> int:
        return num_rows // 4


ACCEPTED = r"an int of at least 1.*\"auto\".*\"explore\".*None \(the whole batch\).*a policy"
WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda: make_policy(0), ValueError, f"microbatch_size=0 is not a size.*{ACCEPTED}"),
    (lambda: make_policy(1.5), TypeError, "microbatch_size=1.5 is not a size"),  # type: ignore[arg-type]
    (lambda: make_policy(True), TypeError, "microbatch_size=True is not a size"),
    (lambda: make_policy("many"), ValueError, "microbatch_size='many' is not a size"),
    (lambda: make_policy(Quarters()), TypeError, r"Quarters.*class from automicro\.Policy"),  # type: ignore[arg-type]
    (lambda: Fixed(0), ValueError, "microbatch_size is 0.*: give"),
    (lambda: Fixed(1.5), TypeError, "microbatch_size is 1.5.*: give"),  # type: ignore[arg-type]
    (lambda: Halving(initial=True), TypeError, "initial is True.*: give"),
    (lambda: Halving(max_microbatch_size=0), ValueError, "max_microbatch_size is 0"),
    (
        lambda: Halving(max_microbatch_size=4, multiple_of=8),
        ValueError,
        "max_microbatch_size=4 is below",
    ),
    (lambda: Explore(max_steps=0), ValueError, "max_steps is 0"),
    (lambda: Explore(max_minutes=5), TypeError, "no argument max_minutes. Limit.* by max_steps"),  # type: ignore[call-arg]
    (lambda: Explore(multiple_of=0), ValueError, "multiple_of is 0"),
    (
        lambda: Explore().with_levels(["plain"], {"sync": []}),
        ValueError,
        "sync has no value to choose",
    ),
    (lambda: Ladder(Halving(), []), ValueError, "each level needs a unique name"),
    (lambda: Ladder(Halving(), ["a", "a"]), ValueError, "each level needs a unique name"),
    (lambda: Fixed(4).propose(0), ValueError, "for 0 rows: give a batch with rows"),
    (lambda: Fixed(None).propose(-3), ValueError, "for -3 rows: give a batch with rows"),
    (lambda: Halving().propose(0), ValueError, "for 0 rows: give a batch with rows"),
    *(
        (
            lambda size=size: Outcome(num_rows=10, microbatch_size=size, fits=True),
            ValueError,
            f"10 rows cannot have slices of {size}: give",
        )
        for size in (0, 11)
    ),
]


def test_wrong_values_are_rejected_with_remedy() -> None:
    for make, error, said in WRONG:
        with pytest.raises(error, match=said):
            make()


@pytest.mark.parametrize("kind", [Halving, Fixed, Explore])
def test_subclass_loads_its_own_state(kind: Any) -> None:
    own = type("Own", (kind,), {})
    own(*[4] * (kind is Fixed)).load_state_dict(own(*[4] * (kind is Fixed)).state_dict())


def test_wrong_state_is_rejected_without_changes() -> None:
    cases: list[Any] = [
        (Fixed(4), Halving().state_dict(), "a Fixed policy .* state of 'Halving'"),
        (Halving(initial=16), Fixed(4).state_dict(), "a Halving policy .* state of 'Fixed'"),
        (Halving(initial=16), {}, "state of 'no known'.*: use the policy that wrote it"),
        (Halving(initial=16), {"kind": "Halving"}, r"is damaged \(KeyError\('learned'\)\): give"),
        (Halving(initial=16), {"kind": "Halving", "learned": []}, "is damaged .*: give what"),
    ]
    for policy, state, said in cases:
        with pytest.raises(ValueError, match=said):
            policy.load_state_dict(state)
        assert policy.propose(64) in (4, 16)
