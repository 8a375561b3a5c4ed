"""Host against device, entering and leaving, compiled modules, and reading real devices."""

import threading

import pytest
import torch
from torch import nn

from automicro.memory.budget import MemoryBudget, active_budget, refuse_compiled
from automicro.memory.device import (
    allocated_bytes,
    capacity_bytes,
    limit_memory,
    peak_bytes,
    read_counts,
    reset_peak,
)
from automicro.memory.meter import Meter
from automicro.torch_private import can_record_memory

KIB = 1024


# Host and device


def test_after_the_host_part_tensors_are_counted_again() -> None:
    with MemoryBudget(None) as budget:
        with pytest.raises(KeyError), budget.host():
            raise KeyError
        x = torch.zeros(1024)
    assert budget.allocated_bytes == x.nbytes


def test_a_transfer_that_does_not_fit_is_refused() -> None:
    batch = torch.zeros(1024)
    with MemoryBudget("1KiB") as budget:
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 4\.00 KiB"):
            budget.transfer(batch)
        assert budget.transfer(batch[:100]).shape == (100,)
    assert budget.allocated_bytes == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4).t(),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
    ],
    ids=["channels_last", "transposed", "coo", "csr"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_transfer_keeps_the_layout(make) -> None:
    tensor = make()
    with MemoryBudget(None) as budget:
        moved = budget.transfer(tensor)
    assert moved.layout is tensor.layout
    assert torch.equal(moved.to_dense(), tensor.to_dense())
    if tensor.layout is torch.strided:
        assert moved.stride() == tensor.stride()


def test_tracking_brings_a_host_tensor_onto_the_device() -> None:
    x = torch.zeros(1024)
    budget = MemoryBudget(None)
    with budget, budget.host():
        x.add_(1)
    assert budget.allocated_bytes == 0
    assert budget.track(x).allocated_bytes == x.nbytes


# Entering and leaving


def test_a_second_budget_inside_the_first_is_refused() -> None:
    with MemoryBudget("1GiB") as outer:
        with (
            pytest.raises(
                ValueError,
                match=r"cannot enter MemoryBudget\('1\.00 MiB'\) inside "
                r"MemoryBudget\('1\.00 GiB'\).*leave the outer budget first",
            ),
            MemoryBudget("1MiB"),
        ):
            pass
        assert active_budget() is outer


def test_other_threads_are_not_watched() -> None:
    seen: list[MemoryBudget | None] = []

    def work() -> None:
        seen.append(active_budget())
        torch.zeros(1024)

    with MemoryBudget("1KiB") as budget:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [None]
    assert budget.peak_bytes == 0


# Compiled modules


def compiled_whole() -> nn.Module:
    module = torch.compile(nn.Linear(2, 2), backend="eager")
    assert isinstance(module, nn.Module)
    return module


def compiled_in_place() -> nn.Module:
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


def compiled_forward() -> nn.Module:
    module = nn.Linear(2, 2)
    module.forward = torch.compile(module.forward, backend="eager")  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("make", [compiled_whole, compiled_in_place, compiled_forward])
def test_compiled_modules_are_refused(make) -> None:
    nested = nn.Sequential(nn.ReLU(), nn.Sequential(make()))
    with pytest.raises(ValueError, match=r"compiled: 1\.0\. Leave out either"):
        refuse_compiled(nested)
    with pytest.raises(ValueError, match=r"compiled: (Linear|OptimizedModule)"):
        MemoryBudget(None).track(make())


# Reading and limiting devices


def test_on_a_cpu_the_active_budget_is_read() -> None:
    with MemoryBudget(None):
        x = torch.zeros(1024)
        torch.zeros(1024)
        assert allocated_bytes("cpu") == x.nbytes
        assert peak_bytes(torch.device("cpu")) == 2 * x.nbytes
        reset_peak("cpu")
        assert peak_bytes("cpu") == x.nbytes


def test_on_an_accelerator_its_own_count_is_read(mocker) -> None:
    module = mocker.patch("torch.get_device_module").return_value
    module.memory_stats_as_nested_dict.return_value = {
        "allocated_bytes": {"all": {"current": 5, "peak": 7}},
        "reserved_bytes": {"all": {"current": 9}},
        "num_alloc_retries": 2,
        "num_ooms": 1,
    }
    assert (allocated_bytes("cuda:1"), peak_bytes("cuda:1")) == (5, 7)
    counts = read_counts("cuda:1")
    assert (counts.reserved_bytes, counts.alloc_retries, counts.ooms) == (9, 2, 1)
    reset_peak("cuda:1")
    module.reset_peak_memory_stats.assert_called_once_with(torch.device("cuda:1"))


def test_an_accelerator_is_asked_twice_for_one_attempt(mocker) -> None:
    module = mocker.patch("torch.get_device_module").return_value
    module.memory_stats_as_nested_dict.return_value = {}  # nothing was allocated yet
    module.mem_get_info.return_value = (6, 10)
    module.get_per_process_memory_fraction.return_value = 0.5
    meter = Meter([torch.device("cuda:1")])
    meter.begin()
    first = meter.end()
    assert (first.peak_bytes, first.capacity_bytes, first.alloc_retries) == (0, 5, 0)
    asked = module.memory_stats_as_nested_dict.call_count
    meter.begin()
    assert meter.end().capacity_bytes == 5  # of a second ago at most
    assert module.memory_stats_as_nested_dict.call_count == asked + 2
    assert module.mem_get_info.call_count == 1
    assert module.synchronize.call_count == 0
    meter.begin(waits=True)
    assert not first.has_waited
    assert meter.end().has_waited
    assert module.synchronize.call_count == 2


def test_a_share_is_left_free_for_others(mocker) -> None:
    module = mocker.patch("torch.get_device_module").return_value
    module.memory_stats_as_nested_dict.return_value = {}
    module.mem_get_info.return_value = (500, 1000)
    module.get_per_process_memory_fraction.return_value = 1.0
    meter = Meter([torch.device("cuda:1")], left_free=0.1)
    meter.begin()
    assert meter.end().capacity_bytes == 450


def test_an_allocator_that_keeps_no_statistics_is_asked_once(mocker) -> None:
    read = mocker.patch("torch.get_device_module").return_value.memory_stats_as_nested_dict
    read.side_effect = RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
    assert peak_bytes("cuda:7") is None
    assert capacity_bytes("cuda:7") is None
    assert read.call_count == 1


def test_an_allocator_that_was_plugged_in_is_named(mocker, caplog) -> None:
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
    with pytest.raises(ValueError, match=r"pluggable allocator .*use torch's own allocator"):
        limit_memory("1MiB", "cuda:6")


@pytest.mark.parametrize("backend", ["native", "cudaMallocAsync", "pluggable"])
def test_only_the_native_allocator_gives_snapshots(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.memory.get_allocator_backend", lambda: backend)
    assert can_record_memory(torch.device("cuda")) == (backend == "native")


def test_a_device_without_statistics_counts_nothing(mocker) -> None:
    mocker.patch("torch.get_device_module", return_value=mocker.Mock(spec=[]))
    assert (allocated_bytes("mps"), peak_bytes("mps")) == (None, None)
    reset_peak("mps")


@pytest.mark.parametrize("device", ["cuda:1", "cuda"])
# Without a limit cudaMallocAsync says some millions, which cannot be set again.
@pytest.mark.parametrize(("before", "after"), [(0.9, 0.9), (2e8, 1.0)])
def test_cuda_is_limited_by_its_fraction_and_restored(mocker, device, before, after) -> None:
    mocker.patch("torch.cuda.get_device_properties").return_value.total_memory = 8 * KIB
    mocker.patch("torch.cuda.get_per_process_memory_fraction", return_value=before)
    set_fraction = mocker.patch("torch.cuda.set_per_process_memory_fraction")
    with pytest.raises(KeyError), limit_memory("2KiB", device):
        raise KeyError
    calls = [mocker.call(each, torch.device(device).index) for each in (0.25, after)]
    assert set_fraction.call_args_list == calls


def test_more_than_the_device_has_is_refused(mocker) -> None:
    mocker.patch("torch.cuda.get_device_properties").return_value.total_memory = 8 * KIB
    with pytest.raises(ValueError, match=r"16\.00 KiB exceeds the 8\.00 KiB of cuda: give at most"):
        limit_memory("16KiB", "cuda")


def test_a_device_that_cannot_be_limited_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot limit the memory of mps.*Leave the limit out"):
        limit_memory("1GiB", "mps")
