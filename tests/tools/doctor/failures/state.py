"""A wide model, and an optimizer with two numbers per parameter."""

import torch
from torch import nn


def main() -> None:
    model = nn.Sequential(nn.Linear(1024, 3072), nn.ReLU(), nn.Linear(3072, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(5):
        x = torch.randn(4, 1024)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()  # culprit
        optimizer.zero_grad()
