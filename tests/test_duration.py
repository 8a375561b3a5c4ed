"""Training durations are parsed as users write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automicro.durations import Duration, Unit


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("2ep", 2, Unit.EPOCHS),
        ("2 ep", 2, Unit.EPOCHS),
        (" 500ba ", 500, Unit.BATCHES),
        ("10000sp", 10_000, Unit.SAMPLES),
        ("1e6tok", 1_000_000, Unit.TOKENS),
        ("1.5e6 tok", 1_500_000, Unit.TOKENS),
        ("1e+3sp", 1000, Unit.SAMPLES),
        ("007ba", 7, Unit.BATCHES),
        ("100h", 360_000, Unit.SECONDS),
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
