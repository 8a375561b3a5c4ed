"""Parsing and formatting of amounts of memory."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from automicro.memory.budget import MemoryBudget, limit_bytes
from automicro.units import format_bytes, parse_bytes, parse_share


def test_byte_amounts_are_parsed() -> None:
    cases: dict[Any, int] = {
        "24MiB": 24 << 20,
        "24 mib": 24 << 20,
        "1.5GB": 1_500_000_000,
        "512 kb": 512_000,
        "0.5KiB": 512,
        ".5 KiB": 512,
        "1TiB": 1 << 40,
        "7PB": 7 * 10**15,
        "100": 100,
        "100 bytes": 100,
        " 3B ": 3,
        1024: 1024,
        1.5e9: 1_500_000_000,
    }
    assert {amount: parse_bytes(amount) for amount in cases} == cases
    assert MemoryBudget("1.5MB").limit_bytes == 1_500_000


REFUSED: dict[str, tuple[list[Any], type[Exception]]] = {
    r"cannot read .* as an amount of memory: write a pos": (
        ["24 parsecs", "", "MiB", "-1MiB", "1e9", "24M", "1,5GB", "nan", "1 2 MB", "∞"],
        ValueError,
    ),
    r"is less than one byte.*give a larger amount": ([0, -1, "0MiB", 0.5, "0.0001kB"], ValueError),
    r"is not a whole number of bytes": ([math.nan, math.inf, -math.inf], ValueError),
    r"1.5 is not a whole number of bytes: .*'24MiB'": ([1.5], ValueError),
    r"give a text such as '24MiB'": ([True, None, b"24MiB", ["24MiB"]], TypeError),
}


def test_invalid_byte_amounts_are_rejected() -> None:
    for message, (amounts, error) in REFUSED.items():
        for amount in amounts:
            with pytest.raises(error, match=message):
                parse_bytes(amount)


@given(st.integers(min_value=1, max_value=2**50))
def test_formatted_bytes_can_be_parsed(num_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.006 * num_bytes


def test_share_is_distinguished_from_bytes() -> None:
    assert [parse_share(each) for each in (0.5, 1.0, "12.5%", " 80 %")] == [0.5, 1.0, 0.125, 0.8]
    assert [parse_share(each) for each in (1, 2.0, "1GiB", None, True)] == [None] * 5
    for wrong in ["0%", "101%", "-5%", "eighty%"]:
        with pytest.raises(ValueError, match=r"is not a share of a device: give one such as '80%'"):
            parse_share(wrong)


def test_share_of_cpu_memory_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"'80%' is a share of .*, but cpu .* Give bytes"):
        limit_bytes("80%", "cpu")
