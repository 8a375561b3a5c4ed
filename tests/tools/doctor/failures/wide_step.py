"""Training in which only the optimizer step does not fit."""

import torch
from torch import nn


def main() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)])
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    for _ in range(5):
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()  # culprit
        optimizer.zero_grad()
