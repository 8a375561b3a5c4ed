"""Batches from pinned memory give bit-identical results, even with late streams.

The second half removes each safeguard and checks that results become wrong.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from automicro import Microbatcher
from automicro.batch import device as transfer
from tests.gpu.device import pinned, to_device
from tests.gpu.subjects import CLASSES, batch, model

SCHEDULES = [(True, True), (True, False), (False, True), (False, False)]


def train(place: Any, size: int = 2) -> list[Tensor]:
    """Return the gradients and losses after each of several batches."""
    net, found = model(), []
    step = Microbatcher(net, loss_fn=nn.MSELoss(), microbatch_size=size, probe=False)
    for seed in range(4):
        inputs, targets = batch(8, seed)
        result = step.backward(place((inputs, F.one_hot(targets, CLASSES).float())))
        found += [each.grad.cpu() for each in net.parameters() if each.grad is not None]
        assert isinstance(result.loss, Tensor)
        found.append(result.loss.cpu())
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("place", [pinned, lambda rows: rows], ids=["pinned", "pageable"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_prefetching_with_late_streams_is_bit_identical(
    schedule: tuple[bool, bool], place: Any, expected: list[Tensor]
) -> None:
    torch.ops.standin.set_late(*schedule)
    assert same(train(place), expected)


class Packed(nn.Linear):
    def forward(self, x: PackedSequence) -> Tensor:  # type: ignore[override]
        assert x.unsorted_indices is not None
        scale = x.unsorted_indices.float()[:, None].mul(0.01).add(1)
        return super().forward(x.data).sum() * scale.expand(-1, 3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_prefetching_packed_sequences_is_bit_identical(schedule: tuple[bool, bool]) -> None:
    rows = [torch.randn(length, 5) for length in (3, 5, 2, 4)]
    given = pack_sequence(rows, enforce_sorted=False), torch.tensor([0, 2, 1, 1])
    found = []
    for rows_given, late in ((given, (False, False)), (pinned(given), schedule)):
        torch.ops.standin.set_late(*late)
        torch.manual_seed(1)
        net = Packed(5, 3).to("standin")
        step = Microbatcher(net, loss_fn=nn.CrossEntropyLoss(), microbatch_size=2, probe=False)
        step.backward(rows_given)
        found.append([each.grad.cpu() for each in net.parameters() if each.grad is not None])
    assert same(*found)


@pytest.fixture
def expected() -> list[Tensor]:
    return train(to_device)


def test_results_are_wrong_if_step_does_not_wait_for_copies(
    expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer._LateCopies, "join", lambda self: None)
    torch.ops.standin.set_late(False, True)
    assert not same(train(pinned), expected)


def test_results_are_wrong_if_copies_do_not_wait_for_step(
    expected: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Any) -> None:
        with self._module.stream(self._side):
            for target, source in self._waiting:
                target.copy_(source, non_blocking=True)
        self._waiting.clear()

    monkeypatch.setattr(transfer._LateCopies, "start", start)
    torch.ops.standin.set_late(True, False)
    assert not same(train(pinned), expected)
