"""Thousands of trials, each of which collects garbage after running out of memory."""

import gc
import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> Iterator[None]:
    """Keep what exists out of each collection: most of it is torch itself."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Leave out what would be logged for every retry."""
    with caplog.at_level(logging.CRITICAL, logger="automicro"):
        yield
