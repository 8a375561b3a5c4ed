"""The cost of packed slices matches dynamic programming over all cuts."""

import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from automicro.lengths.unit import Overhead, _product, _sum, pack, without_lonely_rows

COSTS = st.lists(st.integers(1, 300) | st.floats(0.5, 300), min_size=1, max_size=24)
BUDGETS = st.floats(1, 4000)
OVERHEADS = st.sampled_from([0.0, 1.0, 30.0, 500.0])


def total(costs: list[float], sizes: list[int], overhead: float) -> float:
    begins = np.cumsum([0, *sizes])[:-1]
    return sum(overhead + n * costs[int(i)] for n, i in zip(sizes, begins, strict=True))


def least(costs: list[float], budget: float, overhead: float) -> float:
    """Return the least cost over all cuts, where a single row may exceed the budget."""
    best = [0.0] + [math.inf] * len(costs)
    for end in range(1, len(costs) + 1):
        for begin in range(end):
            padded = (end - begin) * costs[begin]
            if padded <= budget or end - begin == 1:
                best[end] = min(best[end], best[begin] + overhead + padded)
    return best[-1]


@given(COSTS, BUDGETS, OVERHEADS)
def test_pack_finds_cheapest_cut(costs: list[float], budget: float, overhead: float) -> None:
    costs = sorted(map(float, costs), reverse=True)
    sizes = pack(np.array(costs)[:, None], _sum, budget, overhead=overhead)
    assert sum(sizes) == len(costs)
    assert all(sizes)
    begins = np.cumsum([0, *sizes])[:-1]
    assert all(n == 1 or n * costs[i] <= budget for n, i in zip(sizes, begins, strict=True)), (
        "a slice costs more than the budget"
    )
    assert total(costs, sizes, overhead) == pytest.approx(least(costs, budget, overhead))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=20),
    st.integers(1, 20000),
)
def test_slices_of_two_lengths_stay_within_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    table = np.array(sorted(lengths, key=lambda each: -each[0] * each[1]))
    sizes = pack(table, _product, budget, overhead=5.0)
    assert sum(sizes) == len(lengths)
    begin = 0
    for size in sizes:
        longest = table[begin : begin + size].max(0)
        assert size == 1 or size * longest.prod() <= budget
        begin += size


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_single_rows_are_merged(sizes: list[int]) -> None:
    merged = without_lonely_rows(sizes)
    assert sum(merged) == sum(sizes)
    assert sum(sizes) == 1 or min(merged) >= 2


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_overhead_is_fitted_from_steps(noise: float) -> None:
    drawn = np.random.default_rng(0)
    overhead = Overhead()
    assert overhead.of(128.0) == 128.0
    for step in range(64):
        slices, padded = int(drawn.integers(1, 12)), float(drawn.integers(500, 2000))
        seconds = 1e-3 * (72 * slices + padded) * (1 + noise * drawn.standard_normal())
        seconds += 5.0 * (step < 2)  # compilation
        overhead.record(seconds=seconds, slices=slices, padded=padded)
    assert overhead.of(128.0) == pytest.approx(72, rel=1e-6 if not noise else 0.35)
    assert not overhead.wants_seconds
    assert Overhead(**asdict(overhead)).of(1.0) == overhead.of(1.0)


def test_identical_steps_leave_default_overhead() -> None:
    overhead = Overhead()
    for _ in range(64):
        overhead.record(seconds=1.0, slices=4, padded=1000.0)
    assert overhead.of(128.0) == 128.0
