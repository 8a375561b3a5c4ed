"""Amounts of memory as people write them."""

import math
import re
from decimal import Decimal

_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 10 ** (3 * _power)
    _UNITS[f"{_letter}ib"] = 2 ** (10 * _power)

_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(amount: str | int | float) -> int:
    """Read an amount of memory as a whole number of bytes.

    MiB is 2**20 and MB is 10**6; upper and lower case are the same. A number without a unit is in
    bytes. Parts of a byte are dropped.

    Raises:
        TypeError: ``amount`` is neither text nor a number.
        ValueError: the text cannot be read, or the amount is less than one byte.

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
            f"an amount of memory must be at least one byte, but {amount!r} is {num_bytes}: give "
            f"a larger one, such as '24MiB'"
        )
    return num_bytes


def parse_share(amount: object) -> float | None:
    """Read a share of a device, a float of at most 1 or a percentage; None for anything else.

    Raises:
        ValueError: a percentage that is not above 0 and at most 100, or a number that is neither
            a share nor whole.

    >>> parse_share(0.8), parse_share("80%"), parse_share("24MiB"), parse_share(1)
    (0.8, 0.8, None, None)
    """
    if isinstance(amount, float):
        if 0 < amount <= 1:
            return amount
        if math.isfinite(amount) and not amount.is_integer():
            raise ValueError(
                f"{amount!r} is neither a share of a device, such as 0.8, nor a whole number of "
                "bytes: give one of these, or text such as '24MiB'"
            )
    if not isinstance(amount, str) or not amount.strip().endswith("%"):
        return None
    try:
        share = float(amount.strip().removesuffix("%")) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"{amount!r} is no share of a device: give one such as '80%' or 0.8")
    return share


def _parse_text(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    scale = _UNITS.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError(
            f"cannot read {text!r} as an amount of memory: write a positive number and one of "
            f"B, KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, GB, TB (powers of 1000), such as "
            f"'24MiB'"
        )
    return int(Decimal(match[1]) * scale)


def _whole(number: int | float) -> int:
    if not math.isfinite(number):
        raise ValueError(
            f"an amount of memory cannot be {number!r}: give a finite number of bytes, or None "
            f"where no limit is meant"
        )
    return int(number)


def format_bytes(num_bytes: int) -> str:
    """Write a number of bytes for people, in powers of 1024.

    >>> format_bytes(24546000), format_bytes(512)
    ('23.41 MiB', '512 bytes')
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.2f} {unit}"
    return f"{num_bytes} byte{'' if num_bytes == 1 else 's'}"
