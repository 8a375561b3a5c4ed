"""One small batch that runs out of memory where larger ones had fitted."""

import json

import pytest

from automicro.policy.auto import Halving
from automicro.policy.policy import Outcome


def run(policy: Halving, num_rows: int, most: int, *, cost: float | None = None) -> tuple[int, int]:
    """The size that a batch ends with where at most so many rows fit, and how often it failed."""
    failures = 0
    while True:
        size = policy.propose(num_rows, cost)
        fits = size <= most
        policy.record(Outcome(num_rows=num_rows, microbatch_size=size, fits=fits, cost=cost))
        if fits:
            return size, failures
        failures += 1
        assert failures <= num_rows.bit_length()


def sizes(policy: Halving, rows: list[int], most: int = 10**9) -> list[int]:
    return [run(policy, num_rows, most)[0] for num_rows in rows]


@pytest.mark.parametrize("small", [1, 2, 3, 7, 15])
def test_full_batches_go_on_whole_after_one_small_batch_failed(small: int) -> None:
    policy = Halving()
    sizes(policy, [16, 16, 16])
    assert run(policy, small, max(1, small // 2))[0] <= max(1, small // 2)
    assert sizes(policy, [16] * 20) == [16] * 20


def test_before_anything_fitted_a_small_batch_tells_of_larger_ones() -> None:
    policy = Halving()
    run(policy, 2, 1)
    assert sizes(policy, [16]) == [1]


def test_a_batch_as_large_as_those_that_fitted_tells_of_them() -> None:
    policy = Halving()
    sizes(policy, [16, 2, 16])
    run(policy, 16, 4)
    assert sizes(policy, [16, 16]) == [4, 4]


def test_small_batches_keep_to_what_fitted_for_a_while_that_doubles() -> None:
    policy, failures = Halving(), 0
    for _ in range(500):
        sizes(policy, [16, 16, 16])
        failures += run(policy, 2, 1)[1]  # the small batch fails whenever it is tried whole
    assert 5 <= failures <= 8


def test_memory_that_really_shrank_is_found_by_the_next_full_batch() -> None:
    policy = Halving()
    sizes(policy, [16, 16])
    ended = [run(policy, num_rows, 1) for num_rows in (2, 16, 16, 2, 16, 16)]
    assert [size for size, _ in ended] == [1] * 6
    assert [failures for _, failures in ended] == [1, 4, 0, 0, 0, 0]


def test_an_explained_failure_counts_for_larger_batches_too() -> None:
    policy = Halving()
    for _ in range(2):
        policy.propose(16)
        policy.record(measured(16, 16, fits=True, peak=16, capacity=20))
    policy.propose(2)
    policy.record(measured(2, 2, fits=False, peak=2, capacity=1))
    policy.propose(2)
    policy.record(measured(2, 1, fits=True, peak=1, capacity=1))
    assert policy.propose(16) == 1


def measured(num_rows: int, size: int, *, fits: bool, peak: int, capacity: int) -> Outcome:
    return Outcome(
        num_rows=num_rows,
        microbatch_size=size,
        fits=fits,
        peak_bytes=peak,
        resident_bytes=0,
        capacity_bytes=capacity,
    )


def test_short_rows_of_a_smaller_batch_do_not_slow_long_ones() -> None:
    policy = Halving()
    run(policy, 16, 16, cost=100)
    run(policy, 4, 1, cost=50)
    assert run(policy, 16, 16, cost=100) == (16, 0)


def test_failures_stay_logarithmic_whatever_fails() -> None:
    policy, failures = Halving(), 0
    for index in range(2000):
        num_rows = (16, 16, 5, 16, 2)[index % 5]
        failures += run(policy, num_rows, 1 if num_rows < 16 else 16)[1]
    assert failures <= 40


@pytest.mark.parametrize("within", [False, True])
def test_it_goes_on_from_its_state(within: bool) -> None:
    policy = Halving()
    sizes(policy, [16, 16])
    policy.record(Outcome(num_rows=4, microbatch_size=4, fits=False))
    if not within:
        policy.record(Outcome(num_rows=4, microbatch_size=2, fits=True))
    other = Halving()
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert other.propose(4) == policy.propose(4) == 2
    if not within:
        assert other.propose(16) == 16
