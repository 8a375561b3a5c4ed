"""Channels last in memory: the format goes everywhere, and the numbers stay."""

from typing import Any

import pytest
import torch
from torch import nn

from automicro import Microbatcher
from automicro.trainer.surroundings import FORMATS, to_channels_last

ROWS, SIDE = 6, 8


def make_net(dims: int = 2) -> Any:
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


def images(dims: int = 2) -> torch.Tensor:
    return torch.randn(ROWS, 3, *[SIDE] * dims)


@pytest.mark.parametrize("dims", [2, 3])
def test_weights_activations_gradients_and_optimizer_state_have_the_format(dims: int) -> None:
    net, format_ = make_net(dims), FORMATS[dims + 2]
    optimizer = torch.optim.AdamW(net.parameters())  # made before: it keeps its parameters
    to_channels_last(net)
    hidden = images(dims)
    assert hidden.is_contiguous()
    for layer in net:
        hidden = layer(hidden)
        assert hidden.dim() == 2 or hidden.is_contiguous(memory_format=format_)
    hidden.square().mean().backward()
    optimizer.step()
    for weight in (net[0].weight, net[3].weight):
        state = optimizer.state[weight]
        for tensor in (weight, weight.grad, state["exp_avg"], state["exp_avg_sq"]):
            assert tensor.is_contiguous(memory_format=format_)
            assert not tensor.is_contiguous()


def test_gradients_added_up_over_microbatches_keep_the_format() -> None:
    net = make_net()
    to_channels_last(net)
    microbatcher = Microbatcher(
        net, loss_fn=nn.CrossEntropyLoss(), microbatch_size=4, batchnorm="ignore"
    )
    for _ in range(2):
        microbatcher.backward((images(), torch.randint(5, (ROWS,))))
    gradient = net[3].weight.grad
    assert gradient is not None
    assert gradient.is_contiguous(memory_format=torch.channels_last)


def test_a_model_without_convolutions_is_named() -> None:
    message = r"and Sequential has only ones of 1, 2 dimensions; leave channels_last out"
    with pytest.raises(ValueError, match=message):
        to_channels_last(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="Tanh has only ones of no dimensions"):
        to_channels_last(nn.Tanh())
    to_channels_last(nn.Linear(2, 2), nn.Conv2d(2, 2, 1))  # one of the modules is enough


def test_a_layer_without_a_shape_is_named() -> None:
    net: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 3))
    with pytest.raises(ValueError, match=r"channels_last=True, but '1\.weight' gets its shape"):
        to_channels_last(net)
    assert net[0].weight.is_contiguous()
