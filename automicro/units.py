"""Amounts of memory and numbers of parameters in readable notation."""

import math
import re
from decimal import Decimal

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


def count_of(number: int, what: str) -> str:
    """Format a count with its noun.

    >>> count_of(1, "batch"), count_of(1200, "batch")
    ('1 batch', '1,200 batches')
    """
    return f"{number:,} {what}" + ("es" if what.endswith("ch") else "s") * (number != 1)
