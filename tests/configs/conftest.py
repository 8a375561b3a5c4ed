"""What every test of a job that is shipped starts from."""

from tests.demo.conftest import little_for_the_collector_in_each_test

__all__ = ["little_for_the_collector_in_each_test"]
