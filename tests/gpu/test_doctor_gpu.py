"""The doctor on snapshots by CUDA's own allocator."""

import importlib
from pathlib import Path

import pytest
import torch

from automicro.tools.doctor import diagnose
from automicro.torch_private_execution import can_record_memory, dump_memory_snapshot
from tests.gpu.device import DEVICE, GPU, MIB, room
from tests.tools.doctor.test_doctor import PLANTED, names_the_culprit

pytestmark = GPU

# On a device, these differ only in where tensors are created.
NAMES = ("teacher", "bank", "losses")


@pytest.mark.parametrize("name", NAMES)
def test_doctor_finds_planted_culprit_in_cuda_snapshot(name: str, tmp_path: Path) -> None:
    device = DEVICE
    if not can_record_memory(device):
        pytest.skip("no allocator that takes snapshots")
    path = tmp_path / "snapshot.pickle"
    mib, kind, _ = PLANTED[name]
    # Growing memory reaches any limit, and small segments occupy part of it.
    with room((2 if kind == "growth" else 1) * mib * MIB), device:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
        try:
            main = importlib.import_module(f"tests.tools.doctor.failures.{name}").main
            with pytest.raises(torch.OutOfMemoryError):
                main()
            dump_memory_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(None)
    diagnosis = diagnose(path)
    assert names_the_culprit(name, diagnosis), str(diagnosis)
