"""One world of each size for all tests of a module that ask for it."""

from collections.abc import Iterator

import pytest

from tests.ranks.world import World, world_of


@pytest.fixture(scope="module")
def world2() -> Iterator[World]:
    with world_of(2) as world:
        yield world


@pytest.fixture(scope="module")
def world3() -> Iterator[World]:
    with world_of(3) as world:
        yield world


@pytest.fixture(scope="module")
def world4() -> Iterator[World]:
    with world_of(4) as world:
        yield world
