"""Durations and times are parsed as users write them."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automicro.durations import Duration, Unit, parse_time


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("2ep", 2, Unit.EPOCHS),
        (" 500 ba ", 500, Unit.BATCHES),
        ("1e+3sp", 1000, Unit.SAMPLES),
        ("1.5e6 tok", 1_500_000, Unit.TOKENS),
        ("007ba", 7, Unit.BATCHES),
        ("1.5h", 5400, Unit.SECONDS),
        ("5min", 300, Unit.SECONDS),
        ("45 sec", 45, Unit.SECONDS),
    ],
)
def test_parse_reads_number_and_unit(text: str, value: int, unit: Unit) -> None:
    assert Duration.parse(text) == Duration(value=value, unit=unit)


@given(value=st.integers(1, 10**15), unit=st.sampled_from(Unit))
def test_text_and_repr_round_trip(value: int, unit: Unit) -> None:
    duration = Duration(value=value, unit=unit)
    assert Duration.parse(str(duration)) == duration
    assert eval(repr(duration)) == duration


def test_seconds_are_written_in_largest_whole_unit() -> None:
    texts = ("7200sec", "5400sec", "90sec", "1sec")
    assert [str(Duration.parse(text)) for text in texts] == ["2h", "90min", "90sec", "1sec"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (" 2H 30 m ", 9000),
        ("100m", 6000),
        ("1d2h3m4s", 93784),
        ("0h5m", 300),
        (timedelta(minutes=1.5), 90),
    ],
)
def test_times_are_parsed(text: str | timedelta, seconds: int) -> None:
    assert parse_time(text) == seconds
