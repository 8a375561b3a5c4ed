"""The doctor on snapshots that CUDA's own allocator took."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from automicro.tools.doctor import diagnose
from automicro.torch_private import can_record_memory, dump_memory_snapshot, record_memory_history
from tests.gpu.device import DEVICE, GPU
from tests.tools.doctor.test_doctor import PLANTED, names_the_culprit

pytestmark = GPU

# Those that differ on a device only by where tensors are made.
NAMES = ("average", "bank", "gradients", "losses")


@pytest.mark.parametrize("name", NAMES)
def test_the_planted_culprit_is_named_in_a_snapshot_of_cuda(name: str, tmp_path: Path) -> None:
    device = DEVICE
    if not can_record_memory(device):
        pytest.skip("no allocator that takes snapshots")
    path = tmp_path / "snapshot.pickle"
    total = torch.cuda.get_device_properties(device).total_memory
    limit = 8 * PLANTED[name][0] << 20  # libraries and segments take some of it
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(limit / total)
    record_memory_history(200_000)
    failed: Any = None
    try:
        with device:
            for _ in range(50):
                importlib.import_module(f"tests.tools.doctor.failures.{name}").main()
    except torch.OutOfMemoryError as error:
        dump_memory_snapshot(str(path))
        failed = error
    finally:
        record_memory_history(None)
        torch.cuda.set_per_process_memory_fraction(1.0)
    if failed is None:
        pytest.skip(f"{limit} bytes were enough")
    diagnosis = diagnose(path)
    assert names_the_culprit(name, diagnosis), str(diagnosis)
