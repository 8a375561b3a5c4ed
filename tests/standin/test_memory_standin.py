"""Reading and limiting device memory, and the behavior if a device does not support it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from automicro.memory import device as memory
from automicro.memory.budget import limit_bytes, limit_memory
from automicro.remembered.recollection import usable_bytes
from automicro.trainer.device import choose_device, describe_device
from tests.gpu.device import MIB
from tests.standin import device as standin

DEVICE = "standin:0"  # a string, because torch knows it only after installation
GIB = 2**30


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    memory.reset_peak(DEVICE)
    yield
    memory._uncounted.discard(torch.device(DEVICE))
    memory.reset_peak(DEVICE)


def block(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=DEVICE)


def test_allocator_counts_are_up_to_date() -> None:
    before = memory.read_counts(DEVICE)
    held = block(30)
    counts = memory.read_counts(DEVICE)
    assert counts.allocated_bytes == (before.allocated_bytes or 0) + 30 * MIB
    assert memory.allocated_bytes(DEVICE) == counts.allocated_bytes == standin.memory_allocated(0)
    assert counts.reserved_bytes == standin.memory_reserved(0)
    with pytest.raises(torch.OutOfMemoryError):
        block(20 * 1024)
    assert memory.read_counts(DEVICE).ooms == (counts.ooms or 0) + 1
    assert memory.read_counts(DEVICE).alloc_retries == (counts.alloc_retries or 0) + 1
    del held


def test_peak_spans_several_laps() -> None:
    base = memory.allocated_bytes(DEVICE) or 0
    for mib in (40, 10):
        memory.begin_lap(DEVICE)
        block(mib)
        assert memory.read_counts(DEVICE).peak_bytes == base + mib * MIB
    assert memory.peak_bytes(DEVICE) == base + 40 * MIB
    memory.reset_peak(DEVICE)
    assert memory.peak_bytes(DEVICE) == base


def test_capacity_is_free_and_cached_memory_within_share() -> None:
    assert memory.total_bytes(DEVICE) == usable_bytes(DEVICE) == 16 * GIB
    block(100)  # now in the cache
    assert memory.capacity_bytes(DEVICE) == 16 * GIB
    torch.ops.standin.set_occupied(0, GIB)  # by another process
    assert memory.capacity_bytes(DEVICE) == 15 * GIB
    with limit_memory("25%", DEVICE):
        assert memory.capacity_bytes(DEVICE) == usable_bytes(DEVICE) == 4 * GIB
        with pytest.raises(torch.OutOfMemoryError):
            block(4 * 1024 + 2)
    assert usable_bytes(DEVICE) == 16 * GIB


def test_unenforceable_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"the limit of 17.00 GiB exceeds the 16.00 GiB of standin"
    ):
        limit_memory("17GiB", DEVICE)
    monkeypatch.delattr(standin, "set_per_process_memory_fraction")
    with pytest.raises(ValueError, match="cannot limit the memory of standin:0"):
        limit_memory("1GiB", DEVICE)
    monkeypatch.delattr(standin, "get_device_properties")
    assert memory.total_bytes(DEVICE) is usable_bytes(DEVICE) is None
    with pytest.raises(ValueError, match="has no memory of its own"):
        limit_bytes("50%", DEVICE)
    monkeypatch.undo()


def test_device_without_statistics_reports_no_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(standin, "memory_stats_as_nested_dict")
    assert memory.read_counts(DEVICE) == memory.begin_lap(DEVICE) == memory.NO_COUNTS
    assert memory.capacity_bytes(DEVICE) is memory.peak_bytes(DEVICE) is None
    monkeypatch.undo()


def test_allocator_without_statistics_is_queried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(device: Any) -> Any:
        asked.append(device)
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(standin, "memory_stats_as_nested_dict", refuse)
    for _ in range(3):
        assert memory.read_counts(DEVICE) == memory.NO_COUNTS
    assert len(asked) == 1
    assert memory.capacity_bytes(DEVICE) is None
    assert usable_bytes(DEVICE) == 16 * GIB  # for this allocator no share is computed
    monkeypatch.undo()


def test_copies_overlap_only_with_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.copies_overlap(DEVICE)
    monkeypatch.delattr(standin, "Stream")
    assert not memory.copies_overlap(DEVICE)
    monkeypatch.undo()


def test_device_is_chosen_and_described() -> None:
    assert choose_device("auto") == torch.device(DEVICE)
    assert choose_device("standin:1") == torch.device("standin:1")
    assert describe_device(torch.device(DEVICE), None) == "standin:0 (stand-in 0)"
    assert (
        describe_device(torch.device(DEVICE), "25%") == "standin:0 (stand-in 0) limited to 4.00 GiB"
    )
    with pytest.raises(ValueError, match="device='gpu:0' cannot be used here"):
        choose_device("gpu:0")
    with pytest.raises(ValueError, match="cannot be used here"):
        choose_device("cuda:0")
