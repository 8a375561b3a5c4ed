"""Gradients: set aside while an attempt runs, added to when it commits."""

import logging
from collections.abc import Iterable

import torch
from torch import Tensor

from automicro.oom import Failure, classify

logger = logging.getLogger(__name__)


class Gradients:
    """The ``.grad`` of parameters, and of inputs that require one.

    An attempt starts with no gradients at all. Rolling back drops what it made and puts the
    earlier tensors back. Committing adds into these *same* tensors, so that whoever holds them
    (a flat bucket, a captured graph) still holds the gradient. While gradients exist this costs a
    second set; ``zero_grad(set_to_none=True)`` before the step avoids it.

    A gradient that is a view of a larger storage is cloned too: whatever owns that storage (DDP's
    ``gradient_as_bucket_view``) may write into it during the attempt.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._earlier: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._begun = False

    def begin(self) -> None:
        self._earlier = [
            (parameter, gradient, gradient.clone() if _shares_storage(gradient) else None)
            for parameter in self._parameters
            if (gradient := parameter.grad) is not None
        ]
        self._begun = True
        for parameter, _, _ in self._earlier:
            parameter.grad = None

    def prepare(self) -> None:
        for parameter, earlier, copy in self._earlier:
            value = earlier if copy is None else copy
            if parameter.grad is None:  # the batch did not reach this parameter
                parameter.grad = value
            elif parameter.grad.layout is value.layout:
                parameter.grad.add_(value)  # into the attempt's own gradient
            else:
                parameter.grad = value + parameter.grad

    def commit(self) -> None:
        # Copying complete totals needs no memory of its own and can be repeated.
        failures = []
        for _ in range(2):
            failure = self._copy_totals()
            if failure is None:
                break
            failures.append(failure)
        else:
            logger.warning("not all earlier .grad tensors could be kept (%s)", failures[-1])
        self._earlier = []
        self._begun = False
        try:
            for failure in failures:
                if classify(failure) is not Failure.RETRYABLE:
                    raise failure
        finally:
            failures.clear()  # they hold this frame: a cycle
            failure = None

    def _copy_totals(self) -> BaseException | None:
        try:
            for parameter, earlier, _ in self._earlier:
                if parameter.grad is not None and parameter.grad is not earlier:
                    earlier.copy_(parameter.grad)
                    parameter.grad = earlier
        except BaseException as error:
            return error
        return None

    def roll_back(self) -> None:
        if not self._begun:
            return
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient, copy in self._earlier:
            if copy is not None:
                gradient.copy_(copy)
            parameter.grad = gradient
        self._earlier = []
        self._begun = False


def _shares_storage(gradient: Tensor) -> bool:
    if gradient.layout is not torch.strided:
        return False
    return gradient.untyped_storage().nbytes() != gradient.numel() * gradient.element_size()
