"""Channels last in memory: the format goes everywhere, and the numbers stay."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from automicro import Microbatcher
from automicro.batch.types import TENSORS, Pieces
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


@pytest.mark.parametrize("dims", [2, 3])
def test_gradients_equal_those_of_the_usual_format(dims: int) -> None:
    usual = make_net(dims).double()
    net = copy.deepcopy(usual)
    to_channels_last(net)
    batch = images(dims).double(), torch.randint(5, (ROWS,))
    for model in (usual, net):
        model[1].eval()  # so that microbatches are exact
        Microbatcher(model, loss_fn=nn.CrossEntropyLoss(), microbatch_size=4).backward(batch)
    for one, other in zip(net.parameters(), usual.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


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


def test_values_shapes_identities_and_tied_weights_stay() -> None:
    one, two = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    two.weight = one.weight
    net = nn.Sequential(one, two, nn.Conv3d(2, 2, 3))
    net.register_buffer("window", torch.randn(1, 2, 4, 4))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    to_channels_last(net)
    assert one.weight is two.weight
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])
        if value.dim() in FORMATS:
            assert value.is_contiguous(memory_format=FORMATS[value.dim()])


def test_a_model_without_convolutions_is_named() -> None:
    message = r"and Sequential has none; leave it out"
    with pytest.raises(ValueError, match=message):
        to_channels_last(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="Tanh has none"):
        to_channels_last(nn.Tanh())
    to_channels_last(nn.Linear(2, 2), nn.Conv2d(2, 2, 1))  # one of the modules is enough


def test_a_layer_without_a_shape_is_named() -> None:
    net: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 3))
    with pytest.raises(
        ValueError, match=r"channels_last=True, but '1\.weight' of Sequential gets its shape"
    ):
        to_channels_last(net)
    assert net[0].weight.is_contiguous()


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(5, 4, 3, 3),
        torch.randn(5, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(7, 5, 4).transpose(0, 1),
        torch.randn(1, 4, 4).expand(5, 4, 4),
        torch.randn(5, 1, 4).expand(5, 3, 4),
        torch.randn(5, 8)[:, ::2],
    ],
)
def test_rows_that_are_chosen_are_laid_out_as_slices_are(values: torch.Tensor) -> None:
    def order(tensor: torch.Tensor) -> list[int]:
        long = [tensor.stride(dim) for dim in range(tensor.dim()) if values.stride(dim)]
        return sorted(range(len(long)), key=long.__getitem__)

    (chosen,) = TENSORS.cut(values, Pieces([[0, 3, 1]]), 0, "")
    assert torch.equal(chosen, values[[0, 3, 1]])
    assert order(chosen) == order(values[:3])


def test_a_forward_that_relies_on_the_layout_of_its_images_can_be_split() -> None:
    last = nn.Linear(36, 3)

    def forward(model: Any, batch: Any) -> Any:
        flat = batch[0].permute(0, 2, 3, 1).view(len(batch[0]), -1)
        return F.cross_entropy(model(flat), batch[1])

    images = torch.randn(5, 4, 3, 3).to(memory_format=torch.channels_last)
    batch = images, torch.tensor([0, 1, 2, 0, 1])
    result = Microbatcher(last, forward=forward, microbatch_size=2).backward(batch)
    assert result.loss_average_is == "checked"
