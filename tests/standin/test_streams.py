"""Late streams: code that forgets to wait always reads wrong numbers.

`test_prefetching` covers side streams, and tests/gpu counts waits.
"""

import pytest
import torch
from torch import Tensor

from tests.standin import device as standin

ROWS = torch.arange(6.0)


def zeros(device: str = "standin:0") -> Tensor:
    return torch.zeros(6, device=device)


def late(default_streams: bool, other_streams: bool) -> None:
    torch.ops.standin.set_late(default_streams, other_streams)


def test_work_runs_when_host_waits_or_polls() -> None:
    x = zeros()
    standin.synchronize()
    event, other = standin.Event(), standin.Event()
    x.add_(1)
    x.mul_(2)
    event.record()
    assert not standin.current_stream().query()
    event.synchronize()
    assert event.query()
    assert torch.equal(x.cpu(), torch.full((6,), 2.0))
    x.add_(1)
    other.record()
    asked = 0
    while not other.query():
        asked += 1
    assert 0 < asked <= 2


@pytest.mark.parametrize("records", [True, False])
def test_memory_freed_too_early_is_overwritten(records: bool) -> None:
    late(default_streams=True, other_streams=False)
    side, ones, twos = standin.Stream(), ROWS.pin_memory(), (ROWS * 2).pin_memory()
    with side:
        x = ones.to("standin", non_blocking=True)
    standin.current_stream().wait_stream(side)
    result = x.add(0)
    if records:
        x.record_stream(standin.current_stream())
    del x
    with side:
        later = twos.to("standin", non_blocking=True)
    assert torch.equal(result.cpu(), ROWS if records else ROWS * 2)
    del later


def test_pinned_memory_is_kept_until_late_copy() -> None:
    x, source = zeros(), ROWS.pin_memory()
    x.copy_(source, non_blocking=True)
    address = source.data_ptr()
    del source
    others = [torch.zeros(6, pin_memory=True) for _ in range(8)]
    assert address not in {each.data_ptr() for each in others}
    assert torch.equal(x.cpu(), ROWS)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_only_copies_from_pinned_memory_are_late(is_pinned: bool) -> None:
    x, source = zeros(), ROWS.pin_memory() if is_pinned else ROWS.clone()
    x.copy_(source, non_blocking=True)
    source.fill_(9)
    assert torch.equal(x.cpu(), torch.full((6,), 9.0) if is_pinned else ROWS)


def test_copies_to_pinned_memory_finish_late() -> None:
    target = torch.zeros(6, pin_memory=True)
    target.copy_(zeros() + 1, non_blocking=True)
    assert torch.equal(target, torch.zeros(6))
    standin.synchronize()
    assert torch.equal(target, torch.ones(6))


def test_copies_between_devices_keep_order_of_both_streams() -> None:
    x, y = zeros("standin:0"), zeros("standin:1")
    x.add_(3)
    y.copy_(x, non_blocking=True)
    y.mul_(2)
    assert torch.equal(y.cpu(), torch.full((6,), 6.0))
    assert y.device.index == 1


def test_asynchronous_error_is_raised_at_synchronization() -> None:
    table, index = zeros(), torch.tensor([99], device="standin")
    result = torch.empty(1, device="standin")
    torch.index_select(table, 0, index, out=result)
    with pytest.raises((RuntimeError, IndexError), match="index out of range"):
        standin.synchronize()
    standin.synchronize()  # the error is raised only once


def test_device_clock_counts_only_device_work() -> None:
    x = zeros()
    begin, end = standin.Event(enable_timing=True), standin.Event(enable_timing=True)
    begin.record()
    for _ in range(7):
        x.add_(1)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(0.08)  # 10 µs each, including the mark
