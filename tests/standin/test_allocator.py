"""The allocator follows the rules that torch documents for CUDA."""

import pytest
import torch
from torch import Tensor

from tests.gpu.device import MIB
from tests.standin import device as standin


def take(num_bytes: float, device: str = "standin:0") -> Tensor:
    return torch.empty(int(num_bytes), dtype=torch.uint8, device=device)


def stats(*names: str) -> list[int]:
    """Return current numbers of all pools: "allocated_bytes", "segment", "num_ooms" …."""
    found = standin.memory_stats(0)
    return [found[name if name.startswith("num_") else f"{name}.all.current"] for name in names]


def test_full_device_raises_oom_after_retry() -> None:
    torch.ops.standin.set_capacity(0, 40 * MIB)
    kept = take(20 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 30\.00 MiB\. Device 0"):
        take(30 * MIB)
    assert stats("num_alloc_retries", "num_ooms", "reserved_bytes") == [1, 1, 20 * MIB]
    others = [take(20 * MIB), take(30 * MIB, "standin:1")]  # the error left no state behind
    del kept, others


def test_process_share_and_other_processes_limit_memory() -> None:
    torch.ops.standin.set_capacity(0, 100 * MIB)
    standin.set_per_process_memory_fraction(0.5)
    with pytest.raises(torch.OutOfMemoryError, match=r"may use a share of 0\.5"):
        take(51 * MIB)
    standin.set_per_process_memory_fraction(1.0)
    torch.ops.standin.set_occupied(0, 60 * MIB)
    assert standin.mem_get_info() == (40 * MIB, 100 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match=r"of which 40\.00 MiB is free"):
        take(51 * MIB)


def test_reset_sets_peak_to_current_memory() -> None:
    take(6 * MIB)
    assert standin.max_memory_allocated() == 6 * MIB
    kept = take(3 * MIB)
    standin.reset_peak_memory_stats()
    assert standin.max_memory_allocated() == standin.memory_allocated() == 3 * MIB
    assert standin.max_memory_reserved() == 20 * MIB
    del kept


def test_streams_have_own_pools_and_recorded_blocks_wait_for_them() -> None:
    side = standin.Stream()
    with side:
        address = take(6 * MIB).data_ptr()
    block = take(6 * MIB)
    assert block.data_ptr() != address
    with side:
        assert take(6 * MIB).data_ptr() == address
        block.fill_(1)
    address = block.data_ptr()
    block.record_stream(side)
    del block
    assert stats("allocated_bytes", "active_bytes") == [0, 6 * MIB]
    other = take(6 * MIB)
    assert other.data_ptr() != address
    side.synchronize()
    assert take(6 * MIB).data_ptr() == address
    del other


def test_full_device_waits_for_blocks_of_other_streams() -> None:
    torch.ops.standin.set_capacity(0, 40 * MIB)
    side = standin.Stream()
    block = take(30 * MIB)
    with side:
        block.fill_(1)
    block.record_stream(side)
    del block
    kept = take(34 * MIB)
    assert stats("num_alloc_retries", "num_ooms", "num_sync_all_streams") == [1, 0, 1]
    del kept


def test_blocks_are_split_joined_and_returned_by_size() -> None:
    small, large, huge = take(1000), take(6 * MIB), take(16 * MIB + 1)
    held = [1024 + 22 * MIB + 512, (2 + 20 + 18) * MIB, 3]
    assert stats("allocated_bytes", "reserved_bytes", "segment") == held
    other = take(6 * MIB)  # from the rest of the segment of 20 MiB
    assert stats("reserved_bytes") == [40 * MIB]
    del large, huge
    standin.empty_cache()  # only whole segments can be returned
    assert stats("reserved_bytes", "inactive_split_bytes") == [22 * MIB, 16 * MIB - 1024]
    del other
    joined = take(20 * MIB - 512)
    assert stats("reserved_bytes") == [22 * MIB]
    del small, joined
    standin.empty_cache()
    assert stats("allocated_bytes", "reserved_bytes", "segment") == [0, 0, 0]
