"""The "auto" policy: refinement, growing back, thrashing and limits."""

import dataclasses
import json
import logging
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automicro.policy.auto import Halving
from automicro.policy.policy import Outcome
from tests.policy.loop import fit, fit_rows

ROWS = st.integers(1, 300)
RESIDENT = 100


def attempt(
    size: int,
    rows: int,
    capacity: int,
    *,
    cost: float = 1.0,
    constant: int = 0,
    measured: bool = True,
    **more: Any,
) -> Outcome:
    """Attempt on a device with affine memory: 100 bytes resident, 10 per element."""
    peak = RESIDENT + constant + math.ceil(10 * size * cost)
    return Outcome(
        num_rows=rows,
        microbatch_size=size,
        fits=peak <= capacity,
        cost=cost,
        peak_bytes=peak if measured else None,
        resident_bytes=RESIDENT if measured else None,
        capacity_bytes=capacity if measured else None,
        **more,
    )


def run_batch(
    policy: Halving, rows: int, capacity: int, *, cost: float = 1.0, **device: Any
) -> tuple[int, list[int]]:
    """Return the size that fitted, or 1, and the sizes that failed."""
    plan, failed = fit(
        policy, rows, lambda plan: attempt(plan.size, rows, capacity, cost=cost, **device), cost
    )
    return 1 if plan is None else plan.size, [each.size for each in failed]


def test_size_grows_when_rows_need_less_memory() -> None:
    policy, capacity = Halving(), RESIDENT + 330
    for _ in range(4):
        run_batch(policy, 64, capacity)
    for _ in range(2):
        half = attempt(policy.propose(64), 64, capacity, cost=0.5)
        policy.record(dataclasses.replace(half, cost=1.0))
    assert policy.propose(64) == 64


def test_size_grows_after_many_batches_without_measurements() -> None:
    policy = Halving()
    before = [run_batch(policy, 64, RESIDENT + 330, measured=False)[0] for _ in range(200)]
    after = [run_batch(policy, 64, RESIDENT + 700, measured=False) for _ in range(100)]
    assert set(before) == {32}
    assert after[-1] == (64, [])
    assert not any(failed for _, failed in after)


@settings(max_examples=30)
@given(
    seed=st.randoms(use_true_random=False), batches=st.integers(100, 600), stay=st.integers(1, 40)
)
@pytest.mark.sweep
def test_changing_capacity_causes_logarithmically_many_failures(
    seed: Any, batches: int, stay: int
) -> None:
    policy = Halving()
    failures, free = 0, True
    for _ in range(batches):
        if seed.random() < 1 / stay:
            free = not free
        capacity = RESIDENT + (640 if free else 170)
        failures += len(run_batch(policy, 64, capacity)[1])
    assert failures <= 2 * math.log2(batches) + math.log2(64)


def test_allocator_retries_in_one_batch_or_at_one_row_keep_size() -> None:
    policy, of_one = Halving(), Halving(initial=1)
    for batch in range(40):
        assert (policy.propose(64), of_one.propose(4)) == (64, 1)
        policy.record(attempt(64, 64, 10**6, seconds=1.0, alloc_retries=3 * (batch == 1)))
        of_one.record(attempt(1, 4, RESIDENT + 15, seconds=1.0, alloc_retries=3))


def test_smaller_size_without_speedup_is_rarely_retried() -> None:
    policy = Halving()
    sizes, compared = [], []
    for _ in range(400):
        sizes.append(size := policy.propose(64))
        compared.append(policy.compares_seconds)
        policy.record(attempt(size, 64, 10**6, seconds=1.0, alloc_retries=int(size == 64)))
    assert sizes[:7] == [64, 64, 64, 32, 32, 32, 64]
    assert compared[:8] == [False, True, True, True, True, True, False, False]
    assert sizes.count(32) == 3 * 4


@pytest.mark.parametrize(("gain", "kept"), [(0.0, (0, 10)), (0.3, (95, 100))])
def test_smaller_size_is_kept_only_for_real_speedup(gain: float, kept: tuple[int, int]) -> None:
    """Step times vary by five percent, and the allocator retries at the whole batch."""
    ended: list[int] = []
    for seed in range(100):
        draw, policy = random.Random(seed), Halving()
        for _ in range(12):
            size = policy.propose(64)
            seconds = (1.0 if size == 64 else 1.0 - gain) * math.exp(draw.gauss(0, 0.05))
            retries = int(size == 64)
            policy.record(attempt(size, 64, 10**6, seconds=seconds, alloc_retries=retries))
        ended.append(policy.propose(64))
    assert kept[0] <= ended.count(32) <= kept[1]


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_small_initial_size_grows_to_largest_fitting(multiple_of: int) -> None:
    # The constant share outweighs the rows, so one peak cannot predict even twice as many.
    policy = Halving(initial=multiple_of, multiple_of=multiple_of)
    batches = [run_batch(policy, 64, RESIDENT + 1640, constant=1000) for _ in range(8)]
    assert batches[0] == (multiple_of, [])
    assert batches[-1] == (64, [])
    assert sum(len(failed) for _, failed in batches) <= 1
    assert all(size % multiple_of == 0 for size, _ in batches)


def test_failure_of_small_batch_does_not_limit_larger_batch() -> None:
    policy = Halving()
    fit_rows(policy, 16, 16, cost=100)
    fit_rows(policy, 4, 1, cost=50)
    assert fit_rows(policy, 16, 16, cost=100) == (16, [])


def test_failures_stay_logarithmic_for_mixed_batches() -> None:
    policy, failures = Halving(), 0  # batches of five and two rows fail at every whole attempt
    for index in range(2000):
        num_rows = (16, 16, 5, 16, 2)[index % 5]
        failures += len(fit_rows(policy, num_rows, 1 if num_rows < 16 else 16)[1])
    assert 10 <= failures <= 40


def test_sizes_below_multiple_of_warn(caplog: pytest.LogCaptureFixture) -> None:
    policy = Halving(multiple_of=8)
    assert [policy.propose(rows) for rows in (20, 8, 5)] == [20, 8, 5]
    with caplog.at_level(logging.WARNING):
        size, failed = run_batch(policy, 20, RESIDENT + 55)
    assert (size, failed) == (4, [20, 8])
    assert "no longer multiples of multiple_of=8" in caplog.text


BATCH = st.tuples(ROWS, st.sampled_from([0.5, 1.0, 1.1, 3.0]), st.integers(150, 3000))


@settings(max_examples=60)
@given(
    before=st.lists(BATCH, max_size=15),
    after=st.lists(BATCH, max_size=8),
    initial=st.none() | st.integers(1, 100),
)
def test_state_round_trip_through_json_keeps_sizes(
    before: list[tuple[int, float, int]],
    after: list[tuple[int, float, int]],
    initial: int | None,
) -> None:
    policy, resumed = Halving(initial=initial), Halving()
    for rows, cost, capacity in before:
        run_batch(policy, rows, capacity, cost=cost)
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert resumed.state_dict() == policy.state_dict()
    for rows, cost, capacity in after:
        assert run_batch(resumed, rows, capacity, cost=cost) == run_batch(
            policy, rows, capacity, cost=cost
        )


@settings(max_examples=60)
@given(
    batches=st.lists(st.tuples(ROWS, st.sampled_from([0.5, 1.0, 1.1, 3.0])), max_size=30),
    capacity=st.integers(150, 3000),
)
def test_failed_microbatch_is_not_proposed_again_under_constant_memory(
    batches: list[tuple[int, float]], capacity: int
) -> None:
    policy = Halving()
    failures: list[tuple[int, float]] = []
    for rows, cost in batches:
        while True:
            size = policy.propose(rows, cost)
            again = [one for one in failures if one[0] <= size and one[1] <= cost]
            # A single row that fails ends the run.
            assert size == 1 or not again, f"{size} rows at {cost} after {failures}"
            outcome = attempt(size, rows, capacity, cost=cost)
            policy.record(outcome)
            if outcome.fits or size == 1:
                break
            failures.append((size, cost))
