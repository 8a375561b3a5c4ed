"""Reading and limiting the memory of real devices."""

import pytest
import torch

from automicro.memory.budget import MemoryBudget, limit_memory
from automicro.memory.device import Meter, allocated_bytes, peak_bytes, reset_peak
from automicro.torch_private_execution import can_record_memory

KIB = 1024


def test_active_budget_is_read_on_cpu() -> None:
    with MemoryBudget(None):
        x = torch.zeros(1024)
        torch.zeros(1024)
        assert allocated_bytes("cpu") == x.nbytes
        assert peak_bytes(torch.device("cpu")) == 2 * x.nbytes
        reset_peak("cpu")
        assert peak_bytes("cpu") == x.nbytes


def test_attempt_queries_accelerator_statistics_twice(mocker) -> None:
    module = mocker.patch("torch.get_device_module").return_value
    module.memory_stats_as_nested_dict.return_value = {}  # nothing has been allocated yet
    module.mem_get_info.return_value = (6, 10)
    module.get_per_process_memory_fraction.return_value = 0.5
    meter = Meter([torch.device("cuda:1")])
    meter.begin()
    first = meter.end()
    assert (first.peak_bytes, first.capacity_bytes, first.alloc_retries) == (0, 5, 0)
    asked = module.memory_stats_as_nested_dict.call_count
    meter.begin()
    assert meter.end().capacity_bytes == 5  # at most a second old
    assert module.memory_stats_as_nested_dict.call_count == asked + 2
    assert module.mem_get_info.call_count == 1
    assert module.synchronize.call_count == 0
    meter.begin(waits=True)
    assert not first.has_waited
    assert meter.end().has_waited
    assert module.synchronize.call_count == 2
    meter = Meter([torch.device("cuda:1")], left_free=0.1)
    meter.begin()
    assert meter.end().capacity_bytes == 4  # a share is left for others


def test_warning_names_pluggable_allocator(mocker, caplog) -> None:
    module = mocker.patch("torch.get_device_module").return_value
    module.get_device_properties.return_value.total_memory = 2**30
    said = RuntimeError("CUDAPluggableAllocator does not yet support this")
    for name in ("memory_stats_as_nested_dict", "reset_peak_memory_stats"):
        getattr(module, name).side_effect = said
    module.set_per_process_memory_fraction.side_effect = said
    reset_peak("cuda:6")
    reset_peak("cuda:6")
    assert [each.getMessage() for each in caplog.records] == [
        "automicro: the allocator of cuda:6 keeps no statistics (CUDAPluggableAllocator does not "
        "yet support this), so sizes are only halved and no memory is reported. Use torch's own "
        "allocator for both"
    ]
    with pytest.raises(ValueError, match=r"devices like CUDA with torch.s own allocator"):
        limit_memory("1MiB", "cuda:6")


def test_only_native_allocator_supports_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("native", "cudaMallocAsync", "pluggable"):
        monkeypatch.setattr("torch.cuda.memory.get_allocator_backend", lambda: backend)  # noqa: B023
        assert can_record_memory(torch.device("cuda")) == (backend == "native")


# Without a limit, cudaMallocAsync returns some millions, which cannot be set again.
@pytest.mark.parametrize(("device", "before", "after"), [("cuda:1", 0.9, 0.9), ("cuda", 2e8, 1.0)])
def test_cuda_limit_sets_memory_fraction_and_restores_it(mocker, device, before, after) -> None:
    mocker.patch("torch.cuda.get_device_properties").return_value.total_memory = 8 * KIB
    mocker.patch("torch.cuda.get_per_process_memory_fraction", return_value=before)
    set_fraction = mocker.patch("torch.cuda.set_per_process_memory_fraction")
    with pytest.raises(KeyError), limit_memory("2KiB", device):
        raise KeyError
    calls = [mocker.call(each, torch.device(device).index) for each in (0.25, after)]
    assert set_fraction.call_args_list == calls
