"""Tensors of which every rank has a part (DTensor), without importing what makes them."""

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


def local(tensor: Tensor) -> Tensor:
    """What lies on this rank; of a plain tensor all of it.

    >>> import torch
    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part
