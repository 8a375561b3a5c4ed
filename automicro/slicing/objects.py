"""Objects that nothing tells how to open: their attributes, and copies of them."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_OF_ITS_OWN = (
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
    "__del__",
    "__enter__",
    "__next__",
)
"""Methods of a class whose values hold more than their attributes: a file, memory of C."""


def state_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its dictionary and in slots.

    >>> state_of(types.SimpleNamespace(a=1))
    {'a': 1}
    """
    state = dict(getattr(value, "__dict__", ()))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(value, name):
                state[name] = getattr(value, name)
    return state


def copy_object(value: Any) -> Any:
    """A copy that a forward may change, of an object that says how, or that is its attributes.

    Tensors, arrays and containers among the attributes are copied. Whatever holds more (an open
    image) is handed on as it is.

    >>> class Row:
    ...     words = ["a"]
    >>> copy_object(Row()) is Row(), copy_object(len) is len
    (False, True)
    """
    cls = type(value)
    if hasattr(cls, "__copy__"):
        return copy.copy(value)
    if not is_its_attributes(cls):
        return value
    try:
        new = copy.copy(value)
    except TypeError:  # it cannot be made
        return value
    for name, part in state_of(value).items():
        if isinstance(part, torch.Tensor):
            object.__setattr__(new, name, part.clone())
        elif isinstance(part, dict | list | set | bytearray | np.ndarray):
            object.__setattr__(new, name, part.copy())
    return new


@functools.lru_cache(maxsize=1024)
def _is_its_attributes(cls: type) -> bool:
    """Whether a value of a class is nothing but its attributes, so that a copy is as good."""
    is_function = issubclass(cls, types.FunctionType | types.BuiltinFunctionType | type)
    return not is_function and all(
        getattr(cls, name, None) is getattr(object, name, None) for name in _OF_ITS_OWN
    )


# Typed anew: mypy takes the argument of a cached function for any hashable, which type[Any] is not.
is_its_attributes: Callable[[type], bool] = _is_its_attributes
