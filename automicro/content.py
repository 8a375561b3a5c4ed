"""Whether two tensors, or two values made of tensors, are the same."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automicro.torch_private import sparse_parts


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
    if one.is_nested or one.layout is not torch.strided:
        return all(map(same_content, _dense_parts(one), _dense_parts(other)))
    same = one == other
    if one.is_floating_point() or one.is_complex():
        same |= (one != one) & (other != other)
    return bool(same.all())


def _dense_parts(value: Tensor) -> list[Tensor]:
    """What a nested or sparse tensor is made of."""
    if value.is_nested:
        return list(value.unbind())
    if value.layout is torch.sparse_coo:
        return sparse_parts(value)
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    return [value.ccol_indices(), value.row_indices(), value.values()]


def same_values(one: Any, other: Any) -> bool:
    """Whether two values are alike: plain ones, tensors and arrays, nested as they may be.

    Example:
        >>> import torch
        >>> same_values({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 1]})
        True
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return same_content(one, other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    return bool(one == other)
