"""Sizes on a real device: the fewest microbatches that fit, and allocator retries."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Halving, Microbatcher
from tests.gpu.conftest import Record
from tests.gpu.device import DEVICE, GPU, MIB, differences, room, snapshot
from tests.gpu.subjects import batch, microbatcher, model

pytestmark = GPU

ROWS = 24  # halving goes to 12 and 6, and 8 rows are three microbatches


def reserved_bytes(rows: int) -> int:
    """What the allocator takes from the device for a step with microbatches of these rows."""
    net = model()
    step = microbatcher(net, rows)
    for _ in range(2):  # the first makes what libraries keep for ever
        net.zero_grad()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        before = torch.cuda.memory_reserved(DEVICE)
        step.backward(batch(ROWS))
    return torch.cuda.max_memory_reserved(DEVICE) - before


@pytest.fixture
def room_bytes() -> int:
    """Room for 8 rows and not for 12."""
    fits, fails = reserved_bytes(8), reserved_bytes(12)
    assert fits < fails
    return (fits + fails) // 2


def test_training_ends_at_three_microbatches_where_halving_ends_at_four(
    room_bytes: int, record_property: Record
) -> None:
    found: dict[str, list[Any]] = {}
    for name, size in (("halving", Halving(refine=False, grow=False)), ("auto", "auto")):
        net = model()
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
def test_a_trial_that_runs_out_of_memory_changes_no_bit(room_bytes: int) -> None:
    net, other = model(), model()
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


class Retrying(nn.Module):
    """Leaves a block in the cache that is too small for the next request, so many MiB a row."""

    def forward(self, x: Tensor) -> Tensor:
        for mib in (40, 45):
            torch.empty(len(x) * mib * MIB, dtype=torch.uint8, device=x.device)
        return x


@pytest.fixture
def near_the_limit() -> Iterator[None]:
    """Room for 45 MiB for each of 16 rows, but not for 40 beside them; for both of 8."""
    with room(900 * MIB):
        yield


def retries() -> int:
    return int(torch.cuda.memory_stats(DEVICE).get("num_alloc_retries", 0))


@pytest.mark.usefixtures("near_the_limit")
def test_allocator_retries_lead_to_a_smaller_size_at_the_next_batch(
    record_property: Record,
) -> None:
    net = nn.Sequential(nn.Linear(8, 8), Retrying(), nn.Linear(8, 4)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    step = Microbatcher(net, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, probe=False)
    sizes, counts = [], []
    for _ in range(12):
        before = retries()
        result = step.backward((torch.randn(16, 8), torch.arange(16) % 4))
        optimizer.step()
        optimizer.zero_grad()
        assert result.attempts == 1
        sizes.append(result.microbatch_size)
        counts.append(retries() - before)
    record_property("sizes", sizes)
    record_property("retries", counts)
    assert counts[0] > 0
    assert sizes[:4] == [16, 8, 8, 8]
    assert counts[1:4] == [0, 0, 0]
    # Which of the two is faster is the device's affair; whether it stays is decided once.
    assert sizes[4:] == [sizes[4]] * 8
    assert len(steps) == 12


@pytest.mark.usefixtures("near_the_limit")
def test_retries_at_one_row_change_nothing() -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for mib in (600, 700):
                torch.empty(mib * MIB, dtype=torch.uint8, device=x.device)
            return x

    net = nn.Sequential(nn.Linear(8, 8), Always(), nn.Linear(8, 4)).to(DEVICE)
    step = Microbatcher(net, loss_fn=nn.CrossEntropyLoss(), probe=False)
    for _ in range(4):
        before = retries()
        result = step.backward((torch.randn(1, 8), torch.zeros(1, dtype=torch.int64)))
        assert (result.attempts, result.microbatch_size) == (1, 1)
        assert retries() > before
