"""What extra passes change beside tensors of modules: attributes, variables, containers.

Put back afterwards, so that nobody counts rows twice and no state runs ahead.
"""

import contextlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from automicro.reach import OF_EVERY_MODULE, Variable
from automicro.transaction.remembering import CannotRememberError, Remembered

_MOST_BYTES = 2**24  # in a variable that is remembered with all that it holds
_MOST_VALUES = 10_000
_DEPTH = 5


def foreign_states() -> tuple[Any, Any]:
    """What Python's and numpy's generators are at, to be compared."""
    return random.getstate(), repr(np.random.get_state())


class Surroundings:
    """Plain attributes of modules, and variables of functions: changed or replaced, all is undone.

    Containers, tensors, arrays and objects stay the same ones; what they held comes back into
    them. What cannot be copied stays as it is, and of a variable what is large. A part of a
    transaction.

    Args:
        modules: whose attributes are put back.
        variables: of functions.
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
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._values: list[tuple[Variable, Any]] = []
        self._remembered = Remembered()

    def begin(self) -> None:
        for module in self._modules:
            self._begin_table(vars(module), apart_from=OF_EVERY_MODULE)
        for each in self._objects:
            self._begin_table(vars(each))
        for variable in self._variables:
            value = variable.value
            self._values.append((variable, value))
            if _is_light(value):
                self._remember(value)

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._tables.clear()
        self._values.clear()
        self._remembered = Remembered()

    def roll_back(self) -> None:
        self._remembered.put_back()
        for variable, value in self._values:
            variable.put(value)
        for table, before in self._tables:
            table.clear()
            table.update(before)
        self.commit()

    def _begin_table(self, table: dict[str, Any], apart_from: Iterable[str] = ()) -> None:
        self._tables.append((table, dict(table)))
        for name, value in table.items():
            if name not in apart_from and not isinstance(value, nn.Module):
                self._remember(value)

    def _remember(self, value: Any) -> None:
        with contextlib.suppress(CannotRememberError):
            self._remembered.add(value)


def _is_light(value: Any) -> bool:
    """Whether all that a value holds is little enough to be copied for nothing but a look."""
    waiting, seen, bytes_left = [(value, _DEPTH)], set(), _MOST_BYTES
    while waiting:
        each, depth = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor | np.ndarray):
            bytes_left -= each.nbytes
        elif isinstance(each, nn.Module | type) or callable(each):
            continue
        elif isinstance(each, Mapping):
            waiting += [(part, depth - 1) for part in each.values()]
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += [(part, depth - 1) for part in each]
        elif hasattr(each, "__iter__") and not isinstance(each, str | bytes):
            return False  # loaders and files have a life of their own
        else:
            waiting += [(part, depth - 1) for part in getattr(each, "__dict__", {}).values()]
        if bytes_left < 0 or len(seen) > _MOST_VALUES or depth == 0:
            return False
    return True
