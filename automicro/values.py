"""Values of any kind: whether two are the same, as text, and as numbers read from a device."""

import array
import functools
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.torch_private import sparse_parts
from automicro.units import Duration


def comes_from(value: object, *names: str) -> bool:
    """Whether a value is of a class, or of a subclass of one, that a library calls so.

    Args:
        value: any.
        names: of classes with the package that they are in: ``"torch.Tensor"``, wherever in it.

    >>> import fractions
    >>> comes_from(fractions.Fraction(1), "fractions.Fraction"), comes_from(1, "torch.Tensor")
    (True, False)
    """
    classes = type(value).__mro__
    homes = {f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in classes}
    return not homes.isdisjoint(names)


def same_content(one: Tensor, other: Tensor) -> bool:
    """Whether shape, dtype and every bit agree, so that NaN agrees with NaN. Waits for the device.

    Example:
        >>> import torch
        >>> same_content(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
        True
    """
    if one.dtype != other.dtype or one.layout != other.layout or one.is_nested != other.is_nested:
        return False
    if not one.is_nested and one.shape != other.shape:  # ragged sizes are symbols
        return False
    if one.is_meta or other.is_meta:
        return one.is_meta and other.is_meta
    parts = dense_parts(one.detach())
    others = dense_parts(other.detach().to(one.device))
    return len(parts) == len(others) and all(map(_same_bits, parts, others))


def dense_parts(value: Tensor) -> list[Tensor]:
    """The dense tensors that a sparse, quantized, nested or sharded one is made of.

    >>> import torch
    >>> len(dense_parts(torch.eye(2).to_sparse()))
    2
    """
    if hasattr(value, "__tensor_flatten__"):
        inner = (getattr(value, name) for name in value.__tensor_flatten__()[0])
        return [part for each in inner for part in dense_parts(each)]
    if value.is_nested:
        return list(value.unbind())
    if value.is_quantized:
        return [value.int_repr()]
    if value.layout is torch.sparse_coo:
        return sparse_parts(value)
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return [value]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    bits = _BITS[min(one.itemsize, 8)]
    lines = [each.resolve_conj().resolve_neg().reshape(-1) for each in (one, other)]
    return torch.equal(*(each.view(bits) for each in lines))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VALUES = (dict, list, tuple, int, float, complex, str, bytes, bytearray, array.array, torch.Size)


def same_values(one: Any, other: Any, *, by_identity: bool = False) -> bool:
    """Whether two values are alike: plain ones, tensors and arrays, nested as they may be.

    Args:
        one: a value.
        other: another.
        by_identity: whether objects must be the same; if not, their classes say whether they are.

    Example:
        >>> import torch
        >>> same_values({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 1]})
        True
    """
    kind = type(one)
    if one is other or kind is not type(other):
        return one is other
    if issubclass(kind, Tensor):
        return same_content(one, other)
    if issubclass(kind, np.ndarray):
        return _same_arrays(one, other)
    if by_identity and kind not in _VALUES:
        return False
    same = functools.partial(same_values, by_identity=by_identity)
    if issubclass(kind, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if issubclass(kind, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    is_nan = kind in (float, complex) and one != one and other != other
    return is_nan or bool(one == other)


def _same_arrays(one: Any, other: Any) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.hasobject:
        return all(map(operator.is_, one.flat, other.flat))
    return bool(one.tobytes() == other.tobytes())


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """One tensor of several 0-d ones, in the widest type of them, which holds each exactly.

    >>> stack_scalars([torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16)])
    tensor([1., 2.])
    """
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in scalars))
    place = scalars[0].device
    return torch.stack([each.detach().to(place, dtype) for each in scalars])


def alone(scalar: Tensor) -> Tensor:
    """A number without a graph, in memory that holds nothing else.

    Kernels may leave a mean in the memory of its terms, which would live as long as the mean does.

    >>> scalar = torch.nn.functional.mse_loss(torch.ones(1000), torch.zeros(1000))
    >>> alone(scalar), alone(scalar).untyped_storage().nbytes()
    (tensor(1.), 4)
    """
    detached = scalar.detach()
    if type(detached) is not Tensor or detached.layout is not torch.strided:
        return detached
    is_alone = detached.untyped_storage().nbytes() <= detached.element_size()
    return detached if is_alone else detached.clone()


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


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def as_text(value: Any) -> str:
    """A value as text without what is another in each process, such as an address.

    Args:
        value: anything; of what is no plain value, the name of its class or its own is taken.

    >>> as_text({"lr": [0.1, None]}), as_text(nn.MSELoss()), as_text(nn.functional.mse_loss)
    ("{'lr': [0.1, None]}", 'MSELoss', 'mse_loss')
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, Duration | Path):
        return repr(str(value))
    if isinstance(value, Mapping) and not isinstance(value, nn.Module):
        return "{" + ", ".join(f"{as_text(k)}: {as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if isinstance(value, functools.partial):
        options = as_text(value.keywords) if value.keywords else ""
        return f"partial({', '.join([as_text(value.func), *map(as_text, value.args), options])})"
    if type(value).__module__.startswith("automicro."):
        return _ADDRESS.sub("", repr(value))
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    return name
