"""Whether two tensors hold the same values."""

from torch import Tensor


def same_content(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every value agree; NaN agrees with NaN. Waits for the device.

    Example:
        >>> import torch
        >>> same_content(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
        True
    """
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    one, other = one.detach(), other.detach().to(one.device)
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same |= (one != one) & (other != other)
    return bool(same.all())
