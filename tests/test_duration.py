"""How long to train, as users write it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automicro.durations import Duration, Unit, read_duration


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
def test_parse_reads_a_number_and_a_unit(text: str, value: int, unit: Unit) -> None:
    assert Duration.parse(text) == Duration(value=value, unit=unit)


@given(value=st.integers(1, 10**15), unit=st.sampled_from(Unit))
def test_text_and_repr_lead_back_to_the_duration(value: int, unit: Unit) -> None:
    duration = Duration(value=value, unit=unit)
    assert Duration.parse(str(duration)) == duration
    assert eval(repr(duration)) == duration


WRONG = "0.0001h 0h 0ep -1ba 1.5ep 1.5tok 1.23e1sp 1e2ba 1e999999999tok 5min. 5m 2h30min ten ep"


@pytest.mark.parametrize("text", ["", None, True, 2.5, *WRONG.split()])
def test_parse_says_what_is_wrong_and_how_to_write_it(text: Any) -> None:
    kind = ValueError if isinstance(text, str) else TypeError
    said = rf"{text!r} is not a duration.*: write .* epochs \('2ep'\), .* of data \('100h'\)"
    with pytest.raises(kind, match=said):
        Duration.parse(text)


@pytest.mark.parametrize(("text", "error"), [(5, TypeError), ("5", ValueError)])
def test_a_bare_number_is_answered_with_units(text: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"5'? has no unit: write '5ep' \(epochs\), '5ba' \(batches\)"):
        Duration.parse(text)


@pytest.mark.parametrize("value", [1.0, True, "2"])
def test_a_duration_is_built_from_whole_numbers_only(value: Any) -> None:
    with pytest.raises(TypeError, match="is not a whole number: give an int"):
        Duration(value=value, unit=Unit.EPOCHS)


@pytest.mark.parametrize("text", ["5m", "5s", "2hours", "90 seconds"])
def test_what_may_be_of_data_or_of_the_clock_is_refused_with_both(text: str) -> None:
    with pytest.raises(ValueError, match="max_duration=") as caught:
        read_duration("max_duration", text)
    if text == "5s":  # samples are meant more often
        assert "did you mean '5sp'" in str(caught.value)
    else:
        assert "hours of data ('100h'). To limit the time of the run, use max_time=" in str(
            caught.value
        )


def test_seconds_are_written_in_the_largest_unit_that_is_whole() -> None:
    texts = ("7200sec", "5400sec", "90sec", "1sec")
    assert [str(Duration.parse(text)) for text in texts] == ["2h", "90min", "90sec", "1sec"]
