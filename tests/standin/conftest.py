"""Fixtures that reset the stand-in before each test."""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.standin import device as standin

GIB = 2**30

# Doctests import every module, and importing the device would make it the accelerator.
collect_ignore = ["plugin.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.standin)


@pytest.fixture(autouse=True, scope="session")
def installed_device() -> None:
    if not hasattr(torch, standin.NAME):
        pytest.fail(
            "the stand-in is not the accelerator of this run: `make standin`, or pytest with "
            "-p tests.standin.plugin -m standin",
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def fresh_device(installed_device: None) -> Iterator[None]:
    """Reset the device: nothing queued, cached or limited, and all streams late."""
    reset()
    yield
    reset()


def reset() -> None:
    gc.collect()
    standin.set_sync_debug_mode("default")
    torch.ops.standin.set_late(True, True)
    for index in range(standin.NUM_DEVICES):
        standin.synchronize(index)
        torch.ops.standin.set_capacity(index, 16 * GIB)
        torch.ops.standin.set_occupied(index, 0)
        standin.set_per_process_memory_fraction(1.0, index)
    standin.empty_cache()
    standin.set_device(0)
    for index in range(standin.NUM_DEVICES):
        standin.reset_peak_memory_stats(index)
        standin.reset_accumulated_memory_stats(index)
