"""Channels-last models: accumulated gradients keep the memory format of their parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automicro import Microbatcher

ROWS, SIDE = 6, 8
FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


def make_net(dims: int = 2) -> Any:
    torch.manual_seed(0)
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
    norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    return nn.Sequential(
        conv(3, 8, 3, padding=1),
        norm(8),
        nn.ReLU(),
        conv(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 2) ** dims, 5),
    )


def make_batch(dims: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, 3, *[SIDE] * dims), torch.randint(5, (ROWS,))


@pytest.mark.parametrize("dims", [2, 3])
def test_accumulated_gradients_keep_memory_format(dims: int) -> None:
    net = make_net(dims)
    for index in (0, 3):
        net[index].weight.data = net[index].weight.data.to(memory_format=FORMATS[dims])
    microbatcher = Microbatcher(
        net, loss_fn=nn.CrossEntropyLoss(), microbatch_size=4, batchnorm="ignore"
    )
    for _ in range(2):
        microbatcher.backward(make_batch(dims))
    gradient = net[3].weight.grad
    assert gradient is not None
    assert gradient.is_contiguous(memory_format=FORMATS[dims])
