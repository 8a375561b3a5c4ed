"""Sizes on a real device: the fewest microbatches that fit, and allocator retries."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Halving, Microbatcher
from automicro.memory.device import Meter
from tests.gpu.conftest import Record
from tests.gpu.device import (
    DEVICE,
    GPU,
    MIB,
    accelerator,
    differences,
    has_native_allocator,
    only_cuda,
    room,
    snapshot,
)
from tests.gpu.subjects import Hungry, batch, microbatcher, model

pytestmark = GPU

needs_native_allocator = pytest.mark.skipif(
    not has_native_allocator(), reason="cudaMallocAsync counts no retries, and rounds no blocks"
)

ROWS = 24  # halving goes to 12 and 6, and 8 rows are three microbatches


def net_for_sizes() -> nn.Module:
    """A model with real activations on CUDA; elsewhere they are too small for 20 MiB segments."""
    return model() if DEVICE.type == "cuda" else model(Hungry(40, 0))


def reserved_bytes(rows: int) -> int:
    """Return the bytes that the allocator reserves for a step with microbatches of these rows."""
    net = net_for_sizes()
    step = microbatcher(net, rows, probe=False)  # a probe would use other sizes
    for _ in range(2):  # in the first, libraries create their permanent state
        net.zero_grad()
        accelerator.empty_cache()
        accelerator.reset_peak_memory_stats(DEVICE)
        before = accelerator.memory_reserved(DEVICE)
        step.backward(batch(ROWS))
    return int(accelerator.max_memory_reserved(DEVICE) - before)


@pytest.fixture
def room_bytes() -> int:
    """Enough memory for 8 rows, but not for 12."""
    fits, fails = reserved_bytes(8), reserved_bytes(12)
    assert fits < fails
    return (fits + fails) // 2


@needs_native_allocator
def test_auto_settles_at_three_microbatches_and_halving_at_four(
    room_bytes: int, record_property: Record
) -> None:
    found: dict[str, list[Any]] = {}
    for name, size in (("halving", Halving(refine=False)), ("auto", "auto")):
        net = net_for_sizes()
        step = microbatcher(net, size)
        results = []
        with room(room_bytes):
            for number in range(12):
                net.zero_grad()
                results.append(step.backward(batch(ROWS, seed=number)))
        found[name] = results
        record_property(name, [(each.microbatch_size, each.failed_sizes) for each in results])
    assert found["halving"][-1].num_microbatches == 4
    assert found["auto"][-1].num_microbatches == 3
    ooms = {name: sum(each.ooms for each in results) for name, results in found.items()}
    assert ooms["auto"] <= ooms["halving"] + 1


@pytest.mark.usefixtures("deterministic")
def test_oom_during_size_trial_changes_no_bit(room_bytes: int) -> None:
    net, other = net_for_sizes(), net_for_sizes()
    step = microbatcher(net)
    for number in range(6):
        rows = batch(ROWS, seed=number)
        torch.manual_seed(number)
        with room(room_bytes):
            size = step.backward(rows).microbatch_size
        torch.manual_seed(number)
        microbatcher(other, size).backward(rows)
        assert differences(snapshot(net), snapshot(other)) == []
        net.zero_grad()
        other.zero_grad()


class RetryingOnce(nn.Module):
    """Leaves a cached block that is too small for the next request, of some MiB per row."""

    def forward(self, x: Tensor) -> Tensor:
        for mib in (40, 45):
            torch.empty(len(x) * mib * MIB, dtype=torch.uint8, device=x.device)
        return x


class Growing(nn.Module):
    """Requests more each time it gets all rows at once, so that no cached block is large enough."""

    def __init__(self, rows: int, row_mib: int) -> None:
        super().__init__()
        self.rows, self.row_mib, self.more_mib = rows, row_mib, 0

    def forward(self, x: Tensor) -> Tensor:
        self.more_mib += 20 * (len(x) == self.rows)
        num_mib = len(x) * self.row_mib + self.more_mib * (len(x) == self.rows)
        torch.empty(num_mib * MIB, dtype=torch.uint8, device=x.device)
        return x


def train_near_the_limit(asks: nn.Module, batches: int, rows: int = 16) -> Any:
    """Return the microbatch size of each batch, and its allocator retries.

    One such block of 16 rows fits but not two, and two blocks of 8 rows do.
    """
    net = nn.Sequential(nn.Linear(8, 8), asks, nn.Linear(8, 4)).to(DEVICE)
    step = Microbatcher(net, loss_fn=nn.CrossEntropyLoss(), probe=False)
    sizes, counts = [], []
    with room(900 * MIB):
        for _ in range(batches):
            before = accelerator.memory_stats(DEVICE).get("num_alloc_retries", 0)
            result = step.backward((torch.randn(rows, 8), torch.arange(rows) % 4))
            assert result.attempts == 1
            sizes.append(result.microbatch_size)
            after = accelerator.memory_stats(DEVICE).get("num_alloc_retries", 0)
            counts.append(after - before)
    return sizes, counts


@needs_native_allocator
def test_repeated_allocator_retries_reduce_size(record_property: Record) -> None:
    sizes, counts = train_near_the_limit(Growing(16, 30), 12)
    record_property("sizes", sizes)
    record_property("retries", counts)
    assert sizes[:6] == [16, 16, 16, 8, 8, 8]
    assert min(counts[1:3]) > 0
    assert counts[3:6] == [0, 0, 0]
    # The faster of the two depends on the device, but the choice is made only once.
    assert sizes[6:] == [sizes[6]] * 6


@needs_native_allocator
def test_allocator_retry_in_first_batch_only_keeps_size(record_property: Record) -> None:
    sizes, counts = train_near_the_limit(RetryingOnce(), 8)
    record_property("retries", counts)
    assert counts[0] > 0
    assert counts[1:] == [0] * 7
    assert sizes == [16] * 8


@needs_native_allocator
def test_allocator_retries_at_one_row_keep_size() -> None:
    sizes, counts = train_near_the_limit(Growing(1, 480), 5, rows=1)
    assert sizes == [1] * 5
    assert [count > 0 for count in counts] == [False] + [True] * 4


_OUTSIDE = """
import json
import torch
from torch import nn
from automicro import Microbatcher
device = torch.device("cuda")
net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 900, 8)).to(device)
found = []
def note(*_):
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    found.append(total - free - torch.cuda.memory_reserved())
note()
net.register_forward_pre_hook(note)
step = Microbatcher(net, loss_fn=nn.CrossEntropyLoss(), microbatch_size=16, probe=False)
for _ in range(2):
    step.backward((torch.randn(16, 3, 32, 32), torch.zeros(16, dtype=torch.long)))
note()
print(json.dumps(found))
"""


@only_cuda("libraries with memory of their own")
def test_libraries_allocate_memory_before_first_forward(record_property: Record) -> None:
    command = [sys.executable, "-c", _OUTSIDE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    start, first, _, end = json.loads(done.stdout.splitlines()[-1])
    record_property("bytes_outside_of_torch", {"start": start, "first forward": first, "end": end})
    assert first > start, "no library was used before the first forward"


@pytest.mark.parametrize("waits", [True, False])
def test_compared_seconds_are_measured_on_device(waits: bool, record_property: Record) -> None:
    """Without synchronization, they are the seconds that the host takes to enqueue the work."""
    side, times = (4096, 50) if DEVICE.type == "cuda" else (256, 20)
    a = torch.ones(side, side, device=DEVICE)
    meter = Meter([DEVICE])
    measured = []
    for _ in range(3):  # in the first, libraries create their permanent state
        begin, end = (accelerator.Event(enable_timing=True) for _ in range(2))
        accelerator.synchronize(DEVICE)
        meter.begin(waits=waits)
        begin.record()
        for _ in range(times):
            torch.mm(a, a)
        end.record()
        measured.append(meter.end())
        accelerator.synchronize(DEVICE)
    seconds = {"meter": measured[-1].seconds, "events": begin.elapsed_time(end) / 1e3}
    record_property("seconds", {name: round(each, 6) for name, each in seconds.items()})
    assert measured[-1].has_waited == waits
    if DEVICE.type == "cuda" and waits:  # the stand-in has its own clock
        assert seconds["meter"] == pytest.approx(seconds["events"], rel=0.2)
