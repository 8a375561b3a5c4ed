"""Bit-exact pictures of values, and a check that changes are rolled back or committed."""

import array
import collections
import functools
import random
import types
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.state.capture import capture

# Hook handles have different numbers in each run.
_HOOKS = {name for name in vars(nn.Module()) if "hook" in name}
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))


def picture(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Return a value as nested tuples of plain values; objects by their attributes and slots.

    >>> picture({"a": [1, {2}]}) == picture({"a": [1, {2}]}), picture([1]) == picture([1.0])
    (True, False)
    """
    seen, name = {} if seen is None else seen, type(value).__name__
    if isinstance(value, _PLAIN):
        return name, repr(value)
    if id(value) in seen:
        return "again", seen[id(value)][0]
    seen[id(value)] = len(seen), value  # keeps the value, so that its id is not reused
    content, attributes = _content(value, seen), _attributes(value)
    return name, content, [(key, picture(attributes[key], seen)) for key in sorted(attributes)]


def _content(value: Any, seen: dict[int, Any]) -> Any:
    def inside(values: Any) -> list[Any]:
        return [picture(each, seen) for each in values]

    match value:
        case Tensor():
            return _of_tensor(value)
        case np.ndarray():
            is_plain = not value.dtype.hasobject
            return (
                str(value.dtype),
                value.shape,
                value.tobytes() if is_plain else inside(value.flat),
            )
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.random.RandomState() | torch.Generator():
            return repr(_as_lists(value.get_state()))
        case random.Random():
            return value.getstate()
        case bytearray() | array.array():
            return bytes(value)
        case dict() | collections.UserDict():
            return [inside(item) for item in value.items()]
        case set() | frozenset():
            return sorted(map(repr, inside(value)))
        case list() | tuple() | collections.deque():
            return inside(value)
        case functools.partial():
            return inside([value.func, value.args, value.keywords])
        case types.MethodType():
            return inside([value.__self__, value.__func__])
        case type() | types.FunctionType():
            return value.__qualname__
    return ""


def _of_tensor(value: Tensor) -> Any:
    plain = value.detach()
    plain = plain.to_local() if hasattr(plain, "to_local") else plain
    about = plain.dtype, tuple(plain.shape), plain.layout, plain.device.type, value.requires_grad
    if plain.is_meta:
        return about
    return *about, [_bits(part) for part in (plain.unbind() if plain.is_nested else [plain])]


def _bits(plain: Tensor) -> bytes:
    if plain.is_quantized:
        plain = plain.int_repr()
    # A copy, because viewed NumPy memory cannot be resized.
    dense = plain.to_dense().resolve_conj().resolve_neg().reshape(-1).clone()
    return dense.view(torch.uint8).numpy().tobytes()


def _attributes(value: Any) -> dict[str, Any]:
    if isinstance(value, type):
        return {}
    tables = (vars(each) for each in type(value).__mro__ if "__slots__" in vars(each))
    slots = [n for each in tables for n, s in each.items() if type(s) is types.MemberDescriptorType]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    if isinstance(value, Tensor) and value.is_leaf:
        hooks = value._backward_hooks, value._post_accumulate_grad_hooks
        found["hooks"] = [list(each.values()) if each else [] for each in hooks]
    return {
        name: [*each.values()] if name in _HOOKS and isinstance(each, dict) else each
        for name, each in found.items()
    }


def _as_lists(state: Any) -> Any:
    return state.tolist() if isinstance(state, Tensor) else [str(list(np.ravel(e))) for e in state]


class Box:
    def __init__(self, **values):
        vars(self).update(values)


def count(owner, name="n", number=1):
    setattr(owner, name, getattr(owner, name, 0) + number)


def quantized():
    return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


def undone(roots, change, see=list, *, times=3, skip=()):
    """Check that a change is visible, can be rolled back repeatedly, and is kept on commit."""
    captured = capture(roots, skip=skip)
    shown = []
    for _ in range(times):
        assert list(captured.changed()) == []
        before = picture(see())
        for _ in range(2):
            change()
            assert picture(see()) != before, "the test's change changes nothing"
            shown = list(captured.changed())
            assert shown, "the change does not show"
            captured.put_back()
            assert picture(see()) == before
            assert list(captured.changed()) == []
        captured.put_back()
        assert picture(see()) == before
        change()
        captured = captured.again()
    return shown
