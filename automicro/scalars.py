"""Numbers that lie on a device: several are read at once, because each reading waits for it."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """One tensor of several 0-d ones, in the widest type of them, which holds each exactly.

    >>> stack_scalars([torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16)])
    tensor([1., 2.])
    """
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in scalars))
    place = scalars[0].device
    return torch.stack([each.detach().to(place, dtype) for each in scalars])


def read_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """The values of 0-d tensors. Waits once for a device, however many there are.

    >>> read_scalars([torch.tensor(1.0), torch.tensor(2.0)])
    [1.0, 2.0]
    """
    there = [each for each in scalars if each.device.type != "cpu"]
    if len(there) < 2:
        return [each.item() for each in scalars]
    read = iter(stack_scalars(there).tolist())
    return [each.item() if each.device.type == "cpu" else next(read) for each in scalars]
