"""Times are parsed from text."""

from datetime import timedelta

import pytest

from automicro.durations import parse_time


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
def test_times_are_parsed(text: str | timedelta, seconds: int) -> None:
    assert parse_time(text) == seconds
