"""Tools around a run, imported only by the command line, and the parts that they share."""

from collections.abc import Sequence
from dataclasses import dataclass

from automicro.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that would reduce the memory of a step."""

    text: str
    saved_bytes: int  # predicted
    fits: bool | None = None  # whether the same microbatch would then fit; None if unknown


def table(rows: Sequence[tuple[int, str]]) -> list[str]:
    """Return table lines with a number of bytes and a text each."""
    return [f"    {format_bytes(num_bytes):>12}  {text}" for num_bytes, text in rows]
