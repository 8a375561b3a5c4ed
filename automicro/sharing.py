"""The loss of a step over all ranks: with the last vote, or on the device without waiting."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from automicro.passes import Losses


class SharedLosses:
    """Adds up the losses of all ranks, each of which has divided its own by what all count.

    On the host the vote to commit carries them. On an accelerator reading them would make the host
    wait for the device, so there they are added up by one collective of its own, after the vote,
    unless somebody has to look at the loss before the commit.

    Args:
        device: where the losses lie.
        at_once: whether the loss is looked at before the commit.
    """

    def __init__(self, device: torch.device, *, at_once: bool) -> None:
        self._votes = at_once or device.type == "cpu"

    def numbers(self, result: Losses) -> Sequence[float]:
        """The loss and its parts, where the vote carries them."""
        loss, parts = result
        return [each.item() for each in (loss, *parts.values())] if self._votes else ()

    def together(self, result: Losses, sums: Sequence[float]) -> Losses:
        """The loss of all ranks and its parts."""
        loss, parts = result
        if self._votes:
            added = [loss.new_tensor(each) for each in sums]
        else:
            stacked = torch.stack([loss, *parts.values()])
            from automicro.distributed import own_collectives  # slow to import

            with own_collectives():  # the vote to commit has just come before
                dist.all_reduce(stacked)
            added = list(stacked.unbind())
        return added[0], dict(zip(parts, added[1:], strict=True))
