"""A model that is too large for its device, trained without momentum."""

import torch
from torch import Tensor, nn


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


def main() -> None:
    model = nn.Sequential(*[Wide(512) for _ in range(7)])  # culprit
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        x = torch.randn(4, 512)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
