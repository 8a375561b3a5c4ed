"""Comparing the loss of two rows with the losses of each."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from automicro.errors import AutomicroError, BatchError
from automicro.oom import Failure, classify
from automicro.probe.causes import describe_failure, is_combination, name_cause
from automicro.weighting import Average, microbatch_weights

logger = logging.getLogger(__name__)

Losses = Mapping[str, Tensor]


class LossesOf(Protocol):
    """The losses of a few rows by name, without gradients; empty where there are none."""

    def __call__(self, rows: Any, *, training: bool) -> Losses:
        """In evaluation mode, or in as much of training mode as does not mix or draw."""


def compare(
    losses_of: LossesOf,
    take_rows: Callable[[Sequence[int]], Any],
    pairs: Sequence[tuple[int, int]],
    averages: Mapping[str, Average],
    find_targets: Callable[[Any], Any],
) -> str | None:
    """What does not add up and what to do, or None where all is well.

    Args:
        losses_of: computes losses the same way for every call.
        take_rows: a batch of the rows at these indices.
        pairs: indices of two rows each.
        averages: what each loss is taken for, by name.
        find_targets: finds the targets in a batch, to recognise a mean over tokens.

    Raises:
        AutomicroError: the forward gives no usable loss.
    """
    for pair in pairs:
        try:
            both, one, other = (take_rows(rows) for rows in (pair, pair[:1], pair[1:]))
        except BatchError as error:
            logger.info("rows %s could not be taken to probe the loss: %s", pair, error)
            continue
        try:
            measured = _measure(losses_of, (one, other, one, both))
        except AutomicroError:
            raise
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            return describe_failure(error, pair)
        if not all(_is_usable(losses, averages) for losses in measured):
            return None  # the training step says what is wrong
        first, second, again, together = measured
        for name, average in averages.items():
            values = [float(losses[name]) for losses in (first, second, together)]
            if math.isfinite(values[0]) and float(again[name]) != values[0]:
                logger.info("the loss is random in evaluation mode, so it could not be probed")
                return None
            weights = _weights(average, both, [one, other])
            if not math.isfinite(values[2]) or not any(weights):
                continue
            tolerance = _rounding(together[name])
            if not is_combination(values, weights, tolerance):
                cause = name_cause(values, average, tolerance, [one, other], find_targets)
                return f"{name!r}: {cause}" if name else cause
    return None


def _measure(losses_of: LossesOf, batches: Sequence[Any]) -> list[Losses]:
    try:
        return [losses_of(batch, training=False) for batch in batches]
    except Exception as error:
        if classify(error) is not Failure.UNRELATED:
            raise
        # Some models, such as detectors, give losses in training mode only.
        logger.debug("no loss in evaluation mode (%s: %s)", type(error).__name__, error)
    return [losses_of(batch, training=True) for batch in batches]


def _is_usable(losses: Losses, averages: Mapping[str, Average]) -> bool:
    found: Mapping[str, object] = losses  # what a user's function returns is not known
    return found.keys() == averages.keys() and all(
        isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()
        for loss in found.values()
    )


def _weights(average: Average, both: Any, parts: Sequence[Any]) -> tuple[float, float]:
    """The factors that the training step would use."""
    weights = microbatch_weights(average, both, parts, [1, 1])
    one, other = (1.0 if weight is None else float(weight) for weight in weights)
    return one, other


def _rounding(loss: Tensor) -> float:
    """Relative rounding to expect between the loss of two rows and of each of them."""
    if loss.dtype == torch.float64:
        return 1e-9
    if loss.dtype == torch.float32:
        return 2e-5 if loss.device.type == "cpu" else 1e-3
    return 2e-2
