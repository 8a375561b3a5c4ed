"""How many rows each microbatch gets."""

import operator
from typing import Any

from automicro.errors import BatchError


def check_microbatch_size(value: Any, *, name: str = "microbatch_size") -> int:
    """Return `value` as a whole number of rows, at least 1.

    Raises:
        TypeError: it is not an integer (a bool is not one).
        ValueError: it is smaller than 1.

    >>> check_microbatch_size(8)
    8
    """
    remedy = f"Pass a whole number of rows, such as {name}=8."
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a number of rows, got the bool {value}. {remedy}")
    try:
        size = operator.index(value)
    except TypeError as error:
        kind = type(value).__name__
        raise TypeError(f"{name} must be a number of rows, got {value!r} ({kind}). {remedy}") from (
            error
        )
    if size < 1:
        raise ValueError(f"{name} must be at least 1 row, got {size}. {remedy}")
    return size


def describe_cut(num_rows: int, microbatch_size: int, num_microbatches: int) -> str:
    """How a batch is cut, in a few words.

    >>> describe_cut(512, 128, 4), describe_cut(10, 4, 3)
    ('4 × 128 of 512', '3 × up to 4 of 10')
    """
    up_to = "" if microbatch_size * num_microbatches == num_rows else "up to "
    return f"{num_microbatches} × {up_to}{microbatch_size} of {num_rows}"


def balanced_sizes(num_rows: int, microbatch_size: int, *, min_rows: int = 1) -> list[int]:
    """Cut `num_rows` into the fewest microbatches of at most `microbatch_size` rows, balanced.

    The larger ones come first and no two differ by more than one row, so there are at most two
    shapes. `min_rows` is a floor (BatchNorm cannot train on one row): no microbatch is smaller,
    which may make some larger than `microbatch_size`, unless the batch itself is smaller.

    Raises:
        BatchError: there are no rows.

    >>> balanced_sizes(10, 4)
    [4, 3, 3]
    >>> balanced_sizes(5, 2, min_rows=2)
    [3, 2]
    """
    if num_rows < 1:
        raise BatchError(f"A batch of {num_rows} rows cannot be cut: give at least one row.")
    pieces = -(-num_rows // microbatch_size)
    if min_rows > 1:
        pieces = min(pieces, max(1, num_rows // min_rows))
    small, larger = divmod(num_rows, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)
