"""How long to train: ``"2ep"``, ``"500ba"``, ``"10000sp"``, ``"1e6tok"``."""

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import Any

from automicro.origins import comes_from

# At most two digits of exponent: "1e999999999tok" would be a number of a billion digits.
_PATTERN = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)(e\+?[0-9]{1,2})?\s*([a-z]+)")


class Unit(StrEnum):
    """What a duration counts, by the letters it is written with."""

    EPOCHS = "ep"
    BATCHES = "ba"
    SAMPLES = "sp"
    TOKENS = "tok"


_WORDS = {
    Unit.EPOCHS: ("e", "epoch", "epochs"),
    Unit.BATCHES: ("b", "batch", "batches", "it", "iters", "iterations", "step", "steps"),
    Unit.SAMPLES: ("s", "sample", "samples", "row", "rows"),
    Unit.TOKENS: ("t", "token", "tokens", "toks"),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Duration:
    """A number of epochs, optimization batches, samples or tokens.

    Raises:
        TypeError: if the value is not an int.
        ValueError: if the value is below 1.

    >>> Duration.parse("2ep")
    Duration.parse('2ep')
    >>> Duration.parse("500 ba") == Duration(value=500, unit=Unit.BATCHES)
    True
    """

    value: int
    unit: Unit

    def __post_init__(self) -> None:
        if type(self.value) is not int:
            raise TypeError(f"a duration of {self.value!r} is not whole: give an int")
        if self.value < 1:
            raise ValueError(
                f"a duration of '{self.value}{self.unit}' trains nothing: give at least 1"
            )

    def __str__(self) -> str:
        return f"{self.value}{self.unit}"

    def __repr__(self) -> str:
        return f"Duration.parse({str(self)!r})"

    @classmethod
    def parse(cls, text: "str | Duration") -> "Duration":
        """Read a whole number and a unit: ep (epochs), ba (batches), sp (samples), tok (tokens).

        Samples and tokens may be in scientific notation. A duration stands for itself.

        Raises:
            TypeError: if it is a bare number or anything else that is not text.
            ValueError: if the text is no duration, or one below 1.

        >>> Duration.parse("1.5e6tok").value
        1500000
        """
        if isinstance(text, Duration):
            return text
        text = _as_text(text)
        if isinstance(text, int) and not isinstance(text, bool):
            raise TypeError(
                f"a duration of {text} has no unit: say '{text}ep' (epochs) or '{text}ba' (batches)"
            )
        if not isinstance(text, str):
            raise TypeError(f"{text!r} is no duration: write it like '2ep' or '500ba'")
        match = _PATTERN.fullmatch(text.strip())
        if match is None or match[3] not in set(Unit):
            raise ValueError(
                f"{text!r} is no duration{meant_duration(text)}: write a whole number and ep "
                f"(epochs), ba (batches), sp (samples) or tok (tokens), like '2ep' or '500ba'"
            )
        number, exponent, unit = match[1], match[2], Unit(match[3])
        value = Decimal(number + (exponent or ""))
        if value != int(value) or ("." in number and not exponent):
            raise ValueError(f"{text!r} is not whole: give a whole number of {unit.name.lower()}")
        if exponent and unit in (Unit.EPOCHS, Unit.BATCHES):
            raise ValueError(
                f"{text!r} is in scientific notation, which is for sp and tok only: "
                f"say '{int(value)}{unit}'"
            )
        return cls(value=int(value), unit=unit)


def read_duration(name: str, duration: str | Duration) -> Duration:
    """A duration, with the argument's name in what goes wrong.

    Raises:
        TypeError: not text.
        ValueError: no duration.

    >>> read_duration("max_duration", "1e6tok")
    Duration.parse('1000000tok')
    """
    try:
        return Duration.parse(duration)
    except (TypeError, ValueError) as error:
        duration = _as_text(duration)
        text = str(duration).strip()
        never = ", or None" if name.endswith("interval") else ""
        why = (
            f"is not a whole number of epochs, batches, samples or tokens, at least 1"
            f"{meant_duration(text) or _counted_otherwise(text)}; write it like '2ep', '500ba', "
            f"'10000sp' or '1e6tok'{never}"
        )
        if text.isdecimal() and int(text) > 0:
            why = (
                f"has no unit; say '{text}ep' (epochs), '{text}ba' (batches), '{text}sp' (samples) "
                f"or '{text}tok' (tokens)"
            )
        raise type(error)(f"{name}={duration!r} {why}") from None


def _counted_otherwise(text: str) -> str:
    """A hint about units of others that nothing here is counted in."""
    match = re.fullmatch(r"([\d.]+)\s*(dur|[hms]|min|sec|seconds?|minutes?|hours?)", text.lower())
    if match is None:
        return ""
    if match[2] == "dur":
        return f" (of a share of the training, {match[1]}, give the number)"
    return " (a limit in time is max_time='2h30m')"


def _as_text(duration: Any) -> Any:
    """A time of Composer's as it is written; anything else as it is."""
    if not comes_from(duration, "composer.Time"):
        return duration
    return f"{duration.value}{getattr(duration.unit, 'value', duration.unit)}"


def meant_duration(text: object) -> str:
    """A hint to be put behind what is no duration; empty where nobody can tell what was meant.

    >>> meant_duration("5 epochs"), meant_duration("often")
    (" (did you mean '5ep'?)", '')
    """
    match = re.fullmatch(r"(\d+)\s*([a-z]+)", str(text).strip().lower())
    if match is None:
        return ""
    unit = next((unit for unit in Unit if match[2] in _WORDS[unit]), None)
    return "" if unit is None else f" (did you mean '{match[1]}{unit}'?)"
