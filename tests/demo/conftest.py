"""Fixtures for tests of shipped jobs."""

import gc

import pytest


@pytest.fixture(autouse=True)
def freeze_gc_before_each_test() -> None:
    """Hide objects of earlier tests from the garbage collector."""
    gc.freeze()
