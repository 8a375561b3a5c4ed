"""Arguments of the trainer that are refused early."""

from automicro.duration import Duration, Unit


def read_duration(name: str, duration: str | Duration) -> Duration:
    """A duration in epochs or batches.

    Raises:
        TypeError: not text.
        ValueError: no duration, or one in samples or tokens. The message offers epochs and batches
            only.

    >>> read_duration("max_duration", "2ep")
    Duration.parse('2ep')
    """
    try:
        parsed = Duration.parse(duration)
    except (TypeError, ValueError) as error:
        # Said anew: the error offers samples and tokens, too.
        text = str(duration).strip()
        why = (
            "is not a whole number of epochs or batches, at least 1; write it like '2ep' or '500ba'"
        )
        if text.isdecimal() and int(text) > 0:
            why = f"has no unit; say '{text}ep' (epochs) or '{text}ba' (batches)"
        raise type(error)(f"{name}={duration!r} {why}") from None
    if parsed.unit not in (Unit.EPOCHS, Unit.BATCHES):
        raise ValueError(
            f"{name}='{parsed}' counts {parsed.unit.name.lower()}, which the Trainer cannot count "
            "yet; say it in epochs or batches, such as '2ep' or '500ba'"
        )
    return parsed


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
