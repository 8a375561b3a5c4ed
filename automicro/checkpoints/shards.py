"""What checkpoints ask of tensors of which each rank has a part."""

from typing import Any

from torch import Tensor

from automicro.shards import is_sharded, local


def is_pending(tensor: Tensor) -> bool:
    """Whether the value of a sharded tensor is still to be summed over ranks."""
    placements: Any = getattr(tensor, "placements", ())
    return any(each.is_partial() for each in placements)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; of a plain one all of it.

    >>> import torch
    >>> local_part(torch.ones(2))
    tensor([1., 1.])
    """
    return local(tensor.detach()) if is_sharded(tensor) else tensor
