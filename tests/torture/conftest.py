"""Faster trials: each of thousands collects garbage after running out of memory."""

from collections.abc import Iterator

import pytest

from tests.torture.engine.sweep import quiet


@pytest.fixture(autouse=True, scope="module")
def without_log_and_long_collections() -> Iterator[None]:
    with quiet():
        yield
