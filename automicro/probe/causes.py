"""What it means that the losses of a few rows do not add up, and what to do about it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from automicro.probe.readings import readings
from automicro.weighting import Average, Samples, Sum


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The losses of two parts of a few rows, and of both together.

    Attributes:
        values: losses of the first part, the second part, and both together.
        parts: two batches of rows.
        sizes: their rows.
        weights: what they weigh, if the loss is what it was taken for.
        tolerance: relative rounding.
    """

    values: tuple[float, float, float]
    parts: tuple[Any, Any]
    sizes: tuple[int, int]
    weights: tuple[float, float]
    tolerance: float

    @property
    def adds_up(self) -> bool:
        """Whether the loss may be what it was taken for."""
        return is_combination(self.values, self.weights, self.tolerance)

    def fits_mean(self, counts: tuple[float, float]) -> bool:
        """Whether the loss may be a mean for which the parts count so much."""
        total = sum(counts)
        if not total:
            return True  # of nothing: zero or NaN, and no evidence
        weights = (counts[0] / total, counts[1] / total)
        return is_combination(self.values, weights, self.tolerance)

    @property
    def is_mixture(self) -> bool:
        """Whether any weights at all make the losses of the parts that of both."""
        first, second, together = self.values
        slack = self.tolerance * max(0.05, abs(together))
        is_between = min(first, second) - slack <= together <= max(first, second) + slack
        return is_between or not math.isfinite(first + second)


def is_combination(values: Sequence[float], weights: tuple[float, float], tolerance: float) -> bool:
    """Whether the loss of two parts is that of the first and the second with these weights.

    Example:
        >>> is_combination([1.0, 3.0, 2.0], (0.5, 0.5), 1e-9)
        True
        >>> is_combination([1.0, float("nan"), 1.0], (1.0, 0.0), 1e-9)
        True
    """
    *alone, together = values
    pairs = zip(weights, alone, strict=True)
    expected = math.fsum(weight * value for weight, value in pairs if weight)
    # Losses near zero may be differences of numbers near one, with their rounding.
    scale = max(0.05, abs(together), abs(expected), *(abs(v) for v in alone if math.isfinite(v)))
    return abs(expected - together) <= tolerance * scale


def name_cause(
    comparisons: Sequence[Comparison], average: Average, find_targets: Callable[[Any], Any]
) -> str:
    """What a loss is, by the one reading that explains every comparison.

    Args:
        comparisons: of which at least one does not add up.
        average: what the loss was taken for.
        find_targets: finds the targets in a batch.
    """
    taken = f"the loss was taken for {average.describe()}, but a few rows show"
    for reading in readings([each.parts for each in comparisons], find_targets):
        pairs = list(zip(comparisons, reading.weights, strict=True))
        # Where each row counts the same, this is a mean over samples.
        is_uneven = any(
            a * each.sizes[1] != b * each.sizes[0]
            and not (reading.needs_proof and 0 in (*each.values, a, b))
            for each, (a, b) in pairs
        )
        if is_uneven and all(each.fits_mean(counts) for each, counts in pairs):
            return f"{taken} {reading.text}"
    # With a loss of zero beside it, the other part is sum and weighted mean at once.
    clear = [each for each in comparisons if 0 not in each.values]
    sums = [is_combination(each.values, (1.0, 1.0), each.tolerance) for each in clear]
    means = [each.fits_mean(each.sizes) for each in clear]
    if clear and not isinstance(average, Sum) and all(sums) and not all(means):
        return f"{taken} a sum: pass loss_average='none'"
    if clear and not isinstance(average, Samples) and all(means) and not all(sums):
        return f"{taken} a mean over samples: pass loss_average='samples'"
    unexplained = [each for each in comparisons if not (each.adds_up or each.is_mixture)]
    if not unexplained:
        return (
            f"{taken} a weighted mean with other weights than rows (class weights, or a mean over "
            "something else): pass loss_average=… as a callable that gives what a microbatch's "
            "loss was divided by"
        )
    first, second, together = unexplained[0].values
    return (
        f"{taken} that it compares rows (a contrastive loss, or another computation over the "
        f"batch): {first:.6g} and {second:.6g} alone, {together:.6g} together. Splitting changes "
        "its gradient; pass microbatch_size=None to keep batches whole"
    )


def describe_failure(error: Exception, rows: Sequence[int]) -> str:
    """What it means that a few rows, taken alone, have no loss although the whole batch has."""
    return (
        f"the loss cannot be computed on rows {' and '.join(map(str, rows))} alone "
        f"({type(error).__name__}: {error}). A loss or a target that refers to other rows of the "
        "batch cannot be split; pass microbatch_size=None to keep batches whole"
    )
