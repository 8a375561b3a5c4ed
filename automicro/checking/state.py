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

_HOOKS = frozenset(name for name in OF_EVERY_MODULE if "hook" in name)

MISSING = object()
"""Value of a place whose attribute does not exist."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Attribute or function variable that forwards change."""

    name: str  # for messages
    owner: Any  # the module, object or function that has it
    key: str  # its key among the owner's `children`

    def read(self) -> Any:
        """Return the current value, or `MISSING`."""
        parts = _parts_of(self.owner)
        # A function might be named for a variable that it shares with other functions.
        others = getattr(self.owner, "__globals__", {}).get(self.key, MISSING)
        return next((value for key, value in parts if key == self.key), others)

    @property
    def is_of_metric(self) -> bool:
        """Whether it belongs to a metric, which counts its own updates."""
        return all(hasattr(type(self.owner), each) for each in ("update", "compute", "reset"))

    @property
    def is_buffer(self) -> bool:
        """Whether it is a buffer of a module."""
        name = self.key.lstrip(".")
        return isinstance(self.owner, nn.Module) and name in buffer_table(self.owner)

    @property
    def identity(self) -> tuple[int, str]:
        """A key that is equal for equal places."""
        return id(self.owner), self.key


def changed_places(roots: Mapping[str, Any], captured: Captured) -> list[Place]:
    """Return the attributes and variables whose value differs from the captured one."""
    paths = list(captured.changed())
    if not paths:
        return []
    known: dict[str, list[Place]] = {}
    for path, value in walk(roots):
        is_function = isinstance(value, types.FunctionType)
        is_module = isinstance(value, nn.Module)
        # A table of hooks, or the object whose method is one, such as a recorder of activations.
        last = path.rpartition(".")[2]
        is_hooked = last.partition("[")[0] in _HOOKS
        is_start = is_hooked or path in roots
        if not (is_function or is_module or is_start):
            continue
        start = "" if is_function else path
        shown = start if not is_start else "" if is_module else type(value).__name__
        for key, part in _parts_of(value):
            if is_function or key[:1] in (".", "["):
                name = key if is_function else f"{shown}{key}".lstrip(".")
                if last in _HOOKS:
                    name = type(getattr(part, "__self__", part)).__name__
                place = Place(name=name, owner=value, key=key)
                known.setdefault(f"{start}{key}".lstrip("."), []).append(place)
    found: dict[tuple[int, str], Place] = {}
    for path in paths:
        ends = [len(path), *(each.start() for each in re.finditer(r"[.\[]", path))]
        # The longest known path belongs to the innermost owner.
        starts = (path[:end] for end in sorted(ends, reverse=True))
        for place in next((known[start] for start in starts if start in known), []):
            found.setdefault(place.identity, place)
    return [each for each in found.values() if each.key.lstrip(".") not in OF_EVERY_MODULE]


def _parts_of(owner: Any) -> Iterator[tuple[str, Any]]:
    return itertools.chain(children(owner), children(type(owner)))


_MOST_VALUES, _MOST_BYTES, _DEPTH = 10_000, 2**24, 12
_ROUNDING = 1e-5  # for the state of a float32 forward that is summed in a different order


class Snapshot:
    """Copy of a value for comparison with its value at another time.

    Values that are too deep, too large or opaque count as equal.

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
        """Return whether both are equal up to rounding."""
        return _are_alike(self._frozen, other._frozen, near_zero=True)

    def repeats(self, other: "Snapshot") -> bool:
        """Return whether both agree to their significant digits, however small they are."""
        # Two durations near zero are alike but do not repeat; the same computation does.
        is_read = type(self._frozen) is not tuple  # the shape of a tensor that is too large
        return is_read and _are_alike(self._frozen, other._frozen, near_zero=False)

    def _freeze(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
            return value
        if isinstance(value, Tensor) and vars(value):  # such as the gradient of each sample
            return {"": _numbers(value), "attributes": self._freeze(vars(value), depth - 1)}
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return _numbers(value)
        if isinstance(value, bytearray | array.array):
            return bytes(value)
        is_apart = isinstance(value, nn.Module | types.FunctionType | type) or is_plain(value)
        if is_apart or depth == 0 or self._left <= 0:
            return type(value)
        held = [(name, self._freeze(each, depth - 1)) for name, each in children(value)]
        # Sets have no order.
        return sorted(held, key=repr) if isinstance(value, set | frozenset) else dict(held)


def _numbers(value: Any) -> Any:
    """Return a float64 copy of a tensor or array, or the shape if it cannot be copied."""
    is_tensor = isinstance(value, Tensor)
    is_read = value.layout is torch.strided if is_tensor else value.dtype.kind in "biufc"
    if not is_read or value.nbytes > _MOST_BYTES:
        return tuple(value.shape)
    # In float64 on the host: the comparison adds no rounding and holds no device memory.
    copy = value.detach() if is_tensor else torch.from_numpy(np.array(value))
    return copy.cpu().to(torch.complex128 if copy.is_complex() else torch.float64, copy=True)


def _are_alike(one: Any, other: Any, *, near_zero: bool) -> bool:
    """Return whether values agree to relative ``_ROUNDING``, absolute near zero if wanted."""
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
