"""The two-row probe: is the loss of two rows the average of their losses?

Nothing can be read off a plain function, so before a batch is split for the first time the loss
of two rows together is compared with the loss of each. Evaluation mode, no gradient, and buffers
and random numbers are put back. What does not add up is named: a sum, a mean over tokens, class
weights, or a loss that compares rows.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from automicro.oom import Failure, classify
from automicro.weighting import IGNORED, Average, Samples, Sum, Tokens, microbatch_weights

logger = logging.getLogger(__name__)

MAX_PAIRS = 3


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What the probe found.

    Attributes:
        cause: what does not add up, and what to do; None where all is well.
        is_telling: whether the rows differed in what a mean over tokens would count. On equal
            rows such a mean looks like a mean over samples, so later batches are worth a look.
    """

    cause: str | None
    is_telling: bool


def probe(
    losses_of: Callable[[Any], Mapping[str, Tensor]],
    take_rows: Callable[[Sequence[int]], Any],
    leaves: Iterable[tuple[str, Tensor]],
    num_rows: int,
    averages: Mapping[str, Average],
    find_targets: Callable[[Any], Any],
) -> ProbeResult:
    """Compare the loss of two rows with the losses of each.

    Args:
        losses_of: the losses by name of a batch, computed the same way for every call (evaluation
            mode, no gradient).
        take_rows: a batch of the rows at these indices.
        leaves: the tensors of the whole batch by path, from which telling rows are picked.
        num_rows: rows of the whole batch, at least two.
        averages: what each loss is taken for, by name.
        find_targets: finds the targets in a batch, to recognise a mean over tokens.
    """
    pairs, is_telling = _telling_pairs(list(leaves), num_rows)
    for pair in pairs:
        try:
            both, one, other = (take_rows(rows) for rows in (pair, pair[:1], pair[1:]))
            first, second = losses_of(one), losses_of(other)
            again, together = losses_of(one), losses_of(both)
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            return ProbeResult(cause=_describe_failure(error, pair), is_telling=True)
        for name, average in averages.items():
            values = [float(losses[name]) for losses in (first, second, together)]
            if float(again[name]) != values[0]:
                logger.info("the loss is random in evaluation mode, so it could not be probed")
                return ProbeResult(cause=None, is_telling=True)
            if not all(math.isfinite(value) for value in values):
                continue
            weights = _weights(average, both, [one, other])
            tolerance = _rounding(together[name])
            if weights is None or _is_combination(values, weights, tolerance):
                continue
            cause = _cause(values, average, tolerance, _target_counts(one, other, find_targets))
            return ProbeResult(cause=f"{_prefix(name)}{cause}", is_telling=True)
    return ProbeResult(cause=None, is_telling=is_telling)


def _weights(average: Average, both: Any, parts: Sequence[Any]) -> tuple[float, float] | None:
    """The factors that the training step would use, or None where a row counts nothing."""
    weights = microbatch_weights(average, both, parts, [1, 1])
    one, other = (1.0 if weight is None else float(weight) for weight in weights)
    return (one, other) if one and other else None


def _is_combination(
    values: Sequence[float], weights: tuple[float, float], tolerance: float
) -> bool:
    first, second, together = values
    expected = weights[0] * first + weights[1] * second
    scale = max(abs(first), abs(second), abs(together), abs(expected))
    return abs(expected - together) <= tolerance * scale


def _cause(
    values: Sequence[float],
    average: Average,
    tolerance: float,
    counts: Mapping[str, tuple[float, float]],
) -> str:
    taken = f"the loss was taken for {average.describe()}, but two rows show"
    if not isinstance(average, Sum) and _is_combination(values, (1.0, 1.0), tolerance):
        return f"{taken} a sum: pass loss_average='none'"
    if not isinstance(average, Samples) and _is_combination(values, (0.5, 0.5), tolerance):
        return f"{taken} a mean over samples: pass loss_average='samples'"
    for remedy, (one, other) in counts.items():
        weights = (one / (one + other), other / (one + other))
        if _is_combination(values, weights, tolerance):
            return f"{taken} a mean over the targets that are not ignored: {remedy}"
    first, second, together = values
    if min(first, second) < together < max(first, second):
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


def _target_counts(
    one: Any, other: Any, find_targets: Callable[[Any], Any]
) -> dict[str, tuple[float, float]]:
    """How many targets of each row count, by the remedy that would count them so."""
    readings = {
        "pass loss_average='tokens'": Tokens(find_targets),
        "the labels are shifted by one, so pass loss_average=… as a callable that counts the "
        "targets after the first": Tokens(find_targets, shift=1),
    }
    counts = {}
    for remedy, tokens in readings.items():
        try:
            pair = [tokens.denominators(part, [part], [1]) for part in (one, other)]
        except (ValueError, IndexError):  # no targets to be found: no such reading
            continue
        one_count, other_count = (float(count[0]) for count in pair if count is not None)
        if one_count and other_count:
            counts[remedy] = (one_count, other_count)
    return counts


def _describe_failure(error: Exception, pair: Sequence[int]) -> str:
    return (
        f"the loss cannot be computed on rows {pair[0]} and {pair[1]} alone "
        f"({type(error).__name__}: {error}). A loss or a target that refers to other rows of the "
        "batch cannot be split; pass microbatch_size=None to keep batches whole"
    )


def _prefix(name: str) -> str:
    return f"{name!r}: " if name else ""


def _telling_pairs(
    leaves: Sequence[tuple[str, Tensor]], num_rows: int
) -> tuple[list[list[int]], bool]:
    """Pairs of rows that differ in what a loss may count, and whether any of them does.

    Different numbers of ignored targets or of padding tell a mean over tokens from one over
    samples; different classes show class weights. The first and last row serve where none differ.
    """
    pairs: list[list[int]] = []
    could_tell = is_telling = False
    for _, leaf in leaves:
        if leaf.is_nested or leaf.dim() == 0 or leaf.shape[0] != num_rows:
            continue
        if leaf.is_floating_point() or leaf.is_complex():
            continue
        rows = leaf.reshape(num_rows, -1)
        could_tell |= rows.shape[1] > 1
        for per_row in ((rows == IGNORED).sum(1), (rows == 0).sum(1)):
            counts = per_row.tolist()
            if max(counts) > min(counts):
                pairs.append([counts.index(min(counts)), counts.index(max(counts))])
                is_telling |= rows.shape[1] > 1
        first = rows[:, :1].flatten().tolist()
        if len(set(first)) > 1:
            pairs.append([0, next(row for row in range(num_rows) if first[row] != first[0])])
    pairs.append([0, num_rows - 1])
    unique = list(dict.fromkeys(tuple(pair) for pair in pairs))
    return [list(pair) for pair in unique[:MAX_PAIRS]], is_telling or not could_tell


def _rounding(loss: Tensor) -> float:
    """Relative rounding to expect between the loss of two rows and of each of them."""
    if loss.dtype == torch.float64:
        return 1e-9
    if loss.dtype == torch.float32:
        return 2e-5 if loss.device.type == "cpu" else 1e-3
    return 2e-2
