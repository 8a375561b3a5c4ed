"""Train on batches of any structure: a model of all numbers, and a forward that modifies inputs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from automicro import Microbatcher
from tests.batch.structures import Text, numbers_of
from tests.outside import Unreached


class Waves(nn.Module):
    """A model with two parameters that maps all numbers of a batch to one."""

    most = Unreached()

    def __init__(self, most: int | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.3, 1.7], dtype=torch.float64))
        self.most = most

    def forward(self, numbers: Tensor) -> Tensor:
        if self.most is not None and len(numbers) > self.most:
            self.most = None
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.sin(numbers * self.scale[0] + self.scale[1]).sum()


def forward(model: nn.Module, batch: Any) -> Any:
    found = numbers_of(batch)
    return model(torch.cat(found) if found else torch.zeros(len(batch)))


def gradient(model: Waves, size: Any, batch: Any, run: Callable[..., Any] = forward) -> Tensor:
    microbatcher = Microbatcher(
        model, forward=run, microbatch_size=size, loss_average="none", probe=False
    )
    microbatcher.backward(batch)
    assert model.scale.grad is not None
    return model.scale.grad


def spoil(value: Any) -> None:
    """Change everything in a microbatch that can be changed, like a careless forward."""
    if isinstance(value, Tensor):
        if not value.is_nested and value.layout is torch.strided and value.is_floating_point():
            value.mul_(3)
            value.requires_grad_()
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = value[:1]
    elif isinstance(value, dict):
        for part in value.values():
            spoil(part)
        if not isinstance(value, ModelOutput):  # ModelOutput does not allow removal
            value.pop(next(iter(value), None), None)
            value["added"] = 1
    elif isinstance(value, list):
        for part in value:
            spoil(part)
        value.clear()
    elif isinstance(value, tuple):
        for part in value:
            spoil(part)
    elif isinstance(value, Text):
        value.text = "spoiled"
    elif hasattr(value, "y") and not isinstance(value, tuple):  # assign even to frozen classes
        spoil(value.y)
        object.__setattr__(value, "y", None)
    elif hasattr(value, "items"):  # another mapping, possibly read-only
        for _, part in list(value.items()):
            spoil(part)


def spoiling(model: nn.Module, batch: Any) -> Any:
    found = [number.clone() for number in numbers_of(batch)]
    spoil(batch)
    return model(torch.cat(found) if found else torch.zeros(len(batch)))
