"""What functions get at by themselves, past their arguments: modules, variables, objects."""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

_DEPTH = 6
_LIBRARIES = ("torch", "numpy", "torchmetrics", "transformers", "automicro")


class Variable:
    """A place that a function reads: a cell of its closure, or a global name.

    Attributes:
        value: what lies there now.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._read = read
        self._write = write

    @property
    def value(self) -> Any:
        return self._read()

    def put(self, value: Any) -> None:
        """Let it hold something else."""
        self._write(value)


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
    return [module for module in reached_modules([function]) if _has_state(module)]


def reached_modules(functions: Sequence[Any]) -> list[nn.Module]:
    """All modules that functions hold, metrics and other ones without parameters too."""
    seen: set[int] = set()
    found = {
        id(value): value
        for function in functions
        for value in _walk(function, seen)
        if isinstance(value, nn.Module)
    }
    return list(found.values())


def reached_variables(functions: Sequence[Any]) -> list[Variable]:
    """The cells and global names that functions of the caller read, each once.

    Functions that they call are asked too, those of libraries are not.
    """
    seen: set[int] = set()
    found: dict[tuple[int, str], Variable] = {}
    for function in functions:
        for each in _walk(function, seen):
            if isinstance(each, types.FunctionType) and not _is_of_library(each):
                found.update(_variables_of(each))
    return list(found.values())


def reached_objects(functions: Sequence[Any]) -> list[Any]:
    """Objects whose methods the functions are, and callable ones: what they keep may change."""
    found = []
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        owner = function.__self__ if isinstance(function, types.MethodType) else function
        if not isinstance(owner, nn.Module | types.FunctionType | type) and hasattr(
            owner, "__dict__"
        ):
            found.append(owner)
    return found


def _walk(value: Any, seen: set[int], depth: int = _DEPTH) -> Iterator[Any]:
    """Modules and functions, from the outside in; not what lies inside of modules."""
    if depth == 0 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        yield value
        return
    if isinstance(value, types.FunctionType):
        yield value
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
        yield value.__self__
    elif isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif _is_callable_object(value):
        yield from vars(value).values()
        yield type(value).__call__


def _is_callable_object(value: Any) -> bool:
    is_object = callable(value) and not isinstance(value, type | types.ModuleType)
    return is_object and isinstance(getattr(value, "__dict__", None), dict)


def _variables_of(function: types.FunctionType) -> dict[tuple[int, str], Variable]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            contents = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if _may_change(contents):
            found[id(cell), name] = _cell(cell)
    names = function.__globals__
    for name in _global_names(function.__code__):
        if name in names and _may_change(names[name]):
            found[id(names), name] = _global(names, name)
    return found


def _may_change(value: Any) -> bool:
    return not isinstance(value, nn.Module | type | types.ModuleType | types.FunctionType)


def _cell(cell: types.CellType) -> Variable:
    def write(value: Any) -> None:
        cell.cell_contents = value

    return Variable(lambda: cell.cell_contents, write)


def _global(names: dict[str, Any], name: str) -> Variable:
    return Variable(lambda: names[name], functools.partial(names.__setitem__, name))


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_of_library(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _LIBRARIES


def _has_state(module: nn.Module) -> bool:
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return bool(tensors)
