"""Putting back what a run changed in the caller's own modules, where no copy could be taken."""

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro.verification.state import OF_EVERY_MODULE, is_generator, state_of

_DEPTH = 5


class OwnGenerators:
    """Generators that are not torch's global one, put back. A part of a transaction."""

    def __init__(self, generators: Sequence[Any]) -> None:
        self._generators = generators
        self._states: list[Any] = []

    def begin(self) -> None:
        self._states = [state_of(generator) for generator in self._generators]

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._states = []

    def roll_back(self) -> None:
        for generator, state in zip(self._generators, self._states, strict=False):
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            elif isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                generator.set_state(state)
        self._states = []


class Attributes:
    """The plain attributes of modules: replaced or changed inside, all is put back.

    Containers, tensors, arrays and objects stay the same ones; what they held comes back into them.
    A part of a transaction.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> module.seen = [1]
        >>> attributes = Attributes([module])
        >>> attributes.begin()
        >>> module.seen.append(2)
        >>> attributes.roll_back()
        >>> module.seen
        [1]
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._undo: list[Callable[[], Any]] = []
        self._seen: set[int] = set()

    def begin(self) -> None:
        for module in self._modules:
            self._remember_table(vars(module))
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE:
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
            copied = value.copy()
            self._undo.append(lambda: np.copyto(value, copied))
        elif isinstance(value, list | deque):
            self._remember_sequence(value)
        elif isinstance(value, set):
            self._undo.append(functools.partial(_refill, value.update, value.clear, set(value)))
        elif isinstance(value, dict):
            self._remember_table(value)
        elif hasattr(value, "__dict__"):
            self._remember_table(vars(value))
        for part in _parts(value):
            self._remember(part, depth - 1)

    def _remember_tensor(self, tensor: Tensor) -> None:
        copied = tensor.detach().clone()
        self._undo.append(lambda: tensor.copy_(copied) if tensor.shape == copied.shape else None)

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
