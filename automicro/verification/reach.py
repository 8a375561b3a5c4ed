"""Which modules a function gets at by itself, past its arguments."""

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def captured_modules(function: Any) -> list[nn.Module]:
    """Modules with a state that a function holds in its closure, defaults or global names.

    A copy of the model does not replace these: the function would go on using the originals.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> captured_modules(lambda model, batch: model(batch) - teacher(batch)) == [teacher]
        True
        >>> captured_modules(lambda model, batch: model(batch).mean())
        []
    """
    seen: set[int] = set()
    found = {id(module): module for module in _walk(function, seen)}
    return [module for module in found.values() if _has_state(module)]


def _walk(value: Any, seen: set[int], depth: int = 6) -> Iterator[nn.Module]:
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        return
    for part in _reachable(value):
        yield from _walk(part, seen, depth - 1)


def _reachable(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not filled yet
                continue
        yield from value.__defaults__ or ()
        yield from (value.__kwdefaults__ or {}).values()
        for name in _global_names(value.__code__):
            if name in value.__globals__:
                yield value.__globals__[name]
    elif isinstance(value, functools.partial):
        # Its arguments are copied with it, functions in them are not.
        yield from (each for each in (value.func, *value.args) if not isinstance(each, nn.Module))
        yield from (v for v in value.keywords.values() if not isinstance(v, nn.Module))
    elif isinstance(value, types.MethodType):
        yield value.__func__
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _has_state(module: nn.Module) -> bool:
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return bool(tensors)
