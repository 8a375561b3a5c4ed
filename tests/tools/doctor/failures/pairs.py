"""A loss over all pairs of rows."""

import torch
from torch import Tensor, nn


def spread(features: Tensor) -> Tensor:
    differences = features[:, None] - features[None]  # culprit
    return (1 - differences.square().sum(-1)).relu().mean()


def main() -> None:
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = spread(model(torch.randn(500, 32)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
