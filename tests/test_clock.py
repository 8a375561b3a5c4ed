"""Times as text."""

from datetime import timedelta
from typing import Any

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
def test_a_time_is_read(text: str | timedelta, seconds: int) -> None:
    assert parse_time(text) == seconds


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (90, TypeError, "90 is not a time: write whole numbers, as in"),
        (True, TypeError, "True is not a time"),
        (None, TypeError, "None is not a time"),
        ("90", ValueError, "'90' is not a time: write whole numbers, as in"),
        ("", ValueError, "is not a time"),
        ("1:30:00", ValueError, "'1:30:00' is not a time: write whole numbers, as in"),
        ("1.5h", ValueError, "write whole numbers"),
        ("30m2h", ValueError, "is not a time"),
        ("2h2h", ValueError, "is not a time"),
        ("2ep", ValueError, "'2ep' is not a time"),
        ("-5m", ValueError, "is not a time"),
        ("0s", ValueError, "'0s' ends before it starts: give at least '1s'"),
        (timedelta(seconds=-1), ValueError, "ends before it starts"),
    ],
)
def test_what_is_no_time_is_refused_with_the_remedy(
    value: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        parse_time(value)
