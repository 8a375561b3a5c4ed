"""Worlds of processes: one of each size, shared by all tests of a module."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.ranks.world import World, world_of


# Each module has its own processes, so a broken world does not affect the next module.
@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[int], World]]:
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda size: stack.enter_context(world_of(size)))


def world_fixture(size: int) -> Any:
    @pytest.fixture(name=f"world{size}", scope="module")
    def world(worlds: Callable[[int], World]) -> World:
        return worlds(size)

    return world


world1, world2, world3, world4 = map(world_fixture, (1, 2, 3, 4))
