"""Train, then draw a sample in many steps."""

import torch
from torch import Tensor, nn

from tests.tools.doctor.failures.model import Mlp


def sample(model: nn.Module, steps: int) -> Tensor:
    x = torch.randn(128, 128)
    for _ in range(steps):
        x = x - 0.01 * model(x)  # culprit
    return x


def main() -> None:
    model = Mlp(128, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        x = torch.randn(128, 128)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    sample(model, 300)
