"""Arguments of the trainer that are refused early."""

from datetime import timedelta

from automicro.duration import Duration, Unit
from automicro.trainer.clock import parse_time


def read_time(name: str, value: str | timedelta | None) -> float | None:
    """Seconds, or None; with the argument's name in what goes wrong.

    Raises:
        TypeError: not text.
        ValueError: no time.

    >>> read_time("max_time", "2h30m")
    9000.0
    """
    if value is None:
        return None
    try:
        return parse_time(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def read_norm(name: str, value: float | None) -> float | None:
    """A positive number, or None.

    Raises:
        TypeError: not a number.
        ValueError: not above zero.

    >>> read_norm("grad_clip_norm", 1)
    1.0
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, not a number; pass one such as 1.0, or None")
    if not value > 0:
        raise ValueError(f"{name}={value} must be above 0; pass a number such as 1.0, or None")
    return float(value)


def read_count(name: str, value: object) -> int:
    """A whole number of at least 1.

    Raises:
        TypeError: not a whole number.
        ValueError: below 1.

    >>> read_count("accumulate_batches", 4)
    4
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, not a whole number; pass an int such as 1")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1; pass an int such as 1")
    return value


def read_flag(name: str, value: object) -> bool:
    """True or False, and nothing that only counts as one.

    Raises:
        TypeError: anything else.

    >>> read_flag("channels_last", True)
    True
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; pass True or False")
    return value


def in_tokens(**durations: Duration | None) -> dict[str, Duration]:
    """Those durations that count tokens, by the names of their arguments.

    >>> in_tokens(max_duration=Duration.parse("5tok"), eval_interval=Duration.parse("1ep"))
    {'max_duration': Duration.parse('5tok')}
    """
    return {
        name: duration
        for name, duration in durations.items()
        if duration is not None and duration.unit is Unit.TOKENS
    }
