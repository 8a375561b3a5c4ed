"""Gradients: set aside while an attempt runs, added to when it commits."""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from automicro.oom import Failure, classify, release

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

    def commit(self) -> None:
        if self._earlier:
            self._add_to_earlier()
        self._earlier = []
        self._begun = False

    def _add_to_earlier(self) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for parameter, earlier, copy in self._earlier:
            value = earlier if copy is None else copy
            if parameter.grad is None:  # the batch did not reach this parameter
                parameter.grad = value
            elif parameter.grad.layout is value.layout:
                # Into the attempt's own gradient: up to here everything can be rolled back.
                parameter.grad.add_(value)
            else:
                parameter.grad = value + parameter.grad
            pairs.append((earlier, parameter.grad))
        # From here on earlier values are overwritten, so the commit is carried through. Copying
        # complete totals can be repeated, and needs no memory of its own.
        failure = _copy_all(pairs)
        if failure is not None:
            release(failure, pairs[0][0].device)
            again = _copy_all(pairs)
            if again is not None and classify(again) is Failure.RETRYABLE:
                logger.warning("no memory to keep the earlier .grad tensors; new ones hold the sum")
                return
        for (parameter, _, _), (earlier, _) in zip(self._earlier, pairs, strict=True):
            parameter.grad = earlier
        if failure is not None and classify(failure) is not Failure.RETRYABLE:
            failure.add_note("automicro: the batch was committed, its gradient is in .grad")
            raise failure

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


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> BaseException | None:
    try:
        for earlier, total in pairs:
            if earlier is not total:
                earlier.copy_(total)
    except BaseException as error:
        return error
    return None
