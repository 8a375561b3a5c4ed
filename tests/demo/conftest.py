"""What every test of a job that is shipped starts from."""

import gc

import pytest


@pytest.fixture(autouse=True)
def little_for_the_collector_in_each_test() -> None:
    """Take what jobs imported in earlier tests out of the collector's sight.

    They run out of memory, and cycles are collected each time.
    """
    gc.freeze()
