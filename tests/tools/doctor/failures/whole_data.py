"""All data on the device."""

import torch
from torch import nn


def main() -> None:
    images = torch.randn(600, 3, 64, 64)  # culprit
    classes = torch.randint(10, (600,))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64 * 64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for begin in range(0, 600, 40):
        chosen = slice(begin, begin + 40)
        loss = nn.functional.cross_entropy(model(images[chosen]), classes[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
