"""Extra passes leave no trace."""

import random

import torch
from torch import nn

from automicro.step.passes import taking_shapes
from automicro.transaction.rng import RandomState


def test_a_forward_that_gives_layers_their_shapes_ends_there_and_leaves_no_trace():
    first, second = nn.Linear(1, 3), nn.LazyLinear(2)
    model = nn.Sequential(first, second)
    model.register_buffer("seen", torch.zeros(1))
    noise, told = random.Random(1), list[str]()
    torch.manual_seed(0)
    with taking_shapes({"told": told}, model.modules(), RandomState([], [noise])):
        noise.random(), model.get_buffer("seen").add_(1)
        told.append("before")
        first(torch.ones(2, 1)).sum().backward()
        model(torch.ones(2, 1))
        raise AssertionError("the forward went on")
    assert (told, model.get_buffer("seen"), first.weight.grad) == ([], 0, None)
    assert noise.random() == random.Random(1).random()
    drawn = torch.rand(1)
    torch.manual_seed(0)
    again = nn.Linear(3, 2)
    assert torch.equal(again.weight, second.weight)
    assert torch.equal(torch.rand(1), drawn)
    assert not second._forward_hooks
