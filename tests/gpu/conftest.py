"""Fixtures that set up and clean up each test on an accelerator."""

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch

from automicro.trainer.surroundings import CUBLAS_VALUES, CUBLAS_VARIABLE
from tests.gpu.device import DEVICE, accelerator, share_of_device

Record = Callable[[str, object], None]


@pytest.fixture(autouse=True, scope="session")
def started_device(same_environment: None) -> Iterator[None]:
    """Start the device before the first test, which sets an environment variable in some versions.

    The setting that makes cuBLAS deterministic comes first, because torch and cuBLAS read it only
    once, at the first matrix product of a process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CUBLAS_VARIABLE, os.environ.get(CUBLAS_VARIABLE, CUBLAS_VALUES[0]))
        accelerator.init()
        yield


COUNTERS = {
    "ooms": "num_ooms",
    "retries": "num_alloc_retries",
    "segments taken": "segment.all.allocated",
    "segments given back": "segment.all.freed",
}


@pytest.fixture(autouse=True)
def clean_device(record_property: Record) -> Iterator[None]:
    """Clear cached memory, limits and synchronization checks after a test.

    If a test runs out of memory, the counts of the allocator are recorded.
    """
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats(DEVICE)
    accelerator.manual_seed(0)
    fraction = share_of_device()
    before = accelerator.memory_stats(DEVICE)
    yield
    gc.collect()  # now, because frozen objects stay forever
    after = accelerator.memory_stats(DEVICE)
    counted = {name: after.get(key, 0) - before.get(key, 0) for name, key in COUNTERS.items()}
    if counted["ooms"]:
        counted["active bytes at the end"] = after.get("active_bytes.all.current", 0)
        record_property("counters", counted)
    accelerator.set_sync_debug_mode("default")
    accelerator.set_per_process_memory_fraction(fraction, DEVICE)
    accelerator.empty_cache()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Use kernels that give the same bits each time; others raise an error."""
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = benchmark
