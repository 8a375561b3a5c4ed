"""Refine, grow back, thrash and limits of the policy behind "auto"."""

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
from automicro.policy.policy import Outcome, cut_size

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
    """An affine device: 100 bytes resident, 10 for each element."""
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
    """The size that fitted, and those that did not."""
    failed: list[int] = []
    while True:
        size = policy.propose(rows, cost)
        outcome = attempt(size, rows, capacity, cost=cost, **device)
        policy.record(outcome)
        if outcome.fits:
            return size, failed
        assert not failed or size < failed[-1], "goes round in circles"
        if size == 1:
            return 1, [*failed, 1]
        failed.append(size)


def run_batches(
    policy: Halving, count: int, rows: int, capacity: int, **device: Any
) -> tuple[list[int], int]:
    """The sizes of several batches, and how many attempts failed."""
    outcomes = [run_batch(policy, rows, capacity, **device) for _ in range(count)]
    return [size for size, _ in outcomes], sum(len(failed) for _, failed in outcomes)


# Refine


def test_a_batch_that_fits_in_more_rows_than_were_known_to_fit_says_from_what_it_grew() -> None:
    policy = Halving()
    grown = []
    for _ in range(5):
        size, _ = run_batch(policy, 12, RESIDENT + 45)
        grown.append((size, policy.grown_from))
    first = next(index for index, (size, _) in enumerate(grown) if size == 4)
    assert [known for _, known in grown] == [3 if index == first else None for index in range(5)]


def test_where_halving_ends_at_four_microbatches_refining_finds_three() -> None:
    sizes, failures = run_batches(Halving(), 5, 12, RESIDENT + 45)
    assert (sizes[0], sizes[-1], failures) == (3, 4, 2)


def test_memory_that_every_size_needs_is_told_from_that_of_rows() -> None:
    # With one peak alone, each row seems to need 210 bytes and not 10.
    sizes, failures = run_batches(Halving(), 6, 16, RESIDENT + 1000 + 65, constant=1000)
    assert (sizes[0], sizes[-1]) == (4, 6)
    assert 2 in sizes, "one batch in smaller slices measures what rows need"
    assert failures == 2


def test_a_batch_that_failed_is_not_refined_before_it_fits() -> None:
    assert run_batch(Halving(), 12, RESIDENT + 45) == (3, [12, 6])


@pytest.mark.parametrize("policy", [Halving(refine=False), Halving()])
def test_without_refining_or_measurements_halving_is_all(policy: Halving) -> None:
    measured = not policy._refine
    sizes, _ = run_batches(policy, 8, 12, RESIDENT + 45, measured=measured)
    assert set(sizes) == {3}


def test_the_margin_stays_free() -> None:
    capacity = RESIDENT + 90
    assert run_batches(Halving(), 9, 64, capacity)[0][-1] == 8
    policy = Halving(margin=0.1, initial=2)
    sizes, failures = run_batches(policy, 9, 64, capacity)
    assert RESIDENT + 10 * sizes[-1] <= 0.9 * capacity
    assert failures == 0


def test_a_failed_trial_costs_one_attempt() -> None:
    policy = Halving()
    run_batches(policy, 1, 12, RESIDENT + 45)
    assert policy.propose(12) == 4
    policy.record(attempt(4, 12, RESIDENT + 39))
    assert policy.propose(12) == 3


# Costs


def test_one_long_batch_does_not_slow_the_short_ones() -> None:
    policy = Halving()
    run_batches(policy, 3, 64, RESIDENT + 640)
    run_batch(policy, 64, RESIDENT + 640, cost=8.0)
    assert policy.propose(64, 1.0) == 64
    assert policy.propose(64, 8.0) <= 8


def test_an_unseen_cost_starts_from_rows_times_cost() -> None:
    policy = Halving(refine=False)
    run_batch(policy, 64, RESIDENT + 330)
    assert policy.propose(64, 4.0) == 8


# Grow back


def test_sizes_grow_when_the_device_reports_what_was_lacking() -> None:
    policy = Halving()
    sizes, _ = run_batches(policy, 4, 64, RESIDENT + 330)
    assert sizes[-1] == 32
    sizes, failures = run_batches(policy, 4, 64, RESIDENT + 700)
    assert (sizes[-1], failures) == (64, 0)


def test_sizes_grow_when_as_much_work_takes_less() -> None:
    """What rows need falls, while the device reports no more room."""
    policy, capacity = Halving(), RESIDENT + 330
    run_batches(policy, 4, 64, capacity)
    for _ in range(2):
        half = attempt(policy.propose(64), 64, capacity, cost=0.5)
        policy.record(dataclasses.replace(half, cost=1.0))
    assert policy.propose(64) == 64


def test_sizes_grow_after_many_batches_where_nothing_is_measured() -> None:
    policy = Halving()
    assert set(run_batches(policy, 200, 64, RESIDENT + 330, measured=False)[0]) == {32}
    sizes, failures = run_batches(policy, 100, 64, RESIDENT + 700, measured=False)
    assert (sizes[-1], failures) == (64, 0)


def test_without_grow_sizes_never_grow_back() -> None:
    policy = Halving(grow=False)
    run_batches(policy, 4, 64, RESIDENT + 330)
    assert set(run_batches(policy, 600, 64, RESIDENT + 700)[0]) == {32}


@settings(max_examples=30)
@given(
    seed=st.randoms(use_true_random=False), batches=st.integers(100, 600), stay=st.integers(1, 40)
)
def test_a_neighbour_that_comes_and_goes_makes_logarithmically_many_failures(
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


# Thrash


def thrash(policy: Halving, seconds_per_size: dict[int, float], batches: int) -> list[int]:
    sizes = []
    for _ in range(batches):
        size = policy.propose(64)
        sizes.append(size)
        policy.record(
            attempt(size, 64, 10**6, seconds=seconds_per_size[size], alloc_retries=int(size == 64))
        )
    return sizes


def test_allocator_retries_lead_to_a_smaller_size_where_it_is_faster() -> None:
    assert thrash(Halving(), {64: 2.0, 32: 1.0}, 20) == 3 * [64] + 17 * [32]


@pytest.mark.parametrize("at", range(12))
def test_one_batch_with_allocator_retries_changes_nothing(at: int) -> None:
    policy = Halving()
    for batch in range(40):
        assert policy.propose(64) == 64
        policy.record(attempt(64, 64, 10**6, seconds=1.0, alloc_retries=3 * (batch == at)))


def test_allocator_retries_of_the_first_batch_at_a_size_do_not_undo_it() -> None:
    policy = Halving(initial=6)
    for seconds in (3.5, 1.0):  # the larger size is tried, and gives back what is cached
        size = policy.propose(24)
        policy.record(attempt(size, 24, RESIDENT + 90, seconds=seconds, alloc_retries=size > 6))
    grown = policy.propose(24)
    assert grown > 6
    for _ in range(40):
        assert policy.propose(24) == grown
        policy.record(attempt(grown, 24, RESIDENT + 90, seconds=3.5, alloc_retries=0))


def test_seconds_are_measured_only_while_they_are_compared() -> None:
    policy = Halving()
    compared = []
    for _ in range(8):
        size = policy.propose(64)
        compared.append(policy.compares_seconds)
        policy.record(attempt(size, 64, 10**6, seconds=1.0, alloc_retries=int(size == 64)))
    assert compared == [False, True, True, True, True, True, False, False]


def test_a_smaller_size_that_is_not_faster_is_given_up_and_seldom_tried_again() -> None:
    sizes = thrash(Halving(), {64: 1.0, 32: 1.0}, 400)
    assert sizes[:7] == [64, 64, 64, 32, 32, 32, 64]
    assert sizes.count(32) == 3 * 4


class Device:
    """Batches of 192 rows, of which 50 fit at once; times by size, without any allocator retry."""

    def __init__(self, seconds: dict[int, float], *, noise: tuple[float, ...] = (1.0,)) -> None:
        self.seconds, self.noise = seconds, noise
        self.capacity = RESIDENT + 500
        self.policy = Halving()
        self.sizes: list[int] = []
        self.timed: list[bool] = []

    def run(self, batches: int) -> list[int]:
        while len(self.sizes) < batches:
            size = self.policy.propose(192)
            self.timed.append(self.policy.compares_seconds)
            seconds = self.seconds.get(size, 1.0) * self.noise[len(self.timed) % len(self.noise)]
            outcome = attempt(size, 192, self.capacity, seconds=seconds, alloc_retries=0)
            self.policy.record(outcome)
            if outcome.fits:
                self.sizes.append(size)
        return self.sizes


def test_a_size_that_was_faster_when_its_rows_were_measured_is_taken() -> None:
    """24 rows run once, to tell what rows need. Three batches each show that they are faster."""
    sizes = Device({24: 0.8}).run(40)
    assert sizes[:2] == [48, 24]
    assert sizes == [48, 24, *[48] * 4, *[24] * 34]


def test_where_it_was_not_faster_in_passing_no_batch_is_spent_on_it() -> None:
    assert Device({24: 0.97}).run(40) == [48, 24, *[48] * 38]
    assert Device({24: 1.3}).run(40) == [48, 24, *[48] * 38]


def test_a_difference_that_the_spread_explains_is_none() -> None:
    """Both take the same, and steps differ by five percent; the sign is seen by chance alone."""
    ended: list[int] = []
    for seed in range(100):
        draw = random.Random(seed)
        noise = tuple(math.exp(draw.gauss(0, 0.05)) for _ in range(97))
        ended.append(Device({}, noise=noise).run(60)[-1])
    assert ended.count(24) <= 10


def test_the_size_before_it_grew_comes_back_where_it_was_faster() -> None:
    """Memory becomes free after a while, and twice as many rows fit, which take longer."""
    device = Device({192: 1.3, 96: 1.3, 64: 1.3, 24: 1.5})
    device.run(20)
    device.capacity = RESIDENT + 2000
    sizes = device.run(320)
    assert max(sizes) > 48
    assert sizes[-1] == 48
    assert sum(size > 48 for size in sizes) <= 8


def test_seconds_are_watched_for_a_few_batches_at_each_size_only() -> None:
    device = Device({24: 1.3})
    device.run(60)
    assert sum(device.timed) <= 10
    assert not any(device.timed[12:])


def test_where_one_size_only_ever_ran_nothing_is_timed() -> None:
    policy = Halving()
    for _ in range(20):
        assert not policy.compares_seconds
        size = policy.propose(32)
        policy.record(attempt(size, 32, 10**6, seconds=1.0, alloc_retries=0))


@pytest.mark.parametrize("stop_after", range(2, 12))
def test_what_was_measured_in_passing_outlives_a_resume(stop_after: int) -> None:
    device = Device({24: 0.8})
    device.run(stop_after)
    policy = Halving()
    policy.load_state_dict(json.loads(json.dumps(device.policy.state_dict())))
    device.policy = policy
    assert device.run(40) == Device({24: 0.8}).run(40)


def test_at_one_row_allocator_retries_change_nothing() -> None:
    policy = Halving(initial=1)
    for _ in range(5):
        assert policy.propose(4) == 1
        policy.record(attempt(1, 4, RESIDENT + 15, seconds=1.0, alloc_retries=3))


# Starting too small


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_a_start_too_small_to_measure_less_grows_to_what_fits(multiple_of: int) -> None:
    # What every microbatch needs outweighs the rows: one peak predicts not even twice as many.
    policy = Halving(initial=multiple_of, multiple_of=multiple_of)
    batches = [run_batch(policy, 64, RESIDENT + 1640, constant=1000) for _ in range(8)]
    assert batches[0] == (multiple_of, [])
    assert batches[-1] == (64, [])
    assert sum(len(failed) for _, failed in batches) <= 1
    assert all(size % multiple_of == 0 for size, _ in batches)


# Limits


def test_the_largest_size_is_never_passed() -> None:
    sizes, _ = run_batches(Halving(max_microbatch_size=10), 5, 64, 10**6)
    assert set(sizes) == {10}


def test_below_multiple_of_sizes_go_on_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    policy = Halving(multiple_of=8)
    assert [policy.propose(rows) for rows in (20, 8, 5)] == [20, 8, 5]
    with caplog.at_level(logging.WARNING):
        size, failed = run_batch(policy, 20, RESIDENT + 55)
    assert (size, failed) == (4, [20, 8])
    assert "not multiples of multiple_of=8" in caplog.text


@given(rows=ROWS, most=ROWS, multiple=st.integers(1, 20))
def test_a_cut_in_multiples_stays_within_its_limit(rows: int, most: int, multiple: int) -> None:
    size = cut_size(rows, most, multiple_of=multiple)
    assert 1 <= size <= min(rows, most)
    assert size == rows or size % multiple == 0 or most < multiple or rows <= multiple
    assert cut_size(rows, size, multiple_of=multiple) == size


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"margin": 1.0}, "margin is 1.0"),
        ({"max_microbatch_size": 4, "multiple_of": 8}, "max_microbatch_size=4 is below"),
        ({"max_microbatch_size": 0}, "max_microbatch_size is 0"),
    ],
)
def test_senseless_limits_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Halving(**options)


# Start and state


def test_a_suggested_size_that_is_wrong_is_recovered() -> None:
    for rows in (1, 64):
        policy = Halving()
        policy.suggest(rows, 1.0)
        sizes, failures = run_batches(policy, 12, 64, RESIDENT + 330)
        assert (sizes[0], sizes[-1]) == (min(rows, 32), 32)
        assert failures <= 1


def test_a_damaged_state_is_refused_and_nothing_changes() -> None:
    policy = Halving(initial=16)
    state = {"kind": "Halving", "limit": 4, "learned": {"start": None}}
    with pytest.raises(ValueError, match="is damaged"):
        policy.load_state_dict(state)
    assert policy.propose(64) == 16


BATCH = st.tuples(ROWS, st.sampled_from([0.5, 1.0, 1.1, 3.0]), st.integers(150, 3000))


@settings(max_examples=60)
@given(before=st.lists(BATCH, max_size=15), after=st.lists(BATCH, max_size=8))
def test_a_state_that_went_through_json_gives_the_same_sizes(
    before: list[tuple[int, float, int]], after: list[tuple[int, float, int]]
) -> None:
    policy, resumed = Halving(), Halving()
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
def test_while_memory_stays_no_failed_microbatch_is_proposed_again(
    batches: list[tuple[int, float]], capacity: int
) -> None:
    policy = Halving()
    failures: list[tuple[int, float]] = []
    for rows, cost in batches:
        while True:
            size = policy.propose(rows, cost)
            again = [one for one in failures if one[0] <= size and one[1] <= cost]
            # One row that fails ends a run: there is nothing smaller.
            assert size == 1 or not again, f"{size} rows at {cost} after {failures}"
            outcome = attempt(size, rows, capacity, cost=cost)
            policy.record(outcome)
            if outcome.fits or size == 1:
                break
            failures.append((size, cost))
