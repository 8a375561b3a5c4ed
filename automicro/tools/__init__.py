"""Tools around a run, which nothing below the command line imports; and what they share."""

from collections.abc import Sequence
from dataclasses import dataclass

from automicro.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that would make a step smaller.

    Attributes:
        text: what to do.
        saved_bytes: predicted.
        fits: whether the same microbatch would fit then; None where it is not known.
    """

    text: str
    saved_bytes: int
    fits: bool | None = None


def table(rows: Sequence[tuple[int, str]]) -> list[str]:
    """Lines of bytes and words.

    >>> table([(2048, "parameters")])
    ['        2.00 KiB  parameters']
    """
    return [f"    {format_bytes(num_bytes):>12}  {text}" for num_bytes, text in rows]
