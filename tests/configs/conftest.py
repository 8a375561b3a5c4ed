"""Fixtures for tests of shipped jobs."""

from tests.demo.conftest import freeze_gc_before_each_test

__all__ = ["freeze_gc_before_each_test"]
