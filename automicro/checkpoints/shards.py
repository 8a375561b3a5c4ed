"""Tensors of which each rank has a part (DTensor), without importing what makes them."""

import sys
from typing import Any

from torch import Tensor


def is_sharded(tensor: object) -> bool:
    """Whether ranks hold parts of a tensor, or agreed copies of it, on a device mesh.

    >>> import torch
    >>> is_sharded(torch.ones(2))
    False
    """
    # Where nobody imported it there is none; importing it takes half a second.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


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
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    part: Tensor = sharded.to_local()
    return part
