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
from torch import Tensor, nn

from automicro.torch_private import call_hooks, gradient_hooks

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes that a module has without any of its own."""

Read: TypeAlias = Callable[[], Any]
_Place: TypeAlias = tuple[str, Read]

# What their code gets at is no state of the caller's.
_LIBRARIES = frozenset(
    (
        *("numpy", "torch", "torchmetrics", "torchvision", "transformers"),
        *("lightning", "lightning_fabric", "pytorch_lightning"),
    )
) | frozenset(sys.stdlib_module_names)
_NOTHING_OF_ITS_OWN = frozenset(("_iterator", "data_source"))
"""Attributes of loaders and samplers: a pass that is under way, and the data by another name."""

_OPAQUE = (str, bytes, int, float, complex, Tensor, np.ndarray, type(None))
_MOST_ELEMENTS = 100
_MOST_PLACES = 5000
_DEPTH = 6
_DEPTH_IN_DATA = 12  # data sets and transforms lie within one another


class Reach:
    """Modules and generators that some functions and modules get at, wherever these lie.

    Looked through are closures, defaults, the global names that code uses, arguments of
    ``functools.partial``, what a method is bound to, attributes, containers, and the hooks of
    modules and of their parameters. Remembered are the places, so that what stands there later is
    found, too.

    Args:
        roots: functions and modules, by their names.
        past_copies: whether also what is copied with a function is looked through.
        past_libraries: whether also attributes of objects of libraries are, as loaders,
            samplers and transforms have them, and the code of the caller's classes, but no
            large containers, which hold data.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> teachers, noise = [teacher], np.random.default_rng(0)
        >>> def loss(outputs, targets):
        ...     return (outputs - teachers[0](targets)).sum() * noise.random()
        >>> reach = Reach({"loss": loss})
        >>> list(reach.modules()), reach.generators() == [noise]
        (['teachers[0]'], True)
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        *,
        past_copies: bool = True,
        past_libraries: bool = False,
    ) -> None:
        self._roots = dict(roots)
        self._past_copies = past_copies
        self._past_libraries = past_libraries
        self._steps = 0
        self._walk()

    def step(self) -> None:
        """Look again, for new places, before batches 2, 4, 8 …; call it before each."""
        self._steps += 1
        if self._steps > 1 and self._steps & (self._steps - 1) == 0:
            self._walk()

    def modules(self) -> dict[str, nn.Module]:
        """The modules by where they were found, each once, without the roots and their parts."""
        if not self._modules:
            return {}
        found: dict[str, nn.Module] = {}
        known = set(self._known)
        for name, read in self._modules:
            module = read()
            if isinstance(module, nn.Module) and id(module) not in known:
                known |= {id(each) for each in module.modules()}
                found[name] = module
        return found

    def generators(self) -> list[Any]:
        """The generators of random numbers, each once."""
        if not self._generators:
            return []
        found = (read() for _, read in self._generators)
        return list({id(each): each for each in found if is_generator(each)}.values())

    def named_generators(self) -> dict[str, Any]:
        """The same without that of the process, by names that are the same in each run."""
        found: dict[str, Any] = {}
        known = {id(random._inst)}
        for name, read in self._generators:
            generator = read()
            if is_generator(generator) and id(generator) not in known:
                known.add(id(generator))
                found[unused_name(name, found)] = generator
        return found

    def _walk(self) -> None:
        self._modules: list[_Place] = []
        self._generators: list[_Place] = []
        self._seen: set[int] = set()
        self._known = {
            id(each)
            for root in self._roots.values()
            if isinstance(root, nn.Module)
            for each in root.modules()
        }
        depth = _DEPTH_IN_DATA if self._past_libraries else _DEPTH
        waiting: deque[tuple[str, Read, int]] = deque(
            (name, functools.partial(_same, root), depth) for name, root in self._roots.items()
        )
        for _ in range(_MOST_PLACES):
            if not waiting:
                break
            name, read, depth = waiting.popleft()
            for found, place in self._look(name, read):
                value = place()
                if depth and not isinstance(value, _OPAQUE) and id(value) not in self._seen:
                    waiting.append((found, place, depth - 1))
        self._seen.clear()  # ids of what may be gone tomorrow

    def _look(self, name: str, read: Read) -> Iterator[_Place]:
        value = read()
        if id(value) in self._seen or (self._past_libraries and _is_data(value)):
            return
        self._seen.add(id(value))
        if is_generator(value):
            self._generators.append((name, read))
        elif isinstance(value, nn.Module):
            is_root = any(value is root for root in self._roots.values())
            if id(value) not in self._known:
                self._modules.append((name, read))
            if self._past_copies:
                yield from _inside_module("" if is_root else name, value)
        elif isinstance(value, types.FunctionType):
            installed = self._past_libraries and _is_installed(value.__module__)
            yield from _inside_function(value, has_globals=not installed)
        elif isinstance(value, functools.partial):
            yield from self._inside_partial(name, value)
        elif isinstance(value, types.MethodType):
            yield name, functools.partial(_same, value.__func__)
            if self._past_copies:
                yield "self", functools.partial(_same, value.__self__)
        elif self._past_libraries and _is_of_data_library(value):
            table = vars(value)
            for key in sorted(table.keys() - _NOTHING_OF_ITS_OWN):
                yield f"{name}.{key}".lstrip("."), functools.partial(table.get, key)
        else:
            yield from _inside_object(name, value, has_attributes=self._past_copies)
            for owner in type(value).__mro__ if self._past_libraries else ():
                if not (_is_of_library(owner) or _is_installed(owner.__module__)):
                    yield from _inside_class(owner)

    def _inside_partial(self, name: str, value: Any) -> Iterator[_Place]:
        yield name, functools.partial(_same, value.func)
        for place in itertools.chain(
            _elements(f"{name}.args", value.args), _entries(f"{name}.keywords", value.keywords)
        ):
            if self._past_copies or not isinstance(place[1](), nn.Module):
                yield place


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
    found = Reach({"": function}, past_copies=False).modules().values()
    return [module for module in found if _has_state(module)]


def unused_name(name: str, used: Container[str]) -> str:
    """The name, or the name with a number, where it is used.

    >>> unused_name("noise", {"noise"})
    'noise (2)'
    """
    names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
    return next(each for each in names if each not in used)


def is_generator(value: Any) -> bool:
    """Whether a value draws random numbers of its own."""
    kinds = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _inside_module(name: str, root: nn.Module) -> Iterator[_Place]:
    """Attributes that torch does not know of, and what the code of its classes names."""
    classes: dict[type, None] = {}
    for place, module in root.named_modules():
        path = ".".join(filter(None, (name, place)))
        classes |= dict.fromkeys(type(module).__mro__)
        table = vars(module)
        for key in [key for key in table if key not in OF_EVERY_MODULE]:
            yield f"{path}.{key}".lstrip("."), functools.partial(table.get, key)
        for hook in _hooks_of(module):
            yield f"{path}.hook".lstrip("."), functools.partial(_same, hook)
    for each in classes:
        if not _is_of_library(each):
            yield from _inside_class(each)


def _hooks_of(module: nn.Module) -> Iterator[Any]:
    """The caller's hooks of a module, and of its parameters' gradients."""
    tables = [gradient_hooks(each) for each in module.parameters(recurse=False)]
    hooks = [hook for pair in tables for table in pair for hook in (table or {}).values()]
    for hook in [*call_hooks(module), *hooks]:
        function = _code_of(hook)
        if function is None or not _is_ours_or_library(function):
            yield hook


def _inside_class(owner: type) -> Iterator[_Place]:
    for key, value in list(vars(owner).items()):
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        yield f"{owner.__name__}.{key}", functools.partial(_same, value)


def _inside_function(function: Any, *, has_globals: bool) -> Iterator[_Place]:
    if _is_of_library(function):
        return
    code = function.__code__
    names = set(_names(code)) | set(code.co_freevars)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield from _named(name, functools.partial(_contents, cell), names)
    yield from _elements("default", function.__defaults__ or ())
    yield from _entries("default", function.__kwdefaults__ or {})
    for name in sorted(names & function.__globals__.keys()) if has_globals else ():
        yield from _named(name, functools.partial(function.__globals__.get, name), names)


def _named(name: str, read: Read, names: set[str]) -> Iterator[_Place]:
    """What a name stands for; of a module of Python, what is named of it."""
    value = read()
    if not isinstance(value, types.ModuleType):
        yield name, read
    elif not _is_of_library(value, value.__name__):
        for inner in sorted(names & vars(value).keys()):
            yield f"{name}.{inner}", functools.partial(vars(value).get, inner)


def _inside_object(name: str, value: Any, *, has_attributes: bool) -> Iterator[_Place]:
    if isinstance(value, list | tuple):
        yield from _elements(name, value)
    elif isinstance(value, dict):
        yield from _entries(name, value)
    elif isinstance(value, set | frozenset | deque):
        yield from _elements(name, list(itertools.islice(value, _MOST_ELEMENTS)))
    elif not has_attributes or isinstance(value, types.ModuleType):
        return
    elif isinstance(value, type):
        if not _is_of_library(value):
            yield from _inside_class(value)
    elif not _is_of_library(type(value)) or isinstance(value, types.SimpleNamespace):
        yield from _entries(name, getattr(value, "__dict__", {}), dotted=True)
        yield from _elements(name, [call] if (call := _call_of(value)) is not None else [])
        for owner in type(value).__mro__:
            for slot in vars(owner).get("__slots__", ()):
                yield f"{name}.{slot}".lstrip("."), functools.partial(getattr, value, slot, None)


def _call_of(value: Any) -> Any:
    """What runs when an object is called."""
    return type(value).__call__ if callable(value) else None


def _elements(name: str, values: Any) -> Iterator[_Place]:
    kind = tuple if isinstance(values, tuple) else list
    for index in range(min(kind.__len__(values), _MOST_ELEMENTS)):
        yield f"{name}[{index}]", functools.partial(_element, kind, values, index)


def _entries(name: str, table: Any, *, dotted: bool = False) -> Iterator[_Place]:
    for key in list(itertools.islice(dict.__iter__(table), _MOST_ELEMENTS)):
        shown = repr(key) if isinstance(key, str | int) else type(key).__name__
        place = f"{name}.{key}".lstrip(".") if dotted else f"{name}[{shown}]"
        yield place, functools.partial(dict.get, table, key)


def _same(value: Any) -> Any:
    return value


def _element(kind: Any, values: Any, index: int) -> Any:
    """Of a list or tuple itself: a data set that is one may draw when it is asked."""
    return kind.__getitem__(values, index) if index < kind.__len__(values) else None


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


def _is_data(value: Any) -> bool:
    is_container = isinstance(value, (list, tuple, dict, set, frozenset, deque))
    return is_container and len(value) > _MOST_ELEMENTS


def _is_of_data_library(value: Any) -> bool:
    """Whether it is an object of a library, or of ours, that may hold what the caller gave it."""
    package = type(value).__module__.partition(".")[0]
    return (
        (package in _LIBRARIES or package == "automicro")
        and package not in sys.stdlib_module_names
        and not isinstance(value, Iterator | type | types.ModuleType)
        and isinstance(getattr(value, "__dict__", None), dict)
    )


def _has_state(module: nn.Module) -> bool:
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    return bool(tensors)
