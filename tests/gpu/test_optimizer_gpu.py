"""Optimizer memory is predicted and reserved, and no half-applied step goes unnoticed."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from automicro import Halving, OptimizerStepError
from automicro.optimizer.reservation import predict_step_memory
from automicro.optimizer.step import step_optimizer
from tests.gpu.conftest import Record
from tests.gpu.device import (
    DEVICE,
    GPU,
    MIB,
    accelerator,
    allocated_bytes,
    only_cuda,
    requested_bytes,
    room,
    start_cublas,
)
from tests.gpu.subjects import batch, microbatcher

pytestmark = GPU

AdamW = torch.optim.AdamW
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, foreach": functools.partial(AdamW, foreach=True),
    "AdamW, fused": functools.partial(AdamW, fused=True),
    "AdamW, for-loop": functools.partial(AdamW, foreach=False),
    "AdamW, capturable, rate on the device": lambda parameters: AdamW(
        parameters, lr=torch.tensor(1e-3, device=DEVICE), capturable=True
    ),
    "AdamW, rate in a tensor": lambda parameters: AdamW(parameters, lr=torch.tensor(1e-3)),
    "Adam, amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,  # builds its state in the constructor
}
PARAMETERS = [(4096, 4096), (4096, 1024), (1024, 4096), (4096,)]  # about 100 MiB


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    found = [nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in PARAMETERS]
    for weight in found:
        weight.grad = torch.randn_like(weight)
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_state_equals_allocation_of_first_step(
    name: str, record_property: Record
) -> None:
    start_cublas()
    parameters = weights()
    optimizer = OPTIMIZERS[name](parameters)
    stateless = [each for each in parameters if each not in optimizer.state]
    predicted = predict_step_memory(optimizer, stateless)
    before_bytes = requested_bytes()
    accelerator.reset_peak_memory_stats(DEVICE)
    optimizer.step()
    most_bytes = requested_bytes("peak") - before_bytes
    state_bytes = requested_bytes() - before_bytes
    predicted_bytes = sum(predicted.state_bytes)
    record_property("bytes", {"state": state_bytes, "predicted state": predicted_bytes})
    temporary = {"temporary": most_bytes - state_bytes, "predicted": predicted.temporary_bytes}
    record_property("temporary_bytes", temporary)
    # Step counters are on the host, except for fused optimizers, but are counted anyway.
    assert abs(state_bytes - predicted_bytes) <= 512 * len(predicted.state_bytes)


def wide_model() -> nn.Module:
    """A model with 580 MiB of parameters: their state exceeds the memory lost to fragmentation."""
    torch.manual_seed(0)
    body = [nn.Linear(256, 65536), nn.ReLU(), nn.Linear(65536, 8), nn.Flatten()]
    body += [nn.Linear(4096, 4096) for _ in range(8)]
    return nn.Sequential(*body, nn.Linear(4096, 4)).to(DEVICE)


def ooms_by_batch(room_bytes: int, *, reserves: bool) -> list[int]:
    net = wide_model()
    optimizer = AdamW(net.parameters(), foreach=False)
    # No check of the whole batch, and no trial of a larger size.
    step = microbatcher(net, Halving(), optimizer=optimizer if reserves else None, probe=False)
    ooms = []
    with room(room_bytes):
        for seed in range(3):
            ooms.append(step.backward(batch(16, seed=seed)).ooms)
            optimizer.step()
            optimizer.zero_grad()
    return ooms


@only_cuda("rows and blocks of this size in reasonable time")
def test_reservation_moves_oom_from_second_batch_to_first(
    record_property: Record,
) -> None:
    net = wide_model()
    step = microbatcher(net, 8, probe=False)  # a probe would run the whole batch
    step.backward(batch(16))  # so that libraries create their permanent state
    net.zero_grad()
    before_bytes = allocated_bytes()
    accelerator.reset_peak_memory_stats(DEVICE)
    step.backward(batch(16))
    half_batch_bytes = accelerator.max_memory_allocated(DEVICE) - before_bytes
    state_bytes = 2 * sum(parameter.nbytes for parameter in net.parameters())
    del net, step
    room_bytes = half_batch_bytes + state_bytes // 2
    first, *others = ooms_by_batch(room_bytes, reserves=True)
    without = ooms_by_batch(room_bytes, reserves=False)
    record_property("ooms", {"with": [first, *others], "without": without})
    record_property("bytes", {"half": half_batch_bytes, "state": state_bytes})
    assert first >= 2
    assert others == [0, 0]
    assert without[0] < first
    assert without[1] >= 1


@pytest.mark.parametrize("is_first", [True, False], ids=["first step", "later step"])
@pytest.mark.parametrize("name", ["AdamW, foreach", "AdamW, fused", "AdamW, for-loop"])
def test_optimizer_step_oom_raises_named_error(name: str, is_first: bool) -> None:
    net = nn.ParameterList(weights())
    optimizer = OPTIMIZERS[name](net.parameters())
    if not is_first:
        optimizer.step()
    # A fused step with existing state needs no memory.
    fits = name == "AdamW, fused" and not is_first
    named = pytest.raises(OptimizerStepError, match="half applied")
    with nullcontext() if fits else named, room(8 * MIB):
        step_optimizer(optimizer, DEVICE)
