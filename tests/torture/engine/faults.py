"""Errors raised before or after any operation that torch dispatches."""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from automicro.loss.passes import is_extra_pass
from automicro.memory.ledger import CountingMode
from automicro.torch_private import FakeTensor


class Boom(Exception):  # noqa: N818
    """An error unrelated to memory."""


class InjectedOutOfMemory(torch.OutOfMemoryError):
    """An error as a device raises it; a separate class, because weak references need one."""


def out_of_memory() -> BaseException:
    """Return an error as a device raises it."""
    return InjectedOutOfMemory("CUDA out of memory. Tried to allocate 2.00 GiB.")


ERRORS: dict[str, Callable[[], BaseException]] = {
    "oom": out_of_memory,
    "interrupt": KeyboardInterrupt,
    "boom": Boom,
}


@dataclass(frozen=True)
class Fault:
    """An error at one operation, counted from the first one of the call."""

    index: int
    after: bool = False
    kind: str = "oom"


class FaultMode(CountingMode):
    """A mode that counts operations and raises the errors of a plan."""

    def __init__(self, plan: Sequence[Fault] = ()) -> None:
        super().__init__(None)
        self.plan = {fault.index: fault for fault in plan}
        self.num_operations = 0
        self.num_extra = 0  # operations of extra passes
        self.foreign: list[BaseException] = []  # kept alive, to compare identity
        self.out_of_memory: list[weakref.ref[BaseException]] = []
        self.raised_at: list[int] = []
        self.raised_in: list[list[str]] = []  # functions on the stack, outermost first
        self._functions: list[Any] = []
        # Tensors after the last fault are not needed, and recording them is slow.
        self._last = max(self.plan, default=-1)
        self._made: list[tuple[int, weakref.ref[torch.UntypedStorage]]] = []

    def run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one operation, unless an error is planned for it."""
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # a dry run without device memory
        index = self.num_operations
        self.num_operations += 1
        self.num_extra += is_extra_pass()
        self._functions.append(func)
        fault = self.plan.get(index)
        if fault is not None and not fault.after:
            self._raise(fault)
        output = super().run(func, types, args, kwargs)
        if fault is not None:
            del output
            self._raise(fault)
        if index < self._last:
            self._note(index, output, (args, kwargs))
        return output

    @property
    def names(self) -> list[str]:
        """The names of all operations, in order."""
        return [str(each) for each in self._functions]

    def survivors(self, before: int) -> int:
        """Return how many storages created before an operation are still alive."""
        return sum(index < before and storage() is not None for index, storage in self._made)

    def _raise(self, fault: Fault) -> None:
        error = ERRORS[fault.kind]()
        if fault.kind == "oom":
            self.out_of_memory.append(weakref.ref(error))
        else:
            self.foreign.append(error)
        self.raised_at.append(fault.index)
        # A backward may run on a thread of the device, whose stack does not show the caller.
        self.raised_in.append(["look"] * is_extra_pass() + _stack())
        try:
            raise error
        finally:
            del error

    def _note(self, index: int, output: Any, inputs: tuple[Any, ...]) -> None:
        given = {_storage_id(each) for each in _flat(inputs)}
        for each in _flat((output,)):
            if _storage_id(each) not in given:
                self._made.append((index, weakref.ref(each.untyped_storage())))


def _stack() -> list[str]:
    names = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[::-1]


def _flat(values: Sequence[Any]) -> list[torch.Tensor]:
    """Yield the dense tensors in nested values; sparse ones have no memory of their own."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, list | tuple):
            found += _flat(value)
        elif isinstance(value, Mapping):
            found += _flat(list(value.values()))
    return found


def _storage_id(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())
