"""Random number generators: a retried attempt draws the same numbers as the failed one."""

import contextlib
import ctypes
import operator
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from automicro.values import same_values, set_state, state_of


def devices_of(modules: Iterable[nn.Module], device: torch.device) -> tuple[torch.device, ...]:
    """Return the devices that draw in a step: its own, first, and those of the modules.

    >>> devices_of([nn.Linear(2, 2)], torch.device("cpu"))
    (device(type='cpu'),)
    """
    lying = (each for module in modules for each in [*module.parameters(), *module.buffers()])
    found = dict.fromkeys([device, *(each.device for each in lying)])
    return tuple(each for each in found if each == device or each.type not in ("cpu", "meta"))


class RandomState:
    """The generators of Python, NumPy and torch, of devices, and of the caller."""

    def __init__(
        self,
        devices: Iterable[torch.device],
        generators: Iterable[Any] | Callable[[], Iterable[Any]] = (),
    ) -> None:
        self._devices = [each for each in devices if each.type != "cpu"]
        self._generators = generators
        self._state: tuple[Any, ...] | None = None

    def begin(self) -> None:
        given = self._generators
        own = given() if callable(given) else given
        self._state = (
            # Capture all of them, because the generators that a forward uses are unknown.
            _PYTHON.state(),
            _NUMPY.state(),
            torch.get_rng_state(),
            self._devices
            and [
                (each, torch.get_device_module(each).get_rng_state(each)) for each in self._devices
            ],
            own and [(generator, state_of(generator)) for generator in own],
        )

    def prepare(self) -> None:
        """Do nothing, because nothing can fail."""

    def commit(self) -> None:
        self._state = None

    def roll_back(self) -> None:
        self.put_back()
        self._state = None

    def put_back(self) -> None:
        """Restore the state at `begin`; it may be called repeatedly."""
        if self._state is not None:
            self._set(self._state)

    def _set(self, state: tuple[Any, ...]) -> None:
        python, numpy, cpu, accelerators, own = state
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for device, there in accelerators:
            torch.get_device_module(device).set_rng_state(there, device)
        for generator, there in own:
            set_state(generator, there)

    @property
    def has_moved(self) -> bool:
        """Whether any number was drawn since `begin`."""
        before, self._state = self._state, None
        self.begin()
        now, self._state = self._state, before
        assert before is not None
        assert now is not None
        # `state` returns the same objects for Python and NumPy if nothing was drawn.
        return before[0] != now[0] or not same_values(before[1:], now[1:])

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Draw the numbers after `begin` again inside the context, then continue as before.

        >>> state = RandomState([])
        >>> state.begin()
        >>> first = torch.rand(1)
        >>> with state.replaying():
        ...     again = torch.rand(1)
        >>> torch.equal(first, again)
        True
        """
        before = self._state
        assert before is not None
        self.begin()
        now, self._state = self._state, before
        assert now is not None
        self._set(before)
        try:
            yield
        finally:
            self._set(now)


class _Global:
    """A generator of the process. Its state is read only after its memory has changed."""

    def __init__(
        self, ask: Callable[[], Any], find: Callable[[], tuple[tuple[object, ...], object]]
    ) -> None:
        self._ask, self._find = ask, find
        self._objects: tuple[object, ...] = ()
        self._memory: list[Any] = []  # views of its current memory
        self._seen: object = None
        self._state: Any = None

    def state(self) -> Any:
        objects, values = self._find()
        if not objects:
            return self._ask()
        # `np.random.set_bit_generator`, for example, replaces the memory.
        if objects != self._objects:
            self._objects, self._memory = objects, [_memory_of(each) for each in objects]
        seen = [values, *map(_RAW, self._memory)]
        if seen != self._seen:
            self._seen, self._state = seen, self._ask()
        return self._state


_RAW = operator.attrgetter("raw")
_MT19937_BYTES = 2500  # 624 numbers and the position in them


def _memory_of(generator: object) -> Any:
    """Return the memory of the numbers: in CPython's objects, behind the common header."""
    if isinstance(generator, np.random.MT19937):
        return (ctypes.c_char * _MT19937_BYTES).from_address(generator.ctypes.state_address)
    head = object.__basicsize__
    size = type(generator).__basicsize__ - head
    return (ctypes.c_char * size).from_address(id(generator) + head)


def _find_pythons() -> tuple[tuple[object, ...], object]:
    generator: Any = random._inst
    return (generator,) if _IS_CPYTHON else (), generator.gauss_next


def _find_numpys() -> tuple[tuple[object, ...], object]:
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(bits) is not np.random.MT19937 or not _IS_CPYTHON:
        return (), None
    # The second object caches a normal number, which can be used without drawing.
    return (bits, np.random.mtrand._rand), None


_IS_CPYTHON = sys.implementation.name == "cpython"
_PYTHON = _Global(random.getstate, _find_pythons)
_NUMPY = _Global(lambda: np.random.get_state(legacy=False), _find_numpys)
