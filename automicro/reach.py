"""Modules and generators that functions and modules reach other than by their arguments."""

import functools
import itertools
import random
import types
from collections import deque
from collections.abc import Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from automicro.options import unwrapped
from automicro.values import Kind, Kinds, Place, children, is_generator, kinds_of, places, walk

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class Reach:
    """Modules and generators that some functions and modules reach on their own.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> def make(teachers, noise):
        ...     return lambda x, targets: (x - teachers[0](targets)).sum() * noise.random()
        >>> noise = np.random.default_rng(0)
        >>> reach = Reach({"loss": make([teacher], noise)})
        >>> list(reach.modules()), reach.generators() == [noise]
        (['teachers[0]'], True)
    """

    # It remembers places and not values, so that replacements are found, too.
    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = dict(roots)
        self._steps = 0
        self._walk()

    def step(self) -> None:
        """Count a batch, and search for new places before batches 2, 4, 8, …."""
        self._steps += 1
        if self._steps > 1 and self._steps & (self._steps - 1) == 0:
            self._walk()

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules by place, each once, without the roots and their submodules."""
        found: dict[str, nn.Module] = {}
        further: set[int] = set()  # separate, because copying the known ids would be slow
        for path, module in self._read():
            is_known = id(module) in self._known or id(module) in further
            if isinstance(module, nn.Module) and not is_known:
                further |= set(map(id, module.modules()))
                found[_unused(path, found)] = module
        return found

    def generators(self) -> list[Any]:
        """Return the random number generators, each once."""
        return list({id(each): each for _, each in self._read() if is_generator(each)}.values())

    def named_generators(self) -> dict[str, Any]:
        """Return them without those of the process, by names that are the same in each run."""
        # Without DDP's wrapper, which would add an attribute to the names on several ranks only.
        return generators_in({name: unwrapped(each) for name, each in self._roots.items()})

    def _read(self) -> Iterator[tuple[str, Any]]:
        """Yield the current values at the places where modules and generators were found."""
        for place in self._places:
            held = {place.name: place.value} if place.owner is None else children(place.owner)
            yield place.path, dict(held).get(place.name)

    def _walk(self) -> None:
        roots = [each for each in self._roots.values() if isinstance(each, nn.Module)]
        self._known = {id(each) for root in roots for each in root.modules()}
        seen, self._places = set(self._known), list[Place]()
        for place in places(self._roots):
            is_new = isinstance(place.value, nn.Module) and id(place.value) not in seen
            if is_new:
                seen |= set(map(id, place.value.modules()))
            if is_new or is_generator(place.value):
                # Without its value, which is read again each time: a reference here would keep a
                # replaced value alive.
                self._places.append(place if place.owner is None else place._replace(value=None))


def generators_in(roots: Mapping[str, Any], kinds: Kinds = kinds_of) -> dict[str, Any]:
    """Return generators that some values reach, except those of the process, by their paths.

    >>> noise = random.Random(0)
    >>> generators_in({"loss": {"noises": [noise, random.random]}}) == {"loss['noises'][0]": noise}
    True
    """
    found: dict[str, Any] = {}
    for path, value in walk(roots, kinds):
        if is_generator(value) and not any(value is each for each in _OF_THE_PROCESS):
            found[_unused(path, found)] = value
    return found


_OF_THE_PROCESS = (random._inst, np.random.mtrand._rand, torch.default_generator)


def captured_modules(function: Any) -> list[nn.Module]:
    """Return modules with state that a function holds in its closure, defaults or globals.

    Example:
        >>> teacher = nn.Linear(2, 2)
        >>> captured_modules(lambda model, batch, by=teacher: model(batch) - by(batch)) == [teacher]
        True
        >>> captured_modules(lambda model, batch: model(batch).mean())
        []
    """
    # A copy of the model does not replace them: the function still uses the originals.
    found: list[nn.Module] = []
    for _, value in walk({"": function}, _kinds_of_code):
        is_part = any(value is part for each in found for part in each.modules())
        if isinstance(value, nn.Module) and not is_part and any(value.state_dict(keep_vars=True)):
            found.append(value)
    return found


def _kinds_of_code(kind: type) -> tuple[Kind, ...]:
    """Return kinds for names that a function reads, without objects that are copied with it."""
    if issubclass(kind, functools.partial | types.MethodType):
        return (_CODE,)
    is_walked = issubclass(kind, (types.FunctionType, *CONTAINERS))
    return kinds_of(kind) if is_walked or not kinds_of(kind) else (_CLOSED,)


_CODE = Kind(lambda value: [getattr(value, "func", None) or value.__func__], name="")
_CLOSED = Kind(lambda value: None, is_leaf=True)


def _unused(name: str, used: Container[str]) -> str:
    """Return the name, with a number if it is already used.

    >>> _unused("noise", {"noise"})
    'noise (2)'
    """
    names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
    return next(each for each in names if each not in used)
