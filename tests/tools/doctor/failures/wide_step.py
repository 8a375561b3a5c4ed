"""What fits in the forward and the backward, and not in the step of the optimizer."""

import torch
from torch import nn


def main() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for _ in range(5):
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()  # culprit
        optimizer.zero_grad()
