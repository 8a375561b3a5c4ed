"""Optimizer memory is predicted and reserved, and no half-applied step goes unnoticed."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from automicro import OptimizerStepError
from automicro.optimizer.reservation import predict_step_memory
from automicro.optimizer.step import step_optimizer
from tests.gpu.conftest import Record
from tests.gpu.device import (
    DEVICE,
    GPU,
    MIB,
    accelerator,
    requested_bytes,
    room,
    start_cublas,
)

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
