"""Durations, times and amounts of memory in readable notation."""

import math
import re
import time
from collections.abc import Callable
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


_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 10 ** (3 * _power)
    _UNITS[f"{_letter}ib"] = 2 ** (10 * _power)

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(amount: str | int | float) -> int:
    """Parse an amount of memory into a whole number of bytes.

    MiB is 2**20 and MB is 10**6; case is ignored. A number without a unit is in bytes. Text is
    rounded down to whole bytes.

    >>> parse_bytes("24MiB"), parse_bytes("1.5 GB"), parse_bytes(1024)
    (25165824, 1500000000, 1024)
    """
    if isinstance(amount, bool) or not isinstance(amount, str | int | float):
        raise TypeError(
            f"an amount of memory cannot be {amount!r} of type {type(amount).__name__}: give a "
            f"text such as '24MiB' or a number of bytes"
        )
    num_bytes = _parse_text(amount) if isinstance(amount, str) else _whole(amount)
    if num_bytes < 1:
        raise ValueError(
            f"{amount!r} is less than one byte of memory: give a larger amount, such as '24MiB'"
        )
    return num_bytes


def parse_share(amount: object) -> float | None:
    """Parse a share of a device: a float of at most 1 or a percentage. Other values give None.

    >>> parse_share(0.8), parse_share("80%"), parse_share("24MiB"), parse_share(1)
    (0.8, 0.8, None, None)
    """
    if isinstance(amount, float) and 0 < amount <= 1:
        return amount
    if not isinstance(amount, str) or not amount.strip().endswith("%"):
        return None
    try:
        share = float(amount.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{amount!r} is not a share of a device: give one such as '80%' or 0.8")
    return share


def _parse_text(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    scale = _UNITS.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError(
            f"cannot read {text!r} as an amount of memory: write a positive number with a unit, "
            "B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000), such as "
            "'24MiB'"
        )
    # In decimals, because in floats 2.01 GB is one byte less.
    return int(Decimal(match[1]) * scale)


def _whole(number: int | float) -> int:
    if not math.isfinite(number) or (number > 1 and number != int(number)):
        raise ValueError(
            f"{number!r} is not a whole number of bytes: give an int, a share of a device such "
            "as 0.8, or text such as '24MiB'"
        )
    return int(number)


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes with a unit, in powers of 1024.

    >>> format_bytes(24546000), format_bytes(512)
    ('23.41 MiB', '512 bytes')
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.2f} {unit}"
    return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"


def describe_count(number: int) -> str:
    """Format a number of parameters with a suffix.

    >>> list(map(describe_count, (950, 34_100, 124_439_808, 7 * 10**9)))
    ['950', '34.1k', '124.4M', '7.0B']
    """
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= scale:
            return f"{number / scale:.1f}{unit}"
    return str(number)


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


class TimeLimit:
    """Time limit of a run, counted from its construction.

    >>> limit = TimeLimit(10.0, clock=iter([0.0, 4.0, 10.0]).__next__)
    >>> limit.is_over, limit.is_over
    (False, True)
    >>> TimeLimit(None).is_over
    False
    """

    # Earlier calls of fit and earlier processes do not count, because a batch system gives each job
    # its own time.

    def __init__(
        self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        # Monotonic by default: adjusting the wall clock must not end a run.
        self._clock = clock
        self._start = 0.0 if seconds is None else clock()

    @property
    def is_over(self) -> bool:
        """Whether the time limit is reached."""
        return self._seconds is not None and self._clock() - self._start >= self._seconds
