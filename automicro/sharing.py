"""The loss of a step: on the host in one read, and over all ranks."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from automicro.passes import Losses
from automicro.scalars import read_scalars, stack_scalars


def read_losses(losses: Losses) -> Losses:
    """The loss and its parts on the host. Waits for the device once, however many parts there are.

    >>> read_losses((torch.tensor(3.0), {"a": torch.tensor(1.0), "b": torch.tensor(2.0)}))
    (tensor(3.), {'a': tensor(1.), 'b': tensor(2.)})
    """
    loss, parts = losses
    every = [loss, *parts.values()]
    if all(each.device.type == "cpu" for each in every):
        return losses
    return _like(losses, stack_scalars(every).to("cpu").unbind())


def _like(losses: Losses, values: Iterable[Tensor]) -> Losses:
    """Other values for a loss and its parts, in their types."""
    loss, parts = losses
    loss, *others = (
        value.to(each.dtype) for each, value in zip((loss, *parts.values()), values, strict=True)
    )
    return loss, dict(zip(parts, others, strict=True))


class SharedLosses:
    """Adds up the losses of all ranks, each of which has divided its own by what all count.

    On the host the vote to commit carries them. On an accelerator reading them would make the host
    wait for the device, so there they are added up by one collective of its own, after the vote,
    unless somebody has to look at the loss before the commit.

    Args:
        device: where the model computes.
        at_once: whether the loss is looked at before the commit.
    """

    def __init__(self, device: torch.device, *, at_once: bool) -> None:
        self._device = device
        self._votes = at_once or device.type == "cpu"
        self._own: Tensor | None = None  # on an accelerator

    def numbers(self, result: Losses) -> Sequence[float]:
        """The loss and its parts, where the vote carries them."""
        loss, parts = result
        if self._votes:
            return read_scalars([loss, *parts.values()])
        # Before the vote: after it, running out of memory here would leave the others alone.
        self._own = stack_scalars([loss, *parts.values()]).to(self._device)
        return ()

    def together(self, result: Losses, sums: Sequence[float]) -> Losses:
        """The loss of all ranks and its parts."""
        stacked, self._own = self._own, None
        if stacked is None:
            return _like(result, torch.tensor(sums, dtype=torch.float64, device="cpu").unbind())
        from automicro.distributed import own_collectives  # slow to import

        with own_collectives():  # the vote to commit has just come before
            dist.all_reduce(stacked)
        return _like(result, stacked.unbind())
