"""What peaks of memory teach about sizes, and when they are no longer true."""

import pytest

from automicro.policy.frontier import MeasuredPeak, Peaks


@pytest.mark.parametrize(("rows", "cost"), [(4, 1.0), (8, 1.0), (4, 2.0), (8, 2.0)])
def test_as_much_work_that_needs_less_shows_that_peaks_have_fallen(rows: int, cost: float) -> None:
    peaks = Peaks()
    assert not peaks.learn(MeasuredPeak(rows=4, cost=1.0, need=500))
    assert peaks.learn(MeasuredPeak(rows=rows, cost=cost, need=300))


@pytest.mark.parametrize(("rows", "cost", "need"), [(2, 1.0, 300), (4, 0.5, 300), (8, 1.0, 900)])
def test_less_work_that_needs_less_and_more_that_needs_more_show_nothing(
    rows: int, cost: float, need: int
) -> None:
    peaks = Peaks()
    assert not peaks.learn(MeasuredPeak(rows=4, cost=1.0, need=500))
    assert not peaks.learn(MeasuredPeak(rows=rows, cost=cost, need=need))
