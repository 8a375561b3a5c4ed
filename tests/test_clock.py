"""Times as text, and a limit on them."""

from datetime import timedelta

import pytest

from automicro.units import TimeLimit, parse_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2h30m", 9000),
        ("90s", 90),
        ("1d", 86400),
        ("45m", 2700),
        ("1d2h3m4s", 93784),
        (" 2h 30 m ", 9000),
        ("2H30M", 9000),
        ("100m", 6000),
        ("0h5m", 300),
        (timedelta(minutes=1.5), 90),
    ],
)
def test_a_time_is_read(text: str | timedelta, seconds: int) -> None:
    assert parse_time(text) == seconds


def test_a_limit_counts_from_its_construction() -> None:
    now = 1000.0
    limit = TimeLimit(60.0, clock=lambda: now)
    assert not limit.is_over
    now += 59.9
    assert not limit.is_over
    now += 0.2
    assert limit.is_over
    assert not TimeLimit(60.0, clock=lambda: now).is_over
