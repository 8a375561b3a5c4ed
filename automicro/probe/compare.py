"""Comparing the loss of a few rows with the losses of their parts."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, float32, float64

from automicro.errors import AutomicroError, BatchError
from automicro.oom import Failure, classify
from automicro.probe.causes import Comparison, describe_failure, name_cause
from automicro.weighting import Average, microbatch_weights

logger = logging.getLogger(__name__)

Losses = Mapping[str, Tensor]


class LossesOf(Protocol):
    """The losses of a few rows by name, without gradients; empty where there are none."""

    def __call__(self, rows: Any, *, training: bool) -> Losses:
        """In evaluation mode, or in as much of training mode as does not mix or draw."""


class Comparisons:
    """Losses of rows apart and together, gathered until they show what a loss is.

    Args:
        losses_of: computes losses the same way for every call.
        batch: the whole batch.
        take_rows: a batch of the rows at these indices.
        averages: what each loss is taken for, by name.
    """

    def __init__(
        self,
        losses_of: LossesOf,
        batch: Any,
        take_rows: Callable[[Sequence[int]], Any],
        averages: Mapping[str, Average],
    ) -> None:
        self._losses_of = losses_of
        self._batch = batch
        self._take_rows = take_rows
        self._averages = averages
        self._found: dict[str, list[Comparison]] = {name: [] for name in averages}
        self._failure: str | None = None
        self.has_looked = False

    def add(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Compare the rows at these indices; False where further rows would show nothing.

        Raises:
            AutomicroError: the forward gives no usable loss.
        """
        rows = [*one, *other]
        try:
            low, high, both = (self._take_rows(each) for each in (one, other, rows))
        except BatchError as error:
            logger.info("rows %s could not be taken to probe the loss: %s", rows, error)
            return True
        try:
            measured = _measure(self._losses_of, (low, high, low, both))
        except AutomicroError:
            raise
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            if not self.has_looked and self._whole_batch_has_losses():
                self._failure = describe_failure(error, rows)
            return False
        if not all(_is_usable(losses, self._averages) for losses in measured):
            self._found.clear()
            return False  # the training step says what is wrong
        self.has_looked = True
        sizes = (len(one), len(other))
        for name, average in self._averages.items():
            first, second, again, together = (float(losses[name]) for losses in measured)
            if math.isfinite(first) and again != first:
                logger.info("the loss is random in evaluation mode, so it could not be probed")
                self._found.clear()
                return False
            weights = _weights(average, both, [low, high], sizes)
            if not math.isfinite(together) or not any(weights):
                continue
            comparison = Comparison(
                values=(first, second, together),
                parts=(low, high),
                sizes=sizes,
                weights=weights,
                tolerance=_rounding(measured[-1][name]),
            )
            self._found[name].append(comparison)
        return True

    def cause(self, find_targets: Callable[[Any], Any]) -> str | None:
        """What does not add up and what to do, or None where all is well."""
        for name, found in self._found.items():
            if not all(each.adds_up for each in found):
                cause = name_cause(found, self._averages[name], find_targets)
                return f"{name!r}: {cause}" if name else cause
        return self._failure

    def _whole_batch_has_losses(self) -> bool:
        """Whether it is the choice of rows, and no mistake in the model, that left no loss."""
        try:
            _measure(self._losses_of, [self._batch])
        except Exception as error:
            if classify(error) is not Failure.UNRELATED:
                raise
            return False
        return True


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


def _weights(
    average: Average, both: Any, parts: Sequence[Any], sizes: Sequence[int]
) -> tuple[float, float]:
    """The factors that the training step would use."""
    weights = microbatch_weights(average, both, parts, sizes)
    one, other = (1.0 if weight is None else float(weight) for weight in weights)
    return one, other


def _rounding(loss: Tensor) -> float:
    """Relative rounding to expect between the loss of a few rows and of parts of them."""
    if loss.dtype == float64:
        return 1e-9
    if loss.dtype == float32:
        return 2e-5 if loss.device.type == "cpu" else 1e-3
    return 2e-2
