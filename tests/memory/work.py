"""Work of a known size for the simulated device."""

import torch
from torch import nn

KIB = 1024


def floats(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes // 4)


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
