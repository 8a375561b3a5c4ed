"""Arguments of callbacks that are refused early."""

from typing import Any

from automicro.duration import Duration


def read_duration(name: str, value: str | Duration) -> Duration:
    """A duration, with the argument's name in what goes wrong.

    Args:
        name: of the argument.
        value: what was given for it.

    Raises:
        TypeError: not text.
        ValueError: no duration.

    >>> read_duration("half_life", "100ba")
    Duration.parse('100ba')
    """
    try:
        return Duration.parse(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}={value!r}: {error}") from None


def read_count(name: str, value: Any, *, least: int = 1) -> int:
    """A whole number.

    Args:
        name: of the argument.
        value: what was given for it.
        least: that it may be.

    Raises:
        TypeError: not a whole number.
        ValueError: too small.

    >>> read_count("patience", 3)
    3
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is not a whole number; pass an int such as {least}")
    if value < least:
        raise ValueError(f"{name}={value} is below {least}; pass at least {least}")
    return value
