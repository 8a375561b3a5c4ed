"""What extra passes change beside tensors of modules: attributes, variables, containers.

Put back afterwards, so that nobody counts rows twice and no state runs ahead.
"""

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.probe.reach import Variable

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEPTH = 5
_MOST_BYTES = 2**20  # of a tensor or an array outside of modules that is copied
_MOST_ATTRIBUTES = 64  # of an object outside of modules that is opened


def is_generator(value: Any) -> bool:
    """Whether a value draws random numbers of its own."""
    kinds = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
    return isinstance(value, kinds)


def foreign_states() -> tuple[Any, Any]:
    """What Python's and numpy's generators are at, to be compared."""
    return random.getstate(), repr(np.random.get_state())


class Surroundings:
    """Plain attributes of modules, and variables of functions: changed or replaced, all is undone.

    Containers, tensors, arrays and objects stay the same ones; what they held comes back into them.
    A part of a transaction.

    Args:
        modules: whose attributes are put back.
        variables: of functions; large tensors in them, and objects with very much in them, are
            put back as such, but not what is in them.
        objects: whose attributes are put back.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> module.seen = [1]
        >>> surroundings = Surroundings([module])
        >>> surroundings.begin()
        >>> module.seen.append(2)
        >>> surroundings.roll_back()
        >>> module.seen
        [1]
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        variables: Sequence[Variable] = (),
        objects: Sequence[Any] = (),
    ) -> None:
        found = {id(each): each for root in modules for each in root.modules()}
        self._modules = list(found.values())
        self._variables = variables
        self._objects = objects
        self._undo: list[Callable[[], Any]] = []
        self._seen: set[int] = set()
        self._most_bytes: float = _MOST_BYTES

    def begin(self) -> None:
        self._most_bytes = float("inf")
        for module in self._modules:
            self._remember_table(vars(module))
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE:
                    self._remember(value, _DEPTH)
        self._most_bytes = _MOST_BYTES
        for each in self._objects:
            self._remember_table(vars(each))
            for value in vars(each).values():
                self._remember(value, _DEPTH)
        for variable in self._variables:
            value = variable.value
            self._undo.append(functools.partial(variable.put, value))
            self._remember(value, _DEPTH)
        self._seen.clear()

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._undo.clear()

    def roll_back(self) -> None:
        with torch.no_grad():
            for undo in self._undo:
                undo()
        self._undo.clear()

    def _remember(self, value: Any, depth: int) -> None:
        known_elsewhere = isinstance(value, nn.Module | type) or is_generator(value)
        if depth == 0 or id(value) in self._seen or known_elsewhere or callable(value):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self._remember_tensor(value)
        elif isinstance(value, np.ndarray):
            self._remember_array(value)
        elif isinstance(value, list | deque):
            self._remember_sequence(value)
        elif isinstance(value, set):
            self._undo.append(functools.partial(_refill, value.update, value.clear, set(value)))
        elif isinstance(value, dict):
            self._remember_table(value)
        elif self._may_open(value):
            self._remember_table(vars(value))
        elif not isinstance(value, tuple):
            return
        for part in _parts(value):
            self._remember(part, depth - 1)

    def _may_open(self, value: Any) -> bool:
        table = getattr(value, "__dict__", None)
        if not isinstance(table, dict):
            return False
        is_inside = self._most_bytes == float("inf")
        # Loaders and optimizers have a life of their own, threads among it.
        is_plain = len(table) <= _MOST_ATTRIBUTES and not hasattr(value, "__iter__")
        return is_inside or (is_plain and not isinstance(value, torch.optim.Optimizer))

    def _remember_tensor(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided or tensor.nbytes > self._most_bytes:
            return
        copied = tensor.detach().clone()
        self._undo.append(lambda: tensor.copy_(copied) if tensor.shape == copied.shape else None)

    def _remember_array(self, array: np.ndarray) -> None:
        if array.nbytes > self._most_bytes or not array.flags.writeable:
            return
        copied = array.copy()
        self._undo.append(lambda: np.copyto(array, copied))

    def _remember_sequence(self, sequence: Any) -> None:
        elements = list(sequence)
        self._undo.append(functools.partial(_refill, sequence.extend, sequence.clear, elements))

    def _remember_table(self, table: dict[Any, Any]) -> None:
        self._undo.append(functools.partial(_refill, table.update, table.clear, dict(table)))


def _refill(fill: Callable[[Any], None], clear: Callable[[], None], contents: Any) -> None:
    clear()
    fill(contents)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor | np.ndarray | str | bytes):
        return ()
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | deque):
        return list(value)
    return list(getattr(value, "__dict__", {}).values())
