"""From the host to the device: overlapping, without waiting, without touching the result."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automicro import Microbatcher
from tests.gpu.device import DEVICE, GPU, accelerator, differences, snapshot, to_device
from tests.gpu.subjects import batch, microbatcher, model

pytestmark = GPU

BATCHES = 10 if DEVICE.type == "cuda" else 3


def pinned(rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return rows[0].pin_memory(), rows[1].pin_memory()


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.usefixtures("deterministic")
def test_prefetching_from_pinned_memory_gives_the_same_bits(size: int) -> None:
    found = []
    for place in (to_device, pinned):
        net = model()
        step = microbatcher(net, size)
        torch.manual_seed(3)
        for seed in range(BATCHES):  # memory is used again while copies are under way
            step.backward(place(batch(seed=seed)))
        found.append(snapshot(net))
    assert differences(*found) == []


def test_copies_do_not_leave_the_memory_of_every_batch_cached() -> None:
    net = model()
    step = microbatcher(net, 4)
    reserved_bytes = []
    for seed in range(4 * BATCHES):
        step.backward(pinned(batch(seed=seed)))
        net.zero_grad()
        reserved_bytes.append(accelerator.memory_reserved(DEVICE))
    assert reserved_bytes[-1] <= reserved_bytes[4] * 1.05


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out.transpose(1, 2)


def tagged_batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 7, 16, generator=generator)
    targets = torch.randint(5, (8, 7), generator=generator)
    targets[3, 2:] = -100
    return inputs, targets


Place = Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]


@pytest.mark.parametrize("loss_average", ["samples", "tokens", "none"])
@pytest.mark.parametrize("place", [pinned, to_device], ids=["pinned", "on the device"])
@pytest.mark.parametrize("call", ["backward", "evaluate"])
def test_a_settled_step_never_waits_for_the_device(
    call: str, place: Place, loss_average: str
) -> None:
    net = Tagger().to(DEVICE)
    options: dict[str, Any] = {"microbatch_size": 3, "eval_microbatch_size": 3, "probe": False}
    step = Microbatcher(net, loss_fn=F.cross_entropy, loss_average=loss_average, **options)
    for seed in range(3):
        getattr(step, call)(place(tagged_batch(seed)))
        net.zero_grad()
    rows = place(tagged_batch(4))
    accelerator.set_sync_debug_mode("error")
    try:
        result = getattr(step, call)(rows)
    finally:
        accelerator.set_sync_debug_mode("default")
    assert result.num_microbatches == 3
    assert bool(result.loss.isfinite())


def test_the_check_for_waiting_sees_a_value_being_read() -> None:
    value = torch.ones((), device=DEVICE)
    accelerator.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            value.item()
    finally:
        accelerator.set_sync_debug_mode("default")
