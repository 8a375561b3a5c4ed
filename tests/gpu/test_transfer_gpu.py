"""Transfers from host to device overlap without waiting, and give the same result."""

import pytest
import torch

from tests.gpu.device import DEVICE, GPU, accelerator, differences, pinned, snapshot, to_device
from tests.gpu.subjects import batch, microbatcher, model

pytestmark = GPU

BATCHES = 10 if DEVICE.type == "cuda" else 3


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.usefixtures("deterministic")
def test_prefetching_from_pinned_memory_is_bit_identical(size: int) -> None:
    found = []
    for place in (to_device, pinned):
        net = model()
        step = microbatcher(net, size)
        torch.manual_seed(3)
        for seed in range(BATCHES):  # memory is reused while copies run
            step.backward(place(batch(seed=seed)))
        found.append(snapshot(net))
    assert differences(*found) == []


def test_batch_copies_do_not_accumulate_cached_memory() -> None:
    net = model()
    step = microbatcher(net, 4)
    reserved_bytes = []
    for seed in range(4 * BATCHES):
        step.backward(pinned(batch(seed=seed)))
        net.zero_grad()
        reserved_bytes.append(accelerator.memory_reserved(DEVICE))
    assert reserved_bytes[-1] <= reserved_bytes[4] * 1.05
