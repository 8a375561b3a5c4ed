"""What it means that the losses of two rows do not add up, and what to do about it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from automicro.weighting import Average, Samples, Sum, Tokens


def is_combination(values: Sequence[float], weights: tuple[float, float], tolerance: float) -> bool:
    """Whether the loss of two rows is that of the first and the second with these weights.

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
    values: Sequence[float],
    average: Average,
    tolerance: float,
    rows: Sequence[Any],
    find_targets: Callable[[Any], Any],
) -> str:
    """What the losses of two rows, alone and together, show a loss to be.

    Args:
        values: the losses of the first row, the second row, and both together.
        average: what the loss was taken for.
        tolerance: relative rounding.
        rows: the two rows, each as a batch of its own.
        find_targets: finds the targets in a batch.
    """
    taken = f"the loss was taken for {average.describe()}, but two rows show"
    for remedy, (one, other) in _target_counts(rows, find_targets).items():
        weights = (one / (one + other), other / (one + other))
        if one != other and is_combination(values, weights, tolerance):
            return f"{taken} a mean over the targets that are not ignored: {remedy}"
    if not isinstance(average, Sum) and is_combination(values, (1.0, 1.0), tolerance):
        return f"{taken} a sum: pass loss_average='none'"
    if not isinstance(average, Samples) and is_combination(values, (0.5, 0.5), tolerance):
        return f"{taken} a mean over samples: pass loss_average='samples'"
    first, second, together = values
    is_between = min(first, second) < together < max(first, second)
    if is_between or not math.isfinite(first + second):
        return (
            f"{taken} a weighted mean with other weights than rows (class weights, or a mean over "
            "something else): pass loss_average=… as a callable that gives what a microbatch's "
            "loss was divided by"
        )
    return (
        f"{taken} that it compares rows (a contrastive loss, or another computation over the "
        f"batch): {first:.6g} and {second:.6g} alone, {together:.6g} together. Splitting changes "
        "its gradient; pass microbatch_size=None to keep batches whole"
    )


def describe_failure(error: Exception, pair: Sequence[int]) -> str:
    """What it means that two rows, taken alone, have no loss."""
    return (
        f"the loss cannot be computed on rows {pair[0]} and {pair[1]} alone "
        f"({type(error).__name__}: {error}). A loss or a target that refers to other rows of the "
        "batch cannot be split; pass microbatch_size=None to keep batches whole"
    )


def _target_counts(
    rows: Sequence[Any], find_targets: Callable[[Any], Any]
) -> Mapping[str, tuple[float, float]]:
    """How many targets of each row count, by the remedy that would count them so."""
    readings = {
        "pass loss_average='tokens'": Tokens(find_targets),
        "the labels are shifted by one, so pass loss_average=… as a callable that counts the "
        "targets after the first": Tokens(find_targets, shift=1),
    }
    counts = {}
    for remedy, tokens in readings.items():
        try:
            pair = [tokens.denominators(row, [row], [1]) for row in rows]
        except (ValueError, IndexError):  # no targets to be found: no such reading
            continue
        one, other = (float(count[0]) for count in pair if count is not None)
        if one or other:
            counts[remedy] = (one, other)
    return counts
