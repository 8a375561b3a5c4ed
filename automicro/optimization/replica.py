"""A copy of an optimizer that can step without anything of the original moving.

Copying an optimizer shallowly is not enough: many keep lists of tensors, counters, or another
optimizer in attributes of their own, and a step of the copy would move those of the original. So
everything that is reached from it is copied, with stand-ins in place of tensors. Where something
is reached that cannot be copied, or code that holds state elsewhere, there is no copy.
"""

import collections
import contextlib
import copy
import dis
import enum
import functools
import logging
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from automicro.torch_private import STEP_HOOKS

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.finfo, types.BuiltinFunctionType,
    types.ModuleType, logging.Logger, types.GenericAlias,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, dict, collections.deque)


class UncopyableError(TypeError):
    """Something is reached from an optimizer that cannot be copied. The message says what."""


class Replica:
    """Copies an optimizer, with stand-ins in place of its tensors.

    Example:
        >>> weight = nn.Parameter(torch.ones(3))
        >>> optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.9)
        >>> stand_in = nn.Parameter(torch.zeros(3))
        >>> stand_in.grad = torch.ones(3)
        >>> copied = Replica({id(weight): stand_in}).of(optimizer)
        >>> copied.step()
        >>> stand_in.tolist(), weight.tolist(), len(copied.state), len(optimizer.state)
        ([-0.5, -0.5, -0.5], [1.0, 1.0, 1.0], 1, 0)

    Args:
        stand_ins: of parameters, by their id.
        stands_in: makes one of any other tensor; may raise `UncopyableError`.
    """

    def __init__(
        self,
        stand_ins: Mapping[int, Tensor],
        stands_in: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        self._copies: dict[int, Any] = dict(stand_ins)
        self._stands_in = stands_in
        self._originals: list[Any] = []  # so that no id is given twice

    def of(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The copy, without state, without hooks, with the ``step`` of its class.

        Raises:
            UncopyableError: there cannot be one.
        """
        copied: torch.optim.Optimizer = self._copy(optimizer)
        return copied

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, _PLAIN):
            return value
        self._originals.append(value)
        if isinstance(value, Tensor):
            return self._keep(value, self._stands_in(value))
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        if type(value) in (dict, collections.OrderedDict, collections.defaultdict):
            copied = self._keep(value, copy.copy(value))
            items = [(self._copy(key), self._copy(each)) for key, each in value.items()]
            copied.clear()
            copied.update(items)
            return copied
        if type(value) in (list, set, collections.deque):
            copied = self._keep(value, copy.copy(value))
            items = [self._copy(each) for each in value]
            copied.clear()
            (copied.update if isinstance(copied, set) else copied.extend)(items)
            return copied
        if isinstance(value, tuple | frozenset):
            copies = [self._copy(each) for each in value]
            if hasattr(value, "_fields"):
                return self._keep(value, type(value)(*copies))
            return self._keep(value, type(value)(copies))
        if isinstance(value, types.FunctionType):
            require_stateless(value)
            return value
        if isinstance(value, types.MethodType):
            require_stateless(value.__func__)
            return types.MethodType(value.__func__, self._copy(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(
                self._copy(value.func), *self._copy(value.args), **self._copy(value.keywords)
            )
        if isinstance(value, torch.Generator):
            return self._keep(value, value.clone_state())
        if isinstance(value, random.Random) or _is_of_numpy(value):
            return self._keep(value, copy.deepcopy(value))
        return self._instance(value)

    def _keep(self, original: Any, copied: Any) -> Any:
        self._copies[id(original)] = copied
        return copied

    def _optimizer(self, original: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for part in type(original).__mro__:
            for name, value in vars(part).items():
                if _is_torchs(part) and name != "step":
                    continue
                for function in _functions_of(value):
                    require_stateless(function)
        copied: torch.optim.Optimizer = self._keep(original, object.__new__(type(original)))
        table = vars(copied)
        state = vars(original).get("state")
        if state is not None:  # others may share it
            table["state"] = self._keep(state, collections.defaultdict(dict))
            self._originals.append(state)
        for name, value in self._attributes_of(original):
            if name in STEP_HOOKS:
                table[name] = collections.OrderedDict()
            elif name not in ("state", "step"):  # schedulers patch `step` on the instance
                table[name] = self._copy(value)
        return copied

    def _attributes_of(self, original: object) -> Iterator[tuple[str, Any]]:
        """Those of an object, and containers that its class keeps for all."""
        own = vars(original)
        yield from own.items()
        for part in type(original).__mro__:
            for name, value in vars(part).items():
                is_shared = isinstance(value, (*_CONTAINERS, Tensor)) and not name.startswith("__")
                if is_shared and name not in own and not _is_torchs(part):
                    yield name, value

    def _instance(self, original: Any) -> Any:
        kind = type(original)
        is_plain = (
            kind.__module__.partition(".")[0] not in ("torch", *sys.stdlib_module_names)
            and not isinstance(original, nn.Module)
            and getattr(kind, "__reduce_ex__", None) is object.__reduce_ex__
            and not any(hasattr(kind, name) for name in ("__deepcopy__", "__del__", "__slots__"))
            and hasattr(original, "__dict__")
        )
        if not is_plain:
            raise UncopyableError(f"it holds a {kind.__name__}, which cannot be copied")
        for part in kind.__mro__[:-1]:
            for value in vars(part).values():
                for function in _functions_of(value):
                    require_stateless(function)
        copied = self._keep(original, object.__new__(kind))
        for name, value in self._attributes_of(original):
            vars(copied)[name] = self._copy(value)
        return copied


def require_stateless(function: Callable[..., Any]) -> None:
    """Refuse code that keeps something outside of its arguments: in a closure or a global.

    Raises:
        UncopyableError: it does, or may.

    >>> count = 0
    >>> def step():
    ...     global count
    ...     count += 1
    >>> require_stateless(step)
    Traceback (most recent call last):
        ...
    automicro.optimization.replica.UncopyableError: step writes the global 'count'
    """
    _require_stateless(function, set())


def _require_stateless(function: Any, seen: set[int]) -> None:
    # Not __module__, which a wrapper takes over from what it wraps.
    home = str(function.__globals__.get("__name__")).partition(".")[0]
    is_trusted = home == "torch" or home in sys.stdlib_module_names
    if id(function) in seen or (is_trusted and not function.__closure__):
        return
    seen.add(id(function))
    name = function.__name__
    free = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    for step in dis.get_instructions(function.__code__):
        if is_trusted:
            break
        if step.argval == "distributed" and step.opname != "LOAD_CONST":
            raise UncopyableError(f"{name} communicates with other processes")
        if step.opname == "STORE_GLOBAL":
            raise UncopyableError(f"{name} writes the global {step.argval!r}")
        if step.opname == "STORE_DEREF" and step.argval in free:
            raise UncopyableError(f"{name} writes {step.argval!r}, which lies outside of it")
        if step.opname == "LOAD_GLOBAL":
            _require_shareable(function.__globals__.get(step.argval), name, step.argval, seen)
    for each, cell in free.items():
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        _require_shareable(value, name, each, seen)
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        _require_shareable(value, name, "a default", seen)


def _require_shareable(value: Any, function: str, name: str, seen: set[int]) -> None:
    home = value.__name__ if isinstance(value, types.ModuleType) else value.__class__.__module__
    if isinstance(value, types.FunctionType | type):
        home = value.__module__
    if f"{home}.".startswith("torch.distributed."):
        raise UncopyableError(f"{function} communicates with other processes ({name!r})")
    if isinstance(value, (*_PLAIN, types.BuiltinMethodType)):
        return
    if isinstance(value, types.FunctionType):
        _require_stateless(value, seen)
        return
    if isinstance(value, tuple | frozenset):
        for each in value:
            _require_shareable(each, function, name, seen)
        return
    if isinstance(value, types.MethodType):  # as of a decorator of torch
        _require_stateless(value.__func__, seen)
        _require_shareable(value.__self__, function, name, seen)
        return
    is_module_of_torch = isinstance(value, nn.Module | Tensor | torch.optim.Optimizer)
    home = type(value).__module__.partition(".")[0]
    if home in ("torch", "typing") and not is_module_of_torch:
        return
    raise UncopyableError(
        f"{function} uses {name!r}, a {type(value).__name__} that lies outside of the optimizer"
    )


def _functions_of(value: Any) -> list[types.FunctionType]:
    """The functions of something that stands in a class."""
    if isinstance(value, property):
        each = [value.fget, value.fset]
    else:
        each = [value.__func__ if isinstance(value, staticmethod | classmethod) else value]
    return [function for function in each if isinstance(function, types.FunctionType)]


@contextlib.contextmanager
def classes_kept(optimizer: object) -> Iterator[None]:
    """Put back what the classes of an optimizer hold for all of their objects.

    >>> class Counts(torch.optim.SGD):
    ...     steps = 0
    >>> with classes_kept(Counts([nn.Parameter(torch.ones(2))])):
    ...     Counts.steps += 1
    >>> Counts.steps
    0
    """
    parts = [part for part in type(optimizer).__mro__ if not _is_torchs(part)]
    before = [dict(vars(part)) for part in parts]
    held = [
        (value, copy.copy(value))
        for table in before
        for name, value in table.items()
        if type(value) in (list, dict, set) and not name.startswith("__")
    ]
    try:
        yield
    finally:
        for part, table in zip(parts, before, strict=True):
            for name in [name for name in vars(part) if name not in table]:
                delattr(part, name)
            for name, value in table.items():
                if vars(part).get(name) is not value:
                    setattr(part, name, value)
        for value, kept in held:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(kept)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "builtins")


def _is_of_numpy(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy"
