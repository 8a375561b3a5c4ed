"""Changes that forwards make to attributes of modules and variables of functions."""

import array
import itertools
import math
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.reach import OF_EVERY_MODULE
from automicro.state.capture import Captured
from automicro.torch_private import buffer_table
from automicro.values import children, is_plain, walk

MISSING = object()
"""Stands for an attribute that is not there."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a value lies that forwards change: an attribute, or a variable of a function.

    Attributes:
        name: for people.
        owner: the module, object or function that has it.
        key: its name in there, as `children` has it.
    """

    name: str
    owner: Any
    key: str

    def read(self) -> Any:
        """The value; `MISSING` where there is none."""
        parts = _parts_of(self.owner)
        # A function may be named for a variable that others share with it.
        others = getattr(self.owner, "__globals__", {}).get(self.key, MISSING)
        return next((value for key, value in parts if key == self.key), others)

    @property
    def is_of_metric(self) -> bool:
        """Whether it is an attribute of a metric, which counts updates by itself."""
        return all(hasattr(type(self.owner), each) for each in ("update", "compute", "reset"))

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer of a module."""
        name = self.key.lstrip(".")
        return isinstance(self.owner, nn.Module) and name in buffer_table(self.owner)

    @property
    def identity(self) -> tuple[int, str]:
        """The same for the same place."""
        return id(self.owner), self.key


def changed_places(roots: Mapping[str, Any], captured: Captured) -> list[Place]:
    """The attributes and variables in which something is not as it was captured."""
    paths = list(captured.changed())
    if not paths:
        return []
    known: dict[str, list[Place]] = {}
    for path, value in walk(roots):
        is_function = isinstance(value, types.FunctionType)
        is_module = isinstance(value, nn.Module)
        if not (is_function or is_module or path in roots):
            continue
        start = "" if is_function else path
        shown = start if path not in roots else "" if is_module else type(value).__name__
        for key, _ in _parts_of(value):
            if is_function or key[:1] in (".", "["):
                name = key if is_function else f"{shown}{key}".lstrip(".")
                place = Place(name=name, owner=value, key=key)
                known.setdefault(f"{start}{key}".lstrip("."), []).append(place)
    found: dict[tuple[int, str], Place] = {}
    for path in paths:
        ends = [len(path), *(each.start() for each in re.finditer(r"[.\[]", path))]
        # The longest path that is known is that of the innermost owner.
        starts = (path[:end] for end in sorted(ends, reverse=True))
        for place in next((known[start] for start in starts if start in known), []):
            found.setdefault(place.identity, place)
    return [each for each in found.values() if each.key.lstrip(".") not in OF_EVERY_MODULE]


def _parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    return itertools.chain(children(owner), children(type(owner)))


_MOST_VALUES, _MOST_BYTES, _DEPTH = 10_000, 2**24, 12
_ROUNDING = 1e-5  # of the state of a forward in float32, added up in another order


class Snapshot:
    """A value at one moment, for comparison with another moment.

    Tensors and arrays are copied. What is too deep or too much, and what says nothing of itself,
    counts as the same.

    Example:
        >>> before = Snapshot({"step": 1, "mean": torch.zeros(2)})
        >>> before.is_like(Snapshot({"step": 1, "mean": torch.full((2,), 1e-9)}))
        True
        >>> before.is_like(Snapshot({"step": 2, "mean": torch.zeros(2)}))
        False
    """

    def __init__(self, value: Any) -> None:
        self._left = _MOST_VALUES
        self._frozen = self._freeze(value, _DEPTH)

    def is_like(self, other: "Snapshot") -> bool:
        """Whether both are the same but for rounding."""
        return _are_alike(self._frozen, other._frozen, near_zero=True)

    def repeats(self, other: "Snapshot") -> bool:
        """Whether both are the same to the digits that count, however small they are.

        As the same computation leaves them: two durations do not, though both are near zero.
        """
        return _are_alike(self._frozen, other._frozen, near_zero=False)

    def _freeze(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
            return value
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _numbers(value)
        if isinstance(value, bytearray | array.array):
            return bytes(value)
        is_apart = isinstance(value, nn.Module | types.FunctionType | type) or is_plain(value)
        if is_apart or depth == 0 or self._left <= 0:
            return type(value)
        held = [(name, self._freeze(each, depth - 1)) for name, each in children(value)]
        # The order of a set is none.
        return sorted(held, key=repr) if isinstance(value, set | frozenset) else dict(held)


def _numbers(value: Any) -> Any:
    """A copy of a tensor or an array in double precision; the shape of what has no such numbers."""
    is_tensor = isinstance(value, Tensor)
    is_read = value.layout is torch.strided if is_tensor else value.dtype.kind in "biufc"
    if not is_read or value.nbytes > _MOST_BYTES:
        return tuple(value.shape)
    # In double precision on the host, so that the comparison adds no rounding and holds no device
    # memory.
    copy = value.detach() if is_tensor else torch.from_numpy(np.array(value))
    return copy.cpu().to(torch.complex128 if copy.is_complex() else torch.float64, copy=True)


def _are_alike(one: Any, other: Any, *, near_zero: bool) -> bool:
    """Whether they are, to ``_ROUNDING`` of them, or, near zero, of one."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        # `allclose` would broadcast shapes, and an empty tensor has no largest value.
        if one.shape != other.shape or not one.numel():
            return one.shape == other.shape
        scale = 1.0 if near_zero else float(one.nan_to_num().abs().max())
        rounding = _ROUNDING * scale
        return torch.allclose(one, other, rtol=_ROUNDING, atol=rounding, equal_nan=True)
    if isinstance(one, float) and isinstance(other, float):
        rounding = _ROUNDING if near_zero else 0.0
        return one == other or math.isclose(one, other, rel_tol=_ROUNDING, abs_tol=rounding)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _are_alike(one[key], other[key], near_zero=near_zero) for key in one
        )
    return type(one) is type(other) and bool(one == other)
