"""What functions and modules get at by themselves, past their arguments: modules, generators."""

import functools
import itertools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from automicro.options import unwrapped
from automicro.state.values import (
    OBJECT,
    Kind,
    Kinds,
    children,
    is_generator,
    kinds_of,
    places,
    table_of,
    walk,
)

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes that a module has without any of its own."""

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MOST_ELEMENTS = 100  # of a container; longer ones of a loader hold data
# Attributes of loaders and samplers: a pass that is under way, and the data by another name.
_NOTHING_OF_ITS_OWN = frozenset(("_iterator", "data_source"))


class Reach:
    """Modules and generators that some functions and modules get at, wherever these lie.

    Looked through is what `walk` looks through. Remembered are the places, so that what stands
    there later is found, too.

    Args:
        roots: functions and modules, by their names.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> def make(teachers, noise):
        ...     return lambda x, targets: (x - teachers[0](targets)).sum() * noise.random()
        >>> noise = np.random.default_rng(0)
        >>> reach = Reach({"loss": make([teacher], noise)})
        >>> list(reach.modules()), reach.generators() == [noise]
        (['teachers[0]'], True)
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = dict(roots)
        self._steps = 0
        self._walk()

    def step(self) -> None:
        """Look again, for new places, before batches 2, 4, 8 …; call it before each."""
        self._steps += 1
        if self._steps > 1 and self._steps & (self._steps - 1) == 0:
            self._walk()

    def modules(self) -> dict[str, nn.Module]:
        """The modules by where they were found, each once, without the roots and their parts."""
        found: dict[str, nn.Module] = {}
        known = set(self._known)
        for path, module in self._read():
            if isinstance(module, nn.Module) and id(module) not in known:
                known |= set(map(id, module.modules()))
                found[unused_name(path, found)] = module
        return found

    def generators(self) -> list[Any]:
        """The generators of random numbers, each once."""
        return list({id(each): each for _, each in self._read() if is_generator(each)}.values())

    def named_generators(self) -> dict[str, Any]:
        """The same without those of the process, by names that are the same in each run."""
        return generators_in({name: unwrapped(each) for name, each in self._roots.items()})

    def _read(self) -> Iterator[tuple[str, Any]]:
        """What stands where modules and generators were found."""
        for place in self._places:
            held = {place.name: place.value} if place.owner is None else children(place.owner)
            yield place.path, dict(held).get(place.name)

    def _walk(self) -> None:
        roots = [each for each in self._roots.values() if isinstance(each, nn.Module)]
        self._known = {id(each) for root in roots for each in root.modules()}
        self._places = [
            each._replace(value=each.value if each.owner is None else None)
            for each in places(self._roots)
            if is_generator(each.value)
            or (isinstance(each.value, nn.Module) and id(each.value) not in self._known)
        ]


def generators_in(roots: Mapping[str, Any], kinds: Kinds = kinds_of) -> dict[str, Any]:
    """Generators that some values get at, but those of the process, by where they are.

    >>> noise = random.Random(0)
    >>> generators_in({"loss": {"noises": [noise, random.random]}}) == {"loss['noises'][0]": noise}
    True
    """
    found: dict[str, Any] = {}
    for path, value in walk(roots, kinds):
        if is_generator(value) and not any(value is each for each in _OF_THE_PROCESS):
            found[unused_name(path, found)] = value
    return found


_OF_THE_PROCESS = (random._inst, np.random.mtrand._rand, torch.default_generator)


@functools.lru_cache(5_000)
def kinds_of_loading(kind: type) -> tuple[Kind, ...]:
    """What a walk through a loader looks into: also samplers and data sets, but not into data."""
    found = kinds_of(kind)
    if issubclass(kind, _CONTAINERS):
        return tuple(each._replace(read=functools.partial(_read_short, each)) for each in found)
    is_a_pass = issubclass(kind, Iterator | type | types.ModuleType)
    is_of_python = kind.__module__.partition(".")[0] in sys.stdlib_module_names
    if found or is_a_pass or is_of_python or not kind.__dictoffset__:
        return found
    return (_LOADING,)


def _read_short(kind: Kind, value: Any) -> Any:
    return kind.read(value) if len(value) <= _MOST_ELEMENTS else ()


def _read_loading(value: Any) -> dict[str, Any]:
    table = table_of(value)
    return {name: table[name] for name in sorted(table.keys() - _NOTHING_OF_ITS_OWN)}


def captured_modules(function: Any) -> list[nn.Module]:
    """Modules with a state that a function holds in its closure, defaults or global names.

    A copy of the model does not replace these: the function would go on using the originals.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> captured_modules(lambda model, batch, by=teacher: model(batch) - by(batch)) == [teacher]
        True
        >>> captured_modules(lambda model, batch: model(batch).mean())
        []
    """
    found: list[nn.Module] = []
    for _, value in walk({"": function}, _kinds_of_code):
        is_part = any(value is part for each in found for part in each.modules())
        if isinstance(value, nn.Module) and not is_part and any(value.state_dict(keep_vars=True)):
            found.append(value)
    return found


def _kinds_of_code(kind: type) -> tuple[Kind, ...]:
    """What a function reads by name: nothing within what is copied along with it."""
    if issubclass(kind, functools.partial | types.MethodType):
        return (_CODE,)
    is_walked = issubclass(kind, (types.FunctionType, *_CONTAINERS))
    return kinds_of(kind) if is_walked or not kinds_of(kind) else (_CLOSED,)


_LOADING = OBJECT._replace(read=_read_loading)
_CODE = Kind(lambda value: [getattr(value, "func", None) or value.__func__], name="")
_CLOSED = Kind(lambda value: None, is_leaf=True)


def unused_name(name: str, used: Container[str]) -> str:
    """The name, or the name with a number, where it is used.

    >>> unused_name("noise", {"noise"})
    'noise (2)'
    """
    names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
    return next(each for each in names if each not in used)


# ---- the objects' half, until its last users are ported

Read: TypeAlias = Callable[[], Any]
_LIBRARIES = frozenset(
    (
        *("numpy", "torch", "torchmetrics", "torchvision", "transformers"),
        *("lightning", "lightning_fabric", "pytorch_lightning"),
    )
) | frozenset(sys.stdlib_module_names)


class Variable:
    """A place that a function reads: a cell of its closure, a global name, its own attribute.

    Attributes:
        name: as the function calls it.
        value: what lies there now.
    """

    def __init__(self, name: str, read: Read, write: Callable[[Any], Any]) -> None:
        self.name = name
        self._read = read
        self._write = write

    @property
    def value(self) -> Any:
        return self._read()

    def put(self, value: Any) -> None:
        """Let it hold something else."""
        self._write(value)


def reached_variables(functions: Iterable[Any]) -> list[Variable]:
    """The cells and global names that functions of the caller read, each once.

    Functions that they call by name are asked too; those of libraries are not.

    Example:
        >>> def make():
        ...     calls = 3
        ...     return lambda model, batch: model(batch).mean() * calls
        >>> function = make()
        >>> function.__module__ = "theirs"
        >>> [variable.value for variable in reached_variables([function])]
        [3]
    """
    found: dict[tuple[int, str], Variable] = {}
    for function in _reached_functions(functions):
        for key, variable in _variables_of(function):
            kinds = nn.Module | type | types.ModuleType | types.FunctionType
            if not isinstance(variable.value, kinds):
                found[key] = variable
    return list(found.values())


def reached_objects(functions: Sequence[Any]) -> list[Any]:
    """Objects that functions are methods of, callable ones, and functions: all that keep things."""
    found: list[Any] = _reached_functions(functions)
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        owner = function.__self__ if isinstance(function, types.MethodType) else function
        is_plain = not isinstance(owner, nn.Module | types.FunctionType | type)
        if is_plain and isinstance(getattr(owner, "__dict__", None), dict):
            found.append(owner)
    return found


def _reached_functions(functions: Iterable[Any]) -> list[types.FunctionType]:
    """Functions of the caller, and those that they call by name, each once."""
    found: dict[int, types.FunctionType] = {}
    waiting = list(functions)
    while waiting:
        function = _code_of(waiting.pop())
        if function is None or id(function) in found or _is_ours_or_library(function):
            continue
        found[id(function)] = function
        variables = (variable.value for _, variable in _variables_of(function))
        waiting += [value for value in variables if callable(value)]
    return list(found.values())


def _code_of(function: Any) -> types.FunctionType | None:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, types.MethodType):
        function = function.__func__
    if not isinstance(function, types.FunctionType | type | nn.Module) and callable(function):
        function = _call_of(function)
    return function if isinstance(function, types.FunctionType) else None


def _variables_of(function: types.FunctionType) -> Iterator[tuple[tuple[int, str], Variable]]:
    code = function.__code__
    names = {*_names(code), *code.co_freevars}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents  # noqa: B018
        except ValueError:  # not filled yet
            continue
        write = functools.partial(setattr, cell, "cell_contents")
        yield (id(cell), name), Variable(name, functools.partial(_contents, cell), write)
    for table in _namespaces(function, names):
        for name in names & table.keys():
            write = functools.partial(table.__setitem__, name)
            yield (id(table), name), Variable(name, functools.partial(table.get, name), write)
    table = vars(function)
    for name in table:
        write = functools.partial(table.__setitem__, name)
        read = functools.partial(table.get, name)
        yield (id(table), name), Variable(f"{function.__name__}.{name}", read, write)


def _namespaces(function: types.FunctionType, names: set[str]) -> list[dict[str, Any]]:
    """The global names of a function, and those of the caller's modules that its code names."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    # A function may import by itself, too.
    waiting: list[dict[str, Any]] = [{name: _contents(cell) for name, cell in cells}, sys.modules]
    waiting.append(function.__globals__)
    found = {id(function.__globals__): function.__globals__}
    while waiting:
        table = waiting.pop()
        for value in [table[name] for name in names & table.keys()]:
            is_module = isinstance(value, types.ModuleType) and _is_of_caller(value.__name__)
            if is_module and id(vars(value)) not in found:
                found[id(vars(value))] = vars(value)
                waiting.append(vars(value))
    return list(found.values())


def _is_of_caller(module: str) -> bool:
    package = module.partition(".")[0]
    return not (package in _LIBRARIES or package == "automicro" or _is_installed(module))


def _is_ours_or_library(function: types.FunctionType) -> bool:
    ours = (function.__module__ or "").partition(".")[0] == "automicro"
    return ours or _is_of_library(function)


def _call_of(value: Any) -> Any:
    """What runs when an object is called."""
    return type(value).__call__ if callable(value) else None


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_of_library(value: Any, module: str | None = None) -> bool:
    name = module or getattr(value, "__module__", None) or ""
    package = str(name).partition(".")[0]
    return package in _LIBRARIES or (package == "automicro" and isinstance(value, type))


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Whether it is a module of an installed package, whose code draws as the process does."""
    path = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path
