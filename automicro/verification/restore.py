"""Putting back what a run changed in the caller's own modules, where no copy could be taken."""

import contextlib
from collections.abc import Iterable

from torch import nn

from automicro.reach import OF_EVERY_MODULE
from automicro.transaction import CannotRememberError, Remembered


class Attributes:
    """The plain attributes of modules: replaced or changed inside, all is put back.

    Containers, tensors, arrays and objects stay the same ones; what they held comes back into them.
    A part of a transaction. What cannot be copied stays as it is.

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
        self._tables: list[tuple[nn.Module, dict[str, object]]] = []
        self._remembered = Remembered()

    def begin(self) -> None:
        for module in self._modules:
            self._tables.append((module, dict(vars(module))))
            for name, value in vars(module).items():
                if name not in OF_EVERY_MODULE and not isinstance(value, nn.Module):
                    with contextlib.suppress(CannotRememberError):
                        self._remembered.add(value)

    def prepare(self) -> None:
        """Nothing here can fail."""

    def commit(self) -> None:
        self._tables.clear()
        self._remembered = Remembered()

    def roll_back(self) -> None:
        self._remembered.put_back()
        for module, table in self._tables:
            vars(module).clear()
            vars(module).update(table)
        self.commit()
