"""Durations of training, such as "2ep", and limits of time, such as "2h30m"."""

import re
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from enum import StrEnum

# At most two digits of exponent, because "1e999999999tok" has a billion digits.
_PATTERN = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)(e\+?[0-9]{1,2})?\s*([a-z]+)")


class Unit(StrEnum):
    """Unit of a duration, by its letters in text."""

    EPOCHS = "ep"
    BATCHES = "ba"
    SAMPLES = "sp"
    TOKENS = "tok"
    SECONDS = "sec"


_WORDS = {
    Unit.EPOCHS: ("e", "epoch", "epochs"),
    Unit.BATCHES: ("b", "batch", "batches", "it", "iters", "iterations", "step", "steps"),
    Unit.SAMPLES: ("s", "sample", "samples", "row", "rows"),
    Unit.TOKENS: ("t", "token", "tokens", "toks"),
    Unit.SECONDS: (),  # ambiguous: seconds of data or of the clock
}


# Of data, such as speech; max_time limits the duration of a run.
_OF_DATA = {"h": 3600, "min": 60, "sec": 1}


def duration_meant(number: object, name: str) -> str:
    """Return the notation for a number of epochs, batches, etc., or "" for an unknown name.

    >>> duration_meant(3, "epochs"), duration_meant(9, "max_steps"), duration_meant(3, "parsecs")
    ('3ep', '9ba', '')
    """
    word = re.sub("^((max|num|total|train)_)*", "", name)
    unit = next((unit for unit in Unit if word in _WORDS[unit]), "")
    return f"{number}{unit}" if unit and str(number).isdecimal() else ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Duration:
    """A number of epochs, optimization batches, samples, tokens or seconds of data.

    Raises:
        TypeError: the value is not an int.
        ValueError: the value is less than 1.

    >>> Duration.parse("2ep")
    Duration.parse('2ep')
    >>> Duration.parse("500 ba") == Duration(value=500, unit=Unit.BATCHES)
    True
    >>> Duration.parse("1.5h").value, str(Duration(value=7200, unit=Unit.SECONDS))
    (5400, '2h')
    """

    value: int
    unit: Unit

    def __post_init__(self) -> None:
        if type(self.value) is not int:
            raise TypeError(f"a duration of {self.value!r} is not a whole number: give an int")
        if self.value < 1:
            raise ValueError(
                f"a duration of '{self.value}{self.unit}' trains nothing: give at least 1"
            )

    def __str__(self) -> str:
        if self.unit is Unit.SECONDS:
            # In the largest unit that divides the value.
            name, scale = next(each for each in _OF_DATA.items() if self.value % each[1] == 0)
            return f"{self.value // scale}{name}"
        return f"{self.value}{self.unit}"

    def __repr__(self) -> str:
        return f"Duration.parse({str(self)!r})"

    @classmethod
    def parse(cls, text: "str | Duration") -> "Duration":
        """Parse a whole number and a unit: ep (epochs), ba (batches), sp (samples), tok (tokens).

        Seconds of data, such as speech, use h, min or sec, which may be fractions, as in "1.5h".
        Samples and tokens may use scientific notation. A `Duration` is returned unchanged.

        Raises:
            TypeError: the value is a bare number or otherwise not text.
            ValueError: the text is not a duration of at least 1.

        >>> Duration.parse("1.5e6tok").value
        1500000
        """
        return read_duration("", text)


def read_duration(name: str, duration: str | Duration) -> Duration:
    """Parse a duration; errors start with the argument's name."""
    if isinstance(duration, Duration):
        return duration
    given: object = duration
    found = _read_duration(given) if isinstance(given, str) else None
    if found is not None:
        return found
    text = str(duration).strip()
    why = (
        f"is not a duration{_meant_duration(text)}: write a positive whole number of epochs "
        "('2ep'), batches ('500ba'), samples ('10000sp'), tokens ('1e6tok') or hours of data "
        "('100h'). To limit the time of the run, use max_time='2h30m'"
    )
    # The most common mistake has its own message.
    if text.isdecimal() and int(text) > 0:
        why = (
            f"has no unit: write '{text}ep' (epochs), '{text}ba' (batches), '{text}sp' "
            f"(samples) or '{text}tok' (tokens)"
        )
    kind = ValueError if isinstance(given, str) else TypeError
    raise kind(f"{name}={duration!r} {why}" if name else f"{duration!r} {why}")


def _read_duration(text: str) -> Duration | None:
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[3] not in {*Unit, *_OF_DATA}:
        return None
    number, exponent = match[1], match[2] or ""
    # In floats, 1.1h is 3960.0000000000005 seconds, which is not whole.
    value = Decimal(number + exponent) * _OF_DATA.get(match[3], 1)
    unit = Unit.SECONDS if match[3] in _OF_DATA else Unit(match[3])
    # Only hours and minutes can be fractions. Scientific notation is for samples and tokens: 1.5e3
    # tokens are whole, 1.5 batches are not.
    is_odd = "." in number and not exponent and unit is not Unit.SECONDS
    is_odd = is_odd or (bool(exponent) and unit in (Unit.EPOCHS, Unit.BATCHES))
    if is_odd or value != int(value) or value < 1:
        return None
    return Duration(value=int(value), unit=unit)


def _meant_duration(text: str) -> str:
    """Return a suggestion to append to an invalid duration, or ""."""
    match = re.fullmatch(r"(\d+)\s*([a-z]+)", text.lower())
    meant = match and duration_meant(*match.groups())
    return f" (did you mean '{meant}'?)" if meant else ""


_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


_PARTS = re.compile(
    r"(?:(?P<d>[0-9]+)\s*d)?\s*(?:(?P<h>[0-9]+)\s*h)?\s*(?:(?P<m>[0-9]+)\s*m)?\s*"
    r"(?:(?P<s>[0-9]+)\s*s)?"
)


_HOW = "write whole numbers, as in '1d', '2h30m', '45m' or '90s'"


def parse_time(text: str | timedelta) -> float:
    """Parse days, hours, minutes and seconds into seconds.

    >>> parse_time("2h30m"), parse_time("90s")
    (9000.0, 90.0)
    """
    if isinstance(text, timedelta):
        seconds = text.total_seconds()
    elif not isinstance(text, str):
        raise TypeError(f"{text!r} is not a time: {_HOW}")
    else:
        seconds = _read(text)
    if seconds <= 0:
        raise ValueError(f"a time of '{text}' ends before it starts: give at least '1s'")
    return float(seconds)


def _read(text: str) -> int:
    stripped = text.strip().lower()
    # Every part is optional, so empty text matches, too.
    parts = _PARTS.fullmatch(stripped)
    if parts is None or not stripped:
        raise ValueError(f"{text!r} is not a time: {_HOW}")
    return sum(int(parts[unit] or 0) * seconds for unit, seconds in _SECONDS.items())
