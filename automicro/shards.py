"""Tensors of which every rank holds a part: which they are, and the part that lies here."""

from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is sharded, or laid out over ranks in another way.

    >>> import torch
    >>> is_sharded(torch.ones(2))
    False
    """
    # By its method: to import DTensor is slow, and one process has none.
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """What lies on this rank.

    >>> import torch
    >>> local(torch.ones(2)).shape
    torch.Size([2])
    """
    if not is_sharded(tensor):
        return tensor
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part
