"""From a proposed microbatch size to the rows of each slice."""

from dataclasses import dataclass

from automicro.errors import BatchError
from automicro.slicing import balanced_sizes


@dataclass
class CutRule:
    """From a proposed size to the rows of each slice.

    Attributes:
        strict_divisible: whether all slices must have the same number of rows.
        min_rows: the fewest rows of a slice; 2 where BatchNorm refuses a single row.

    >>> CutRule().cut(10, 4), CutRule().cut(50, 16, multiple_of=8)
    ([4, 3, 3], [16, 16, 16, 2])
    """

    strict_divisible: bool = False
    min_rows: int = 1

    def cut(self, num_rows: int, size: int, *, multiple_of: int = 1) -> list[int]:
        """The rows of each slice, the largest first.

        Args:
            num_rows: of the batch.
            size: the most rows of a slice.
            multiple_of: what the rows of all slices but the last are a multiple of, where the
                size is one.

        Raises:
            BatchError: ``strict_divisible`` is set and the rows do not divide by the size.
        """
        if not self.strict_divisible:
            if multiple_of > 1 and size % multiple_of == 0:
                return _whole_units(num_rows, size // multiple_of, multiple_of)
            return balanced_sizes(num_rows, size, min_rows=self.min_rows)
        if num_rows % size:
            raise BatchError(
                f"strict_divisible=True: a batch of {num_rows} rows is not a multiple of "
                f"microbatch_size={size} (remainder {num_rows % size}); make the batch a multiple "
                "of it (drop_last=True in the data loader), or leave strict_divisible out: a "
                "ragged rest is exact"
            )
        return [size] * (num_rows // size)

    def largest_divisor(self, num_rows: int, size: int) -> int:
        """The largest size of at most ``size`` rows that divides the batch."""
        return next(each for each in range(size, 0, -1) if num_rows % each == 0)


def _whole_units(num_rows: int, most_units: int, unit: int) -> list[int]:
    """Balanced slices of whole units of rows, of which the last unit may be short."""
    units = -(-num_rows // unit)
    sizes = [each * unit for each in balanced_sizes(units, most_units)]
    sizes[-1] -= units * unit - num_rows
    return sizes
